"""The benchmark harness: verified first, interleaved, and aware of who else uses the machine."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness, ranks  # noqa: E402


class Recorder:
    """A contender that writes down what is asked of it."""

    def __init__(self, name: str, log: list[str], right: bool = True) -> None:
        self.name, self.log, self.right = name, log, right

    def verify(self) -> None:
        self.log.append(f"verify {self.name}")
        if not self.right:
            raise AssertionError(f"{self.name} is wrong")

    def sample(self) -> float:
        self.log.append(f"sample {self.name}")
        return 0.5 if self.name == "a" else 1.0

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def case(log: list[str], *, right: bool = True) -> harness.Case:
    makers = [
        lambda: Recorder("a", log),
        lambda: None,  # not installed here
        lambda: Recorder("b", log, right),
    ]
    return harness.Case("a case", makers, work=10.0, unit="things")


def test_verifies_then_interleaves(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    settings = harness.Settings(samples=2, warmup=1)
    results = harness.measure(case(log), settings, harness.Quiet(enabled=False))
    assert log == [
        *("verify a", "sample a", "verify b", "sample b"),
        *("sample a", "sample b"),
        *("sample b", "sample a"),
        *("close b", "close a"),
    ]
    assert [result.contender for result in results] == ["a", "b"]
    assert [result.rate for result in results] == [20.0, 10.0]
    assert "a / b: 2.00" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    with pytest.raises(AssertionError, match="b is wrong"):
        harness.measure(case(log, right=False), harness.Settings(), harness.Quiet(enabled=False))
    assert "sample b" not in log
    assert log[-2:] == ["close b", "close a"]
    assert "a case" not in capsys.readouterr().out


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="load is only watched where /proc is")
def test_our_own_work_is_not_outside_load() -> None:
    before = harness.tree_ticks(os.getpid())
    # Half a second of a child's processor time, waited for: it counts as this tree's.
    code = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    ticks = harness.tree_ticks(os.getpid()) - before
    assert ticks >= 0.4 * os.sysconf("SC_CLK_TCK")
    assert harness.tree_ticks(2**22 + 1) == 0  # no such process


class Answer:
    """What each rank of the test below does."""

    def __init__(self, value: float) -> None:
        self.value = value

    def verify(self) -> None:
        if self.value < 0:
            raise ValueError("a negative value")

    def sample(self) -> float:
        print("a library prints")
        return self.value + int(os.environ["RANK"])

    def close(self) -> None:
        pass


def open_answer(value: float) -> Answer:
    return Answer(value)


@pytest.fixture
def tests_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.mark.usefixtures("tests_on_path")
def test_ranks_answer_with_the_slowest() -> None:
    job = ranks.Ranks("answers", "test_benchmarks:open_answer", n=3, deadline=60.0, value=1.5)
    try:
        job.verify()
        assert job.sample() == 3.5
    finally:
        job.close()
    assert all(process.returncode == 0 for process in job.processes)


@pytest.mark.usefixtures("tests_on_path")
def test_a_wrong_rank_ends_all() -> None:
    job = ranks.Ranks("answers", "test_benchmarks:open_answer", n=2, deadline=60.0, value=-1.0)
    with pytest.raises(RuntimeError, match="rank 0: ValueError: a negative value"):
        job.verify()
    job.close()
    assert all(process.poll() is not None for process in job.processes)
