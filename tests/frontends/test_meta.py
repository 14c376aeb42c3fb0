"""Modules built without memory: values from a folder, or from an initialisation."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
from gang import Gang

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("model", "gather"), [("llama", "view"), ("llama", "copy"), ("bert", "view"), ("t5", "view")]
)
def test_pretrained(
    gang: Callable[[int], Gang], tmp_path: pathlib.Path, model: str, gather: str
) -> None:
    gang(2).run("cases_meta:pretrained", folder=str(tmp_path), model=model, gather=gather)


def test_each_rank_reads_what_it_keeps(gang: Callable[[int], Gang], tmp_path: pathlib.Path) -> None:
    for read, size in gang(2).run("cases_meta:owned_ranges", folder=str(tmp_path)):
        # Half of the file, and whole blocks of a MiB at the edges of each half unit.
        assert 0.4 * size < read < 0.75 * size


@pytest.mark.parametrize("case", ["refused", "headless"])
def test_folders(gang: Callable[[int], Gang], tmp_path: pathlib.Path, case: str) -> None:
    gang(2).run(f"cases_meta:{case}", folder=str(tmp_path))


def test_initialised(gang: Callable[[int], Gang]) -> None:
    gang(2).run("cases_meta:initialised")
