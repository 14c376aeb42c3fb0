"""``flatshard env``: what it says is what the machine has."""

from __future__ import annotations

import json
import os

import pytest

from flatshard import blas
from flatshard.cli.__main__ import main

pytestmark = pytest.mark.quick


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FLATSHARD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLATSHARD_THREADS", "1")
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["isa"] in report["isas"]
    assert 1 <= report["cores"] <= (os.cpu_count() or 1)
    assert "OpenBLAS" in report["blas"] and "core" in report["blas"]
    assert report["cuda"].startswith("not used: ")
    assert report["variables"] == {"FLATSHARD_THREADS": "1"}
    with open("/proc/meminfo") as lines:
        total = int(next(lines).split()[1]) * 1024
    assert 0 < report["memory_free_bytes"] <= report["memory_bytes"] <= total


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [line.split()[0] for line in lines]
    assert {"machine", "isa", "cores", "memory", "blas", "cuda"} <= set(keys)


def test_isa_follows_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATSHARD_CPU", "baseline")
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["isa"] == "baseline"


def test_blas_is_named_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blas.find().is_file()
    monkeypatch.setenv("FLATSHARD_BLAS", "/nowhere/libblas.so")
    with pytest.raises(FileNotFoundError, match="FLATSHARD_BLAS='/nowhere/lib"):
        blas.find()


def test_gemm_rate() -> None:
    rate = blas.flops(seconds=0.02)
    assert 1e7 < rate < 1e13
    with pytest.raises(ValueError, match="at least one thread"):
        blas.flops(threads=0, seconds=0.0)
