"""Starts the two jobs whose results tests/hf judges: once for all tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flatshard

HERE = Path(__file__).resolve().parent
DEADLINE = 240.0


def run(words: list[str], folder: Path, **variables: str) -> str:
    """Runs Python with these words; its output."""
    package = str(Path(flatshard.__file__).parent.parent)
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **offline, "PYTHONPATH": package, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each case gave: a list by rank, or of one where it ran alone."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("hf")
    path = os.pathsep.join([str(Path(flatshard.__file__).parent.parent), str(HERE)])
    script = str(HERE / "job.py")
    launch = ["-m", "flatshard.cli", "launch", "-n", "2"]
    run([*launch, script, str(folder)], folder, PYTHONPATH=path)
    run([script, str(folder), "--alone"], folder, PYTHONPATH=path)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    found = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    alone = json.loads((folder / "alone-0.json").read_text())
    return {**found, **{name: [value] for name, value in alone.items()}}


@pytest.fixture
def found(job: dict[str, list[Any]], request: pytest.FixtureRequest) -> Any:
    """Of the case that the test is named after: rank 0's result. Every rank must have one, and
    none may have raised."""
    results = [one["found"] for one in job[request.node.name.removeprefix("test_")]]
    for rank, result in enumerate(results):
        if isinstance(result, dict) and "raised" in result:
            pytest.fail(f"rank {rank}: {result['where']}")
    return results[0]
