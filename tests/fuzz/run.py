"""Runs every fuzz target, prints which branches of its reader were reached, plants a bug in each.

    python tests/fuzz/run.py [--seconds 8] [TARGET ...]

C targets run with libFuzzer and sanitizers (clang); Python ones are run by readers.py.
Fails when something is found (it says where the input lies: fix it, and add the input to the
target's corpus, which tests replay), when fewer than 80 % of a reader's branches were reached, or
when a copy of the reader that lacks one check gets through its minute.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "fuzz"
LEAST = 0.80
PLANTED_SECONDS = 60
NBYTES_MAX = 4096


@dataclass(frozen=True)
class CTarget:
    """A program fuzz_NAME, the functions of its reader, and the check that planting removes."""

    name: str
    #: Source under csrc to its functions; empty: all of them.
    reader: dict[str, tuple[str, ...]]
    #: (source under csrc, text, other text).
    plant: tuple[str, str, str]
    dictionary: bool = True
    #: Of the sources: what only writes, or what no input of this target reaches.
    without: tuple[str, ...] = ()


C_TARGETS = {
    target.name: target
    for target in (
        CTarget(
            "safetensors",
            {"io/safetensors.c": (), "io/json.c": ()},
            ("io/safetensors.c", "if (tensor->end - tensor->begin != total / 8) {", "if (0) {"),
            without=("fs_utf8_is_valid",),
        ),
        CTarget(
            "pieces",
            {"io/pieces.c": ()},
            ("io/pieces.c", " || piece->end > numel", ""),
            without=("damaged_header",),  # needs checksums: tests/io has it
        ),
        CTarget(
            "control",
            {
                "comm/rendezvous.c": (
                    "judge",
                    "answer",
                    "ask_over",
                ),
                "comm/local_socket.c": ("fs_socket_receive", "fs_socket_receive_files"),
                "comm/join.c": ("attach",),
                "comm/meet.c": ("goes_with", "what_differs", "find_odd"),
                "comm/report.c": ("add_what", "add_rank", "fs_op_name"),
                "comm/job.c": ("fs_note_load",),
            },
            ("comm/rendezvous.c", " || said->rank >= job->size", ""),
            dictionary=False,
        ),
    )
}
PYTHON_TARGETS = (
    *("index", "weight_map", "pickle", "torch_zip", "config", "fsdp", "deepspeed", "accelerate"),
)


def stale(target: CTarget) -> list[str]:
    """What the table above says of csrc and is no longer so."""
    name, text, _ = target.plant
    times = (ROOT / "csrc" / name).read_text().count(text)
    wrong = [] if times == 1 else [f"{text!r} is {times} times in csrc/{name}, not once"]
    for source, functions in target.reader.items():
        whole = (ROOT / "csrc" / source).read_text()
        wrong += [
            f"csrc/{source} has no function {function} any more"
            for function in functions
            if not re.search(rf"^{function}\(", whole, re.MULTILINE)
        ]
    return wrong


def make(*words: str) -> None:
    subprocess.run(["make", "-s", "-f", "tests/fuzz/Makefile", *words], cwd=ROOT, check=True)


def run_c(target: CTarget, program: pathlib.Path, seconds: float, found: str) -> bool:
    """Was nothing found?"""
    new = BUILD / "new" / (target.name + found)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk would be the limit
    with tempfile.TemporaryDirectory(prefix="fs-fuzz-", dir=memory) as scratch:
        return _run_c(target, program, seconds, found, new, scratch)


def _run_c(
    target: CTarget,
    program: pathlib.Path,
    seconds: float,
    found: str,
    new: pathlib.Path,
    scratch: str,
) -> bool:
    words = [str(program), f"-max_total_time={round(seconds)}", f"-max_len={NBYTES_MAX // 4}"]
    words += [f"-artifact_prefix={BUILD}/found{found}-{target.name}-", "-timeout=10", "-seed=1"]
    words += ["-rss_limit_mb=2048", "-verbosity=0", "-print_final_stats=1"]
    if target.dictionary:
        words.append(f"-dict={HERE / 'headers.dict'}")
    done = subprocess.run(
        [*words, str(new), str(HERE / "corpus" / target.name)],
        cwd=ROOT,
        env={
            **os.environ,
            "LLVM_PROFILE_FILE": str(BUILD / f"{target.name}{found}.profraw"),
            "TMPDIR": scratch,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds + 120,
    )
    (BUILD / f"{target.name}{found}.log").write_text(done.stdout)
    return done.returncode == 0


def branches_c(target: CTarget, program: pathlib.Path) -> tuple[int, int, list[str]]:
    """(reached, all, lines with an outcome that was not) of the reader's functions."""
    profile = BUILD / f"{target.name}.profdata"
    raw = BUILD / f"{target.name}.profraw"
    subprocess.run(["llvm-profdata", "merge", "-o", str(profile), str(raw)], check=True)
    told = subprocess.run(
        ["llvm-cov", "export", "-instr-profile", str(profile), str(program)],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    seen = total = 0
    missing: set[str] = set()
    counted = set()
    for function in json.loads(told)["data"][0]["functions"]:
        source = function["filenames"][0].rpartition("csrc/")[2]
        name = function["name"].rpartition(":")[2]
        wanted = target.reader.get(source)
        if wanted is None or (wanted and name not in wanted) or name in target.without:
            continue
        counted.add(name)
        for line, _, _, _, true, false, file, *_ in function["branches"]:
            if file != 0:  # inside a macro: FS_TRY, which only hands on what failed
                continue
            total += 2
            seen += (true > 0) + (false > 0)
            if not (true and false):
                missing.add(f"{source}:{line}")
    assert counted >= {name for names in target.reader.values() for name in names}
    return seen, total, sorted(missing)


def planted_c(target: CTarget) -> float | None:
    """Seconds until the copy without a check was caught; None: not at all."""
    copy = BUILD / "planted" / target.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", copy / "csrc")
    name, text, other = target.plant
    source = copy / "csrc" / name
    source.write_text(source.read_text().replace(text, other))
    here = copy.relative_to(ROOT)  # make knows no path with a blank
    make(f"SOURCE={here / 'csrc'}", f"BUILD={here}", f"TARGETS={target.name}")
    started = time.monotonic()
    clean = run_c(target, copy / f"fuzz_{target.name}", PLANTED_SECONDS, "-planted")
    return None if clean else time.monotonic() - started


def run_python(name: str, seconds: float, *words: str) -> tuple[int, str]:
    """(exit status, what it said)."""
    done = subprocess.run(
        [sys.executable, str(HERE / "readers.py"), name, f"--seconds={seconds}", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds + 120,
    )
    return done.returncode, done.stdout


class Report:
    """A line a target, and what went wrong."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def target(self, name: str, runs: str, seen: int, total: int, planted: float | None) -> None:
        part = seen / total
        caught = "NOT found" if planted is None else f"found in {planted:.1f} s"
        reached = f"branches {seen}/{total} = {part:.0%}"
        print(f"{name:<12}{runs:>14} runs   {reached}   planted bug {caught}", flush=True)
        if part < LEAST:
            self.failed.append(f"{name}: {part:.0%} of the branches, at least {LEAST:.0%} expected")
        if planted is None:
            self.failed.append(f"{name}: a check less was not noticed in {PLANTED_SECONDS} s")

    def found(self, name: str, text: str) -> None:
        self.failed.append(f"{name}: FOUND\n{text}")
        print(f"{name:<12}FOUND something\n{text}")


def main(arguments: list[str]) -> int:
    """The exit status: 0 when all is well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each target (default: 8)")
    parser.add_argument("--missing", action="store_true", help="list branches not reached")
    options = parser.parse_args(arguments)
    chosen = options.targets or [*C_TARGETS, *PYTHON_TARGETS]
    unknown = set(chosen) - {*C_TARGETS, *PYTHON_TARGETS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    BUILD.mkdir(parents=True, exist_ok=True)
    old = [words for name in chosen if name in C_TARGETS for words in stale(C_TARGETS[name])]
    if old:
        parser.error("; ".join(old))
    report = Report()
    for name in [name for name in C_TARGETS if name in chosen]:
        target, program = C_TARGETS[name], BUILD / "fuzz" / f"fuzz_{name}"
        make(f"TARGETS={name}")
        if not run_c(target, program, options.seconds, ""):
            report.found(name, (BUILD / f"{name}.log").read_text()[-3000:])
            continue
        log = (BUILD / f"{name}.log").read_text()
        runs = log.rpartition("number_of_executed_units:")[2].split()[0]
        seen, total, missing = branches_c(target, program)
        report.target(name, runs, seen, total, planted_c(target))
        if options.missing:
            print("  ", *missing)
    for name in [name for name in PYTHON_TARGETS if name in chosen]:
        out = BUILD / f"{name}.json"
        status, said = run_python(name, options.seconds, f"--json={out}", f"--out={BUILD}")
        if status != 0:
            report.found(name, said[-3000:])
            continue
        told = json.loads(out.read_text())
        started = time.monotonic()
        planted = BUILD / "planted"
        caught, _ = run_python(name, PLANTED_SECONDS, "--plant", f"--out={planted}")
        seconds = time.monotonic() - started if caught == 1 else None
        report.target(name, str(told["runs"]), told["seen"], told["total"], seconds)
        if options.missing:
            print("  ", *told["missing"])
    for words in report.failed:
        print(words, file=sys.stderr)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
