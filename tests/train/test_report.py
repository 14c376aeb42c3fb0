"""What a run tells: speed, metrics, the picture, the result, the words of a sample."""

from __future__ import annotations

import fcntl
import json
import math
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from flatshard.models.report import (
    RESULT_KEYS,
    Display,
    Meter,
    Metrics,
    StepReport,
    draw_loss,
    size,
    write_result,
)
from flatshard.models.writing import known_words

pytestmark = pytest.mark.quick


def test_median_leaves_out_the_first_two_steps() -> None:
    meter = Meter(1_000_000, 12e9, "as measured")
    assert meter.tokens_per_second is None and meter.step_ms is None
    meter.add(10.0, 100)
    assert meter.tokens_per_second == 10.0
    for seconds in (5.0, 0.1, 0.2, 0.3):
        meter.add(seconds, 100)
    assert meter.tokens_per_second == pytest.approx(500.0)
    assert meter.step_ms == pytest.approx(200.0)
    assert meter.mfu(500.0) == pytest.approx(6 * 1e6 * 500 / 12e9)
    assert "6 x 1,000,000 parameters x tokens/s / 12 GFLOP/s" in meter.formula()
    assert math.isnan(Meter(1, 0.0, "").mfu(1.0))


def test_metrics_are_cut_where_a_run_resumes(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(file)
    for step in range(1, 6):
        metrics.write(step=step, loss=float(step))
    metrics.write(step=5, eval_loss=math.inf)
    metrics.close()
    with open(file, "a") as stream:
        stream.write('{"step": 6, "lo')  # a kill in the middle of a line
    metrics = Metrics(file, after=3)
    metrics.write(step=4, loss=-4.0)
    metrics.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, -4)]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.write(step=1, loss=math.nan, norm=math.inf)
    metrics.close()
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": None, "norm": None}


def test_result_has_every_key(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "result.json"
    write_result(
        file, {"params": 3, "mfu": math.nan, "memory": {"weights": {"rank": 1, "host": 2}}}
    )
    result = json.loads(file.read_text())
    assert tuple(result) == RESULT_KEYS
    assert result["params"] == 3 and result["mfu"] is None and result["steps"] is None
    write_result(file, {"error": "it broke"})
    assert json.loads(file.read_text())["error"] == "it broke"
    write_result(file, {"error": "a later one"}, replace=False)
    assert json.loads(file.read_text())["error"] == "it broke"
    assert [entry.name for entry in file.parent.iterdir()] == ["result.json"]


def report(step: int, *, applied: bool = True) -> StepReport:
    return StepReport(
        step=step, steps=40, loss=2.5, grad_norm=0.75, lr=1e-3, applied=applied,
        reason="applied" if applied else "nonfinite", tokens=step * 100, tokens_per_second=1234.0,
        step_ms=81.0, mfu=0.5, memory=61_000_000,
    )  # fmt: skip


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(40, 0)
    for step in range(1, 41):
        display.step(report(step, applied=step != 7), 1234.0, 0.5)
    display.note("done")
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 + 1 + 1 + 1  # every second step, the first, the skipped one, the note
    assert lines[0] == (
        "step     1/40  loss 2.500  norm 0.75  lr 1.0e-03  1,234 tok/s  MFU 50%  61.0 MB"
    )
    assert "SKIPPED (nonfinite)" in lines[4]
    assert Display(40, 0, on=False).step(report(1), 1.0, 1.0) is None
    assert capsys.readouterr().out == ""


def test_a_bar_in_a_terminal(tmp_path: Path) -> None:
    """In a pseudo-terminal with a size the steps go to a bar; in one without, to lines."""
    program = (
        "from flatshard.models.report import Display, StepReport\n"
        "d = Display(4, 0)\n"
        "for i in range(1, 5):\n"
        "    d.step(StepReport(step=i, steps=4, loss=2.5, grad_norm=0.7, lr=1e-3, applied=True,\n"
        "        reason='applied', tokens=i, tokens_per_second=9.0, step_ms=1.0, mfu=0.5,\n"
        "        memory=10), 9.0, 0.5)\n"
        "d.note('a line')\n"
        "d.close()\n"
    )
    for rows, columns, bar in ((40, 120, True), (0, 0, False)):
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=slave, stdout=slave, stderr=slave
        ) as process:
            os.close(slave)
            text = b""
            while True:
                try:
                    piece = os.read(master, 4096)
                except OSError:  # the other end is closed
                    break
                if not piece:
                    break
                text += piece
            assert process.wait(60) == 0, text
        os.close(master)
        assert (b"4/4 [" in text) == bar
        assert (b"step     4/4  loss 2.500" in text) != bar
        assert b"a line" in text


def test_sizes() -> None:
    assert [size(n) for n in (0, 999, 1500, 123_456, 61e6, 2.5e9)] == [
        "0 B", "999 B", "1.5 kB", "123 kB", "61.0 MB", "2.50 GB",
    ]  # fmt: skip


def test_known_words() -> None:
    corpus = ["def open(path):", "return path"]
    assert known_words("def path return_to xopen open(", corpus) == (4, 6)
    assert known_words("def pat", corpus) == (1, 1)  # the last word may be cut short
    assert known_words("123 4 a", corpus) == (0, 0)


def test_loss_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.write(step=0, eval_loss=5.5)
    for step in range(1, 9):
        metrics.write(step=step, loss=5.0 / step)
    metrics.close()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = draw_loss(tmp_path / "m.jsonl", tmp_path / "loss.png")
    assert said is not None and "pip install 'flatshard[plot]'" in said
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert draw_loss(tmp_path / "m.jsonl", tmp_path / "loss.png") is None
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
