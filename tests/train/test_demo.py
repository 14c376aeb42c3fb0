"""``flatshard demo``: leaves nothing behind, and prints what the README shows."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import flatshard as fs
from flatshard.cli import demo

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DEADLINE = 240.0
#: What differs from run to run: where the survivor was when its peer died, and how that is said.
REPORT = re.compile(r"PeerLost: .*?(?=\n +Last good checkpoint)", re.DOTALL)


def shape(text: str) -> list[str]:
    """Lines without figures, the machine and the places where ranks were."""
    text = re.sub(r"^machine .*$", "machine", text, flags=re.MULTILINE)
    text = REPORT.sub("PeerLost", text)
    text = re.sub(r"model\.layers\.\S+", "NAME", text)
    return [re.sub(r"[\d,.]+(e-\d+)?", "#", line) for line in text.splitlines()]


@pytest.mark.timeout(300)
def test_every_claim_holds_and_nothing_stays(tmp_path: pathlib.Path) -> None:
    package = str(pathlib.Path(fs.__file__).resolve().parent.parent)
    # Variables of a run of tests are none of flatshard's own, and it would say so.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FLATSHARD_")}
    done = subprocess.run(
        [sys.executable, "-m", "flatshard.cli", "demo"],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": package, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and os.listdir(tmp_path) == []
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"^```text\n\$ flatshard demo\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert block is not None
    assert shape(done.stdout) == shape(block.group(1))
    first = re.search(r"^\$ flatshard (\w+)", readme, re.MULTILINE)
    assert first is not None and first.group(1) == "demo"

    pid = re.search(r"rank 1 \(pid (\d+)\) is killed in step (\d+)", done.stdout)
    assert pid is not None and not pathlib.Path(f"/proc/{pid[1]}").exists()
    good, next_good = (
        int(re.search(words, done.stdout)[1])  # type: ignore[index]
        for words in (r"Last good checkpoint: step (\d+)", r"fell back to step (\d+)")
    )
    assert next_good + 5 == good < int(pid[2])


def test_a_claim_that_does_not_hold_is_printed_and_is_the_exit_status(monkeypatch, capsys) -> None:
    def tell(story: demo.Story, folder: pathlib.Path) -> None:
        story.claim(True, "two is two")
        story.claim(False, "two is three")

    monkeypatch.setattr(demo, "_tell", tell)
    assert demo.main([]) == 1
    out = capsys.readouterr().out
    assert "FAILED: two is three" in out and "two is two" not in out
    assert "1 of 2 claims did not hold" in out


def test_a_job_that_fails_ends_the_demo_with_its_last_words(tmp_path) -> None:
    run = demo.Run(tmp_path, "none", 2, steps=1, checkpoints=str(tmp_path / "nowhere")).start()
    with pytest.raises(demo.DemoError, match="no such folder"):
        run.expect(0)


def test_a_lie_is_found_out(tmp_path, monkeypatch) -> None:
    """Claims are computed, not asserted: each of them fails when what it speaks of is wrong."""
    story = demo.Story()
    whole = demo.Run(tmp_path, "whole", 2, steps=3, hash_at=(2, 3)).start().expect(0)
    saved = tmp_path / "checkpoints"
    run = demo.Run(tmp_path, "save", 2, steps=3, checkpoints=str(saved), save_every=1, hash_at=(3,))
    run.start().expect(0)
    shutil.rmtree(saved / "step-000003")
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(demo, "COMPARED", 1)
    monkeypatch.setattr(whole, "losses", lambda: dict.fromkeys((1, 2, 3), 5.0))
    monkeypatch.setattr(whole, "hashes", lambda: dict.fromkeys((1, 2, 3), "no such"))
    monkeypatch.setattr(demo, "_flip_one_bit", lambda path, draw: ("model.norm.weight", 0))
    demo._resume(story, tmp_path, saved, 2, whole)
    demo._damage(story, tmp_path, saved, whole)
    assert story.held == 0 and len(story.failed) == 5, story.failed
