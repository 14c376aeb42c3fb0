"""Ctrl-C and its like: remembered at once, acted on at the next step, by all ranks together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequest"]


class StopRequest:
    """Notes the first SIGINT and every signal of ``save_on``; the second SIGINT is Ctrl-C as ever.

    A context manager: handlers are set on entry and put back on exit. Outside the main thread,
    where Python allows no handlers, it sets none; ranks that are threads share the one of their
    launcher.

    Parameters
    ----------
    save_on : sequence of str
        Names of signals that ask for a save and an orderly end.
    """

    def __init__(self, save_on: Sequence[str] = ()) -> None:
        self._signals = [signal.SIGINT, *(signal.Signals[name] for name in save_on)]
        self._before: dict[signal.Signals, Any] = {}
        self._noted = 0

    @property
    def signal(self) -> int:
        """The number of the signal that asked to stop; 0 as long as none did."""
        return self._noted

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._noted == signal.SIGINT:
                signal.default_int_handler(number, frame)  # raises KeyboardInterrupt
            self._noted = number
        elif not self._noted:
            self._noted = number

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
