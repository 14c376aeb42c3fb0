"""One folder, one batch after another, two front ends: transformers' Llama, and the native one.

    python examples/llama_both.py
    flatshard launch -n 2 examples/llama_both.py --stage 3 --precision bf16

Both start from the same Hugging Face folder and train on the same bytes. Then each resumes from the
checkpoint of the other, and trains on.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

import flatshard as fs
import flatshard.torch as ft

TEXT = Path(__file__).parent / "data" / "sentence_pairs.tsv"


def batches(world: fs.World, steps: int, batch: int, length: int) -> list[np.ndarray[Any, Any]]:
    """This rank's rows of each step's batch: bytes of the text."""
    text = np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int64)
    starts = np.random.default_rng(0).integers(0, len(text) - length, (steps, batch * world.size))
    mine = starts[:, world.rank :: world.size]
    return [np.stack([text[s : s + length] for s in row]) for row in mine]


def digest(shards: fs.Shards) -> str:
    """Of the weights by name: front ends list them in different orders."""
    h = hashlib.sha256()
    for name in sorted(shards.names):
        h.update(f"{name}\0".encode())
        h.update(np.ascontiguousarray(shards.full(name)).tobytes())
    return h.hexdigest()[:12]


class Native:
    """``flatshard.models.Llama`` and ``flatshard.AdamW``."""

    def __init__(self, folder: Path, world: fs.World, args: argparse.Namespace) -> None:
        self.model = fs.models.Llama.from_pretrained(
            folder, world=world, sharding=fs.Sharding(stage=args.stage), precision=args.precision
        )
        self.optimizer = fs.AdamW(self.model, lr=args.lr, eps=1e-6, weight_decay=0.0)

    def step(self, tokens: np.ndarray[Any, Any]) -> float:
        loss = self.model.forward_backward(tokens[:, :-1], tokens[:, 1:])
        self.optimizer.step(max_norm=1.0)
        return float(loss.mean)

    def save(self, directory: Path, step: int) -> None:
        fs.checkpoint.save(directory, self.model, self.optimizer, step=step)

    def load(self, directory: Path, step: int) -> None:
        fs.checkpoint.load(directory, self.model, self.optimizer, step=step)

    def digest(self) -> str:
        return digest(self.model.shards)

    def close(self) -> None:
        self.model.close()


class Torch:
    """``transformers.LlamaForCausalLM`` through ``flatshard.torch``."""

    def __init__(self, folder: Path, world: fs.World, args: argparse.Namespace) -> None:
        self.world = world
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = ft.AdamW(self.model.parameters(), lr=args.lr, eps=1e-6, weight_decay=0.0)
        ft.fully_shard(
            self.model,
            world=world,
            sharding=fs.Sharding(stage=args.stage),
            mp_policy=args.precision,
        )

    def step(self, tokens: np.ndarray[Any, Any]) -> float:
        ids = torch.from_numpy(tokens)
        loss = self.model(input_ids=ids, labels=ids).loss
        ft.backward(loss, optimizer=self.optimizer)
        ft.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        return float(self.world.all_reduce(np.array([loss.item()]), op="mean")[0])

    def save(self, directory: Path, step: int) -> None:
        ft.save(directory, self.model, self.optimizer, step=step)

    def load(self, directory: Path, step: int) -> None:
        ft.load(directory, self.model, self.optimizer, step=step)

    def digest(self) -> str:
        return digest(ft.shards(self.model))

    def close(self) -> None:
        ft.unshard(self.model)


def main() -> None:
    parser = argparse.ArgumentParser(description="The same Llama in two front ends.")
    parser.add_argument("--size", default="tiny", help="of the native model's names")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("runs/both"))
    args = parser.parse_args()

    world = fs.init()
    folder = args.out / "start"
    first = fs.models.Llama.from_config(args.size, world=world, seed=1)
    first.save_pretrained(folder)
    first.close()

    data = batches(world, 2 * args.steps, args.batch, args.length)
    losses: dict[str, list[float]] = {}
    for kind in (Native, Torch):
        run = kind(folder, world, args)
        losses[kind.__name__] = [run.step(tokens) for tokens in data[: args.steps]]
        name = kind.__name__.lower()
        run.save(args.out / name, args.steps)
        world.print(f"{name} after {args.steps} steps: weights {run.digest()}")
        run.close()
    for step, pair in enumerate(zip(losses["Native"], losses["Torch"], strict=True), 1):
        if step == 1 or step % 10 == 0:
            world.print(f"step {step}: native loss {pair[0]:.6f}  transformers {pair[1]:.6f}")

    for kind, other in ((Native, "torch"), (Torch, "native")):
        run = kind(folder, world, args)
        run.load(args.out / other, args.steps)
        weights = run.digest()
        after = [run.step(tokens) for tokens in data[args.steps :]]
        world.print(
            f"{kind.__name__.lower()} resumed from {other}, weights {weights}: "
            f"loss {after[0]:.6f} .. {after[-1]:.6f}"
        )
        run.close()


if __name__ == "__main__":
    main()
