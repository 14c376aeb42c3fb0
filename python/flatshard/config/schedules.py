"""DeepSpeed's learning rates as functions of the step.

Each gives the rate that the optimizer sees in step k (0 = the first). DeepSpeed sets a first rate
when the schedule is made and moves it after each step, so step k has the value of its iteration
k - 1, and the first step has a rate of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..schedule import Schedule

__all__ = ["RATES", "one_cycle_betas"]


def _warm(options: Mapping[str, Any], iteration: int) -> float:
    """Part of the way through the warm-up, 0 to 1."""
    steps = max(2, options["warmup_num_steps"])
    if options["warmup_type"] == "log":
        return math.log(iteration + 1) / math.log(steps)
    return float(iteration / steps)


def warmup(lr: float, options: Mapping[str, Any]) -> Schedule:
    """WarmupLR, and WarmupDecayLR where there is a total."""
    low, high = options["warmup_min_lr"], options["warmup_max_lr"]
    high = lr if high == "lr" else high
    steps = max(2, options["warmup_num_steps"])
    total = options.get("total_num_steps")

    def rate(step: int) -> float:
        iteration = step - 1
        if iteration < 0:
            return float(low)
        part = 1.0
        if iteration < steps:
            part = _warm(options, iteration)
        elif total is not None:
            part = max(0.0, (total - iteration) / max(1.0, total - steps))
        return float(low + (high - low) * part)

    return rate


def warmup_cosine(lr: float, options: Mapping[str, Any]) -> Schedule:
    """WarmupCosineLR: parts of the optimizer's rate."""
    first, last = options["warmup_min_ratio"], options["cos_min_ratio"]
    steps = max(2, options["warmup_num_steps"])
    total = options["total_num_steps"]

    def rate(step: int) -> float:
        iteration = step - 1
        if iteration < 0:
            return 0.0
        if iteration < steps:
            return float(lr * (first + (1.0 - first) * _warm(options, iteration)))
        done = min(1.0, (iteration - steps + 1) / max(1, total - steps))
        return float(lr * max(0.0, last + (1.0 - last) * (1.0 + math.cos(math.pi * done)) / 2))

    return rate


def range_test(lr: float, options: Mapping[str, Any]) -> Schedule:
    """LRRangeTest: a rate that only rises."""
    low, size = options["lr_range_test_min_lr"], options["lr_range_test_step_size"]

    def rate(step: int) -> float:
        interval = step / size
        if options["lr_range_test_staircase"]:
            interval = math.floor(interval)
        return float(low * (1 + options["lr_range_test_step_rate"] * interval))

    return rate


def _height(options: Mapping[str, Any], iteration: int) -> float:
    """Height within the cycle, 0 at its ends and 1 at the peak."""
    up, down = float(options["cycle_first_step_size"]), float(options["cycle_second_step_size"])
    at = iteration % (up + down)
    rising = at <= up
    height = at / up if rising else (up + down - at) / down
    stairs = options["cycle_first_stair_count" if rising else "cycle_second_stair_count"]
    if stairs > 0:
        height = math.floor(at * stairs / up if rising else (up + down - at) * stairs / down)
        height /= stairs
    return height


def _after(options: Mapping[str, Any], step: int) -> float | None:
    """Decays since the end of the cycle; None within it."""
    total = options["cycle_first_step_size"] + options["cycle_second_step_size"]
    if step - 1 < total:
        return None
    size = options["decay_step_size"]
    return (step - total) / size if size else 0.0


def one_cycle(lr: float, options: Mapping[str, Any]) -> Schedule:
    """OneCycle: up, down, then decay."""
    low, high = options["cycle_min_lr"], options["cycle_max_lr"]

    def rate(step: int) -> float:
        decays = _after(options, step)
        if decays is not None:
            return float(low / (1 + options["decay_lr_rate"] * decays))
        return float(low + (high - low) * _height(options, step))

    return rate


def one_cycle_betas(options: Mapping[str, Any]) -> Callable[[int], tuple[float, float]]:
    """OneCycle's betas: down while the rate goes up; the second is 0.99."""
    low, high = options["cycle_min_mom"], options["cycle_max_mom"]

    def betas(step: int) -> tuple[float, float]:
        decays = _after(options, step)
        if step == 0:
            return (low, 0.99)
        if decays is not None:
            return (min(high * (1 + options["decay_mom_rate"] * decays), 1 - 2**-24), 0.99)
        return (high - (high - low) * _height(options, step), 0.99)

    return betas


#: Name to (lr, options) -> rate by step.
RATES: Mapping[str, Callable[[float, Mapping[str, Any]], Schedule]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup,
    "WarmupCosineLR": warmup_cosine,
    "LRRangeTest": range_test,
    "OneCycle": one_cycle,
}
