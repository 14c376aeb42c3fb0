"""Sharded checkpoints inside the folders of Trainer and Accelerate (SHARDED_STATE_DICT).

Each rank writes its own pieces, as ``flatshard.checkpoint`` does; they load at any number of ranks,
and ``flatshard export`` makes them whole.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from .. import torch as ft

__all__ = ["are_in", "read", "write"]


def _place(folder: str | os.PathLike[str], number: int) -> str:
    return os.path.join(folder, "flatshard" if number == 0 else f"flatshard_{number}")


def are_in(folder: str | os.PathLike[str], number: int = 0) -> bool:
    """Whether a folder holds pieces."""
    return os.path.isdir(_place(folder, number))


def write(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Any,
    *,
    step: int,
    number: int = 0,
) -> None:
    """Writes weights, and state where there is an optimizer. Collective.

    Parameters
    ----------
    folder : path
        Of the whole checkpoint.
    model : Module
        A sharded one.
    optimizer : Optimizer or None
        What Accelerate wrapped, unwrapped.
    step : int
        Number of the step.
    number : int
        Of the model, where there are several.
    """
    ft.save(_place(folder, number), model, optimizer, step=step).wait()


def read(
    folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: Any, *, number: int = 0
) -> None:
    """Loads what `write` wrote, at whatever number of ranks. Collective.

    Parameters
    ----------
    folder : path
        Of the whole checkpoint.
    model : Module
        A sharded one.
    optimizer : Optimizer or None
        None: weights alone.
    number : int
        Of the model, where there are several.
    """
    ft.load(_place(folder, number), model, optimizer)
