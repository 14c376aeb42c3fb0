"""The logger ``flatshard``: the rank in each record, rank 0 alone unless asked otherwise.

``FLATSHARD_LOG=debug`` (info, warning, error) sets the level, ``FLATSHARD_LOG=all:info`` lets every
rank speak. Where the program has configured logging, its handlers get the records; else they go to
stderr.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping

from .errors import ConfigError

__all__ = [
    "every_rank",
    "logger",
    "set_keep",
    "set_rank",
    "setup",
    "tell",
    "warn_unknown_variables",
]

logger = logging.getLogger("flatshard")

#: ``extra=`` of records that matter from whichever rank they come, such as a wait that lasts.
every_rank = {"every_rank": True}

LEVELS = ("debug", "info", "warning", "error")

_rank = threading.local()
_process_rank = int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() else 0
_everyone = False

Keep = Callable[[str], object]
_process_keep: Keep | None = None


def set_rank(rank: int, *, thread_only: bool) -> None:
    """Says which rank this thread (a rank that is a thread) or this process speaks for."""
    global _process_rank
    if thread_only:
        _rank.value = rank
    else:
        _process_rank = rank


def set_keep(keep: Keep | None, *, thread_only: bool) -> None:
    """Who keeps the last lines of this rank, for the report that names it as late."""
    global _process_keep
    if thread_only:
        _rank.keep = keep
    else:
        _process_keep = keep


def _kept(record: logging.LogRecord) -> None:
    keep: Keep | None = getattr(_rank, "keep", None) or _process_keep
    if keep is None:
        return
    with contextlib.suppress(Exception):  # a record that cannot be formatted is told by its handler
        line = record.getMessage().split("\n", 1)[0]
        keep(f"{record.levelname.lower()}: {line}".encode(errors="backslashreplace").decode())


class _Ranks(logging.Filter):
    """Puts the rank into each record; drops what other ranks than 0 say, unless asked for."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = getattr(_rank, "value", _process_rank)
        record.rank = rank
        _kept(record)
        return rank == 0 or _everyone or getattr(record, "every_rank", False)


class _Stderr(logging.Handler):
    """Writes to whatever sys.stderr is now, where the program has no handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        level = record.levelname.lower()
        try:
            text = f"flatshard {level} (rank {getattr(record, 'rank', 0)}): {record.getMessage()}\n"
            sys.stderr.write(text)
        except Exception:
            self.handleError(record)


def setup(environment: Mapping[str, str] = os.environ) -> None:
    """Level and ranks from FLATSHARD_LOG; called at import."""
    global _everyone
    text = environment.get("FLATSHARD_LOG", "")
    level = text.removeprefix("all:").lower()
    if level and level not in LEVELS:
        raise ConfigError(
            f"FLATSHARD_LOG={text}: expected {', '.join(LEVELS)}, or all: and one of them"
        )
    _everyone = text.startswith("all:")
    logger.setLevel((level or "warning").upper())
    if not logger.handlers:
        logger.addFilter(_Ranks())
        logger.addHandler(_Stderr())


def tell(rank: int, text: str) -> None:
    """Says why this rank stops, before anybody can end its process for it.

    The program's handlers get the record; stderr gets the text, from them or from here.
    """
    text = f"rank {rank} stops: {text}"
    handlers = logging.getLogger().handlers
    if handlers:
        logger.error("%s", text, extra=every_rank)
    streams = [
        getattr(handler, "stream", None) for handler in handlers if handler.level <= logging.ERROR
    ]
    if sys.stderr is not None and sys.stderr not in streams:
        sys.stderr.write(f"flatshard error (rank {rank}): {text}\n")
        sys.stderr.flush()


def warn_unknown_variables(
    known: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> None:
    """One warning for each FLATSHARD_* variable that is in no table; called at import."""
    for name in sorted(environment):
        if name.startswith("FLATSHARD_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "'flatshard env' lists what there is"
            logger.warning("the environment variable %s is not one of flatshard's; %s", name, hint)
