"""``flatshard env``: what it says is what the machine has."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
from pathlib import Path

import pytest

from flatshard import _device, blas
from flatshard.cli import env
from flatshard.cli.__main__ import main

pytestmark = pytest.mark.quick


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FLATSHARD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLATSHARD_THREADS", "1")
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"numpy", "torch", "transformers", "accelerate"} <= set(report["packages"])
    assert report["isa"] in report["isas"]
    assert 1 <= report["cores"] <= (os.cpu_count() or 1)
    assert "OpenBLAS" in report["blas"] and "core" in report["blas"]
    assert "off" in report["cuda"] or "cuda:0" in report["cuda"]
    assert report["variables"] == {"FLATSHARD_THREADS": "1"}
    with open("/proc/meminfo") as lines:
        total = int(next(lines).split()[1]) * 1024
    assert 0 < report["memory_free_bytes"] <= report["memory_bytes"] <= total


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [line.split()[0] for line in lines]
    assert {"machine", "isa", "cores", "memory", "blas", "cuda"} <= set(keys)


def test_cuda_is_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FLATSHARD_CUDA_LIBRARY", raising=False)
    monkeypatch.setattr(_device, "LIBRARY", tmp_path / "libfs_cuda.so")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert main(["env", "--json"]) == 0
    cuda = json.loads(capsys.readouterr().out)["cuda"]
    assert "no libfs_cuda.so" in cuda["off"] and "FLATSHARD_CUDA=1" in cuda["off"]
    assert cuda["CUDA_HOME"].startswith(f"{str(tmp_path)!r} holds no bin/nvcc")
    assert cuda["nvcc"] and cuda["driver"]


@pytest.mark.parametrize(
    ("toolkit", "driver", "named"),
    [("13.0", 12040, True), ("12.8", 13000, False), ("13.0", 13000, False)],
)
def test_a_toolkit_newer_than_the_driver_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, toolkit: str, driver: int, named: bool
) -> None:
    """A compiler that says a version, and a driver that takes another."""
    nvcc, source = tmp_path / "nvcc", tmp_path / "driver.c"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {toolkit}, V{toolkit}.1'\n")
    nvcc.chmod(0o755)
    source.write_text(f"int cuDriverGetVersion(int *out) {{ *out = {driver}; return 0; }}\n")
    library = tmp_path / "libcuda.so.1"
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    monkeypatch.delenv("FLATSHARD_CUDA_LIBRARY", raising=False)
    monkeypatch.setattr(_device, "LIBRARY", tmp_path / "libfs_cuda.so")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: str(library))
    found = env.cuda()
    assert found["nvcc"] == f"{nvcc} (CUDA {toolkit})"
    assert found["driver"] == f"{library} (CUDA {driver // 1000}.{driver % 1000 // 10})"
    assert ("toolkit" in found) is named
    if named:
        assert "nvcc is of CUDA 13 and the driver takes CUDA 12 at most" in found["toolkit"]


def test_cuda_is_there(
    cuda: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cuda"]
    assert "sm_90" in found["cuda:0"] and "13" in found["cublas"] and found["nccl"]
    assert "off" not in found


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
