"""The examples run, alone and on several ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flatshard

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE = 120.0


def run(words: list[str], folder: Path) -> str:
    package = str(Path(flatshard.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": package},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_llama(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "a.txt").write_text("one two three four five six seven\n" * 300)
    script = str(EXAMPLES / "train_llama.py")
    words = ["--data", "a.txt", "--steps", "21", "--batch", "2", "--length", "32"]
    start = [] if ranks == 1 else ["-m", "flatshard.cli", "launch", "-n", str(ranks)]
    out = run([*start, script, *words], tmp_path)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 3 and losses[-1] < losses[0] - 1.0
    assert (tmp_path / "run" / "step-000021" / "index.json").is_file()
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.torch
def test_train_torch(tmp_path: Path) -> None:
    """On two ranks, resumed alone: far below what 20 steps from the start reach.

    The line's bytes without their order have 2.5 nats; 20 steps bring 0.5 to 0.75, 60 bring 0.05
    to 0.12, over seeds, thread counts and the kernels of several processors.
    """
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    (tmp_path / "a.txt").write_text("one two three four five six seven\n" * 300)
    script = str(EXAMPLES / "train_torch.py")
    words = ["--data", "a.txt", "--length", "32"]
    launched = ["-m", "flatshard.cli", "launch", "-n", "2", script, *words]
    out = run([*launched, "--steps", "40", "--precision", "bf16"], tmp_path)
    out += run([script, *words, "--steps", "60", "--precision", "bf16"], tmp_path)
    assert "resumed at step 40" in out
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 3 and losses[0] < 1.5 and losses[2] < 0.3
    assert (tmp_path / "run" / "model.pt").is_file()


def test_notebook(tmp_path: Path) -> None:
    out = run([str(EXAMPLES / "notebook.py")], tmp_path)
    digests = re.findall(r"^stage \d: loss 0\.0\d+  weights ([0-9a-f]{12})$", out, re.MULTILINE)
    assert len(digests) == 4 and len(set(digests)) == 1


def test_jax_mlp(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    script, found = str(EXAMPLES / "jax_mlp.py"), []
    for stage in ("0", "3"):
        words = ["-m", "flatshard.cli", "launch", "-n", "2", script, "--stage", stage]
        out = run([*words, "--precision", "bf16", "--steps", "60"], tmp_path)
        losses = [float(x) for x in re.findall(r"step +\d+ loss ([\d.]+)", out)]
        assert losses[-1] < 0.5 * losses[0]
        found += re.findall(r"loss [\d.]+, weights ([0-9a-f]{12})", out)
    assert len(found) == 2 and len(set(found)) == 1, "the same bits at both stages"


def test_precision_study(tmp_path: Path) -> None:
    out = run([str(EXAMPLES / "precision_study.py"), "--steps", "20", "--seeds", "1"], tmp_path)
    rows = re.findall(r"^ +([\d.e-]+) +(bf16\S*) +([\d.]+) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    last = {(float(rate), precision): float(loss) for rate, precision, _, loss, _ in rows}
    first = {float(first) for *_, first, _, _ in rows}
    assert len(last) == 6 and len(first) == 1, "one model, six runs"
    assert last[1e-5, "bf16"] < last[1e-5, "bf16-pure"] - 0.1, "flat without masters"
    assert abs(last[1e-3, "bf16"] - last[1e-3, "bf16-pure"]) < 0.2, "alike at a high rate"
    moved = dict(re.findall(r"steps of 1e-6 in (\S+): moved by (\S+)", out))
    assert float(moved["bf16-pure"]) == 0.0
    assert 0.9e-3 < float(moved["bf16"]) < 1.1e-3
    assert (tmp_path / "precision.json").is_file()
