"""Compiles csrc/cuda with nvcc, for real: no GPU is needed for that.

    python tools/cuda.py                 compile and link everything into build/cuda/libfs_cuda.so
    python tools/cuda.py --arch sm_90    for one architecture only: faster
    python tools/cuda.py --find          only says where nvcc is
    python tools/cuda.py --stand-in      by the C++ compiler, on the stand-in for CUDA's runtime

nvcc is the one on the path, in CUDA_HOME, or of the wheel nvidia-cuda-nvcc. What did not change is
not compiled again. setup.py builds the package's library with these functions.
"""

import argparse
import concurrent.futures
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted(ROOT.glob("csrc/cuda/*.cu"))
#: What csrc/cuda uses of the rest, compiled by the C compiler.
C_SOURCES = [ROOT / "csrc/base" / name for name in ("status.c", "dtype.c", "env.c", "library.c")]
#: Element arithmetic must give the CPU's bits: no contraction, no flush, no approximation.
ARITHMETIC = ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]
#: But for products of attention, which fuse on the CPU too.
FUSED = {"attention_forward.cu", "attention_backward.cu", "attention_plain.cu"}
FLAGS = ["-O3", "-std=c++17", "-Werror", "all-warnings", "-Xcompiler"]
FLAGS += ["-fPIC,-Wall,-Wextra,-fvisibility=hidden"]
C_FLAGS = ["-O3", "-std=c11", "-fPIC", "-fvisibility=hidden"]
#: The library shows its entry alone, and brings CUDA's runtime along.
LINK = ["-shared", "-cudart", "static", "-Xlinker", "--version-script=csrc/cuda/exports.map"]
#: Ampere, Hopper, Blackwell where nvcc knows it, and PTX of the oldest for what comes after.
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]


def find_nvcc() -> str | None:
    """The path of nvcc, or None."""
    home = os.environ.get("CUDA_HOME")
    candidates = [pathlib.Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    candidates += [pathlib.Path(on_path)] if on_path else []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(pathlib.Path(folder).glob("cu*/bin/nvcc"))
    return next((str(path) for path in candidates if path.is_file()), None)


def home_fault() -> str | None:
    """What is wrong with CUDA_HOME, or None."""
    home = os.environ.get("CUDA_HOME")
    if not home or (pathlib.Path(home) / "bin" / "nvcc").is_file():
        return None
    return f"CUDA_HOME={home!r} holds no bin/nvcc"


def known(nvcc: str) -> list[str]:
    """Those of ARCHITECTURES that this nvcc compiles for."""
    codes = run([nvcc, "--list-gpu-code"]).split()
    return [arch for arch in ARCHITECTURES if arch in codes]


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def arithmetic(source: pathlib.Path) -> list[str]:
    """The flags of a source's arithmetic."""
    fused = source.name in FUSED
    return [flag for flag in ARITHMETIC if not (fused and flag == "--fmad=false")]


def to_ptx(nvcc: str, source: pathlib.Path, out: pathlib.Path) -> str:
    """A source as PTX for the oldest architecture, the text."""
    oldest = "compute_" + ARCHITECTURES[0].removeprefix("sm_")
    target = out / f"{source.stem}.ptx"
    flags = [*FLAGS, *arithmetic(source), f"-arch={oldest}"]
    run([nvcc, *flags, "-ptx", str(source), "-o", str(target)])
    return target.read_text(encoding="utf-8")


def build_id() -> str:
    """What setup.py stamps the extension with: the library must be of the same sources."""
    return run([sys.executable, "-c", "import setup; print(setup.build_id())"]).strip()


def key(command: list[str], depfile: pathlib.Path) -> str | None:
    """A hash of a command and of all that it read the last time; None: there was no last time."""
    digest = hashlib.sha256("\0".join(command).encode())
    try:
        rule = depfile.read_text(encoding="utf-8").partition(":")[2]
        for name in rule.replace("\\\n", " ").split():
            digest.update((ROOT / name).read_bytes())
    except OSError:
        return None
    return digest.hexdigest()


def compile_one(command: list[str], target: pathlib.Path) -> None:
    """Runs a command that makes target, unless that is what there is."""
    depfile, stamp = target.with_suffix(".d"), target.with_suffix(".key")
    if target.is_file() and stamp.is_file() and stamp.read_text() == key(command, depfile):
        return
    run([*command, "-MMD", "-MF", str(depfile), "-o", str(target)])
    stamp.write_text(key(command, depfile) or "")


def compile_all(nvcc: str, out: pathlib.Path, architectures: list[str], build: str) -> pathlib.Path:
    """The library of all sources, for all architectures and with PTX of the first."""
    out.mkdir(parents=True, exist_ok=True)
    numbers = [arch.removeprefix("sm_") for arch in architectures]
    targets = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    targets.append(f"-gencode=arch=compute_{numbers[0]},code=compute_{numbers[0]}")
    compiler = os.environ.get("CC", "cc").split()
    jobs = []
    for source in [*SOURCES, *C_SOURCES]:
        # Only a source that uses the build's number is compiled again for another one.
        text = source.read_text(encoding="utf-8")
        macro = [f'-DFS_BUILD_ID="{build}"'] if "FS_BUILD_ID" in text else []
        command = [nvcc, *FLAGS, *arithmetic(source), *targets]
        if source.suffix == ".c":
            command = [*compiler, *C_FLAGS]
        jobs.append(([*command, *macro, "-c", str(source)], out / f"{source.name}.o"))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, *zip(*jobs, strict=True)))
    library = out / "libfs_cuda.so"
    objects = [str(target) for _, target in jobs]
    run([nvcc, *LINK, *targets, *objects, "-o", str(library)])
    return library


def stand_in() -> pathlib.Path:
    """The library on the stand-in for CUDA's runtime: no nvcc is needed."""
    run(["make", "-s", "-f", "tests/c/Makefile", "stand-in", f"BUILD_ID={build_id()}"])
    return ROOT / "build" / "ctest" / "plain" / "libfs_cuda.so"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="sm_80, sm_90, ...; may be repeated")
    parser.add_argument("--find", action="store_true", help="only say where nvcc is")
    parser.add_argument("--stand-in", action="store_true", help="without nvcc, for tests")
    arguments = parser.parse_args()
    if arguments.stand_in:
        sys.stdout.write(f"{stand_in().relative_to(ROOT)}\n")
        return
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit(
            "no nvcc: not in CUDA_HOME, not on the path, and no wheel: pip install -r "
            "tools/requirements-cuda.txt"
        )
    if arguments.find:
        sys.stdout.write(f"{nvcc}\n")
        return
    architectures = arguments.arch or known(nvcc)
    library = compile_all(nvcc, ROOT / "build" / "cuda", architectures, build_id())
    sys.stdout.write(f"{library.relative_to(ROOT)}: {library.stat().st_size} bytes, by {nvcc}\n")


if __name__ == "__main__":
    main()
