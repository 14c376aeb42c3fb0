"""What the ranks of a world have done: operations, bytes, and how long they waited."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import _core

__all__ = ["Log", "LogEvent", "LogRow"]


@dataclass(frozen=True)
class LogRow:
    """Totals of one operation.

    Attributes
    ----------
    rank : int or None
        None in a sum over ranks.
    op : str
        ``all_reduce``, ``reduce``, ``gather``, ``barrier``, ...; "" in a sum over operations.
    unit : str
        The unit that was gathered, summed or waited for; "" for operations that have none.
    control : bool
        True for the agreements that ranks make (fences, openings, verdicts), False for data.
    count : int
        How often.
    nbytes : int
        Bytes that were moved: of a collective the whole message, of ``reduce`` what this rank read
        from all ranks' gradients, of ``gather`` what it copied (nothing in view), of a fence its
        record.
    seconds : float
        How long, without operations inside this one (a sum that a rank does while it waits).
    waited : float
        Seconds of these that the rank had nothing to do but to wait for others.
    """

    rank: int | None
    op: str
    unit: str
    control: bool
    count: int
    nbytes: int
    seconds: float
    waited: float


@dataclass(frozen=True)
class LogEvent:
    """One operation of one rank.

    Attributes
    ----------
    rank, op, unit, nbytes
        As in `LogRow`; the op ``wait`` is the waiting part of another operation.
    control : bool
        As in `LogRow`.
    start : float
        Seconds of the host's monotonic clock (`time.monotonic`), equal on all ranks.
    seconds, waited : float
        The whole length, operations inside included, and what of it was waiting.
    """

    rank: int
    op: str
    unit: str
    control: bool
    nbytes: int
    start: float
    seconds: float
    waited: float


def _sum(rows: Iterable[LogRow], base: LogRow) -> LogRow:
    count = nbytes = 0
    seconds = waited = 0.0
    for row in rows:
        count += row.count
        nbytes += row.nbytes
        seconds += row.seconds
        waited += row.waited
    return replace(base, count=count, nbytes=nbytes, seconds=seconds, waited=waited)


class Log:
    """Operations of every rank of a world up to now. Made by :meth:`World.log`.

    Attributes
    ----------
    rows : tuple of LogRow
        Totals of every rank, operation and unit since the world began.
    events : tuple of LogEvent
        The last operations of every rank (4,096 of each), by start.
    lost : dict of int to int
        Rank to how many earlier operations `events` does not hold any more; `rows` counts them.
    """

    def __init__(
        self, rows: tuple[LogRow, ...], events: tuple[LogEvent, ...], lost: dict[int, int]
    ) -> None:
        self.rows = rows
        self.events = events
        self.lost = lost

    def __iter__(self) -> Iterator[LogRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        total = self.total()
        return (
            f"<flatshard.Log of {len(self.lost)} ranks: {total.count} operations, "
            f"{total.nbytes} bytes, {total.waited:.3f} s waited>"
        )

    def total(
        self,
        *,
        rank: int | None = None,
        op: str | None = None,
        unit: str | None = None,
        control: bool | None = None,
    ) -> LogRow:
        """The sum of all rows that are as asked.

        Parameters
        ----------
        rank : int, optional
            One rank. Default: the sum over all of them.
        op, unit : str, optional
            One operation, one unit; ``unit=""``: operations without a unit.
        control : bool, optional
            Agreements alone (True), or data alone (False).
        """
        chosen = [
            row
            for row in self.rows
            if (rank is None or row.rank == rank)
            and (op is None or row.op == op)
            and (unit is None or row.unit == unit)
            and (control is None or row.control == control)
        ]
        return _sum(chosen, LogRow(rank, op or "", unit or "", bool(control), 0, 0, 0.0, 0.0))

    def since(self, earlier: Log) -> Log:
        """What came after an earlier log of the same world.

        Parameters
        ----------
        earlier : Log
            Its totals are taken off, and the operations that it holds left out.
        """
        before = {(row.rank, row.op, row.unit): row for row in earlier.rows}
        rows = []
        for row in self.rows:
            old = before.get((row.rank, row.op, row.unit))
            if old is not None:
                row = replace(
                    row,
                    count=row.count - old.count,
                    nbytes=row.nbytes - old.nbytes,
                    seconds=row.seconds - old.seconds,
                    waited=row.waited - old.waited,
                )
            if row.count:
                rows.append(row)
        seen = set(earlier.events)
        events = tuple(event for event in self.events if event not in seen)
        later = Log(tuple(rows), events, {})
        for rank in self.lost:
            later.lost[rank] = self._made(rank) - earlier._made(rank) - later._made(rank)
        return later

    def _made(self, rank: int) -> int:
        """Events so far, those included that are not kept."""
        return self.lost.get(rank, 0) + sum(event.rank == rank for event in self.events)

    def __str__(self) -> str:
        """A table: one line for each operation and unit, ranks summed, data before control."""
        ranks = sorted(self.lost)
        lines = [_line("operation", "unit", "calls", "bytes", "seconds", "waited", "most by rank")]
        keys = sorted({(row.control, row.op, row.unit) for row in self.rows})
        kinds = (False, True)
        for control in kinds:
            for key in (key for key in keys if key[0] == control):
                lines.append(self._table_line(key[1], key[2], key[0], ranks))
            total = self.total(control=control)
            name = "control" if control else "data"
            lines.append(_row_line(f"all {name}", "", total, ""))
        return "\n".join(lines)

    def _table_line(self, op: str, unit: str, control: bool, ranks: list[int]) -> str:
        by_rank = [self.total(rank=rank, op=op, unit=unit).waited for rank in ranks]
        most = max(range(len(ranks)), key=by_rank.__getitem__)
        told = f"{by_rank[most]:.3f} rank {ranks[most]}" if by_rank[most] >= 0.0005 else ""
        return _row_line(op, unit, self.total(op=op, unit=unit, control=control), told)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the operations for chrome://tracing or ui.perfetto.dev.

        Parameters
        ----------
        path : path
            A JSON file, replaced if it is there. One track a rank, on one clock; what a rank does
            while it waits stands inside the wait.
        """
        begin = min((event.start for event in self.events), default=0.0)
        found: list[dict[str, Any]] = [_named("process_name", 0, "flatshard")]
        for rank in sorted(self.lost):
            found.append(_named("thread_name", rank, f"rank {rank}"))
            found.append({**_named("thread_sort_index", rank, ""), "args": {"sort_index": rank}})
        for event in self.events:
            found.append(
                {
                    "ph": "X",
                    "name": f"{event.op} {event.unit}" if event.unit else event.op,
                    "cat": "control" if event.control else "data",
                    "pid": 0,
                    "tid": event.rank,
                    "ts": round((event.start - begin) * 1e6, 3),
                    "dur": round(event.seconds * 1e6, 3),
                    "args": {"bytes": event.nbytes, "waited_us": round(event.waited * 1e6, 3)},
                }
            )
        text = json.dumps(
            {
                "traceEvents": found,
                "displayTimeUnit": "ms",
                "otherData": {"lost": {str(rank): n for rank, n in self.lost.items()}},
            }
        )
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def _named(name: str, rank: int, text: str) -> dict[str, Any]:
    args: Mapping[str, str] = {"name": text}
    return {"ph": "M", "name": name, "pid": 0, "tid": rank, "args": args}


def _line(*cells: str) -> str:
    op, unit, *numbers, most = cells
    middle = "".join(f" {number:>10}" for number in numbers)
    return f"{op:<26} {unit:<14}{middle}  {most}".rstrip()


def _row_line(op: str, unit: str, row: LogRow, most: str) -> str:
    return _line(
        op, unit, f"{row.count:,}", _nbytes(row.nbytes), f"{row.seconds:.3f}",
        f"{row.waited:.3f}", most,
    )  # fmt: skip


def _nbytes(n: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"


def read(core: _core.World) -> Log:
    """The log of a world as it is now, of all ranks; reads their memory and waits for none."""
    rows: list[LogRow] = []
    events: list[LogEvent] = []
    lost: dict[int, int] = {}
    for rank in range(core.size):
        totals, kept, lost[rank] = core.log(rank)
        for op, control, unit, count, nbytes, _start, spent, waited in totals:
            rows.append(LogRow(rank, op, unit, control, count, nbytes, spent * 1e-9, waited * 1e-9))
        for op, control, unit, _count, nbytes, start, spent, waited in kept:
            events.append(
                LogEvent(rank, op, unit, control, nbytes, start * 1e-9, spent * 1e-9, waited * 1e-9)
            )
    events.sort(key=lambda event: (event.start, -event.seconds))
    return Log(tuple(rows), tuple(events), lost)
