"""What is laid flat: parameters, their groups and units, as callers name them and as the core takes
them."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "Group",
    "Parameter",
    "check_groups",
    "core_definition",
    "default_unit",
    "matching",
    "numpy_dtype",
    "take_groups",
]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name; bfloat16 comes from ml_dtypes, imported when first needed."""
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the layout.

    Parameters
    ----------
    name : str
        Its name; the first one of a tie.
    tied_name : str or None
        Its second name.
    shape : tuple of int
        Its whole shape.
    unit : int
        Index of its unit.
    trainable : bool
        Whether it has a gradient and optimizer state.
    group : str or None
        Name of its group, where the caller named groups.
    """

    name: str
    tied_name: str | None
    shape: tuple[int, ...]
    unit: int
    trainable: bool = True
    group: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return (self.name,) if self.tied_name is None else (self.name, self.tied_name)

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Group:
    """Hyperparameters of the parameters whose names match a pattern.

    Parameters
    ----------
    name : str
        The group's name.
    match : tuple of str
        Shell patterns (``fnmatch``) of parameter names; the first group that matches wins.
    options : mapping
        Hyperparameters that differ from the optimizer's.
    """

    name: str
    match: tuple[str, ...]
    options: Mapping[str, Any]


def core_definition(
    parameters: Sequence[Parameter], units: Iterable[tuple[str, int, int]]
) -> tuple[list[tuple[Any, ...]], list[tuple[str, int, int]]]:
    """Parameters and units as the core takes them."""
    numbers: dict[str | None, int] = {None: 0}
    rows = []
    for p in parameters:
        group = numbers.setdefault(p.group, len(numbers))
        rows.append((p.name, p.tied_name, p.shape, p.unit, p.trainable, group))
    return rows, list(units)


def default_unit(name: str) -> str:
    """The unit of a parameter unless the caller says otherwise: its name up to the first numbered
    component ("model.layers.3.mlp.weight" -> "model.layers.3"), else its first component."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def take_groups(groups: Mapping[str, Mapping[str, Any]] | None) -> tuple[Group, ...]:
    """Groups as a caller writes them: ``{name: {"match": patterns, option: value}}``."""
    taken = []
    for name, options in (groups or {}).items():
        rest = dict(options)
        match = rest.pop("match", None)
        if not match:
            raise ValueError(f'groups[{name!r}] needs "match": a list of parameter name patterns')
        taken.append(Group(name, (match,) if isinstance(match, str) else tuple(match), rest))
    return tuple(taken)


def matching(what: str, patterns: Iterable[str], parameters: Sequence[Parameter]) -> set[int]:
    """Indices of the parameters of which a name matches one of the patterns. A pattern that none
    matches is refused: it is a typing error. ``what`` says whose pattern it is."""
    found: set[int] = set()
    for pattern in patterns:
        matched = {
            i
            for i, parameter in enumerate(parameters)
            if any(fnmatch.fnmatchcase(name, pattern) for name in parameter.names)
        }
        if not matched:
            names = [name for p in parameters for name in p.names]
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            hint = f"; the nearest name is {near[0]}" if near else ""
            raise ValueError(f"{what}: no parameter matches {pattern!r}{hint}")
        found |= matched
    return found


def check_groups(groups: Sequence[Group], parameters: Sequence[Parameter]) -> None:
    """Refuse a pattern that no parameter matches: it is a typing error, and would train with other
    hyperparameters than were asked for."""
    for group in groups:
        matching(f"groups[{group.name!r}]", group.match, parameters)
