"""A learning rate of a DeepSpeed file as one of torch's schedulers."""

from __future__ import annotations

from typing import Any

import torch

from ..config import ScheduleSettings

__all__ = ["RateSchedule"]


class RateSchedule(torch.optim.lr_scheduler.LRScheduler):  # type: ignore[misc]
    """Sets each group's rate to what the schedule says of its step.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose groups are driven.
    schedule : ScheduleSettings
        From the configuration, with every value known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ScheduleSettings) -> None:
        self._rates = [schedule.rate(float(g["lr"])) for g in optimizer.param_groups]
        self._betas = schedule.betas()
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rates of the coming step; moves betas too where the schedule does."""
        if self._betas is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = self._betas(self.last_epoch)
        return [rate(self.last_epoch) for rate in self._rates]

    def state_dict(self) -> dict[str, Any]:
        """Where it stands; the functions come from the configuration."""
        return {
            key: value
            for key, value in self.__dict__.items()
            if key not in ("optimizer", "_rates", "_betas")
        }
