"""The exceptions of flatshard. Everything else it raises is a built-in one."""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConfigError",
    "FlatshardError",
    "MemoryBudgetError",
    "NonFiniteError",
    "PeerLost",
    "WorldError",
]


class FlatshardError(Exception):
    """Base of every exception that is flatshard's own."""


class WorldError(FlatshardError):
    """The job of this world is over for every rank: close the world and build a new one.

    Attributes
    ----------
    rank : int or None
        The rank that was lost, late or different, counted in the whole job; None: none in
        particular.
    """

    rank: int | None = None


class PeerLost(WorldError, ConnectionError):
    """A rank died, left or failed while others needed it. The text says who, and what it did."""


class CollectiveTimeout(WorldError, TimeoutError):
    """A rank did not come within the deadline. The text says who came, who did not, and where."""


class CollectiveMismatch(WorldError):
    """Ranks called different operations, sizes or dtypes at one fence: the text names both. Or they
    hold different models, optimizers or copies: it names rank and parameter, and the world goes
    on."""


class CheckpointError(FlatshardError):
    """A checkpoint is missing, damaged, or of another model. The text names what and where."""


class ConfigError(FlatshardError, ValueError):
    """A configuration says something that is unknown, contradictory or not offered.

    Attributes
    ----------
    keys : tuple
        What became of each key that was read, ``flatshard.config.Key``, refused ones among them;
        empty where the error is not about single keys. The text has a line for each refused one.
    """

    keys: tuple[Any, ...] = ()


class NonFiniteError(FlatshardError, ArithmeticError):
    """Too many steps in a row were skipped: gradients were not finite, or ranks asked for it."""


class MemoryBudgetError(FlatshardError, MemoryError):
    """What was asked for would not fit, found before anything was allocated; with the table."""
