"""Checkpoints of sharded modules: the files of ``flatshard.checkpoint``."""

from __future__ import annotations

import os
from typing import Any

import torch

from .. import checkpoint
from . import _registry
from ._adopt import binding_of
from ._binding import Binding
from ._guards import say_once
from ._module import buffer_sums

__all__ = ["load", "save"]


def _bound(optimizer: Any, what: str) -> Binding:
    """The binding of an optimizer, with the groups as they stand. Collective the first time."""
    binding = binding_of(optimizer, what)
    binding.bind(what)
    binding.follow_groups()
    return binding


def save(
    directory: str | os.PathLike[str],
    module: torch.nn.Module,
    optimizer: Any = None,
    *,
    step: int,
    **options: Any,
) -> Any:
    """Write a checkpoint: ``flatshard.checkpoint.save`` of the shards behind a module. Collective.

    Parameters
    ----------
    directory : path
        Of all checkpoints of a run.
    module : Module
        A sharded one. Its buffers are not in the checkpoint; a warning names those that changed
        since `fully_shard`, such as BatchNorm's statistics: write them beside it.
    optimizer : Optimizer, optional
        Of this package, or adopted.
    step : int
        Number of the checkpoint.
    **options
        Of ``flatshard.checkpoint.save``.

    Returns
    -------
    Saving
        As ``flatshard.checkpoint.save``.
    """
    sharded = _registry.sharded_of(module, "save")
    sharded.check_values("save()")
    sharded.held.check("before save()")
    _say_what_is_lost(sharded)
    binding = None if optimizer is None else _bound(optimizer, "save")
    engine = None if binding is None else binding.engine
    return checkpoint.save(directory, sharded, engine, step=step, **options)


def _say_what_is_lost(sharded: Any) -> None:
    """Warns of buffers that training changes: a run that resumes would begin with fresh ones."""
    if not sharded.world.is_main:
        return
    now = buffer_sums(sharded.module)
    changed = [name for name, crc in now.items() if crc != sharded.buffer_sums.get(name)]
    if changed:
        named = ", ".join(changed[:4]) + (", ..." if len(changed) > 4 else "")
        say_once(
            "save",
            "save(): buffers changed since fully_shard() and are in no checkpoint: "
            f"{named}. A run that resumes would begin with fresh ones: on rank 0 keep them beside "
            "it, torch.save(dict(module.named_buffers()), file), and after load() copy them back",
        )


def load(
    directory: str | os.PathLike[str],
    module: torch.nn.Module,
    optimizer: Any = None,
    **options: Any,
) -> Any:
    """Read a checkpoint, of any world size and of the native models too. Collective.

    Parameters
    ----------
    directory : path
        Of all checkpoints of a run, or of a Hugging Face model.
    module : Module
        A sharded one.
    optimizer : Optimizer, optional
        Of this package, or adopted; its groups take over the saved hyperparameters.
    **options
        Of ``flatshard.checkpoint.load``.

    Returns
    -------
    Loaded
        As ``flatshard.checkpoint.load``.
    """
    sharded = _registry.sharded_of(module, "load")
    sharded.held.check("before load()")
    binding = None if optimizer is None else _bound(optimizer, "load")
    engine = None if binding is None else binding.engine
    loaded = checkpoint.load(directory, sharded, engine, **options)
    if binding is not None:
        binding.take_groups()
    sharded.has_values = True
    sharded.held.refresh()
    return loaded
