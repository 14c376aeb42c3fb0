"""Ranks for the tests of this folder: started when first needed, ended with the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from gang import Gang


@pytest.fixture(scope="module")
def gang(nothing_stays: None) -> Iterator[Callable[[int], Gang]]:
    """gang(n): n ranks."""
    gangs: dict[int, Gang] = {}

    def of(n: int) -> Gang:
        return gangs.setdefault(n, Gang(n))

    yield of
    for gang in gangs.values():
        gang.stop()
