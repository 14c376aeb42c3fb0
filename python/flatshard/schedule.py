"""Learning rates as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Schedule", "constant", "cosine", "linear"]

#: Step number (0 = the first) to learning rate.
Schedule = Callable[[int], float]


def _check(lr: float, warmup: int, total: int | None) -> None:
    if not math.isfinite(lr) or lr < 0:
        raise ValueError(f"lr={lr!r}: expected a finite number, 0 or more")
    if warmup < 0:
        raise ValueError(f"warmup={warmup!r}: expected 0 steps or more")
    if total is not None and total < max(warmup, 1):
        raise ValueError(f"total={total!r} steps: expected at least warmup={warmup} and 1")


def _with_warmup(lr: float, warmup: int, after: Schedule) -> Schedule:
    def rate(step: int) -> float:
        if step < 0:
            raise ValueError(f"step={step!r}: expected 0 or more")
        if step < warmup:
            return lr * (step + 1) / warmup
        return after(step)

    return rate


def _decay(lr: float, warmup: int, total: int, rate_at: Callable[[float], float]) -> Schedule:
    """After the warm-up ``rate_at`` of the part of the rest that is done, from 0 to 1."""
    _check(lr, warmup, total)

    def after(step: int) -> float:
        return rate_at(min(1.0, (step - warmup) / max(1, total - warmup)))

    return _with_warmup(lr, warmup, after)


def constant(lr: float, *, warmup: int = 0) -> Schedule:
    """Constant rate after a linear warm-up.

    Parameters
    ----------
    lr : float
        The rate.
    warmup : int, steps
        The first ``warmup`` steps use ``lr * (step + 1) / warmup``.

    Returns
    -------
    callable
        Step number (0 = the first) to rate.

    Raises
    ------
    ValueError
        A negative rate or length.
    """
    _check(lr, warmup, None)
    return _with_warmup(lr, warmup, lambda step: lr)


def linear(lr: float, *, warmup: int = 0, total: int, final: float = 0.0) -> Schedule:
    """Linear decay from ``lr`` to ``final`` after a linear warm-up.

    Parameters
    ----------
    lr, final : float
        Rate at the end of the warm-up, and from step ``total`` on.
    warmup, total : int, steps
        Length of the warm-up and of the whole schedule.

    Returns
    -------
    callable
        Step number (0 = the first) to rate.

    Raises
    ------
    ValueError
        A negative rate or length, or ``total`` below ``warmup``.
    """
    return _decay(lr, warmup, total, lambda done: lr + (final - lr) * done)


def cosine(lr: float, *, warmup: int = 0, total: int, final: float = 0.0) -> Schedule:
    """Half a cosine from ``lr`` to ``final`` after a linear warm-up.

    Parameters
    ----------
    lr, final : float
        Rate at the end of the warm-up, and from step ``total`` on.
    warmup, total : int, steps
        Length of the warm-up and of the whole schedule.

    Returns
    -------
    callable
        Step number (0 = the first) to rate.

    Raises
    ------
    ValueError
        A negative rate or length, or ``total`` below ``warmup``.

    References
    ----------
    Loshchilov & Hutter 2017, "SGDR", equation 5, without restarts.
    """

    def half_wave(done: float) -> float:
        return final + (lr - final) * 0.5 * (1.0 + math.cos(math.pi * done))

    return _decay(lr, warmup, total, half_wave)
