"""Settings for a module of torch, looked at by its methods alone: nothing imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from .settings import Settings, Units

__all__ = ["ignored_parameters", "module_options", "module_units", "sized_modules"]

#: As in FSDP's policy by size: not wrapped, and not looked into.
_NO_UNITS = {"ModuleList", "ModuleDict"}
_LEAVES = {"MultiheadAttention"}


def module_options(settings: Settings, module: Any) -> dict[str, Any]:
    """Arguments of ``flatshard.torch.fully_shard`` for a module.

    Parameters
    ----------
    settings : Settings
    module : torch.nn.Module

    Returns
    -------
    dict
        ``sharding``, ``units``, ``ignored_params``, and ``mp_policy`` where a precision was given.

    Raises
    ------
    ConfigError
        A class or module that is named is not in the module.
    """
    ignored = ignored_parameters(settings, module)
    made: dict[str, Any] = {
        "sharding": settings.sharding,
        "units": module_units(settings.units, module, ignored),
    }
    if ignored:
        made["ignored_params"] = ignored
    if "precision" in settings.given:
        made["mp_policy"] = settings.precision
    return made


def module_units(units: Units, module: Any, ignored: Iterable[Any] = ()) -> Any:
    """``units=`` of ``fully_shard``.

    Parameters
    ----------
    units : Units
    module : torch.nn.Module
    ignored : iterable of Parameter
        Left unsharded, and so not counted where units go by size.
    """
    if units.by == "classes":
        return list(units.match(type(m).__name__ for m in module.modules()))
    if units.by == "size":
        return sized_modules(module, units.min_num_params, ignored)
    return [] if units.by == "whole" else "auto"


def sized_modules(module: Any, least: int, ignored: Iterable[Any] = ()) -> list[Any]:
    """The submodules that FSDP's policy by size wraps.

    Parameters
    ----------
    module : torch.nn.Module
    least : int
        Parameters of a unit: of a module without those that are units already.
    ignored : iterable of Parameter
        Not counted.

    Returns
    -------
    list of Module
        From the innermost on; the module itself is not among them.
    """
    left_out = {id(p) for p in ignored}  # and what is in a unit already: a tie counts once
    found: list[Any] = []

    def visit(m: Any, is_root: bool) -> int:
        """Elements of m that belong to units within it, or to it as a unit."""
        names = {kind.__name__ for kind in type(m).__mro__}
        numel = sum(p.numel() for p in m.parameters() if id(p) not in left_out)
        if numel < least or names & _LEAVES:
            return 0
        inside = sum(visit(child, False) for child in m.children())
        if is_root or numel - inside < least or names & _NO_UNITS:
            return inside
        found.append(m)
        left_out.update(id(p) for p in m.parameters())
        return int(numel)

    visit(module, True)
    return found


def ignored_parameters(settings: Settings, module: Any) -> list[Any]:
    """The Parameters of ``ignored_modules``.

    Parameters
    ----------
    settings : Settings
    module : torch.nn.Module

    Raises
    ------
    ConfigError
        A module that is named is not there, or a pattern matches none.
    """
    asked = settings.ignored_modules
    if not asked:
        return []
    there = dict(module.named_modules())
    if isinstance(asked, str):
        chosen = [m for name, m in there.items() if re.fullmatch(asked, name)]
        if not chosen:
            raise ConfigError(f"ignored_modules: no module's name matches {asked!r}")
    else:
        missing = [name for name in asked if name not in there]
        if missing:
            raise ConfigError(f"ignored_modules: the model has no module {missing[0]!r}")
        chosen = [there[name] for name in asked]
    unique = {id(p): p for m in chosen for p in m.parameters()}
    return list(unique.values())
