"""Kernels against memory: each operation beside some that touch the same arrays and do nothing.

The other lines of a case are the bound: the same bytes read and written, once each, by the same
threads; the faster of the two ways counts. Options: threads=2, numel=33554432, isa=avx512 (the
best of this machine).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.harness import Case, Contender, Settings, Suite
from flatshard import _core

__all__ = ["SUITE"]

BF16 = np.dtype(ml_dtypes.bfloat16)
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.1
Array = np.ndarray[Any, Any]

SCALARS = {
    "lr": LR,
    "decay": 1 - LR * DECAY,
    "beta1": BETA1,
    "beta2": BETA2,
    "one_minus_beta1": 1 - BETA1,
    "one_minus_beta2": 1 - BETA2,
    "eps": EPS,
    "step_size": LR / (1 - BETA1),
    "inv_sqrt_bc2": (1 - BETA2) ** -0.5,
}


class Operation:
    """One kernel, with what checks its first run."""

    def __init__(self, name: str, run: Callable[[], object], check: Callable[[], None]) -> None:
        self.name, self.run, self.check = name, run, check

    def verify(self) -> None:
        self.run()
        self.check()

    def sample(self) -> float:
        started = time.perf_counter()
        self.run()
        return time.perf_counter() - started

    def close(self) -> None:
        pass


def bound(
    kernels: Any,
    reads: Sequence[Array],
    updates: Sequence[Array],
    writes: Sequence[Array],
    *,
    tiles: bool,
) -> Operation:
    """Touches the same arrays."""
    parts = (tuple(reads), tuple(updates), tuple(writes))
    arrays = tuple(x for part in parts for x in part)
    sizes = len(parts[0]), len(parts[1])

    def run() -> None:
        kernels.stream(arrays, *sizes, 0, tiles)

    def check() -> None:
        before = [x[-8:].view(np.uint32).copy() for x in parts[1]]
        kernels.stream(arrays, *sizes, 1 << 31, tiles)
        for x, old in zip(parts[1], before, strict=True):
            touched = np.array_equal(x[-8:].view(np.uint32), old ^ (1 << 31))
            assert touched, "the bound did not touch its arrays"
        kernels.stream(arrays, *sizes, 1 << 31, tiles)

    way = "tile by tile" if tiles else "line by line"
    return Operation(f"bound: the same bytes, {way}", run, check)


def draw(numel: int, dtype: Any, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(numel, np.float32).astype(dtype)


def sum_case(kernels: Any, numel: int, sources: int) -> Case:
    src = [draw(numel, np.float32, seed) for seed in range(sources)]
    acc = np.zeros(numel, np.float32)
    result: list[tuple[float, bool]] = []

    def run() -> None:
        result[:] = [kernels.sum(acc, src)]

    def check() -> None:
        want = src[0].copy()
        for x in src[1:]:
            want += x
        assert np.array_equal(acc, want)
        assert abs(result[0][0] / np.square(want, dtype=np.float64).sum() - 1) < 1e-12

    who: list[Callable[[], Contender | None]] = [
        lambda: Operation("sum, norm, non-finite test", run, check),
        lambda: bound(kernels, src, [], [acc], tiles=False),
        lambda: bound(kernels, src, [], [acc], tiles=True),
    ]
    title = f"sum of {sources} ranks, fp32, {numel * 4 / 1e6:.0f} MB each"
    return Case(title, who, numel * 4 / 1e9, "GB of message")


def update_case(kernels: Any, numel: int, *, master: bool, moments: Any, grads: Any) -> Case:
    start, g = draw(numel, np.float32, 1), draw(numel, grads, 2)
    m, v = np.zeros(numel, moments), np.zeros(numel, moments)
    arrays: dict[str, Array] = {"moment1": m, "moment2": v}
    if master:
        arrays |= {"master": start.copy(), "weight": start.astype(BF16)}
    else:
        arrays |= {"weight": start.copy()}

    def run() -> None:
        kernels.update("adamw", g, **arrays, **SCALARS)

    def check() -> None:
        some = slice(0, 1 << 16)
        grad = g[some].astype(np.float64)
        want = start[some] * (1 - LR * DECAY) - LR * grad / (np.abs(grad) + EPS)
        found = arrays["master" if master else "weight"][some]
        # Moments rounded to 8 bits move the first step by up to 1 in 100 of lr.
        bound = 1e-6 * np.maximum(np.abs(want), LR) + (0.02 * LR if moments == BF16 else 0.0)
        assert (np.abs(found - want) <= bound + 1e-2 * LR * (np.abs(grad) < 1e-5)).all()

    updates = [m, v, arrays["master" if master else "weight"]]
    writes = [arrays["weight"]] if master else []
    who: list[Callable[[], Contender | None]] = [
        lambda: Operation("AdamW", run, check),
        lambda: bound(kernels, [g], updates, writes, tiles=False),
        lambda: bound(kernels, [g], updates, writes, tiles=True),
    ]
    nbytes = sum(x.itemsize for x in (g, *updates, *updates, *writes))
    title = (
        f"AdamW, {numel / 1e6:.0f} M parameters, {g.dtype} gradients, {m.dtype} moments, "
        f"{'fp32 masters and bf16 weights' if master else 'fp32 weights'}, {nbytes} B each"
    )
    return Case(title, who, numel / 1e6, "Mparam")


def convert_case(kernels: Any, numel: int, dst: Any, src: Any) -> Case:
    x, y = draw(numel, src, 3), np.zeros(numel, dst)
    who: list[Callable[[], Contender | None]] = [
        lambda: Operation(
            "convert",
            lambda: kernels.convert(y, x),
            lambda: np.testing.assert_array_equal(y.view(np.uint8), x.astype(dst).view(np.uint8)),
        ),
        lambda: bound(kernels, [x], [], [y], tiles=False),
        lambda: bound(kernels, [x], [], [y], tiles=True),
    ]
    title = f"{x.dtype} to {y.dtype}, {numel / 1e6:.0f} M elements"
    return Case(title, who, numel * (x.itemsize + y.itemsize) / 1e9, "GB")


def cases(settings: Settings) -> Sequence[Case]:
    options = settings.options
    threads = int(options.get("threads", _core.cpu_count()))
    numel = int(options.get("numel", 1 << 16 if settings.smoke else 1 << 25))
    kernels: Any = _core.Kernels(options.get("isa"), threads=threads)
    print(f"  {kernels.name}, {threads} threads")
    made: list[Callable[[], Case]] = [
        lambda: sum_case(kernels, numel, 2),
        lambda: sum_case(kernels, numel, 4),
        lambda: update_case(kernels, numel, master=False, moments=np.float32, grads=np.float32),
        lambda: update_case(kernels, numel, master=True, moments=np.float32, grads=np.float32),
        lambda: update_case(kernels, numel, master=True, moments=np.float32, grads=BF16),
        lambda: update_case(kernels, numel, master=True, moments=BF16, grads=BF16),
        lambda: convert_case(kernels, numel, BF16, np.float32),
        lambda: convert_case(kernels, numel, np.float32, BF16),
        lambda: convert_case(kernels, numel, np.float16, np.float32),
    ]
    return [make() for make in made]


SUITE = Suite("kernels", "each kernel against the memory bound", cases)
