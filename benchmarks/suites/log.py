"""What the log of operations costs: the same work with and without it.

Two ranks of this machine: fences alone, collectives of 4 kB, and whole training steps of the tiny
model, which are as small as steps get. Options: ranks=2, size=tiny, fences=2000, steps=20.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import Case, Contender, Settings, Suite
from benchmarks.ranks import Ranks
from benchmarks.suites.train import CONFIGS, Training

__all__ = ["SUITE", "open_collectives", "open_steps"]


def set_off(off: bool) -> None:
    from flatshard import _core

    _core.log_set_off(off)


class Collectives:
    """Many fences (numel 0), or all-reduces of numel floats."""

    def __init__(self, off: bool, times: int, numel: int) -> None:
        import flatshard

        self.world = flatshard.init()
        set_off(off)
        self.off, self.times = off, times
        self.x = np.ones(numel, np.float32)

    def verify(self) -> None:
        before = self.world.log().total(rank=self.world.rank).count
        self.work()
        made = self.world.log().total(rank=self.world.rank).count - before
        assert made == (0 if self.off else self.times), f"{made} operations were logged"

    def work(self) -> None:
        for _ in range(self.times):
            if self.x.size:
                self.world.all_reduce(self.x, out=self.x, op="max")
            else:
                self.world.barrier()

    def sample(self) -> float:
        self.world.barrier()
        started = time.perf_counter()
        self.work()
        return time.perf_counter() - started

    def close(self) -> None:
        self.world.close()


class Steps(Training):
    """Several training steps."""

    def __init__(self, off: bool, times: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        set_off(off)
        self.times = times

    def sample(self) -> float:
        tokens = self.batch()
        self.world.barrier()
        started = time.perf_counter()
        for _ in range(self.times):
            self.step(tokens)
        return time.perf_counter() - started


def open_collectives(**arguments: Any) -> Collectives:
    return Collectives(**arguments)


def open_steps(**arguments: Any) -> Steps:
    return Steps(**arguments)


def cases(settings: Settings) -> Sequence[Case]:
    options = settings.options
    ranks = int(options.get("ranks", 2))
    fences = int(options.get("fences", 100 if settings.smoke else 2000))
    steps = int(options.get("steps", 1 if settings.smoke else 20))
    size = options.get("size", "tiny")

    def pair(function: str, **arguments: Any) -> list[Callable[[], Contender | None]]:
        return [
            lambda off=off: Ranks(  # type: ignore[misc]
                "without the log" if off else "with the log",
                f"benchmarks.suites.log:{function}",
                n=ranks,
                off=off,
                **arguments,
            )
            for off in (False, True)
        ]

    training: dict[str, Any] = {
        "config": CONFIGS[size],
        "precision": "fp32",
        "stage": 3,
        "gather": "view",
        "batch": 2,
        "length": 32,
    }
    return [
        Case("fences", pair("open_collectives", times=fences, numel=0), float(fences), "fences"),
        Case(
            "all-reduces of 4 kB",
            pair("open_collectives", times=fences, numel=1024),
            float(fences),
            "calls",
        ),
        Case(
            f"training steps of {size}, batch 2 x 32",
            pair("open_steps", times=steps, **training),
            float(steps),
            "steps",
        ),
    ]


SUITE = Suite("log", "what the log of operations costs", cases)
