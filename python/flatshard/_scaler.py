"""The loss scale in motion."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import NonFiniteError
from .policy import LossScale

__all__ = ["Scaler"]


class Scaler:
    """The loss scale in motion. Fed with verdicts, which are equal on all ranks, so it is too."""

    def __init__(self, policy: LossScale | float | None) -> None:
        if isinstance(policy, (int, float)):
            policy = LossScale(initial=float(policy), dynamic=False, minimum=float(policy))
        self.policy = policy
        self.scale = policy.initial if policy is not None else 1.0
        self.clean = 0
        self.patience = policy.hysteresis if policy is not None else 0

    @property
    def core(self) -> float:
        """What the core is told: 0 for no scaling."""
        return self.scale if self.policy is not None else 0.0

    def follow(self, reason: str) -> None:
        """Next scale after a verdict.

        Raises
        ------
        NonFiniteError
            An overflow at the floor, or with a static scale of which there is no lower one.
        """
        policy = self.policy
        if policy is None or not policy.dynamic:
            return
        if reason == "applied":
            self.clean += 1
            if policy.restore == "applied":
                self.patience = policy.hysteresis
            if self.clean >= policy.window:
                self.scale = min(self.scale * policy.factor, 2.0**60)
                self.clean, self.patience = 0, policy.hysteresis
        elif reason == "overflow":
            self.clean = 0
            self.patience -= 1
            if self.patience > 0:
                return
            if self.scale <= policy.minimum:
                raise NonFiniteError(
                    f"gradients overflow at the lowest loss scale, {policy.minimum:g}"
                )
            self.scale = max(self.scale / policy.factor, policy.minimum)
            self.patience = policy.hysteresis if policy.restore == "shrink" else 1

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "clean": self.clean, "patience": self.patience}

    def restore(self, state: Mapping[str, float]) -> None:
        self.scale = float(state["scale"])
        self.clean = int(state["clean"])
        self.patience = int(state["patience"])
