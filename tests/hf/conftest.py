"""Starts the two jobs whose results tests/hf judges: once for all tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hf_spawn import run

import flatshard

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of both jobs: what two ranks saved, one resumes from."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    return tmp_path_factory.mktemp("hf")


PATH = os.pathsep.join([str(Path(flatshard.__file__).parent.parent), str(HERE)])


@pytest.fixture(scope="session")
def job(folder: Path) -> dict[str, list[Any]]:
    """What each case gave on two ranks: a list by rank."""
    launch = ["-m", "flatshard.cli", "launch", "-n", "2", str(HERE / "job.py"), str(folder)]
    run(launch, folder, PYTHONPATH=PATH, FLATSHARD_REPORT_AFTER="1")
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.fixture(scope="session")
def alone(folder: Path, job: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What each case gave in a world of one, after the others."""
    run([str(HERE / "job.py"), str(folder), "--alone"], folder, PYTHONPATH=PATH)
    found = json.loads((folder / "alone-0.json").read_text())
    return {name: [value] for name, value in found.items()}


def result(results: list[Any]) -> Any:
    """Rank 0's result. Every rank must have one, and none may have raised."""
    for rank, one in enumerate(results):
        if isinstance(one["found"], dict) and "raised" in one["found"]:
            pytest.fail(f"rank {rank}: {one['found']['where']}")
    return results[0]["found"]


@pytest.fixture
def found(job: dict[str, list[Any]], request: pytest.FixtureRequest) -> Any:
    """Of the case on two ranks that the test is named after."""
    return result(job[request.node.name.removeprefix("test_")])


@pytest.fixture
def found_alone(alone: dict[str, list[Any]], request: pytest.FixtureRequest) -> Any:
    """Of the case in a world of one that the test is named after."""
    return result(alone[request.node.name.removeprefix("test_")])
