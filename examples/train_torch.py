"""Train an ordinary PyTorch module, sharded: what changes is marked.

    flatshard launch -n 2 examples/train_torch.py --data corpus.txt
    torchrun --nproc-per-node 2 examples/train_torch.py --data corpus.txt --stage 1
    python examples/train_torch.py --data corpus.txt                         # alone

A small causal transformer learns bytes of a text; it resumes where the last run ended.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
from torch import nn

import flatshard as fs
import flatshard.torch as ft


class Bytes(nn.Module):
    """A causal transformer over bytes, its head tied to its embedding."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        # Alike in size: places of standard deviation 1, torch's default, would drown the bytes.
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.embed(tokens) + self.places(torch.arange(length))
        for block in self.blocks:
            x = block(x, src_mask=mask.to(x.dtype))
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="a text file")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--out", default="run")
    options = parser.parse_args()

    world = fs.init()  # instead of torch.distributed.init_process_group
    text = torch.tensor(list(pathlib.Path(options.data).read_bytes()))
    model = Bytes(64, 2, options.length)
    optimizer = ft.AdamW(model.parameters(), lr=5e-3)  # instead of torch.optim.AdamW
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    # instead of DistributedDataParallel(model), or FSDP's fully_shard on each block
    ft.fully_shard(model, world=world, sharding=options.stage, mp_policy=options.precision)

    done = 0
    if list(pathlib.Path(options.out).glob("step-*")):
        loaded = ft.load(options.out, model, optimizer)
        done = loaded.step
        schedule.load_state_dict(loaded.user["schedule"])
        world.print(f"resumed at step {done}")
    for step in range(done, options.steps):
        optimizer.zero_grad()
        total = 0.0
        for part in range(options.accumulate):
            seed = (step * options.accumulate + part) * world.size + world.rank
            generator = torch.Generator().manual_seed(seed)
            starts = torch.randint(
                0, len(text) - options.length, (options.batch,), generator=generator
            )
            tokens = torch.stack([text[s : s + options.length + 1] for s in starts])
            with ft.accumulate(model, last=part + 1 == options.accumulate):
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), tokens[:, 1:].flatten()
                )
                ft.backward(loss / options.accumulate, optimizer=optimizer)  # scales under fp16
            total += loss.item() / options.accumulate
        ft.clip_grad_norm_(model, 1.0)
        result = optimizer.step()
        schedule.step()
        if (step + 1) % 20 == 0:
            mean = float(world.all_reduce(total, op="sum")) / world.size
            world.print(f"step {result.step}  loss {mean:.3f}  norm {result.grad_norm:.2f}")
    user = {"schedule": schedule.state_dict()}
    ft.save(options.out, model, optimizer, step=options.steps, user=user).wait()
    if world.is_main:  # weights are whole on every rank: one of them may save alone
        torch.save(ft.state_dict(model, dtype="master"), pathlib.Path(options.out) / "model.pt")
    world.close()


if __name__ == "__main__":
    main()
