"""Activation checkpointing: units compute their forward again in backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ._units import Units, find_units

__all__ = ["activation_checkpointing"]


def activation_checkpointing(
    module: torch.nn.Module, units: Units = "auto", *, use_reentrant: bool = False
) -> torch.nn.Module:
    """Keep the inputs of some submodules alone, and run their forward again in backward.

    Parameters
    ----------
    module : Module
        Sharded or not.
    units : "auto", class name, class, callable, or a list of names, classes and submodules
        Which submodules, as for `fully_shard`.
    use_reentrant : bool
        Which of torch's two kinds.

    Returns
    -------
    Module
        The module itself.

    Raises
    ------
    ValueError
        There is no such submodule, one is inside another, or the module checkpoints already.
    """
    if any(getattr(m, "gradient_checkpointing", False) is True for m in module.modules()):
        raise ValueError(
            "activation_checkpointing: gradient checkpointing of transformers is enabled on this "
            "module already; use one of them"
        )
    chosen = find_units(module, units)
    if not chosen:
        raise ValueError("activation_checkpointing: no submodule to checkpoint; name some in units")
    ids = {id(m) for m in chosen}
    for unit in chosen:
        if "forward" in unit.__dict__ and isinstance(unit.forward, _Recomputed):
            raise ValueError(f"activation_checkpointing: {type(unit).__name__} has it already")
        if any(id(inner) in ids for inner in unit.modules() if inner is not unit):
            raise ValueError(
                f"activation_checkpointing: a {type(unit).__name__} holds another of the submodules"
            )
    for unit in chosen:
        unit.forward = _Recomputed(unit, use_reentrant)
    return module


class _Recomputed:
    """A forward that is run again in backward. Copies of the module keep it."""

    def __init__(self, unit: torch.nn.Module, use_reentrant: bool) -> None:
        self.unit = unit
        self.use_reentrant = use_reentrant
        functools.update_wrapper(self, type(unit).forward)
        self.__dict__.pop("__wrapped__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.unit).forward
        if not torch.is_grad_enabled():
            return forward(self.unit, *args, **kwargs)
        if self.use_reentrant:
            call = functools.partial(forward, self.unit, **kwargs)
            return checkpoint(call, *args, use_reentrant=True)
        return checkpoint(forward, self.unit, *args, use_reentrant=False, **kwargs)
