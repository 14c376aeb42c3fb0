"""The verdict of a step, as callers see it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REASONS", "StepResult"]

#: In the order in which the core numbers them.
REASONS = ("applied", "nonfinite", "overflow", "rank_skipped", "no_gradient")


@dataclass(frozen=True)
class StepResult:
    """The verdict of a step: equal on every rank, truthy if the step was applied.

    Parameters
    ----------
    applied : bool
        Whether weights moved. If not, nothing did: no moment, no decay, no step count.
    reason : str
        "applied", "nonfinite", "overflow", "rank_skipped" or "no_gradient".
    step : int
        Steps applied so far, this one included.
    grad_norm : float
        Norm of the averaged gradient over all ranks, before clipping; NaN when not finite. The
        2-norm, unless the step was asked for another.
    clip_coef : float
        What the gradient was multiplied by to respect ``max_norm``; 1 without clipping.
    loss_scale : float
        Scale of the loss that was undone; 1 without loss scaling.
    nonfinite : (str, int) or None
        First parameter whose gradient is not finite, and the rank that produced it (-1: the sum
        over ranks overflowed, or what it was multiplied by after backward).
    count : int or None
        Tokens or samples of the whole step, where micro-batches gave counts.
    skipped : tuple of (int, str)
        With "rank_skipped": every rank that asked for the skip, and the reason it gave.
    """

    applied: bool
    reason: str
    step: int
    grad_norm: float
    clip_coef: float
    loss_scale: float
    nonfinite: tuple[str, int] | None
    count: int | None
    skipped: tuple[tuple[int, str], ...] = ()

    def __bool__(self) -> bool:
        return self.applied
