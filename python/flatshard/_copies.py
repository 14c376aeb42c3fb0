"""Copies that must be equal: compared over the ranks by checksums."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .errors import CollectiveMismatch

if TYPE_CHECKING:
    from ._shards import Shards

__all__ = ["check_copies"]

#: As the core numbers them: weight, master rounded, master, moments.
_COPIES = 6
_WEIGHT, _ROUNDED, _MASTER, _MOMENT1 = range(4)
_HELD = 1 << 32
#: Differences that are named one by one.
_NAMED_MOST = 8

Table = npt.NDArray[np.int64]


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _who(votes: list[tuple[int, int, int]]) -> str:
    """Who holds what the others do not. votes: (rank, copy, checksum)."""
    counts = Counter(crc for _, _, crc in votes)
    usual, most = counts.most_common(1)[0]
    odd = [(rank, copy) for rank, copy, crc in votes if crc != usual]
    if list(counts.values()).count(most) > 1:  # no majority: nobody knows who is right
        ranks = sorted({rank for rank, _, _ in votes})
        if len(ranks) == 1:
            return f"rank {ranks[0]}: it is not the rounded master"
        return f"{_ranks(ranks)} hold different copies"
    masters = sorted({rank for rank, copy in odd if copy == _ROUNDED})
    weights = sorted({rank for rank, copy in odd if copy != _ROUNDED})
    found = [_ranks(weights)] if weights else []
    found += [f"{_ranks(masters)} (the master behind it)"] if masters else []
    return " and ".join(found)


def _differing(table: Table, copies: tuple[int, ...]) -> list[int]:
    """Segments whose holders do not all say the same. table: (ranks, copies, segments)."""
    some = table[:, copies].reshape(-1, table.shape[2])
    held = some >= _HELD
    low = np.where(held, some, np.iinfo(np.int64).max).min(axis=0)
    high = np.where(held, some, -1).max(axis=0)
    found: list[int] = np.flatnonzero((high >= 0) & (low != high)).tolist()
    return found


def check_copies(shards: Shards) -> None:
    """What :meth:`flatshard.Shards.check` does. Collective."""
    world, core = shards.world, shards._core
    segments = core.segments()
    mine = np.empty(_COPIES * len(segments), np.int64)
    core.checksums(mine)
    table: Table = world.all_gather(mine).reshape(world.size, _COPIES, len(segments))
    compared: dict[str, tuple[int, ...]] = {
        "weight": (_WEIGHT, _ROUNDED),
        "master": (_MASTER,),
        **{name: (_MOMENT1 + m,) for m, name in enumerate(shards._moments)},
    }
    said: list[str] = []
    for what, copies in compared.items():
        for s in _differing(table, copies):
            votes = [
                (rank, copy, int(table[rank, copy, s]))
                for rank in range(world.size)
                for copy in copies
                if table[rank, copy, s] >= _HELD
            ]
            p, _, begin, end = segments[s]
            name = shards.parameters[p].name
            said.append(f"{what} of {name!r}, elements [{begin}, {end}): {_who(votes)}")
    if not said:
        return
    more = f"; and {len(said) - _NAMED_MOST} more" if len(said) > _NAMED_MOST else ""
    raise CollectiveMismatch(
        "copies that must be equal differ: " + "; ".join(said[:_NAMED_MOST]) + more + ". Memory "
        "was damaged or written from outside: go on from the last checkpoint"
    )
