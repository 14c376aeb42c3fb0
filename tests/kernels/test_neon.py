"""The kernels for Arm, cross-compiled and run under emulation: the golden bits of x86."""

import glob
import os
import pathlib
import platform
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"

# As setup.py and tests/c/Makefile.
FLAGS = [
    "-std=c11",
    "-O2",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
]


@pytest.fixture(scope="module")
def tools() -> None:
    if platform.machine() == "aarch64":
        pytest.skip("this machine runs them itself: see tests/c")
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            reason = f"{tool} is not on the path (Debian: gcc-aarch64-linux-gnu, qemu-user)"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["test_kernels", "test_threads"])
def test_program(tools: None, name: str, tmp_path: pathlib.Path) -> None:
    sources = sorted(glob.glob("csrc/base/*.c", root_dir=ROOT))
    sources += sorted(glob.glob("csrc/device/*.c", root_dir=ROOT))
    program = tmp_path / name
    compiled = subprocess.run(
        [COMPILER, *FLAGS, "-Icsrc", "-Itests/c", f"tests/c/{name}.c", *sources]
        + ["-o", str(program), "-ldl", "-lm"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    done = subprocess.run(
        [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(program)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
