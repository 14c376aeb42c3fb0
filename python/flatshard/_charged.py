"""Bytes charged to a rank by class of memory, as plans and models add them up."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Charged", "add", "charged"]

#: Class to (private, world, device) bytes; every class of the ledger.
Charged = dict[str, tuple[int, int, int]]


def charged(ledger: Mapping[str, tuple[int, int, int, int]]) -> Charged:
    """What the core's rows of (private, world, peak, device) bytes say, without the peak."""
    return {name: (row[0], row[1], row[3]) for name, row in ledger.items()}


def add(a: Charged, b: Charged) -> Charged:
    """Both together, class by class."""
    return {
        name: (x[0] + b[name][0], x[1] + b[name][1], x[2] + b[name][2]) for name, x in a.items()
    }
