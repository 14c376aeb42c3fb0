"""Which parameters are gathered and reduced together, and what each is called."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ConfigError
from ..shard import Parameter

__all__ = ["Member", "Plan", "Units", "find_plan", "find_units"]

Units = str | type | Callable[[torch.nn.Module], bool] | Iterable[Any]

#: Name of the unit of what belongs to the sharded module itself.
ROOT = "(root)"


@dataclass
class Member:
    """A Parameter of the sharded module, once, with every place that holds it.

    Parameters
    ----------
    parameter : torch.nn.Parameter
        The object itself; it stays the same for ever.
    names : list of str
        Its names, the first one first; more than one for a tie.
    places : list of (Module, str)
        Modules and attribute names that hold it.
    unit : int
        Index of its unit.
    """

    parameter: torch.nn.Parameter
    names: list[str]
    places: list[tuple[torch.nn.Module, str]]
    unit: int = -1

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


@dataclass
class Plan:
    """A module cut into units.

    Parameters
    ----------
    members : list of Member
        Listed unit by unit: the order of the layout.
    units : list of str
        Names of the units, in the order of their first parameter.
    modules : list of (Module or None)
        The module whose forward uses each unit, where it is one module.
    links : list of (Module, str, Module)
        Parent, attribute and child: how one gets to the Parameters.
    """

    members: list[Member] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    modules: list[torch.nn.Module | None] = field(default_factory=list)
    links: list[tuple[torch.nn.Module, str, torch.nn.Module]] = field(default_factory=list)

    def parameters(self) -> list[Parameter]:
        """As the layout takes them."""
        return [
            Parameter(
                name=m.name,
                tied_name=m.names[1] if len(m.names) > 1 else None,
                shape=tuple(m.parameter.shape),
                unit=m.unit,
                trainable=m.parameter.requires_grad,
            )
            for m in self.members
        ]

    def places(self) -> list[tuple[str, int, int]]:
        """Units with their places in the order of gradients: backward comes from the last one."""
        last = len(self.units) - 1
        return [(name, last - u, last - u) for u, name in enumerate(self.units)]


def _class_names(module: torch.nn.Module) -> dict[str, type]:
    return {type(m).__name__: type(m) for m in module.modules()}


def _by_class_names(module: torch.nn.Module, names: Sequence[str], what: str) -> set[int]:
    known = _class_names(module)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(f"{what}: no submodule is a {name}; the nearest class is {near[0]}")
    return {id(m) for m in module.modules() if type(m).__name__ in names}


def _automatic(module: torch.nn.Module) -> set[int]:
    """The blocks that the model says must stay whole; else what stands in lists; else nothing."""
    whole: set[str] = set()
    for m in module.modules():
        names = getattr(m, "_no_split_modules", None)
        if isinstance(names, (list, tuple, set)):
            whole.update(str(name) for name in names)
    found = {id(m) for m in module.modules() if type(m).__name__ in whole}
    if found:
        return found
    inside: set[int] = set()
    for m in module.modules():
        if id(m) in inside or not isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        children = [c for c in m.children() if next(c.parameters(), None) is not None]
        if len(children) > 1:
            found.update(id(c) for c in children)
            inside.update(id(s) for s in m.modules())
    return found


def _asked(module: torch.nn.Module, units: Units) -> set[int]:
    if isinstance(units, str):
        return _automatic(module) if units == "auto" else _by_class_names(module, [units], "units")
    if isinstance(units, type):
        return {id(m) for m in module.modules() if isinstance(m, units)}
    if callable(units):
        return {id(m) for m in module.modules() if units(m)}
    here = {id(m) for m in module.modules()}
    found: set[int] = set()
    for item in units:
        if isinstance(item, torch.nn.Module):
            if id(item) not in here:
                raise ConfigError(f"units: a {type(item).__name__} is no submodule of this module")
            found.add(id(item))
        elif isinstance(item, (str, type)):
            found |= _asked(module, item)
        else:
            raise ConfigError(
                f"units: {item!r} is neither a class, its name, nor a submodule of this module"
            )
    return found


def find_units(module: torch.nn.Module, units: Units) -> list[torch.nn.Module]:
    """The submodules that are units, in the order of the module."""
    asked = _asked(module, units)
    return [m for m in module.modules() if id(m) in asked]


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def _unit_path(owner: str, unit_paths: set[str], above: set[str]) -> str:
    """The unit of a parameter that the module at ``owner`` holds: the innermost unit around it,
    else the outermost module without units inside, else the holder itself."""
    prefixes = _prefixes(owner)
    for path in reversed(prefixes):
        if path in unit_paths:
            return path
    for path in prefixes[1:]:
        if path not in above:
            return path
    return owner


def _collect(module: torch.nn.Module, ignored: set[int]) -> dict[int, Member]:
    members: dict[int, Member] = {}
    for path, holder in module.named_modules(remove_duplicate=False):
        for attribute, parameter in holder._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            name = f"{path}.{attribute}" if path else attribute
            member = members.setdefault(id(parameter), Member(parameter, [], []))
            member.names.append(name)
            if not any(h is holder and a == attribute for h, a in member.places):
                member.places.append((holder, attribute))
    return members


def find_plan(module: torch.nn.Module, units: Units, ignored: set[int]) -> Plan:
    """Cut a module into units.

    Parameters
    ----------
    module : Module
        What is sharded.
    units : "auto", class name, class, callable, or a list of names, classes and submodules
        Which submodules are units.
    ignored : set of int
        Ids of Parameters that stay private.

    Returns
    -------
    Plan
        Every other Parameter in exactly one unit; a tie belongs to the unit of its first name.

    Raises
    ------
    ConfigError
        A name or module that is not there.
    """
    asked = _asked(module, units)
    paths = dict(module.named_modules(remove_duplicate=False))
    unit_paths = {path for path, m in paths.items() if id(m) in asked and path}
    above = {prefix for path in unit_paths for prefix in _prefixes(path)[:-1]}
    order: dict[str, list[Member]] = {}
    for member in _collect(module, ignored).values():
        owner = member.name.rpartition(".")[0]
        order.setdefault(_unit_path(owner, unit_paths, above), []).append(member)
    plan = Plan()
    for holder in module.modules():
        for attribute, child in holder._modules.items():
            if child is not None and next(child.parameters(), None) is not None:
                plan.links.append((holder, attribute, child))
    for u, (path, members) in enumerate(order.items()):
        plan.units.append(path or ROOT)
        plan.modules.append(paths[path])
        for member in members:
            member.unit = u
            plan.members.append(member)
    return plan
