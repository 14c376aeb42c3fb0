"""The native model and its trainer on device "cuda", which is a stand-in where no GPU is, against
the CPU's. Bits of single operations are for tests/c/test_cuda_*.c."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest

import flatshard
from flatshard.cli.__main__ import main
from flatshard.models import Llama, LlamaConfig
from flatshard.models.options import TrainConfig
from flatshard.models.rates import peak_of

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
)
DEADLINE = 120.0


def steps(
    world: flatshard.World, *, stage: int, n: int, precision: str = "fp32"
) -> tuple[list[float], str, str]:
    """Mean losses of n steps; hashes of weights and of the optimizer's state."""
    model = Llama.from_config(
        CONFIG,
        seed=3,
        world=world,
        sharding=flatshard.Sharding(stage=stage),
        precision=precision,
    )
    optimizer = flatshard.AdamW(model, lr=1e-2)
    ids = np.random.default_rng(world.rank).integers(0, CONFIG.vocab_size, (2, 10), np.int32)
    losses = []
    for _ in range(n):
        losses.append(model.forward_backward(ids[:, :-1], ids[:, 1:]).mean)
        assert optimizer.step(max_norm=1.0).applied
    hashes = flatshard.weights_sha256(model), flatshard.state_sha256(model)
    model.close()
    return losses, *hashes


def run(device: str, ranks: int, **words: Any) -> tuple[list[float], str, str]:
    world = flatshard.local_world(ranks, device=device, timeout=DEADLINE, threads=1)
    results = world.run(lambda one: steps(one, **words))
    assert all(result == results[0] for result in results)
    return results[0]


def check(ranks: int, stages: tuple[int, ...], n: int) -> None:
    """Sums are taken in another order than a CPU's: 1e-4 of the loss over a few steps; between
    stages nothing differs."""
    want = run("cpu", ranks, stage=0, n=n)
    first = None
    for stage in stages:
        got = run("cuda", ranks, stage=stage, n=n)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
        assert got[0][-1] < got[0][0]
        first = got if first is None else first
        assert got == first, f"stage {stage} of {ranks} ranks differs from stage {stages[0]}"


def test_training_agrees_with_the_cpu(cuda: pathlib.Path) -> None:
    check(2, (0, 3), 2)


@pytest.mark.parametrize(("stage", "precision"), [(3, "bf16"), (1, "fp32")])
def test_the_plan_is_all_that_is_allocated(cuda: pathlib.Path, stage: int, precision: str) -> None:
    """Row by row, scratch of kernels and cuBLAS's workspace among them; and of the device's own
    count nothing is left over."""
    sharding = flatshard.Sharding(stage=stage)
    [planned] = flatshard.plan(
        CONFIG, world_size=1, sharding=sharding, precision=precision, batch=(2, 9), device="cuda"
    ).ranks

    def rank(world: flatshard.World) -> None:
        before = world.device_memory()
        model = Llama.from_config(CONFIG, world=world, sharding=sharding, precision=precision)
        optimizer = flatshard.AdamW(model, lr=1e-2)
        ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 10), np.int32)
        model.forward_backward(ids[:, :-1], ids[:, 1:])
        assert optimizer.step().applied
        held = {name: row[3] for name, row in world.memory().items()}
        assert held == {name: row[2] for name, row in planned.items()}
        assert held["scratch"] >= 32 << 20
        now = world.device_memory()
        assert now["allocated"] - before["allocated"] == sum(held.values())
        assert now["total"] == now["free"] + now["allocated"] + now["reserved"]
        with pytest.raises(MemoryError) as error:
            flatshard.shard({"w": np.broadcast_to(np.float32(0), now["total"] // 4)}, world)
        asked = re.search(r"asked for (\d+) bytes", str(error.value))
        assert asked is not None and int(asked[1]) > 4 * now["total"]
        for said in (
            f"of {now['total']} on the device in all",
            f"{now['allocated']} are allocated by flatshard",
            f"{now['reserved']} reserved by",
            f"{now['free']} free",
        ):
            assert said in str(error.value)
        model.close()

    flatshard.local_world(1, device="cuda", timeout=DEADLINE, threads=1).run(rank)
    with pytest.raises(RuntimeError, match="computes on the CPU"):
        flatshard.local_world(1).run(flatshard.World.device_memory)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_twenty_steps_agree_with_the_cpu(cuda: pathlib.Path, ranks: int) -> None:
    check(ranks, (0, 1, 2, 3), 20)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_descend_as_the_cpu_does(cuda: pathlib.Path, precision: str) -> None:
    # Activations are rounded there and not here: a few parts in a thousand of each loss.
    want, got = (run(device, 1, stage=3, n=3, precision=precision)[0] for device in ("cpu", "cuda"))
    np.testing.assert_allclose(got, want, rtol=2e-2)


def generated(world: flatshard.World) -> tuple[Any, Any, float]:
    model = Llama.from_config(CONFIG, seed=5, world=world)
    ids = np.arange(14, dtype=np.int32).reshape(2, 7)
    text = model.generate(ids, n=4)
    logits = model.logits(ids)
    loss = model.loss(ids[:, :-1], ids[:, 1:]).mean
    model.close()
    return text, logits, loss


def test_generation_and_logits_agree_with_the_cpu(cuda: pathlib.Path) -> None:
    want, got = (
        flatshard.local_world(1, device=device, timeout=DEADLINE).run(generated)[0]
        for device in ("cpu", "cuda")
    )
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], atol=1e-4)
    assert abs(got[2] - want[2]) <= 1e-4 * want[2]


def test_the_trainer_on_a_device(
    cuda: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = dataclasses.replace(CONFIG, vocab_size=260, num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(small.to_hf(dtype="float32")))
    (tmp_path / "text.txt").write_text("alpha beta gamma " * 60)
    words = [
        "train", str(tmp_path / "config.json"), "--data", str(tmp_path / "text.txt"),
        "--out", str(tmp_path / "run"), "--batch", "1", "--length", "8", "--steps", "3",
        "--eval-sequences", "1", "--sample-tokens", "2", "--prompt", "al", "--save-every", "0",
        "--device", "cuda", "--ranks-as", "threads", "--json", str(tmp_path / "result.json"),
    ]  # fmt: skip
    assert main(words) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 3 and result.get("error") is None
    assert result["loss_last"] < result["loss_first"]
    said = capsys.readouterr().out
    assert "on cuda" in said and "products measured on the same device" in said
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    flatshard.init().close()


def test_peaks_are_of_the_devices_that_are_meant() -> None:
    assert peak_of("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert peak_of("NVIDIA H100 80GB HBM3", "float16") == 989e12
    assert peak_of("NVIDIA H200", "bfloat16") == 989e12
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA L4"):
        assert peak_of(name, "bfloat16") is None
    assert peak_of("NVIDIA H200", "float32") is None


def test_a_device_that_cannot_be_is_refused(tmp_path: pathlib.Path) -> None:
    base = {"model": "tiny", "out": str(tmp_path / "run")}
    with pytest.raises(flatshard.ConfigError, match="expected 'cpu', 'cuda' or 'cuda:N'"):
        TrainConfig(**base, device="gpu").check()
    with pytest.raises(flatshard.ConfigError, match="host memory"):
        TrainConfig(**base, device="cuda", gather="view").check()
