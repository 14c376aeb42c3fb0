"""Clipping by the global norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from . import _registry

if TYPE_CHECKING:
    from ._module import Sharded

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    module_or_params: torch.nn.Module | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Clip the gradients of a sharded module by their global norm. Collective.

    Parameters
    ----------
    module_or_params : Module or iterable of Parameter
        The sharded module, or all its Parameters.
    max_norm : float
        What the norm is brought down to; ``inf`` only measures.
    norm_type : float
        2.0, or ``inf`` for the largest magnitude.

    Returns
    -------
    Tensor
        0-dim, float32: norm of the averaged gradient before clipping, equal on every rank; NaN if
        it is not finite.

    Raises
    ------
    ValueError
        Nothing is sharded, only some of the Parameters were given, or another ``norm_type``.

    Notes
    -----
    The first half of a step: the optimizer multiplies by the coefficient as it updates, so no pass
    over memory is spent on it. ``torch.nn.utils.clip_grad_norm_`` works too, and costs one.
    """
    if isinstance(module_or_params, torch.nn.Module):
        given: list[Any] = list(module_or_params.parameters())
    elif isinstance(module_or_params, torch.Tensor):
        given = [module_or_params]
    else:
        given = list(module_or_params)
    sharded = _registry.sharded_of(given, "clip_grad_norm_")
    ids = {id(p) for p in given}
    for member in sharded.members:
        if member.parameter.requires_grad and id(member.parameter) not in ids:
            raise ValueError(
                f"clip_grad_norm_: Parameter {member.name} of the sharded module is missing: the "
                "norm is that of the whole module. For a part of it use "
                "torch.nn.utils.clip_grad_norm_"
            )
    return torch.tensor(agree(sharded, max_norm, norm_type), dtype=torch.float32)


def agree(sharded: Sharded, max_norm: float, norm_type: float) -> float:
    """Phase one of a step; its arguments wait for the second."""
    optimizer = sharded.find_optimizer()
    sharded.before_step("clip_grad_norm_")
    norm: float = optimizer.engine.grad_norm(max_norm=float(max_norm), norm_type=float(norm_type))
    return norm
