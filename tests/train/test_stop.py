"""Signals: the first is remembered, the second Ctrl-C is Ctrl-C, and handlers are put back."""

from __future__ import annotations

import signal
import threading

import pytest

from flatshard.models.stop import StopRequest

pytestmark = pytest.mark.quick


def test_first_is_noted_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert stop.signal == 0
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_named_signals_are_noted_and_others_left_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with StopRequest(["SIGUSR1"]) as stop:
        assert signal.getsignal(signal.SIGTERM) is before[0]
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert stop.signal == signal.SIGUSR1
        signal.raise_signal(signal.SIGINT)  # a person who is in a hurry after that
        assert stop.signal == signal.SIGINT
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_other_threads_set_no_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    inside: list[object] = []

    def enter() -> None:
        with StopRequest(["SIGTERM"]) as stop:
            inside.append((signal.getsignal(signal.SIGINT), stop.signal))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [(before, 0)]
