"""Does a model's loss use ``num_items_in_batch``? Asked once, because its signature does not say.

transformers takes every model with ``**kwargs`` for one that divides its loss by the number of
items in the whole step. Several, the sequence classifiers among them, take the argument and ignore
it: the loss is then a mean already, and the Trainer's corrections multiply loss, gradient norm and
evaluation loss by the world size and by the accumulation steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["loss_is_summed"]


def _loss(model: torch.nn.Module, inputs: Mapping[str, Any], items: Any) -> float | None:
    outputs = model(**inputs, num_items_in_batch=items)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    return None if loss is None else float(loss.detach().float().mean())


def loss_is_summed(
    model: torch.nn.Module, inputs: Mapping[str, Any], items: torch.Tensor | int
) -> bool | None:
    """Whether twice the items halve the loss of this batch.

    Parameters
    ----------
    model : Module
        Asked twice, without gradients, dropout off; random numbers are as before afterwards.
    inputs : mapping
        A batch with its labels.
    items : int or Tensor
        ``num_items_in_batch`` of it.

    Returns
    -------
    bool or None
        None where this batch cannot tell: no loss, or one that is zero or not finite.
    """
    mode = {m: m.training for m in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            one = _loss(model, inputs, items)
            two = _loss(model, inputs, items * 2)
    finally:
        for module, training in mode.items():
            module.training = training
    if one is None or two is None or not (abs(one) > 0.0 and abs(one) < float("inf")):
        return None
    return abs(two / one - 1.0) > 0.25
