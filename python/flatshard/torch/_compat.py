"""Differences between versions of torch, from 2.4 on, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["increment_versions", "register_before_load"]


def increment_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd that values changed behind its back."""
    increment = torch.autograd.graph.increment_version
    try:
        increment(tensors)
    except (AttributeError, TypeError):  # takes one tensor at a time before 2.6
        for tensor in tensors:
            increment(tensor)


def register_before_load(module: torch.nn.Module, hook: Any) -> Any:
    """hook(module, state_dict, prefix, ...) before a module loads; the handle."""
    register = getattr(module, "register_load_state_dict_pre_hook", None)
    if register is not None:
        return register(hook)
    return module._register_load_state_dict_pre_hook(hook, with_module=True)  # before 2.5
