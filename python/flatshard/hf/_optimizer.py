"""The wrapper that Accelerate's ``prepare`` puts around an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from .. import torch as ft
from ..optim import StepResult

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's wrapper, over an optimizer of flatshard.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        One of ``flatshard.torch``, or the user's own after ``flatshard.torch.adopt``: the same
        object, so a scheduler that was made with it goes on driving it.
    max_norm : float, optional
        Clip to this where the script does not clip itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.max_norm = max_norm
        #: Set by ``Accelerator.clip_grad_norm_``, for the coming step.
        self.clipped = False
        #: Of the last step.
        self.result: StepResult | None = None

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the loss scale where there is one: what GradScaler is elsewhere."""
        state: dict[str, Any] = self.optimizer.state_dict()
        scaler = self._scaler()
        if scaler is not None:
            state["loss_scale"] = scaler.state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, or a state of the same class of torch. Collective.

        Parameters
        ----------
        state_dict : dict
            Equal on every rank.
        """
        if "loss_scale" in state_dict:
            self.optimizer._flatshard.bind("load_state_dict")
        self.optimizer.load_state_dict(state_dict)
        scaler = self._scaler()
        if scaler is not None and "loss_scale" in state_dict:
            scaler.restore(state_dict["loss_scale"])
            self.optimizer._flatshard.sharded.shards._core.set_loss_scale(scaler.core)

    def _scaler(self) -> Any:
        binding = self.optimizer._flatshard
        scaler = None if binding.engine is None else binding.engine._scaler
        return scaler if scaler is not None and scaler.policy is not None else None

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult | None:
        """The step, unless gradients are still being accumulated. Collective.

        Returns
        -------
        StepResult or None
            What happened; None between steps.
        """
        if not self.gradient_state.sync_gradients:
            return None
        if self.max_norm is not None and not self.clipped and closure is None:
            ft.clip_grad_norm_(
                [p for group in self.param_groups for p in group["params"]], self.max_norm
            )
        self.clipped = False
        result: StepResult = self.optimizer.step(closure)
        # Accelerate's and the Trainer's schedulers wait where a step was skipped.
        self._is_overflow = not result
        self.result = result
        return result
