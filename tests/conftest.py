"""What all tests share: what is printed at the top, which tests need torch, and that nothing stays.

Seeds: tests draw from `rng`, whose seed is printed; TEST_SEED repeats a run.
"""

import functools
import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

LEFT_OUT = pytest.StashKey[list[str]]()

# Python's own helpers, which live as long as this process.
LASTING = ("resource_tracker", "forkserver")


@functools.cache
def seed() -> int:
    """The seed of this run: TEST_SEED, or a fixed one."""
    return int(os.environ.get("TEST_SEED", "20240229"))


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts background jobs with Ctrl-C ignored; tests of Ctrl-C need it heard."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("FLATSHARD_TEST_DEVICE"):
        compute_on(os.environ["FLATSHARD_TEST_DEVICE"])


@functools.cache
def cuda_library() -> pathlib.Path:
    """The library of device "cuda": what FLATSHARD_CUDA_LIBRARY names, else csrc/cuda on the
    stand-in for CUDA's runtime, compiled when it changed."""
    named = os.environ.get("FLATSHARD_CUDA_LIBRARY")
    if named:
        return pathlib.Path(named)
    from flatshard import _core

    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "-s", "-f", "tests/c/Makefile", f"-j{os.cpu_count() or 1}", "stand-in"]
        + [f"BUILD_ID={_core.build_id()}"],
        cwd=ROOT,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return ROOT / "build/ctest/plain/libfs_cuda.so"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Device "cuda" works in the test, and in processes that it starts; the library's path."""
    for program in ("make", os.environ.get("CXX", "g++").split()[0]):
        if shutil.which(program) is None:
            assert not os.environ.get("CI"), f"no {program}"
            pytest.skip(f"no {program}: the stand-in for CUDA cannot be built")
    monkeypatch.setenv("FLATSHARD_CUDA_LIBRARY", str(cuda_library()))
    return cuda_library()


def compute_on(device: str) -> None:
    """Makes local_world one of this device where a test does not say: FLATSHARD_TEST_DEVICE."""
    import flatshard
    from flatshard import job

    os.environ["FLATSHARD_CUDA_LIBRARY"] = str(cuda_library())
    on_cpu = job.local_world

    class OnDevice(job.LocalWorld):
        def run(self, function: Any, *args: Any) -> Any:
            try:
                return super().run(function, *args)
            except ValueError as error:
                if 'gather="view"' in str(error) and "computes on" in str(error):
                    pytest.skip("it is about weights that ranks share in host memory")
                raise

    def on_device(n: int, **words: Any) -> flatshard.LocalWorld:
        local = on_cpu(n, **{"device": device, **words})
        local.__class__ = OnDevice
        return local

    job.local_world = flatshard.local_world = on_device


def pytest_report_header(config: pytest.Config) -> str:
    return f"flatshard: {platform.machine()}, {os.cpu_count()} cores, seed {seed()}"


@functools.cache
def needs_torch(path: pathlib.Path) -> bool:
    """Does a test module import torch or transformers, at any depth of its text?"""
    return bool(
        re.search(
            r"^\s*(import|from) (torch|transformers)\b|importorskip\(\s*\"(torch|transformers)",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Leaves out files that import torch or transformers first thing, where they are missing."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    found = re.findall(
        r"^(?:import|from) (torch|transformers)\b", collection_path.read_text(), re.MULTILINE
    )
    missing = {name for name in found if importlib.util.find_spec(name) is None}
    if not missing:
        return None
    config.stash.setdefault(LEFT_OUT, []).append(collection_path.name)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = terminalreporter.config.stash.get(LEFT_OUT, [])
    if left_out:
        names = ", ".join(sorted(left_out))
        terminalreporter.write_line(f"left out, for want of torch or transformers: {names}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tenth",
        metavar="SEED",
        help="of the tests marked full, only those of a tenth that SEED draws",
    )


def drawn(nodeid: str, draw: str) -> bool:
    """Is a test in the tenth that a seed draws?"""
    digest = hashlib.sha256(f"{draw} {nodeid}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if needs_torch(item.path):
            item.add_marker("torch")
    draw = config.getoption("--tenth")
    if draw is not None:
        left_out = [
            item
            for item in items
            if item.get_closest_marker("full") and not drawn(item.nodeid, draw)
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ from test to test and not from run to run."""
    name = [ord(letter) for letter in request.node.nodeid]
    return np.random.default_rng([seed(), *name])


def children() -> dict[int, str]:
    """Living child processes of this one: pid -> command line. Empty where /proc does not say."""
    found = {}
    for listing in pathlib.Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                found[int(pid)] = command.decode(errors="replace").strip()
            except OSError:
                continue
    return found


@pytest.fixture(scope="module", autouse=True)
def nothing_stays() -> Iterator[None]:
    """Fails a module whose tests leave processes behind."""
    before = set(children())
    yield
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        left = {
            pid: command
            for pid, command in children().items()
            if pid not in before and command and not any(word in command for word in LASTING)
        }
        if not left:
            return
        time.sleep(0.05)
    pytest.fail(f"processes were left behind: {left}")
