"""The tail of a step, from gradients as backward leaves them to new weights: sum over ranks, norm,
clipping, update of masters and moments, compute copy. One rank; options threads=2, numel=64000000,
precision=bf16, rule=AdamW (default: all there are).

Bound: our own stream kernel reads and writes the same arrays, in the same two passes, and does
nothing with them; the better of its two ways counts. torch does the tail in four calls: cast the
gradients, clip_grad_norm_, fused AdamW, cast the weights. DeepSpeed's is the same with its CPU Adam
in the middle; it is measured where it is installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Case, Contender, Settings, Suite
from benchmarks.ranks import Ranks

__all__ = ["SUITE", "open_bound", "open_flatshard"]

LR, BETAS, EPS, DECAY, MAX_NORM = 1e-3, (0.9, 0.999), 1e-8, 0.1, 1.0

#: What is kept of a parameter, bytes: gradient in its slot; then master, moments and compute copy,
#: and which of these the update reads and which it only writes.
KEPT = {
    ("fp32", "AdamW"): {"grad": 4, "updates": (4, 4, 4), "writes": ()},
    ("bf16", "AdamW"): {"grad": 2, "updates": (4, 4, 4), "writes": (2,)},
    ("bf16-split", "AdamW"): {"grad": 2, "updates": (2, 2, 4, 4), "writes": ()},
    ("bf16", "Lion"): {"grad": 2, "updates": (4, 4), "writes": (2,)},
    ("bf16-pure", "AdamW"): {"grad": 2, "updates": (2, 2, 2), "writes": ()},
    ("bf16-pure", "Lion"): {"grad": 2, "updates": (2, 2), "writes": ()},
}


def nbytes(precision: str, rule: str) -> int:
    """Read or written for each parameter: the gradient and its sum, the sum again and the state."""
    kept: dict[str, Any] = KEPT[precision, rule]
    total: int = kept["grad"] + 4 + 4 + 2 * sum(kept["updates"]) + sum(kept["writes"])
    return total


class Flatshard:
    """A world of one with one unit of `numel` parameters.

    what : "slot", the gradient lies where a native backward writes it; or "copy", it is the
        caller's array, and copying it is part of the step. "tiny": in its slot, and gradients,
        weights and moments are subnormal numbers.
    """

    def __init__(self, numel: int, what: str, precision: str, rule: str) -> None:
        import ml_dtypes

        import flatshard as fs

        self.what, self.precision, self.rule = what, precision, rule
        self.world = fs.init()
        rng = np.random.default_rng(0)
        half = np.float32 if precision == "fp32" else ml_dtypes.bfloat16
        size = 1e-39 if what == "tiny" else 1.0
        self.start = (rng.standard_normal(numel, np.float32) * np.float32(size)).astype(half)
        self.grad = (rng.standard_normal(numel, np.float32) * np.float32(min(size, 1e-3))).astype(
            half
        )
        mix: Any = precision
        if precision != "fp32":
            mix = fs.MixedPrecision(
                param="bfloat16",
                reduce="bfloat16",
                master={"bf16": "float32", "bf16-split": "split"}.get(precision),
                moments="bfloat16" if precision == "bf16-pure" else "float32",
            )
        masters = {"w": self.start.astype(np.float32)}
        self.shards = fs.shard(masters, self.world, sharding=fs.Sharding(stage=2), precision=mix)
        options: dict[str, Any] = {"lr": LR, "weight_decay": DECAY}
        if rule == "AdamW":
            options |= {"betas": BETAS, "eps": EPS}
        self.optimizer = getattr(fs, rule)(self.shards, **options)
        (self.unit,) = self.shards.units

    def verify(self) -> None:
        """One step against the rule in fp64."""
        self.sample()
        found = self.shards.full("w", "master").astype(np.float64)
        start, grad = self.start.astype(np.float64), self.grad.astype(np.float64)
        norm = float(np.sqrt(np.square(grad).sum()))
        assert abs(self.norm / norm - 1) < 1e-6, (self.norm, norm)
        grad *= min(1.0, MAX_NORM / (norm + 1e-6))
        # A first step's corrections cancel.
        step = np.sign(grad) if self.rule == "Lion" else grad / (np.abs(grad) + EPS)
        expected = start * (1 - LR * DECAY) - LR * step
        worst = np.max(np.abs(found - expected) / np.maximum(np.abs(expected), LR))
        # A bf16 weight is rounded to 8 bits, and so are the moments that the step is made of.
        bound = 1e-5 if self.precision != "bf16-pure" else 2.0**-6
        assert worst < bound, f"worst relative difference {worst}"

    def sample(self) -> float:
        core = self.shards._core
        started = time.perf_counter()
        if self.what == "copy":
            self.unit.reduce({"w": self.grad})
        else:
            core.grad_put(0, self.grad)
            started = time.perf_counter()
            core.grad_publish(0, False)
            core.round_end(-1, False)
        self.norm = self.optimizer.step(max_norm=MAX_NORM).grad_norm
        return time.perf_counter() - started

    def close(self) -> None:
        self.world.close()


class Bound:
    """The same arrays in the same two passes, read and written and nothing else."""

    def __init__(self, numel: int, precision: str, rule: str) -> None:
        from flatshard import _core

        kept: dict[str, Any] = KEPT[precision, rule]
        self.kernels: Any = _core.Kernels(None, threads=int(os.environ["FLATSHARD_THREADS"]))
        sizes = {2: np.float16, 4: np.float32}

        # Each begins 16 KiB further, so that arrays of a power of two do not meet in the same sets
        # of a cache.
        places = itertools.count()

        def one(itemsize: int) -> NDArray[Any]:
            at = next(places) * 16384 // itemsize
            return np.ones(numel + at, sizes[itemsize])[at:]

        def some(*nbytes: int) -> list[NDArray[Any]]:
            return [one(itemsize) for itemsize in nbytes]

        grad, acc = some(kept["grad"]), some(4)
        updates, writes = some(*kept["updates"]), some(*kept["writes"])
        self.passes = [
            ((*grad, *acc), 1, 0),
            ((*acc, *updates, *writes), 1, len(updates)),
        ]

    def run(self, tiles: bool, mask: int = 0) -> float:
        started = time.perf_counter()
        for arrays, reads, updates in self.passes:
            self.kernels.stream(arrays, reads, updates, mask, tiles)
        return time.perf_counter() - started

    def verify(self) -> None:
        arrays, reads, _ = self.passes[1]
        before = arrays[reads][-8:].view(np.uint32).copy()
        self.run(True, 1 << 31)
        touched = np.array_equal(arrays[reads][-8:].view(np.uint32), before ^ (1 << 31))
        assert touched, "the bound did not touch its arrays"

    def sample(self) -> float:
        return min(self.run(False), self.run(True))

    def close(self) -> None:
        pass


def open_flatshard(numel: int, what: str, precision: str, rule: str) -> Flatshard:
    return Flatshard(numel, what, precision, rule)


def open_bound(numel: int, precision: str, rule: str) -> Bound:
    return Bound(numel, precision, rule)


def cases(settings: Settings) -> Sequence[Case]:
    options = settings.options
    threads = int(options.get("threads", 2))
    numel = int(options.get("numel", 1 << 20 if settings.smoke else 64_000_000))

    def there(module: str) -> bool:
        return settings.peers and importlib.util.find_spec(module) is not None

    def ours(name: str, what: str, precision: str, rule: str) -> Callable[[], Contender | None]:
        job = "benchmarks.suites.step:open_flatshard"
        return lambda: Ranks(
            name, job, n=1, threads=threads, numel=numel, what=what, precision=precision, rule=rule
        )

    def bound(precision: str, rule: str) -> Callable[[], Contender | None]:
        job = "benchmarks.suites.step:open_bound"
        name = "bound: the same arrays, read and written"
        return lambda: Ranks(
            name, job, n=1, numel=numel, precision=precision, rule=rule, threads=threads
        )

    def peer(module: str, name: str) -> Callable[[], Contender | None]:
        job = f"benchmarks.peers.{module}:open_step"
        return lambda: Ranks(name, job, n=1, threads=threads, numel=numel)

    made = []
    for precision, rule in KEPT:
        if options.get("precision", precision) != precision or options.get("rule", rule) != rule:
            continue
        who = [ours(f"flatshard: sum, norm, clip, {rule}", "slot", precision, rule)]
        who.append(bound(precision, rule))
        if (precision, rule) == ("bf16", "AdamW"):
            who.append(ours("flatshard: the same, gradients copied in", "copy", precision, rule))
            if there("torch"):
                who.append(peer("torch_step", "torch: cast, clip_grad_norm_, AdamW, cast"))
            if there("torch") and there("deepspeed"):
                who.append(peer("deepspeed_step", "DeepSpeed: cast, clip, CPU Adam, cast"))
        else:
            beside = f"flatshard: bf16, AdamW, {nbytes('bf16', 'AdamW')} B each"
            who.append(ours(beside, "slot", "bf16", "AdamW"))
        title = (
            f"{numel / 1e6:.0f} M parameters, {precision}, {rule}, {threads} threads: "
            f"{nbytes(precision, rule)} B each"
        )
        made.append(Case(title, who, numel / 1e6, "Mparam"))
    if {"precision", "rule"} & set(options):
        return made
    tiny = [
        ours(f"flatshard: {name}", what, "bf16", "AdamW")
        for name, what in (("subnormal numbers", "tiny"), ("ordinary numbers", "slot"))
    ]
    made.append(Case(f"{numel / 1e6:.0f} M parameters, bf16, AdamW", tiny, numel / 1e6, "Mparam"))
    return made


SUITE = Suite("step", "sum, norm, clip, update, publish against memory and peers", cases)
