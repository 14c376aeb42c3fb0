"""The logger ``flatshard``: the rank in each record, rank 0 alone unless asked otherwise.

``FLATSHARD_LOG=debug`` (info, warning, error) sets the level, ``FLATSHARD_LOG=all:info`` lets every
rank speak. Where the program has configured logging, its handlers get the records; else they go to
stderr.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import threading
from collections.abc import Mapping

from .errors import ConfigError

__all__ = ["every_rank", "logger", "set_rank", "setup", "warn_unknown_variables"]

logger = logging.getLogger("flatshard")

#: ``extra=`` of records that matter from whichever rank they come, such as a wait that lasts.
every_rank = {"every_rank": True}

LEVELS = ("debug", "info", "warning", "error")

_rank = threading.local()
_process_rank = int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() else 0
_everyone = False


def set_rank(rank: int, *, thread_only: bool) -> None:
    """Says which rank this thread (a rank that is a thread) or this process speaks for."""
    global _process_rank
    if thread_only:
        _rank.value = rank
    else:
        _process_rank = rank


class _Ranks(logging.Filter):
    """Puts the rank into each record; drops what other ranks than 0 say, unless asked for."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = getattr(_rank, "value", _process_rank)
        record.rank = rank
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


def warn_unknown_variables(
    known: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> None:
    """One warning for each FLATSHARD_* variable that is in no table; called at import."""
    for name in sorted(environment):
        if name.startswith("FLATSHARD_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "'flatshard env' lists what there is"
            logger.warning("the environment variable %s is not one of flatshard's; %s", name, hint)
