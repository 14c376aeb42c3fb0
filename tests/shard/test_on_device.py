"""Shards whose arrays lie in a device's memory: the CPU's bits, and gradients that lie there too.

On the stand-in for CUDA's runtime and for NCCL, ranks as threads, each with a device of its own.
"""

import pathlib
from typing import Any

import numpy as np
import pytest

import flatshard as fs

pytestmark = pytest.mark.usefixtures("cuda")

SHAPES = {"embed.w": (11, 7), "layers.0.w": (7, 9), "layers.0.b": (9,), "layers.1.w": (9, 5)}


def make(seed: int, scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        name: (scale * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def train(world: fs.World, stage: int, precision: str) -> list[Any]:
    """Three steps of two micro-batches."""
    shards = fs.shard(
        make(1), world, sharding=fs.Sharding(stage=stage, gather="copy"), precision=precision
    )
    optimizer = fs.AdamW(shards, lr=1e-2, weight_decay=0.1)
    seen: list[Any] = []
    for step in range(3):
        for micro in range(2):
            grads = make(100 * step + 10 * micro + world.rank)
            for unit in reversed(shards.units):
                with unit.gathered() as weights:
                    assert set(weights) == set(unit.names)
                unit.reduce({name: grads[name] for name in unit.names})
        result = optimizer.step(max_norm=1.0)
        seen.append((result.applied, result.grad_norm, result.clip_coef))
    seen += [fs.weights_sha256(shards), fs.state_sha256(shards)]
    optimizer_state = shards.full("layers.0.w", "exp_avg_sq")
    return [*seen, optimizer_state.tobytes()]


@pytest.mark.parametrize(
    ("size", "stage", "precision"),
    [(1, 3, "bf16"), (2, 3, "fp32"), (3, 0, "bf16-split"), (2, 2, "fp16"), (4, 1, "bf16-pure")],
)
def test_the_bits_of_the_cpu(size: int, stage: int, precision: str) -> None:
    here, there = (
        fs.local_world(size, device=device).run(train, stage, precision)
        for device in ("cpu", "cuda")
    )
    assert here == there


def uneven(world: fs.World, gather: str) -> str:
    """Steps in which rank r brings (r + step) % 3 micro-batches, and reads weights in each."""
    shards = fs.shard(make(1), world, sharding=fs.Sharding(stage=3, gather=gather))
    optimizer = fs.AdamW(shards, lr=1e-2)
    for step in range(3):
        for micro in range((world.rank + step) % 3):
            grads = make(100 * step + 10 * micro + world.rank)
            for unit in [*shards.units, *reversed(shards.units)]:
                with unit.gathered() as weights:
                    assert set(weights) == set(unit.names)
            for unit in reversed(shards.units):
                with unit.gathered():
                    unit.reduce({name: grads[name] for name in unit.names}, count=3 + world.rank)
        assert optimizer.step().count == sum(
            (3 + rank) * ((rank + step) % 3) for rank in range(world.size)
        )
    return fs.state_sha256(shards)


def test_ranks_with_other_numbers_of_micro_batches() -> None:
    """Whatever is gathered how: what a rank does not bring is absent."""
    seen = {
        sha
        for device, gather in (("cpu", "view"), ("cpu", "copy"), ("cuda", "copy"))
        for sha in fs.local_world(3, device=device).run(uneven, gather)
    }
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("size", "stage", "precision"), [(1, 3, "bf16"), (3, 3, "fp32"), (2, 1, "fp16")]
)
def test_the_plan_is_what_is_held(size: int, stage: int, precision: str) -> None:
    def rank(world: fs.World) -> None:
        before = world.memory()
        shards = fs.shard(make(1), world, sharding=fs.Sharding(stage=stage), precision=precision)
        optimizer = fs.AdamW(shards, lr=1e-2)
        for unit in reversed(shards.units):
            unit.reduce({name: make(2)[name] for name in unit.names})
        assert optimizer.step(max_norm=1.0)
        planned = shards.planned()
        held = {
            name: tuple(row[i] - before[name][i] for i in (0, 1, 3))
            for name, row in world.memory().items()
        }
        for name in planned:
            if name != "bookkeeping":
                assert held[name] == planned[name], name
        assert planned["weights"][:2] == (0, 0)
        assert world.rank > 0 or planned["weights"][2] > 0
        plan = fs.plan(
            make(1), world_size=world.size, sharding=fs.Sharding(stage=stage),
            precision=precision, device="cuda",
        )  # fmt: skip
        assert plan.ranks[world.rank]["moments"] == planned["moments"]
        text = fs.describe(shards)
        assert "device memory" in text and "world memory" not in text and "gather copy" in text

    fs.local_world(size, device="cuda").run(rank)


class Interface:
    """What speaks __cuda_array_interface__ alone."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def test_gradients_that_lie_on_the_device() -> None:
    """What a unit gathers is handed in as its gradient: by DLPack, by the array interface, and
    from the host, which gives the same bits."""

    def rank(world: fs.World, way: str) -> str:
        shards = fs.shard(make(1), world, sharding=fs.Sharding(stage=3))
        optimizer = fs.SGD(shards, lr=0.5)
        for unit in reversed(shards.units):
            with unit.gathered() as weights:
                host = {name: array.copy_to_host() for name, array in weights.items()}
                for name, array in host.items():
                    assert np.array_equal(array, make(1)[name])
                if way == "interface":
                    unit.reduce({name: Interface(array) for name, array in weights.items()})
                elif way == "mixed":
                    names = list(weights)
                    unit.reduce({names[0]: weights[names[0]]} | {n: host[n] for n in names[1:]})
                else:
                    unit.reduce(host if way == "host" else weights)
                array = None
        assert optimizer.step()
        return fs.weights_sha256(shards)

    ways = [
        fs.local_world(2, device="cuda").run(rank, way)
        for way in ("dlpack", "interface", "host", "mixed")
    ]
    assert len({sha for ranks in ways for sha in ranks}) == 1
    halved = fs.local_world(1).run(
        lambda world: fs.weights_sha256(
            fs.shard({n: a * np.float32(0.5) for n, a in make(1).items()}, world)
        )
    )
    assert ways[0][0] == halved[0]


def test_values_written_in_a_block_and_values_that_lie_on_the_device() -> None:
    def rank(world: fs.World) -> None:
        shards = fs.shard(make(1), world, sharding=fs.Sharding(stage=3))
        unit = shards.unit("layers.0")
        with unit.gathered(write=True) as weights:
            weights["layers.0.b"][:] = 3.0
        assert (shards.full("layers.0.b") == 3.0).all()
        with unit.gathered() as weights:
            other = fs.shard(dict(weights), world)
            weights = {}
        assert (other.full("layers.0.b") == 3.0).all()

    fs.local_world(2, device="cuda").run(rank)


def test_an_array_that_is_still_used_keeps_its_unit() -> None:
    def rank(world: fs.World) -> None:
        shards = fs.shard(make(1), world, sharding=fs.Sharding(stage=3))
        unit = shards.units[0]
        kept = unit.gather()["embed.w"].__dlpack__(stream=1)
        with pytest.raises(BufferError, match="still in use"):
            unit.release()
        del kept
        unit.release()

    fs.local_world(1, device="cuda").run(rank)


def test_an_array_of_another_rank_is_refused(cuda: pathlib.Path) -> None:
    arrays: dict[int, Any] = {}

    def rank(world: fs.World) -> None:
        shards = fs.shard(make(1), world, sharding=fs.Sharding(stage=1))
        unit = shards.units[0]
        arrays[world.rank] = unit.gather()["embed.w"]
        world.barrier()
        with pytest.raises(ValueError, match=r"gradient of embed\.w lies on cuda"):
            unit.reduce({"embed.w": arrays[1 - world.rank]})
        world.barrier()
        arrays.clear()
        unit.release()

    fs.local_world(2, device="cuda").run(rank)
