"""Lets the other ranks ask this one where it is, when it keeps them waiting too long.

`faulthandler` writes the line of the interrupted thread, even where that is deep in C and holds the
interpreter's lock. It is registered from init to close for one real-time signal that nobody uses.
Only a rank whose job has failed sends it; see csrc/comm/locate.c.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os

from . import _core
from .errors import ConfigError

__all__ = ["start", "stop"]

VARIABLE = "FLATSHARD_REPORT_SIGNAL"


class _State:
    """The signal that this process answers now, 0: none."""

    signal = 0
    watches_fork = False


def start(job: _core.Job) -> None:
    """From now on this rank, a process, can be asked.

    Raises
    ------
    ConfigError
        If FLATSHARD_REPORT_SIGNAL is not a real-time signal of this system.
    """
    number = _asked()
    if number is None or not hasattr(faulthandler, "register"):
        return
    try:
        _State.signal, file = job.answer_open(number)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}={number}: {error}") from None
    if not _State.signal:
        return
    try:
        # The thread that is asked alone: the frames of running threads cannot be read.
        faulthandler.register(_State.signal, file=file, all_threads=False, chain=True)
    except BaseException:
        job.answer_close()
        raise
    if not _State.watches_fork:
        _State.watches_fork = True
        os.register_at_fork(after_in_child=_in_child)
    job.answer_ready()


def _asked() -> int | None:
    """The signal of the environment; 0: choose one; None: do without."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return 0
    if not text.isdecimal():
        raise ConfigError(f"{VARIABLE}={text}: expected the number of a real-time signal, or 0")
    return int(text) or None


def stop(job: _core.Job) -> None:
    """This rank is not asked any more. What else has taken the signal since keeps it."""
    if _State.signal and job.answer_on_top():
        faulthandler.unregister(_State.signal)
    _State.signal = 0
    job.answer_close()


def _in_child() -> None:
    """A forked child does not answer for its parent."""
    if _State.signal:
        with contextlib.suppress(Exception):
            faulthandler.unregister(_State.signal)
        _State.signal = 0
