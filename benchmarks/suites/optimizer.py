"""The whole tail of a step: bf16 gradients summed, norm, clipping, AdamW with fp32 masters, bf16
weights. One rank; option threads=2, numel=67108864.

torch does it in four calls: cast the gradients, clip_grad_norm_, fused AdamW, cast the weights.
flatshard takes gradients from the caller's memory here, so its figure holds a copy that the native
model does not make. Below, the updates alone.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.harness import Case, Contender, Settings, Suite
from benchmarks.ranks import Ranks

__all__ = ["SUITE", "open_flatshard"]

LR, BETAS, EPS, DECAY, MAX_NORM = 1e-3, (0.9, 0.999), 1e-8, 0.1, 1.0


class Flatshard:
    """A world of one with one unit of `numel` parameters."""

    def __init__(self, numel: int, what: str) -> None:
        import ml_dtypes

        import flatshard as fs

        self.what = what
        self.world = fs.init()
        rng = np.random.default_rng(0)
        self.start = rng.standard_normal(numel, np.float32).astype(ml_dtypes.bfloat16)
        self.grad = (rng.standard_normal(numel, np.float32) * 1e-3).astype(ml_dtypes.bfloat16)
        sharding = fs.Sharding(stage=2)
        masters = {"w": self.start.astype(np.float32)}
        self.shards = fs.shard(masters, self.world, sharding=sharding, precision="bf16")
        self.optimizer = fs.AdamW(self.shards, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        (self.unit,) = self.shards.units

    def verify(self) -> None:
        """One step against AdamW in fp64."""
        self.unit.reduce({"w": self.grad})
        result = self.optimizer.step(max_norm=MAX_NORM)
        grad = self.grad.astype(np.float64)
        norm = float(np.sqrt(np.square(grad).sum()))
        assert abs(result.grad_norm / norm - 1) < 1e-6, (result.grad_norm, norm)
        grad *= min(1.0, MAX_NORM / (norm + 1e-6))
        step = LR * grad / (np.abs(grad) + EPS)  # the first step's corrections cancel
        expected = self.start.astype(np.float64) * (1 - LR * DECAY) - step
        found = self.shards.full("w", "master")
        worst = np.max(np.abs(found - expected) / np.maximum(np.abs(expected), LR))
        assert worst < 1e-5, f"worst relative difference {worst}"

    def sample(self) -> float:
        started = time.perf_counter()
        self.unit.reduce({"w": self.grad})
        if self.what == "bare":
            started = time.perf_counter()
        self.optimizer.step(max_norm=MAX_NORM)
        return time.perf_counter() - started

    def close(self) -> None:
        self.world.close()


def open_flatshard(numel: int, what: str) -> Flatshard:
    return Flatshard(numel, what)


def cases(settings: Settings) -> Sequence[Case]:
    options = settings.options
    threads = int(options.get("threads", 2))
    numel = int(options.get("numel", 1 << 20 if settings.smoke else 1 << 26))
    torch = settings.peers and importlib.util.find_spec("torch") is not None

    def ours(what: str, name: str) -> Callable[[], Contender | None]:
        job = "benchmarks.suites.optimizer:open_flatshard"
        return lambda: Ranks(name, job, n=1, threads=threads, numel=numel, what=what)

    def peer(what: str, name: str) -> Callable[[], Contender | None]:
        job = "benchmarks.peers.torch_optimizer:open_step"
        return lambda: Ranks(name, job, n=1, threads=threads, numel=numel, what=what)

    whole = [ours("whole", "flatshard: copy, sum, norm, clip, AdamW, bf16")]
    bare = [ours("bare", "flatshard: clip, AdamW, masters, bf16")]
    if torch:
        whole.append(peer("whole", "torch: cast, clip_grad_norm_, AdamW, cast"))
        bare.append(peer("bare", "torch: fused AdamW in fp32, no clip, no bf16"))
    title = f"{numel / 1e6:.0f} M parameters, bf16 with fp32 masters, {threads} threads"
    return [
        Case(f"{title}: the whole tail of a step", whole, numel / 1e6, "Mparam"),
        Case(f"{title}: the update alone", bare, numel / 1e6, "Mparam"),
    ]


SUITE = Suite("optimizer", "sum, norm, clip, AdamW, publish", cases)
