"""Whole models in the ways people train them, one case each: see cases_models.py."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
from gang import Gang

pytest.importorskip("torch")
pytest.importorskip("transformers")

CASES = [
    "recomputed",
    "adapters",
    "odd_uses",
    "bf16_outputs",
    "local_steps",
    "launched_wrong",
    "shapes",
]


@pytest.mark.parametrize("case", CASES)
def test_model(gang: Callable[[int], Gang], case: str) -> None:
    gang(2).run(f"cases_models:{case}")


@pytest.mark.full
def test_inductor(gang: Callable[[int], Gang]) -> None:
    """Takes a C++ compiler, and its time."""
    gang(2).run("cases_models:inductor")


def test_native_model(gang: Callable[[int], Gang], tmp_path: pathlib.Path) -> None:
    gang(2).run("cases_models:native", folder=str(tmp_path))


def test_a_rank_dies(gang: Callable[[int], Gang]) -> None:
    """Rank 0 gets its PeerLost; rank 1 has no answer to give."""
    with pytest.raises(AssertionError) as caught:
        gang(2).run("cases_models:killed")
    assert "rank 1: the rank ended" in str(caught.value)
    assert "rank 0:" not in str(caught.value).split("--- stderr")[0]
