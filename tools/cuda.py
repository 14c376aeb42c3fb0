"""Compiles csrc/cuda with nvcc, for real: no GPU is needed for that.

    python tools/cuda.py                 compile and link everything into build/cuda/libfs_cuda.so
    python tools/cuda.py --arch sm_90    for one architecture only: faster
    python tools/cuda.py --find          only says where nvcc is

nvcc is the one on the path, in CUDA_HOME, or of the wheel nvidia-cuda-nvcc.
"""

import argparse
import concurrent.futures
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
FLAGS = ["-O3", "-std=c++17", "-Werror", "all-warnings", "-Xcompiler", "-fPIC,-Wall,-Wextra"]
#: Ampere, Hopper, and PTX of the oldest for what comes after.
ARCHITECTURES = ["sm_80", "sm_90"]


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


def run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def to_ptx(nvcc: str, source: pathlib.Path, out: pathlib.Path) -> str:
    """A source as PTX for the oldest architecture, the text."""
    oldest = "compute_" + ARCHITECTURES[0].removeprefix("sm_")
    target = out / f"{source.stem}.ptx"
    run([nvcc, *FLAGS, *ARITHMETIC, f"-arch={oldest}", "-ptx", str(source), "-o", str(target)])
    return target.read_text(encoding="utf-8")


def build_id() -> str:
    """What setup.py stamps the extension with: the library must be of the same sources."""
    code = "import setup; print(setup.build_id())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"setup.py cannot be read:\n{done.stderr}")
    return done.stdout.strip()


def compile_all(nvcc: str, out: pathlib.Path, architectures: list[str]) -> pathlib.Path:
    """The library of all sources, for all architectures and with PTX of the first."""
    out.mkdir(parents=True, exist_ok=True)
    numbers = [arch.removeprefix("sm_") for arch in architectures]
    targets = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    targets.append(f"-gencode=arch=compute_{numbers[0]},code=compute_{numbers[0]}")
    compiler = os.environ.get("CC", "cc").split()
    stamp = f'-DFS_BUILD_ID="{build_id()}"'
    commands, objects = [], []
    for source in [*SOURCES, *C_SOURCES]:
        target = out / f"{source.name}.o"
        objects.append(str(target))
        if source.suffix == ".cu":
            commands.append([nvcc, *FLAGS, *ARITHMETIC, *targets, stamp, "-c", str(source)])
        else:
            commands.append([*compiler, "-O3", "-std=c11", "-fPIC", "-c", str(source)])
        commands[-1] += ["-o", str(target)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    library = out / "libfs_cuda.so"
    exports = f"-Xlinker=--version-script={ROOT / 'csrc/cuda/exports.map'}"
    run([nvcc, "-shared", *targets, *objects, exports, "-o", str(library)])
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="sm_80, sm_90, ...; may be repeated")
    parser.add_argument("--find", action="store_true", help="only say where nvcc is")
    arguments = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit(
            "no nvcc: not in CUDA_HOME, not on the path, and no wheel: pip install -r "
            "tools/requirements-cuda.txt"
        )
    if arguments.find:
        sys.stdout.write(f"{nvcc}\n")
        return
    library = compile_all(nvcc, ROOT / "build" / "cuda", arguments.arch or ARCHITECTURES)
    sys.stdout.write(f"{library.relative_to(ROOT)}: {library.stat().st_size} bytes, by {nvcc}\n")


if __name__ == "__main__":
    main()
