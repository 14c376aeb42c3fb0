"""How anything here is timed.

A contender is verified before it is timed: a result that is wrong is never given a speed.
Contenders of one case are warmed up, then sampled in rounds, each once a round, so that a change
of the machine falls on all of them; the order turns from round to round. Before each sample the
machine must be quiet: what other processes use for a second may not pass 0.2 of a core, else we
wait and say so. Figures are the minimum, the median and the 99th percentile of all samples.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = [
    "Case",
    "Contender",
    "Quiet",
    "Result",
    "Settings",
    "Suite",
    "Unavailable",
    "about_machine",
    "measure",
]

OUTSIDE_CORES = 0.2  # most that others may use before a sample
LOOK_SECONDS = 1.0  # for how long we look
PATIENCE_SECONDS = 120.0  # after this long we sample all the same, and the result says so


# ---- what is measured ---------------------------------------------------------------------------


class Contender(Protocol):
    """Something that does the work of a case.

    `name` appears in tables. `verify` raises if its result is wrong. `sample` does the work once
    and returns the seconds it took. `close` gives everything back.
    """

    name: str

    def verify(self) -> None: ...

    def sample(self) -> float: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """How thoroughly to measure.

    smoke : one sample of the smallest cases, no waiting: shows that everything runs.
    samples, warmup : of each contender.
    peers : also measure other libraries, where they are installed.
    options : what was given on the command line as NAME=VALUE.
    """

    smoke: bool = False
    samples: int = 10
    warmup: int = 2
    peers: bool = True
    options: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of work that several contenders do.

    contenders : functions that open one; returning None means that it is not installed here.
    work : how much one sample does, in units of `unit`; the table shows work per second.
    compare : print how many times faster the first is than each of the others; False where the
        contenders are parts of one thing.
    remarks : further lines to print, made from the results: shares of a bound, goals.
    """

    title: str
    contenders: Sequence[Callable[[], Contender | None]]
    work: float
    unit: str
    compare: bool = True
    remarks: Callable[[list[Result]], list[str]] | None = None


class Unavailable(Exception):
    """A suite cannot run on this machine; the text says what it wants."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """Cases of one topic. cases(settings) makes them, or raises Unavailable."""

    name: str
    about: str
    cases: Callable[[Settings], Sequence[Case]]


@dataclasses.dataclass(frozen=True)
class Result:
    """Raw samples of one contender in one case, in seconds, in the order they were taken."""

    case: str
    contender: str
    seconds: tuple[float, ...]
    work: float
    unit: str
    loaded: int  # samples taken although others used the machine

    @property
    def least(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]

    @property
    def rate(self) -> float:
        """Work per second at the median."""
        return self.work / self.median

    def row(self) -> str:
        loaded = f"  ({self.loaded} of {len(self.seconds)} under load)" if self.loaded else ""
        return (
            f"  {self.contender:<44} {show(self.least):>9} {show(self.median):>9} "
            f"{show(self.p99):>9} {self.rate:>12,.4g} {self.unit}/s{loaded}"
        )


def show(seconds: float) -> str:
    """1.23 s, 4.56 ms or 7.89 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


# ---- a quiet machine ----------------------------------------------------------------------------


def busy_ticks() -> int:
    """Clock ticks that all cores together have spent on work since the start of the system."""
    first = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[1:9])
    return user + nice + system + irq + softirq + steal


def tree_ticks(root: int) -> int:
    """Clock ticks of a process, its descendants, and those of them that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = pathlib.Path(entry.path, "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        fields = text.rpartition(")")[2].split()
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))
    total = 0
    for pid in parents:
        above: int | None = pid
        while above is not None and above > 1 and above != root:
            above = parents.get(above)
        if above == root:
            total += ticks[pid]
    return total


@dataclasses.dataclass
class Quiet:
    """Waits until others leave the machine alone.

    wait() returns True when a sample may be called clean. Where there is no /proc, nothing is
    known: every sample counts as clean and the header says that load was not watched.
    """

    enabled: bool = True
    waited: float = 0.0

    def outside_cores(self) -> float:
        """Cores that processes outside this one's tree used, over LOOK_SECONDS."""
        root = os.getpid()
        ours, all_ticks, started = tree_ticks(root), busy_ticks(), time.monotonic()
        time.sleep(LOOK_SECONDS)
        elapsed = time.monotonic() - started
        others = (busy_ticks() - all_ticks) - (tree_ticks(root) - ours)
        return max(0.0, others / os.sysconf("SC_CLK_TCK") / elapsed)

    def wait(self) -> bool:
        if not self.enabled or not os.path.exists("/proc/stat"):
            return True
        started = time.monotonic()
        used = self.outside_cores()
        told = False
        while used > OUTSIDE_CORES:
            if not told:
                print(f"  others use {used:.2f} cores: waiting for a quiet second", flush=True)
                told = True
            if time.monotonic() - started > PATIENCE_SECONDS:
                print(f"  still {used:.2f} cores: sampling under load", flush=True)
                return False
            used = self.outside_cores()
        self.waited += time.monotonic() - started
        return True


# ---- measuring ----------------------------------------------------------------------------------


def measure(case: Case, settings: Settings, quiet: Quiet) -> list[Result]:
    """Opens, verifies, warms up and samples the contenders of a case; prints a row of each."""
    opened: list[Contender] = []
    taken: dict[int, list[float]] = {}
    loaded: dict[int, int] = {}
    try:
        for make in case.contenders:
            contender = make()
            if contender is None:
                continue
            opened.append(contender)
            contender.verify()
            for _ in range(settings.warmup):
                contender.sample()
        for turn in range(settings.samples):
            for place in range(len(opened)):
                index = (place + turn) % len(opened)
                clean = quiet.wait()
                taken.setdefault(index, []).append(opened[index].sample())
                loaded[index] = loaded.get(index, 0) + (not clean)
        results = [
            Result(case.title, who.name, tuple(taken[index]), case.work, case.unit, loaded[index])
            for index, who in enumerate(opened)
        ]
    finally:
        for contender in reversed(opened):
            contender.close()
    print(case.title)
    for result in results:
        print(result.row(), flush=True)
    if case.compare and len(results) > 1:
        first = results[0]
        for other in results[1:]:
            print(f"  {first.contender} / {other.contender}: {first.rate / other.rate:.2f}")
    for line in case.remarks(results) if case.remarks else []:
        print(f"  {line}")
    return results


# ---- the machine --------------------------------------------------------------------------------


def said(*command: str) -> str:
    """First line a command prints, or 'not found'."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "not found"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else "not found"


def version_of(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def about_machine() -> dict[str, Any]:
    """What a figure depends on: machine, commit, compiler, instruction set, versions."""
    root = pathlib.Path(__file__).resolve().parent.parent
    commit = said("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    changed = said("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    packages = ("flatshard", "numpy", "scipy-openblas32", "torch", "transformers")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "commit": commit + ("" if changed == "not found" else " with changes"),
        "compiler": said(os.environ.get("CC", "cc").split()[-1], "--version"),
        "load_watched": os.path.exists("/proc/stat"),
        **{name: version_of(name) for name in packages},
    }
