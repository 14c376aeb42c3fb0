"""The tests of steps once more, on a device: worlds of threads there compute on the
stand-in for CUDA. What is about weights in host memory that ranks share is left out."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 280.0

SUITES = [
    pytest.param("shard/test_step.py", "one_bad_gradient", 12),
    pytest.param("shard/test_step.py", "", 60, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("suite", "chosen", "least"), SUITES)
def test_a_suite(suite: str, chosen: str, least: int, cuda: pathlib.Path) -> None:
    end = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not full",
            "--timeout",
            "60",
            "-k",
            chosen,
            f"tests/{suite}",
        ],
        cwd=ROOT,
        env={**os.environ, "FLATSHARD_TEST_DEVICE": "cuda"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert end.returncode == 0, end.stdout[-4000:]
    passed = re.search(r"(\d+) passed", end.stdout)
    assert passed is not None and int(passed.group(1)) >= least, end.stdout[-500:]
