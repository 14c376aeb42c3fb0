"""Checks of run_on_gpu.sh that go through the public interface: a check is one process.

    python tests/cuda/gpu_checks.py train       30 steps on the device beside the CPU's losses
    python tests/cuda/gpu_checks.py offload     the same bits wherever the memory classes live
    python tests/cuda/gpu_checks.py torch       a sharded nn.Module beside torch alone
    python tests/cuda/gpu_checks.py golden      writes golden.json, from the CPU

--tiny makes the work small enough for the stand-in. What should be kept is printed as a line
"VALUES {...}".
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import pathlib
import time
from typing import Any

import numpy as np

import flatshard as fs

GOLDEN = pathlib.Path(__file__).with_name("golden.json")
# fp32: the device adds in another order than the CPU, nothing else. bf16: the device keeps
# activations in bf16 (2^-9 relative rounding of each), where the CPU keeps them in fp32.
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def batch(vocabulary: int, shape: tuple[int, int], step: int) -> tuple[Any, Any]:
    """Sequences that count up by one or two: something to learn in thirty steps."""
    rng = np.random.default_rng(step)
    start = rng.integers(0, vocabulary, (shape[0], 1))
    stride = rng.integers(1, 3, (shape[0], 1))
    ids = (start + stride * np.arange(shape[1] + 1)) % vocabulary
    return ids[:, :-1].astype(np.int32), ids[:, 1:].astype(np.int32)


def run(
    device: str,
    precision: str,
    *,
    tiny: bool,
    steps: int,
    stage: int = 3,
    offload: fs.Offload | None = None,
    rule: Any = fs.AdamW,
) -> tuple[list[float], str, str]:
    """Losses of each step and hashes of weights and state after the last."""
    with fs.init(device=device) as world:
        sharding = fs.Sharding(stage=stage, gather="copy", offload=offload)
        model = fs.models.Llama.from_config(
            TINY if tiny else "tiny", world=world, sharding=sharding, precision=precision
        )
        optimizer = rule(model, lr=1e-2 if rule is fs.SGD else 1e-3)
        shape = (2, 16) if tiny else (4, 128)
        losses = []
        for step in range(steps):
            inputs, targets = batch(model.config.vocab_size, shape, step)
            loss = model.forward_backward(inputs, targets)
            result = optimizer.step(max_norm=1.0)
            assert result.applied, f"step {step} was not applied: {result}"
            losses.append(float(loss.mean))
        hashes = fs.weights_sha256(model), fs.state_sha256(model)
        model.close()
    return losses, *hashes


def cpu_losses(precision: str, tiny: bool, steps: int) -> tuple[list[float], str]:
    """The CPU's, computed here where there is a CBLAS library, else as golden.json has them."""
    try:
        return run("cpu", precision, tiny=tiny, steps=steps)[0], "computed here"
    except FileNotFoundError:
        if tiny:
            raise
        golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
        return golden[precision][:steps], "golden.json"


def check_train(tiny: bool) -> None:
    steps = 3 if tiny else 30
    values: dict[str, Any] = {"steps": steps}
    for precision, bound in BOUNDS.items():
        want, source = cpu_losses(precision, tiny, steps)
        started = time.perf_counter()
        got, *_ = run("cuda", precision, tiny=tiny, steps=steps)
        off = max(abs(g - w) / w for g, w in zip(got, want, strict=True))
        values[precision] = {
            "seconds": round(time.perf_counter() - started, 2),
            "largest_difference": off,
            "bound": bound,
            "cpu": source,
            "losses": got,
        }
        print(f"{precision}: {got[0]:.5f} to {got[-1]:.5f}, {off:.2e} from the CPU ({source})")
        print("VALUES " + json.dumps(values), flush=True)
        assert all(map(math.isfinite, got)), got
        assert off <= bound, f"{precision}: losses differ by {off:.3e}, more than {bound:.0e}"
        assert tiny or got[-1] < got[0], f"{precision}: the loss does not fall: {got}"


def check_offload(tiny: bool) -> None:
    """Every class alone and all together, at stages 0 and 3, in fp32 and bf16, every rule once."""
    steps = 2 if tiny else 10
    homes = {
        "state": fs.Offload(state="cpu"),
        "grads": fs.Offload(grads="cpu"),
        "params": fs.Offload(params="cpu"),
        "all": fs.Offload(state="cpu", grads="cpu", params="cpu"),
    }
    compared = 0
    for precision in ("bf16", "fp32"):
        for stage in (3, 0):
            want = run("cuda", precision, tiny=tiny, steps=steps, stage=stage)
            for name, offload in homes.items():
                if stage != 3 and offload.params == "cpu":
                    continue  # whole weights stay on the device
                got = run("cuda", precision, tiny=tiny, steps=steps, stage=stage, offload=offload)
                assert got == want, f"{precision}, stage {stage}, {name} on the CPU: other bits"
                compared += 1
    for rule in (fs.SGD, fs.Adam, fs.Lion, fs.Adagrad):
        want = run("cuda", "bf16", tiny=tiny, steps=steps, rule=rule)
        got = run("cuda", "bf16", tiny=tiny, steps=steps, rule=rule, offload=homes["all"])
        assert got == want, f"{rule.__name__}: other bits with everything on the CPU"
        compared += 1
    print("VALUES " + json.dumps({"runs_with_the_same_bits": compared}))


def torch_losses(device: str, stage: int | None, steps: int) -> list[float]:
    """Of a small network on a device: sharded at a stage, or with None by torch alone."""
    import torch

    import flatshard.torch as ft

    torch.manual_seed(3)
    torch.backends.cuda.matmul.allow_tf32 = False
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    net: Any = torch.nn.Sequential(
        torch.nn.Embedding(50, 64),
        *(copy.deepcopy(layer) for _ in range(3)),
        torch.nn.Linear(64, 50),
    ).to(device)
    words = {"lr": 1e-3, "weight_decay": 0.01}
    with fs.init(device="cuda") as world:
        if stage is None:
            optimizer: Any = torch.optim.AdamW(net.parameters(), **words)
        else:
            ft.fully_shard(
                net, world=world, sharding=stage, units=[torch.nn.TransformerEncoderLayer]
            )
            optimizer = ft.AdamW(net.parameters(), **words)
        losses = []
        for step in range(steps):
            tokens, targets = batch(50, (8, 24), step)
            optimizer.zero_grad()
            logits = net(torch.from_numpy(tokens.astype(np.int64)).to(device))
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1),
                torch.from_numpy(targets.astype(np.int64)).to(device).flatten(),
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if stage is not None:
            ft.unshard(net)
    return losses


def check_torch(tiny: bool) -> None:
    """Parameters, gradients and gathers in the order of torch's own stream: where a GPU is, its
    tensors; else tensors of the host."""
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    steps = 3 if tiny else 30
    want = torch_losses(device, None, steps)
    values: dict[str, Any] = {"torch": torch.__version__, "device": device, "losses": want}
    for stage in (3, 0):
        got = torch_losses(device, stage, steps)
        off = max(abs(g - w) / w for g, w in zip(got, want, strict=True))
        values[f"stage {stage}"] = off
        print("VALUES " + json.dumps(values), flush=True)
        assert off <= 1e-4, f"stage {stage}: losses differ by {off:.3e} from torch's: {got}"


def write_golden() -> None:
    golden = {name: run("cpu", name, tiny=False, steps=30)[0] for name in BOUNDS}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=("train", "offload", "torch", "golden"))
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.check == "golden":
        write_golden()
    elif arguments.check == "train":
        check_train(arguments.tiny)
    elif arguments.check == "torch":
        check_torch(arguments.tiny)
    else:
        check_offload(arguments.tiny)


if __name__ == "__main__":
    main()
