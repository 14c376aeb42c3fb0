"""Tests of life cycles start ranks as the tests of worlds do, or fork them from a template."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from template import Template

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "comm"), str(HERE.parent / "products")]


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    """A process that forks ranks."""
    from template import Template

    with Template() as process:
        yield process
