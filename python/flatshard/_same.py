"""What must be the same on every rank, compared before anything is opened."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from ._layout import Group, Parameter
from .errors import CollectiveMismatch
from .policy import Policy

if TYPE_CHECKING:
    from .world import World

__all__ = ["check_same", "describe_model"]

#: Ranks that are named one by one.
_NAMED_MOST = 8


def describe_model(
    parameters: Sequence[Parameter],
    units: Sequence[tuple[str, int, int]],
    policy: Policy,
    groups: Sequence[Group],
    dtypes: Sequence[str],
) -> dict[str, Any]:
    """A model and how it is sharded, as :func:`check_same` compares it: parameters in order, then
    everything else by field."""
    rows = []
    for i, p in enumerate(parameters):
        rows.append(
            {
                "name": p.name,
                "tied name": p.tied_name,
                "shape": list(p.shape),
                "dtype": dtypes[i] if dtypes else None,
                "unit": units[p.unit][0],
                "trainable": p.trainable,
            }
        )
    return {
        "parameters": rows,
        "places of units": {name: places for name, *places in units},
        "sharding": dataclasses.asdict(policy.sharding),
        "precision": dataclasses.asdict(policy.precision),
        "groups": {g.name: {"match": list(g.match), **g.options} for g in groups},
    }


def _said(value: Any) -> str:
    return repr(tuple(value)) if isinstance(value, list) else repr(value)


def _differing_parameter(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> str | None:
    for i, (mine, theirs) in enumerate(zip(got, want, strict=False)):
        if mine["name"] != theirs["name"]:
            same = sorted(p["name"] for p in got) == sorted(p["name"] for p in want)
            order = " (the same names, in another order)" if same else ""
            return f"parameter {i} is {mine['name']!r}, not {theirs['name']!r}{order}"
        for field, value in theirs.items():
            if mine[field] != value:
                return (
                    f"the {field} of parameter {i}, {mine['name']!r}, is {_said(mine[field])}, not "
                    f"{_said(value)}"
                )
    if len(got) != len(want):
        longer, more = (got, "more") if len(got) > len(want) else (want, "less")
        name = longer[min(len(got), len(want))]["name"]
        return f"{len(got)} parameters, not {len(want)}: {name!r} is the first {more}"
    return None


def _difference(got: Any, want: Any, path: str = "") -> str:
    """The first field in which two descriptions differ, in words."""
    if isinstance(got, dict) and isinstance(want, dict):
        if not path and "parameters" in want:
            found = _differing_parameter(got["parameters"], want["parameters"])
            if found is not None:
                return found
        for field in [*want, *(f for f in got if f not in want)]:
            here = f"{path}.{field}" if path else field
            if field not in got or field not in want:
                return f"{here} is there" if field in got else f"{here} is not there"
            if got[field] != want[field]:
                return _difference(got[field], want[field], here)
    return f"{path} is {_said(got)}, not {_said(want)}"


def check_same(world: World, what: str, description: Mapping[str, Any]) -> None:
    """Refuse, on every rank, what is not the same on all. Collective.

    Parameters
    ----------
    world : World
        The ranks.
    what : str
        What is opened, for the message.
    description : mapping
        Nested; its leaves become JSON, or their ``repr``.

    Raises
    ------
    CollectiveMismatch
        Names the ranks that differ from most of the others (from the lowest rank where there is no
        majority), and for each the first field. The world stays usable.

    Notes
    -----
    One fence of 16 bytes a rank; the descriptions are exchanged only where they differ.
    """
    text = json.dumps(description, default=repr).encode()
    mine = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.int64)
    digests = [row.tobytes() for row in world.all_gather(mine).reshape(world.size, 2)]
    if len(set(digests)) == 1:
        return
    texts = _core.io_share(world._core, text)
    usual = Counter(digests).most_common(1)[0][0]  # of equals, what came first
    first = digests.index(usual)
    want = json.loads(texts[first])
    odd = [rank for rank in range(world.size) if digests[rank] != usual]
    lines = [f"rank {r}: {_difference(json.loads(texts[r]), want)}" for r in odd[:_NAMED_MOST]]
    if len(odd) > _NAMED_MOST:
        lines.append(f"and {len(odd) - _NAMED_MOST} more ranks")
    raise CollectiveMismatch(
        f"{what}: ranks differ, and must not. Compared with rank {first}, " + "; ".join(lines)
    )
