"""Backward with the loss scale that 16-bit gradients need."""

from __future__ import annotations

from typing import Any

import torch

from ._adopt import binding_of

__all__ = ["backward"]


def backward(loss: torch.Tensor, *, optimizer: Any) -> None:
    """``loss.backward()``, with the loss multiplied by the optimizer's scale first.

    Parameters
    ----------
    loss : Tensor
        0-dim.
    optimizer : Optimizer
        Of this package, or adopted: it undoes the scale in its step, and changes it after an
        overflow. Without loss scaling (fp32, bf16) this is ``loss.backward()``.

    Raises
    ------
    TypeError
        Another optimizer.
    """
    binding = binding_of(optimizer, "backward")
    sharded = binding.bind("backward")
    scale = binding.engine.loss_scale
    grads = sharded.grads
    before, grads.scaled = grads.scaled, True
    try:
        (loss if scale == 1.0 else loss * scale).backward()
    finally:
        grads.scaled = before
