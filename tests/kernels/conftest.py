"""Kernels on every instruction set of this machine and with one to four threads."""

import itertools
from collections.abc import Callable

import pytest

from flatshard import _core

ISAS = tuple(_core.cpu_isas())


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kernels(isa: str) -> _core.Kernels:
    """One thread."""
    return _core.Kernels(isa)


def every_table() -> list[_core.Kernels]:
    """All instruction sets with one and with three threads, the baseline with one thread first."""
    return [_core.Kernels(isa, threads=t) for isa, t in itertools.product(ISAS, (1, 3))]


@pytest.fixture(name="every_table")
def every_table_fixture() -> Callable[[], list[_core.Kernels]]:
    return every_table
