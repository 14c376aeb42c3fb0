"""Runs the stages of run_on_gpu.sh, each within its own limit, and writes down what came out.

One line of JSON a stage is appended to results.jsonl as soon as it ends: what follows may be killed
and loses nothing. A stage that fails or runs out of time does not keep the later ones from running;
the exit status says whether any did. Standard library only: this runs before anything is built.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
#: Seconds for everything together on a GPU. The stages' own limits add up to more: each is for a
#: stage that goes wrong, and what comes last gets what is left.
BUDGET = 475.0
TAIL = 1500  # characters of a failed stage's output that go into its line
DRY_LIMIT = 600.0  # of a stage against the stand-in, which is slow


@dataclasses.dataclass
class Place:
    """Where the stages run.

    dry : against the stand-in for CUDA, at tiny sizes.
    arch : the GPU's architecture ("sm_90"), or "" where there is none.
    """

    dry: bool
    out: pathlib.Path
    arch: str = ""
    nvcc: str = "nvcc"

    @property
    def library(self) -> pathlib.Path:
        return ROOT / "build" / ("ctest/plain" if self.dry else "cuda") / "libfs_cuda.so"

    def environment(self) -> dict[str, str]:
        found = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "FLATSHARD_CUDA_LIBRARY": str(self.library),
            "CUDA_ARCH": self.arch,
            "NVCC": self.nvcc,
        }
        # C programs know nothing of Python's packages: the loader finds CUDA's libraries for them.
        found["LD_LIBRARY_PATH"] = os.pathsep.join(
            [*find_cuda_libraries(), os.environ.get("LD_LIBRARY_PATH", "")]
        )
        blas = find_blas()
        if "FLATSHARD_BLAS" not in found and blas:
            found["FLATSHARD_BLAS"] = blas
        return found


@dataclasses.dataclass(frozen=True)
class Stage:
    """Commands that run one after the other, all within limit seconds.

    commands : made when the stage's turn comes.
    needs : why the stage cannot run here, or "".
    """

    name: str
    limit: float
    about: str
    commands: Callable[[Place], Sequence[Sequence[str]]]
    needs: Callable[[Place], str] = lambda place: ""


def find_blas() -> str:
    """A CBLAS library for the CPU's side of comparisons where scipy-openblas32 is not installed:
    the one that SciPy's wheel brings along. "" if there is none, or none is needed."""
    if importlib.util.find_spec("scipy_openblas32") is not None:
        return ""
    spec = importlib.util.find_spec("scipy")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(glob.glob(f"{folder}.libs/libscipy_openblas-*.so"))
        if found:
            return found[0]
    return ""


def find_cuda_libraries() -> list[str]:
    """Folders of cuBLAS and NCCL in Python's packages."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found: set[str] = set()
    for folder in folders:
        for name in ("libcublas.so.1*", "libnccl.so.2"):
            found |= {str(path.parent) for path in pathlib.Path(folder).glob(f"*/lib/{name}")}
    return sorted(found)


# ---- what there is ------------------------------------------------------------------------------


def said(*command: str) -> str:
    """What a command prints, or "" if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def about(place: Place) -> tuple[dict[str, Any], str]:
    """The machine, and what of it keeps the other stages from running ("": nothing)."""
    queried = said(
        "nvidia-smi",
        "--query-gpu=name,driver_version,compute_cap,memory.total",
        "--format=csv,noheader",
    )
    gpus = [[word.strip() for word in line.split(",")] for line in queried.splitlines()]
    if gpus:
        place.arch = "sm_" + gpus[0][2].replace(".", "")
    torch = said(sys.executable, "-c", "import torch; print(torch.__version__)")
    nvcc = said(sys.executable, "tools/cuda.py", "--find")
    place.nvcc = nvcc or place.nvcc
    found = {
        "gpus": gpus,
        "nvcc": [nvcc, *said(nvcc, "--version").splitlines()[-1:]] if nvcc else [],
        "python": sys.version.split()[0],
        "torch": torch or "absent",
        "commit": said("git", "rev-parse", "--short", "HEAD") or "unknown",
        "cores": os.cpu_count(),
        "dry_run": place.dry,
    }
    wanted = {"a GPU (nvidia-smi names none)": bool(gpus), "nvcc": bool(nvcc)}
    missing = [name for name, there in wanted.items() if not there and not place.dry]
    return found, " and ".join(missing)


# ---- stages -------------------------------------------------------------------------------------


def check(name: str) -> Callable[[Place], Sequence[Sequence[str]]]:
    """A check of gpu_checks.py."""
    return lambda place: [
        [sys.executable, "tests/cuda/gpu_checks.py", name, *(["--tiny"] if place.dry else [])]
    ]


def build(place: Place) -> Sequence[Sequence[str]]:
    core = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    if not place.dry:
        return [core, [sys.executable, "tools/cuda.py", "--arch", place.arch]]
    # Of the same build as the extension, which is made just before.
    python = shlex.quote(sys.executable)
    build_id = f"$({python} -c 'from flatshard import _core; print(_core.build_id())')"
    return [core, ["sh", "-c", f"{' '.join(make(place))} stand-in BUILD_ID={build_id}"]]


def make(place: Place) -> list[str]:
    flavour = "plain" if place.dry else "cuda"
    return ["make", "-s", "-f", "tests/c/Makefile", f"-j{os.cpu_count() or 1}",
            f"FLAVOUR={flavour}"]  # fmt: skip


def c_tests(*names: str) -> Callable[[Place], Sequence[Sequence[str]]]:
    return lambda place: [[*make(place), f"TESTS={' '.join(names)}", "run"]]


def kernel_tests() -> list[str]:
    """The C tests of kernels: all that are not about the stand-in, or have a stage of their own."""
    found = []
    for path in sorted((ROOT / "tests" / "c").glob("test_cuda_*.c")):
        if path.stem in ("test_cuda_device", "test_cuda_engine"):
            continue
        if "// stand-in only" not in path.read_text(encoding="utf-8"):
            found.append(path.stem)
    return found


def sanitizer(tool: str, *names: str) -> Callable[[Place], Sequence[Sequence[str]]]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"]
    return lambda place: [[*command, f"build/ctest/cuda/{name}"] for name in names]


def needs_sanitizer(place: Place) -> str:
    if place.dry:
        return "the stand-in has no compute-sanitizer: FLAVOUR=asan and tsan take its place"
    return "" if shutil.which("compute-sanitizer") else "compute-sanitizer is not on the path"


def needs_torch(place: Place) -> str:
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


def bench(part: str) -> Callable[[Place], Sequence[Sequence[str]]]:
    def commands(place: Place) -> Sequence[Sequence[str]]:
        table = str(place.out / f"bench-{part}.json")
        how = ["--smoke"] if place.dry else ["--no-wait", "--samples", "5"]
        return [[sys.executable, "-m", "benchmarks", "--suite", "cuda", *how, "--json", table,
                 f"part={part}"]]  # fmt: skip

    return commands


STAGES = [
    Stage("build", 150, "the extension, and libfs_cuda.so for this chip alone", build),
    Stage("kernels", 75, "every kernel has the CPU's bits", lambda p: c_tests(*kernel_tests())(p)),
    Stage("device", 20, "memory, streams, events", c_tests("test_cuda_device")),
    Stage("nccl", 30, "one communicator and two, on every GPU", c_tests("test_cuda_engine")),
    Stage("train", 45, "30 steps beside the CPU's losses", check("train")),
    Stage("torch", 30, "a sharded nn.Module beside torch alone", check("torch"), needs_torch),
    Stage("bench-ops", 45, "step, sum, products against copy and torch", bench("ops")),
    Stage("bench-rows", 30, "kernels that memory bounds, against copy", bench("rows")),
    Stage("bench-attention", 30, "attention against torch", bench("attention")),
    Stage("bench-1b", 100, "tokens/s and MFU, 1B, against torch", bench("1b")),
    Stage("offload", 40, "the same bits with and without", check("offload")),
    Stage("bench-7b", 100, "tokens/s and MFU, layers of 7B, against torch", bench("7b")),
    Stage("memcheck", 40, "compute-sanitizer", sanitizer("memcheck", "test_cuda_model"),
          needs_sanitizer),
    Stage("racecheck", 40, "compute-sanitizer", sanitizer("racecheck", "test_cuda_model"),
          needs_sanitizer),
    Stage("synccheck", 30, "compute-sanitizer", sanitizer("synccheck", "test_cuda_model"),
          needs_sanitizer),
    Stage("bench-offload", 60, "what offload costs", bench("offload")),
]  # fmt: skip


# ---- running ------------------------------------------------------------------------------------


def run(command: Sequence[str], place: Place, seconds: float) -> tuple[int | None, str]:
    """Exit status (None: it ran out of time and was killed, its children too) and output."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=place.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(seconds, 1.0))
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def values_of(output: str) -> dict[str, Any]:
    """What a stage wants kept: lines "VALUES {...}" of its output."""
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("VALUES "):
            found.update(json.loads(line.removeprefix("VALUES ")))
    return found


def figures(place: Place, stage: Stage) -> dict[str, Any]:
    """Of a benchmark, also one that was killed: case and contender -> seconds and rate at the
    median."""
    path = place.out / f"{stage.name}.json"
    if not path.is_file():
        return {}
    found: dict[str, Any] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["results"]:
        ordered = sorted(row["seconds"])
        median = ordered[len(ordered) // 2]
        found.setdefault(row["case"], {})[row["contender"]] = {
            "median_s": median,
            "least_s": ordered[0],
            f"{row['unit']}/s": row["work"] / median,
        }
    return {"figures": found}


def perform(stage: Stage, place: Place, seconds: float) -> dict[str, Any]:
    """Runs one stage; its line."""
    line: dict[str, Any] = {"stage": stage.name, "status": "passed"}
    reason = stage.needs(place)
    if reason:
        return {**line, "status": "skipped", "reason": reason}
    started = time.monotonic()
    output = ""
    for command in stage.commands(place):
        left = seconds - (time.monotonic() - started)
        try:
            status, said_ = run(command, place, left)
        except OSError as error:
            status, said_ = 127, f"{command[0]}: {error}\n"
        output += f"$ {' '.join(command)}\n{said_}"
        if status != 0:
            why = f"exit status {status}" if status is not None else f"killed after {seconds:.0f} s"
            line |= {"status": "failed", "reason": f"{' '.join(command)}: {why}"}
            line["tail"] = said_[-TAIL:]
            break
    with (place.out / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"\n== {stage.name}\n{output}")
    line["seconds"] = round(time.monotonic() - started, 2)
    return {**line, "limit": seconds, **values_of(output), **figures(place, stage)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/cuda/run_on_gpu.sh", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="against the stand-in, tiny sizes")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--list", action="store_true", help="names the stages, in order of worth")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.list:
        for stage in STAGES:
            print(f"{stage.name:>14}  {stage.limit:>4.0f} s  {stage.about}")
        return 0
    place = Place(dry=arguments.dry_run, out=pathlib.Path(os.environ.get("OUT", "build/gpu")))
    place.out = (ROOT / place.out).resolve()
    place.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    lines: list[dict[str, Any]] = []

    def write(line: dict[str, Any]) -> None:
        lines.append(line)
        with (place.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        told = {"failed": line.get("reason"), "skipped": line.get("reason")}.get(line["status"])
        print(f"{line['stage']:>14}: {line['status']}" + (f" ({told})" if told else ""), flush=True)

    machine, missing = about(place)
    status = "failed" if missing else "passed"
    environment = {"stage": "environment", "status": status, "machine": machine}
    write({**environment, **({"reason": f"there is no {missing} here"} if missing else {})})
    if missing:
        return 1
    for stage in STAGES:
        if arguments.only and stage.name not in arguments.only:
            continue
        left = BUDGET - (time.monotonic() - started)
        limit = DRY_LIMIT if place.dry else min(stage.limit, left)
        if limit < 3:
            write({"stage": stage.name, "status": "failed", "reason": "no time was left"})
            continue
        write(perform(stage, place, limit))
    print(f"{time.monotonic() - started:.0f} s; {place.out / 'results.jsonl'}")
    return int(any(line["status"] == "failed" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
