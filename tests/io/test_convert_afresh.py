"""Folders that PyTorch, transformers and DeepSpeed write now, by the scripts that made the
committed ones: what is installed must be read as the versions of then are."""

import contextlib
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import converted
import pytest
import safetensors.numpy
import test_convert_deepspeed
import test_convert_torch

from flatshard import checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

pytest.importorskip("torch")


def make(script: str, folder: pathlib.Path, *words: str, python: str = sys.executable) -> None:
    """Runs a making script on two ranks, with a deadline for all of it."""
    command = [python, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    process = subprocess.Popen(
        [*command, str(converted.FIXTURES / script), str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            # The launcher ends its workers, which are in sessions of their own, on this one.
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=40)
            process.kill()
            process.communicate(timeout=10)
    assert process.returncode == 0, out[-3000:]


def test_torch(tmp_path) -> None:
    make("make_torch.py", tmp_path)
    truth = converted.truth_of(tmp_path / "dcp")
    for name in ("nested", "flat"):
        test_convert_torch.check_dcp(tmp_path / "dcp" / name, truth, tmp_path / f"run-{name}")
    checkpoint.convert(tmp_path / "fsdp", tmp_path / "run-fsdp")
    truth = converted.truth_of(tmp_path / "fsdp")
    _, state = converted.loads(tmp_path / "run-fsdp", truth, ties=test_convert_torch.TIE)
    test_convert_torch.check_groups(state)
    checkpoint.convert(tmp_path / "dcp-columns", tmp_path / "run-columns")
    checkpoint.export(tmp_path / "run-columns", tmp_path / "out")
    got = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    for name, arrays in converted.truth_of(tmp_path / "dcp-columns").items():
        assert got[name].tobytes() == arrays["weight"].tobytes()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")
def test_transformers(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, str(converted.FIXTURES / "make_transformers.py"), str(tmp_path / "made")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    checkpoint.convert(tmp_path / "made", tmp_path / "run")
    truth = converted.truth_of(tmp_path / "made")
    converted.loads(tmp_path / "run", truth, steps=3)
    shutil.rmtree(tmp_path / "run")
    checkpoint.convert(
        tmp_path / "made" / "pytorch_model.bin",
        tmp_path / "run",
        optimizer=tmp_path / "made" / "optimizer.pt",
    )
    converted.loads(
        tmp_path / "run", truth, ties=[("lm_head.weight", "model.embed_tokens.weight")], steps=3
    )


def with_deepspeed() -> str | None:
    """A Python that has DeepSpeed: this one, or the one that .ci/run made."""
    if importlib.util.find_spec("deepspeed") is not None:
        return sys.executable
    other = pathlib.Path(__file__).resolve().parents[2] / "build" / "others" / "bin" / "python"
    return str(other) if other.exists() else None


@pytest.mark.skipif(with_deepspeed() is None, reason="no deepspeed")
def test_deepspeed(tmp_path) -> None:
    make("make_deepspeed.py", tmp_path, python=with_deepspeed() or "")
    for stage in test_convert_deepspeed.STAGES:
        run = tmp_path / f"run-{stage}"
        test_convert_deepspeed.check(tmp_path / f"deepspeed-{stage}", run, stage)
