"""Gradients summed by NCCL's own reduce-scatter, on the stand-in, which adds in a rotated order."""

import re
from typing import Any

import numpy as np
import pytest

import flatshard as fs

SHAPES = {"embed.w": (11, 7), "layers.0.w": (7, 9), "layers.0.b": (9,), "layers.1.w": (9, 5)}
ROUNDS = 2
EPS = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


def gradients(kind: str, rank: int, micro: int) -> dict[str, Any]:
    """Whole numbers, whose sums are exact in either dtype, or noise that bfloat16 holds; of some
    parameters none."""
    rng = np.random.default_rng(10 * rank + micro)
    out = {}
    for at, (name, shape) in enumerate(SHAPES.items()):
        noise = rng.standard_normal(shape).astype(np.float32)
        noise = (noise.view(np.uint32) & 0xFFFF0000).view(np.float32)
        whole = rng.integers(-7, 8, shape).astype(np.float32)
        if at == 0 or (rank + micro + at) % 3 != 0:
            out[name] = whole if kind == "whole" else noise
    return out


def sums(world: fs.World, kind: str, reduce: str, sharding: fs.Sharding, bad: str) -> Any:
    """The summed gradients: from zero weights, what a step of SGD with rate 1 takes off, times the
    ranks, whose number is a power of two. bad: the last rank brings a NaN of this parameter."""
    shards = fs.shard(
        {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, world,
        sharding=sharding, precision=fs.MixedPrecision(reduce=reduce),
    )  # fmt: skip
    optimizer = fs.SGD(shards, lr=1.0)
    for micro in range(ROUNDS):
        grads = gradients(kind, world.rank, micro)
        if bad and world.rank == world.size - 1 and micro == 0:
            grads[bad] = np.full(SHAPES[bad], np.nan, np.float32)
        for unit in reversed(shards.units):
            unit.reduce({name: grads[name] for name in unit.names if name in grads})
    result = optimizer.step()
    if bad:
        return result.nonfinite
    return {name: -world.size * shards.full(name) for name in SHAPES}, fs.describe(shards)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_sums(stage: int, reduce: str, cuda: Any) -> None:
    """Exact where every order is; else within the roundings of size - 1 additions on the wire."""
    ring = fs.Sharding(
        stage=stage, reduce_order="ring", partition="flat" if stage % 2 else "per_parameter"
    )
    size = 4 if stage == 3 else 2
    world = fs.local_world(size, device="cuda")
    for kind in ("whole", "noise"):
        for got, text in world.run(sums, kind, reduce, ring, ""):
            line = re.search(r"sum over ranks +(.*)", text)
            assert line is not None and f"{reduce}, by NCCL" in line.group(1)
            for name, shape in SHAPES.items():
                want, bound = np.zeros(shape), np.zeros(shape)
                for micro in range(ROUNDS):
                    held = [
                        gradients(kind, rank, micro)[name].astype(np.float64)
                        for rank in range(size)
                        if name in gradients(kind, rank, micro)
                    ]
                    want += sum(held, np.zeros(shape))
                    bound += sum(map(abs, held), np.zeros(shape))
                # size - 1 additions in the wire's dtype, then one of micro-batches and the step's
                # in float32; to first order, with as much again for the rest.
                bound *= 2 * ((size - 1) * EPS[reduce] + (ROUNDS + 1) * EPS["float32"])
                if kind == "whole":
                    bound[...] = 0
                assert (abs(got[name] - want) <= bound).all(), name


def test_another_order_gives_other_bits(cuda: Any) -> None:
    """What the option is: at the stand-in's order, not the CPU's."""
    world = fs.local_world(4, device="cuda")
    rank, ring = (
        world.run(sums, "noise", "bfloat16", fs.Sharding(reduce_order=order), "")[0][0]
        for order in ("rank", "ring")
    )
    assert any((rank[name] != ring[name]).any() for name in SHAPES)


@pytest.mark.parametrize("bad", ["layers.0.b", "layers.1.w"])
def test_what_is_not_finite_has_a_name(bad: str, cuda: Any) -> None:
    found = fs.local_world(4, device="cuda").run(
        sums, "noise", "bfloat16", fs.Sharding(reduce_order="ring"), bad
    )
    assert found == [(bad, 3)] * 4


def test_a_sum_that_overflows_on_the_wire_is_nobodys(cuda: Any) -> None:
    """What each rank brought is finite."""

    def rank(world: fs.World) -> Any:
        shards = fs.shard(
            {"w": np.zeros(64, np.float32)}, world, sharding=fs.Sharding(reduce_order="ring"),
            precision=fs.MixedPrecision(reduce="bfloat16"),
        )  # fmt: skip
        optimizer = fs.SGD(shards, lr=1.0)
        shards.units[0].reduce({"w": np.full(64, 3e38, np.float32)})
        return optimizer.step().nonfinite

    assert fs.local_world(2, device="cuda").run(rank) == [("w", -1)] * 2


def test_one_rank_sums_nothing(cuda: Any) -> None:
    sharding = fs.Sharding(reduce_order="ring")
    [(got, text)] = fs.local_world(1, device="cuda").run(sums, "noise", "float32", sharding, "")
    assert "by NCCL" not in text
    want = sum(gradients("noise", 0, micro)["embed.w"] for micro in range(ROUNDS))
    assert (got["embed.w"] == want).all()


def test_the_cpu_refuses_it_by_name() -> None:
    with pytest.raises(ValueError, match=r'reduce_order="ring".*computes on the CPU.*"rank"'):
        fs.local_world(1).run(sums, "noise", "float32", fs.Sharding(reduce_order="ring"), "")
    with pytest.raises(ValueError, match=r"reduce_order='tree'.*expected"):
        fs.Sharding(reduce_order="tree")  # type: ignore[arg-type]
