"""Which Parameters are sharded, and where: the one place that finds a sharded module again.

Everything is held weakly. The module keeps its `Sharded` alive, through its forward hook, so that
a module nobody uses any more takes its world memory along.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from ._module import Sharded

__all__ = [
    "Entry",
    "by_parameters",
    "entry_of",
    "find_module",
    "forget",
    "optimizers",
    "remember",
    "sharded_of",
]


class Entry(NamedTuple):
    """A Parameter's place."""

    sharded: Sharded
    place: int


# By id, because tensors compare by element; the weak reference tells an id that was used again.
_parameters: dict[int, tuple[weakref.ref[Any], weakref.ref[Sharded], int]] = {}
_modules: dict[int, tuple[weakref.ref[Any], weakref.ref[Sharded]]] = {}

#: Optimizers of this package that were made and may bind to a module sharded later.
optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def remember(sharded: Sharded) -> None:
    """Enters a sharded module and its Parameters."""
    owner = weakref.ref(sharded)
    for key in [k for k, row in _modules.items() if row[1]() is None]:
        del _modules[key]
    for key in [k for k, entry in _parameters.items() if entry[1]() is None]:
        del _parameters[key]
    module = sharded.module
    _modules[id(module)] = (weakref.ref(module), owner)
    for index, member in enumerate(sharded.members):
        _parameters[id(member.parameter)] = (weakref.ref(member.parameter), owner, index)


def forget(sharded: Sharded) -> None:
    """The reverse; twice is fine."""
    _modules.pop(id(sharded.module), None)
    for member in sharded.members:
        _parameters.pop(id(member.parameter), None)


def entry_of(parameter: Any) -> Entry | None:
    """Where a Parameter is sharded, or None."""
    found = _parameters.get(id(parameter))
    if found is None or found[0]() is not parameter:
        return None
    sharded = found[1]()
    return None if sharded is None else Entry(sharded, found[2])


def find_module(module: torch.nn.Module) -> Sharded | None:
    """The sharding of exactly this module, or None."""
    found = _modules.get(id(module))
    if found is None or found[0]() is not module:
        return None
    return found[1]()


def by_parameters(parameters: Iterable[Any]) -> list[Sharded]:
    """Every sharded module that one of them belongs to."""
    around = {id(e.sharded): e.sharded for e in map(entry_of, parameters) if e}
    return list(around.values())


def sharded_of(target: Any, what: str) -> Sharded:
    """The sharded module of a module (itself, or around it), a Parameter, or several.

    Raises
    ------
    ValueError
        It is not sharded, or Parameters belong to several sharded modules.
    """
    if isinstance(target, torch.nn.Module):
        exact = find_module(target)
        if exact is not None:
            return exact
        around = by_parameters(target.parameters())
        words = f"{what}: the Parameters of this {type(target).__name__}"
    else:
        around = by_parameters([target] if isinstance(target, torch.Tensor) else list(target))
        words = f"{what}: these Parameters"
    if len(around) == 1:
        return around[0]
    if around:
        raise ValueError(
            f"{words} belong to {len(around)} sharded modules; call it for each of them"
        )
    raise ValueError(f"{words} are not sharded; call flatshard.torch.fully_shard(module) first")
