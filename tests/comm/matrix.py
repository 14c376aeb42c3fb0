"""Every collective on one world, checked exactly: values are small integers.

Expected values come from NumPy in int64 or float64, never from flatshard.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}
OPS = ("sum", "mean", "max", "min")
LARGE = 2**20 + 3


def spread(limit: int = 1025) -> list[int]:
    """0 to 1025: both sides of every power of two, and some odd ones."""
    near = {2**k + d for k in range(11) for d in (-1, 0, 1)}
    return sorted(n for n in near | {0, 5, 100, 777, 1000} if 0 <= n <= limit)


def values(rank: int, n: int) -> np.ndarray:
    """Integers 0 to 12: sums of eight of them are exact in every dtype."""
    return (np.arange(n, dtype=np.int64) * 7 + rank * 5 + 3) % 13


@functools.lru_cache(maxsize=64)  # ranks that are threads share it
def operand(rank: int, n: int, dtype: str) -> np.ndarray:
    return values(rank, n).astype(np.float32).astype(DTYPES[dtype])


@functools.lru_cache(maxsize=64)
def reduction(op: str, size: int, n: int, dtype: str) -> np.ndarray:
    """What a reduction over ranks must give, in the dtype."""
    rows = np.stack([values(rank, n) for rank in range(size)]).reshape(size, n)
    if op == "mean":
        accurate = np.float64 if dtype == "float64" else np.float32
        return (rows.sum(0).astype(accurate) / accurate(size)).astype(DTYPES[dtype])
    whole = {"sum": rows.sum(0), "max": rows.max(0), "min": rows.min(0)}[op]
    return whole.astype(np.float32).astype(DTYPES[dtype])


def equal(got: np.ndarray, want: np.ndarray, what: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: {got.dtype}{got.shape}, not {want.dtype}{want.shape}"
    )
    wrong = np.flatnonzero(got.view(np.uint8) != want.view(np.uint8))
    assert not wrong.size, f"{what}: byte {wrong[0]} of {got.nbytes} differs"


def uneven(size: int, n: int) -> list[int]:
    """n cut into parts of different sizes, one of them empty where there are three ranks."""
    weights = [(rank * 3 + 1) % 5 if size > 2 else rank + 1 for rank in range(size)]
    weights = [weight if rank != 1 or size < 3 else 0 for rank, weight in enumerate(weights)]
    total = max(1, sum(weights))
    parts = [n * weight // total for weight in weights]
    parts[-1] += n - sum(parts)
    return parts


def place(world: Any, x: np.ndarray, in_world_memory: bool) -> np.ndarray:
    if not in_world_memory:
        return x
    there = world.symmetric(x.shape, x.dtype)
    there[...] = x
    return there


def check(
    world: Any,
    sizes: Iterable[int],
    dtypes: Sequence[str] = tuple(DTYPES),
    in_world_memory: bool = False,
    some_ops: Sequence[str] = OPS,
) -> int:
    """Runs every collective; returns how many were checked."""
    size, rank, done = world.size, world.rank, 0
    for dtype in dtypes:
        ops = [op for op in some_ops if op != "mean" or dtype.startswith(("float", "bfloat"))]
        for n in sizes:
            what = f"rank {rank} of {size}, {n} of {dtype}"
            x = place(world, operand(rank, n, dtype), in_world_memory)
            for op in ops:
                want = reduction(op, size, n, dtype)
                equal(world.all_reduce(x, op=op), want, f"all_reduce {op}, {what}")
                counts = uneven(size, n)
                begin = sum(counts[:rank])
                got = world.reduce_scatter(x, op=op, counts=counts)
                mine = want[begin : begin + counts[rank]]
                equal(got, mine, f"reduce_scatter {op}, {what}")
            everyone = [operand(r, n, dtype) for r in range(size)]
            equal(world.all_gather(x), np.concatenate(everyone), f"all_gather, {what}")
            own = x[: counts[rank]]
            cut = np.concatenate([whole[:k] for whole, k in zip(everyone, counts, strict=True)])
            equal(world.all_gather(own, counts=counts), cut, f"all_gather uneven, {what}")
            root = n % size
            equal(world.broadcast(x, root=root), everyone[root], f"broadcast, {what}")
            blocks = np.tile(x, size) if n < 5000 else np.resize(x, size * (n // size))
            per = len(blocks) // size
            sent = [
                np.tile(other, size) if n < 5000 else np.resize(other, size * per)
                for other in everyone
            ]
            came = np.concatenate([other[rank * per : (rank + 1) * per] for other in sent])
            equal(world.all_to_all(blocks), came, f"all_to_all, {what}")
            y = x if in_world_memory else x.copy()
            world.all_reduce(y, out=y)
            equal(y, reduction("sum", size, n, dtype), f"all_reduce in place, {what}")
            world.barrier()
            done += 2 * len(ops) + 6
    return done
