"""Gradients looked at, scaled and replaced by parameter between the last micro-batch and a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flatshard as fs
from flatshard import _core
from flatshard._kinds import GRAD

pytestmark = pytest.mark.quick

SHAPES = {"a.w": (13, 7), "a.b": (5,), "b.w": (3, 11), "b.unused": (4,), "b.frozen": (6,)}


def gradients(rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng([rank, step])
    return {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in SHAPES.items()
        if name not in ("b.unused", "b.frozen")
    }


def opened(world: fs.World, stage: int) -> tuple[fs.Shards, fs.SGD]:
    params = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    shards = fs.shard(params, world, sharding=fs.Sharding(stage=stage), frozen=["b.frozen"])
    return shards, fs.SGD(shards, lr=0.5)


def reduce_all(shards: fs.Shards, grads: dict[str, Any]) -> None:
    for unit in reversed(shards.units):
        unit.reduce({name: grads[name] for name in unit.names if name in grads})


def sums_of(shards: fs.Shards, world: fs.World) -> tuple[Any, Any]:
    mine = np.zeros((2, len(shards.parameters)))
    _core.grad_sums(shards._core, mine)
    return world.all_reduce(mine[0].copy(), op="sum"), world.all_reduce(mine[1].copy(), op="max")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_scaled_and_replaced(n: int, stage: int) -> None:
    totals = {
        name: sum(gradients(r, 0)[name].astype(np.float64) for r in range(n))
        for name in gradients(0, 0)
    }

    def rank(world: fs.World) -> None:
        shards, optimizer = opened(world, stage)
        reduce_all(shards, gradients(world.rank, 0))
        shards.end_micro_batch()
        squares, largest = sums_of(shards, world)
        for name, total in totals.items():
            p = shards.index(name)
            np.testing.assert_allclose(squares[p], np.square(total).sum(), rtol=1e-6)
            np.testing.assert_allclose(largest[p], np.abs(total).max(), rtol=1e-6)
        assert squares[shards.index("b.unused")] == squares[shards.index("b.frozen")] == 0.0

        _core.grad_scale(shards._core, shards.index("a.w"), 0.25)
        new = np.full(SHAPES["b.unused"], 2.0, np.float32)
        with shards.storing() as store:
            store(shards.index("b.unused"), GRAD, new)
        _core.grad_replaced(shards._core, shards.index("b.unused"))
        squares, _ = sums_of(shards, world)
        expected = {**totals, "a.w": totals["a.w"] * 0.25, "b.unused": new.astype(np.float64)}
        for name, total in expected.items():
            np.testing.assert_allclose(
                squares[shards.index(name)], np.square(total).sum(), rtol=1e-6
            )

        del expected["b.w"]
        _core.grad_forget(shards._core, shards.index("b.w"))
        result = optimizer.step()
        norm = np.sqrt(sum(np.square(v).sum() for v in expected.values())) / n
        np.testing.assert_allclose(result.grad_norm, norm, rtol=1e-6)
        for name, total in expected.items():
            np.testing.assert_allclose(shards.full(name), 1.0 - 0.5 * total / n, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(shards.full("b.frozen"), 1.0)
        np.testing.assert_array_equal(shards.full("b.w"), 1.0)

        reduce_all(shards, gradients(world.rank, 0))  # factors are those of one step
        before = shards.full("a.w")
        optimizer.step()
        np.testing.assert_allclose(
            before - shards.full("a.w"), 0.5 * totals["a.w"] / n, rtol=0, atol=1e-6
        )
        shards.close()

    fs.local_world(n).run(rank)


def test_order() -> None:
    """Nothing changes while gradients may come, and none comes after they were looked at."""

    def rank(world: fs.World) -> None:
        shards, optimizer = opened(world, 3)
        reduce_all(shards, gradients(world.rank, 0))
        with pytest.raises(RuntimeError, match="micro-batches may still come"):
            _core.grad_scale(shards._core, 0, 0.5)
        shards.end_micro_batch()
        sums_of(shards, world)
        with pytest.raises(RuntimeError, match="looked at"):
            reduce_all(shards, gradients(world.rank, 1))
        with pytest.raises(ValueError, match="frozen"):
            _core.grad_replaced(shards._core, shards.index("b.frozen"))
        with pytest.raises(ValueError, match="two rows"):
            _core.grad_sums(shards._core, np.zeros(3))
        optimizer.zero()
        reduce_all(shards, gradients(world.rank, 1))
        assert optimizer.step().applied
        shards.close()

    fs.local_world(2).run(rank)


def test_factors_differ() -> None:
    """Ranks that scale by different numbers are told, not left with torn parameters."""

    def rank(world: fs.World) -> None:
        shards, optimizer = opened(world, 3)
        reduce_all(shards, gradients(world.rank, 0))
        shards.end_micro_batch()
        sums_of(shards, world)
        _core.grad_scale(shards._core, 0, 0.5 if world.rank else 0.25)
        with pytest.raises(fs.CollectiveMismatch):
            optimizer.step()

    fs.local_world(2).run(rank)


@pytest.mark.parametrize("factor", [np.nan, np.inf, -np.inf, 1e39, 1e200])
def test_a_factor_that_leaves_no_finite_gradient_skips(factor: float) -> None:
    """It is the verdict's to find, on every rank: nothing moves, and the parameter is named."""

    def rank(world: fs.World) -> None:
        shards, optimizer = opened(world, 3)
        reduce_all(shards, gradients(world.rank, 0))
        shards.end_micro_batch()
        sums_of(shards, world)
        before = fs.weights_sha256(shards)
        _core.grad_scale(shards._core, shards.index("a.b"), factor)
        result = optimizer.step(max_norm=1.0)
        assert not result.applied and result.reason == "nonfinite"
        assert result.nonfinite == ("a.b", -1) and np.isnan(result.grad_norm)
        assert fs.weights_sha256(shards) == before
        reduce_all(shards, gradients(world.rank, 0))
        assert optimizer.step().applied
        world.barrier()

    fs.local_world(3).run(rank)
