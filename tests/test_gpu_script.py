"""The script for a real GPU: how it runs its stages, and its quick part against the stand-in."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Sequence

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "cuda"


def module(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look there
    spec.loader.exec_module(made)
    return made


run = module("gpu_stages")


def place(folder: pathlib.Path) -> "run.Place":
    return run.Place(dry=True, out=folder)


def stage(*commands: Sequence[str], **fields: object) -> "run.Stage":
    return run.Stage("a", 60.0, "a test's", lambda place: commands, **fields)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# ---- the runner ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_stage_passes_with_values(tmp_path: pathlib.Path) -> None:
    line = run.perform(
        stage(python("print('words')"), python("print('VALUES {\"x\": 1}')")), place(tmp_path), 60
    )
    assert line["status"] == "passed" and line["x"] == 1 and line["seconds"] >= 0
    assert "words" in (tmp_path / "log.txt").read_text()


@pytest.mark.quick
def test_a_failure_ends_the_stage_and_says_why(tmp_path: pathlib.Path) -> None:
    line = run.perform(
        stage(python("print('VALUES {\"x\": 1}'); raise SystemExit(3)"), python("print('never')")),
        place(tmp_path),
        60,
    )
    assert line["status"] == "failed" and "exit status 3" in line["reason"] and line["x"] == 1
    assert "$ " in (tmp_path / "log.txt").read_text()
    assert "\nnever" not in (tmp_path / "log.txt").read_text()
    line = run.perform(stage(["/nowhere/program"]), place(tmp_path), 60)
    assert line["status"] == "failed" and "exit status 127" in line["reason"]


@pytest.mark.quick
def test_a_stage_out_of_time_is_killed_with_its_children(tmp_path: pathlib.Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('VALUES {\"x\": 1}', flush=True)\n"
        "time.sleep(60)\n"
    )
    line = run.perform(stage(python(code)), place(tmp_path), 2)
    assert line["status"] == "failed" and "killed after 2 s" in line["reason"]
    assert line["x"] == 1, "what was said before is kept"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            state = pathlib.Path(f"/proc/{pid.read_text()}/stat").read_text().rpartition(")")[2]
        except OSError:
            return  # gone
        if state.split()[0] == "Z":
            return  # gone, but for whoever collects it
        time.sleep(0.05)
    pytest.fail("the child lives on")


@pytest.mark.quick
def test_a_stage_that_cannot_run_is_skipped_by_name(tmp_path: pathlib.Path) -> None:
    line = run.perform(stage(needs=lambda place: "no such tool here"), place(tmp_path), 60)
    assert line == {"stage": "a", "status": "skipped", "reason": "no such tool here"}


@pytest.mark.quick
def test_figures_of_a_benchmark_that_was_cut_short(tmp_path: pathlib.Path) -> None:
    row = {"case": "c", "contender": "ours", "seconds": [0.5, 0.25, 1.0], "work": 2.0,
           "unit": "GB", "loaded": 0}  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"results": [row]}))
    line = run.perform(stage(python("raise SystemExit(1)")), place(tmp_path), 60)
    assert line["figures"] == {"c": {"ours": {"median_s": 0.5, "least_s": 0.25, "GB/s": 4.0}}}


@pytest.mark.quick
def test_a_failed_stage_does_not_stop_later_ones(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [
        dataclasses.replace(stage(python(code)), name=name)
        for name, code in (("first", "raise SystemExit(1)"), ("second", "pass"))
    ]
    monkeypatch.setattr(run, "STAGES", stages)
    monkeypatch.setattr(run, "about", lambda place: ({"gpus": []}, ""))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu_stages.py", "--dry-run"])
    assert run.main() == 1
    lines = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["status"]) for line in lines] == [
        ("environment", "passed"),
        ("first", "failed"),
        ("second", "passed"),
    ]
    assert run.main() == 1
    again = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(again) == 6, "lines are appended"


@pytest.mark.quick
def test_without_a_gpu_it_says_so(tmp_path: pathlib.Path) -> None:
    # A folder with nvidia-smi's name missing from the path: whatever this machine has.
    bare = {"PATH": str(tmp_path), "OUT": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu_stages.py")],
        env=bare,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "a GPU (nvidia-smi names none)" in done.stdout
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["status"] == "failed"


@pytest.mark.quick
def test_the_stages_fit_into_eight_minutes() -> None:
    assert run.BUDGET <= 480
    names = [stage.name for stage in run.STAGES]
    assert len(set(names)) == len(names)
    assert names.index("build") < names.index("kernels") < names.index("train")


# ---- its content --------------------------------------------------------------------------------


def test_golden_losses_are_the_cpus() -> None:
    # Another BLAS sums in another order: the last digits may differ, the losses not.
    checks = module("gpu_checks")
    golden = json.loads((FOLDER / "golden.json").read_text())
    for precision in checks.BOUNDS:
        got = checks.run("cpu", precision, tiny=False, steps=30)[0]
        assert len(golden[precision]) == 30
        for step, (a, b) in enumerate(zip(got, golden[precision], strict=True)):
            # A processor may round what bf16 multiplies, or not: 2^-9 of each operand.
            bound = {"fp32": 1e-4, "bf16": 2e-3}[precision] * b
            assert abs(a - b) <= bound, f"{precision}, step {step}: {a}, not {b}"


def test_dry_run(tmp_path: pathlib.Path) -> None:
    for program in ("make", "c++"):
        if shutil.which(program) is None:
            assert not os.environ.get("CI"), f"no {program}: CI must have it"
            pytest.skip(f"the stand-in for CUDA is compiled, and there is no {program} here")
    only = [word for name in QUICK for word in ("--only", name)]
    done = subprocess.run(
        [str(FOLDER / "run_on_gpu.sh"), "--dry-run", *only],
        env={**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable, "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    log = tmp_path / "log.txt"
    assert done.returncode == 0, (
        done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    )
    lines = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    found = {line["stage"]: line for line in lines}
    assert set(found) == {"environment", *QUICK}
    assert found["environment"]["machine"]["dry_run"] is True
    assert found["memcheck"]["status"] == "skipped" and "stand-in" in found["memcheck"]["reason"]
    ran = [line["status"] for name, line in found.items() if name != "memcheck"]
    assert ran == ["passed"] * len(ran)


#: What a dry run of the suite of tests does; all else takes minutes, or is tested elsewhere.
QUICK = ("build", "device", "train", "memcheck")
