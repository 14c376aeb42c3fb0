"""Builds, installs and imports flatshard with every other Python from 3.10 that is on this machine.

Each gets an environment of its own in build/pythons. The quick tests run on the newest; the others
import and take one training step.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "pythons"
VERSIONS = [(3, minor) for minor in range(10, 15)]


def works(python: str, version: tuple[int, int]) -> bool:
    """Is python of that version, and can it make environments and build extensions?"""
    code = (
        "import sys, sysconfig, os, venv, ensurepip\n"
        f"assert sys.version_info[:2] == {version}\n"
        "assert os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h'))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True)
    return done.returncode == 0


def find(version: tuple[int, int]) -> str | None:
    """A Python of a version: on the path, or among pyenv's."""
    name = f"python{version[0]}.{version[1]}"
    candidates = [found] if (found := shutil.which(name)) else []
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
        pattern = f"versions/{version[0]}.{version[1]}.*/bin/python"
        candidates += [str(path) for path in sorted(pathlib.Path(root).glob(pattern))]
    return next((path for path in candidates if works(path, version)), None)


def run(*words: str | pathlib.Path, **options: object) -> None:
    """Runs a command; ends the program if it fails."""
    done = subprocess.run([str(word) for word in words], **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        sys.exit(f"{' '.join(str(word) for word in words)} ended with {done.returncode}")


STEP = """
import numpy as np, flatshard as fs
def work(world):
    model = fs.models.Llama.from_config("tiny", world=world, sharding=fs.Sharding(stage=3))
    optimizer = fs.AdamW(model, lr=1e-3)
    tokens = np.arange(64, dtype=np.int32).reshape(2, 32) % 50
    model.forward_backward(tokens, tokens)
    return optimizer.step(max_norm=1.0).applied
assert all(fs.local_world(2).run(work))
"""


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    here = sys.version_info[:2]
    found = {v: path for v in VERSIONS if v != here and (path := find(v)) is not None}
    absent = [f"{a}.{b}" for a, b in VERSIONS if (a, b) != here and (a, b) not in found]
    print(f"with {len(found)} other Pythons; not on this machine: {', '.join(absent) or 'none'}")
    for version, python in found.items():
        started = time.monotonic()
        name = f"{version[0]}.{version[1]}"
        environment = WORK / name
        run(python, "-m", "venv", environment)
        own = environment / "bin" / "python"
        pip = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, "setuptools>=77", "numpy>=2.0", "wheel")
        # In this tree: each Python's extension has a name of its own, and tests look here.
        run(own, "setup.py", "-q", "build_ext", "--inplace", cwd=ROOT)
        run(*pip, "ml_dtypes>=0.4", "safetensors>=0.4", "scipy-openblas32>=0.3.27", "tqdm>=4.60")
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        run(own, "-W", "error", "-c", STEP, cwd=environment, env=variables)
        if version == max(found):
            run(*pip, "-r", str(ROOT / "tools" / "requirements-test.txt"))
            tests = ["-m", "pytest", "-q", "-m", "quick and not full and not torch"]
            run(own, *tests, cwd=ROOT, env=variables)
        print(f"Python {name}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
