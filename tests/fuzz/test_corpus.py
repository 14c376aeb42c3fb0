"""What fuzzing starts from and what it found: every input in tests/fuzz/corpus, each time."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

import reader_targets  # noqa: E402
import readers  # noqa: E402
import run  # noqa: E402


def test_every_target_has_a_corpus_and_nothing_else_has() -> None:
    folders = {path.name for path in (HERE / "corpus").iterdir()}
    assert folders == {*run.C_TARGETS, *run.PYTHON_TARGETS}
    assert set(run.PYTHON_TARGETS) == set(reader_targets.TARGETS)
    for name in folders:
        inputs = list((HERE / "corpus" / name).iterdir())
        assert len(inputs) >= 10, name
        assert max(path.stat().st_size for path in inputs) <= run.NBYTES_MAX, name


@pytest.mark.quick
@pytest.mark.parametrize("name", run.C_TARGETS)
def test_the_table_of_c_targets_is_that_of_the_sources(name: str) -> None:
    """The plant must be there to be taken out; else only the slow run of all targets tells."""
    assert run.stale(run.C_TARGETS[name]) == []


@pytest.mark.timeout(300)
def test_c_targets(tmp_path: pathlib.Path) -> None:
    """Under the compiler's own sanitizers: no libFuzzer is needed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    built = subprocess.run(
        ["make", "-s", "-j2", "-f", "tests/fuzz/Makefile", "KIND=replay"],
        cwd=ROOT, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=240,
    )  # fmt: skip
    if built.returncode != 0 and "sanitize" in built.stdout and not os.environ.get("CI"):
        pytest.skip(f"no sanitizers here: {built.stdout[-200:]}")
    assert built.returncode == 0, built.stdout[-4000:]
    for name in run.C_TARGETS:
        program = ROOT / "build" / "fuzz" / "replay" / f"fuzz_{name}"
        inputs = sorted((HERE / "corpus" / name).iterdir())
        done = subprocess.run(
            [program, *inputs], cwd=tmp_path, env={**clean, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        assert done.stdout.count("corpus") == len(inputs)


@pytest.mark.quick
@pytest.mark.parametrize("name", run.PYTHON_TARGETS)
def test_python_targets(name: str, tmp_path: pathlib.Path) -> None:
    target = reader_targets.TARGETS[name]
    accepted = 0
    for path in sorted((HERE / "corpus" / name).iterdir()):
        accepted += reader_targets.run_one(target, path.read_bytes(), tmp_path)
    assert accepted > 0, "the corpus holds what is right, too"


@pytest.mark.parametrize("name", run.PYTHON_TARGETS)
@pytest.mark.timeout(120)
def test_a_planted_bug_is_found(name: str, tmp_path: pathlib.Path) -> None:
    status, said = run.run_python(name, run.PLANTED_SECONDS, "--plant", f"--out={tmp_path}")
    assert status == 1 and "found by run" in said, said
    assert len(list(tmp_path.glob(f"found-{name}-*"))) == 1


@pytest.mark.quick
def test_branches_are_counted_right() -> None:
    """The tracer against a function whose outcomes can be counted by hand."""
    import types

    module = types.ModuleType("counted")
    module.__file__ = "counted.py"
    source = """
def f(n):
    if n > 1:
        return 2
    for _ in range(n):
        pass
    return 0
"""
    exec(compile(source, "counted.py", "exec"), vars(module))
    module.f.__module__ = "counted"  # type: ignore[attr-defined]
    target = reader_targets.Target("f", lambda data, folder: None, (), (module,))
    branches = readers.Branches(target)
    assert branches.total == 4
    for n, seen in ((0, 2), (0, 2), (1, 3), (2, 4)):
        with branches:
            module.f(n)  # type: ignore[attr-defined]
        assert len(branches.seen) == seen, n
    assert branches.missing() == []
