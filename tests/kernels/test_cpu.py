"""Which instruction set runs, how many processors there are, what the build is."""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest

from flatshard import _core

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ASK = "from flatshard import _core; print(_core.cpu_isa(), _core.Kernels().name)"


def ask(code: str = ASK, **changes: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "FLATSHARD_CPU"} | changes
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )


def linux_features() -> set[str]:
    """Processor features as the kernel lists them."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        pytest.skip("no /proc/cpuinfo to compare with")
    found = re.search(r"^(flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return set(found.group(2).split()) if found else set()


def test_sets_are_those_of_the_processor() -> None:
    features = linux_features()
    want = ["baseline"]
    if platform.machine() == "x86_64":
        avx2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm"}
        if avx2 <= features:
            want.append("avx2")
        if avx2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= features:
            want.append("avx512")
            if "avx512_bf16" in features:
                want.append("avx512_bf16")
    elif platform.machine() == "aarch64":
        want.append("neon")
    assert _core.cpu_isas() == want
    done = ask()
    assert done.stdout.split() == [want[-1], f"cpu/{want[-1]}"], done.stderr


def test_the_variable_chooses(isa: str) -> None:
    done = ask(FLATSHARD_CPU=isa)
    assert done.stdout.split() == [isa, f"cpu/{isa}"], done.stderr


def test_the_variable_refuses() -> None:
    done = ask(FLATSHARD_CPU="mmx")
    assert done.returncode != 0
    assert "ValueError: FLATSHARD_CPU=mmx is not an instruction set: use baseline" in done.stderr
    foreign = "neon" if platform.machine() == "x86_64" else "avx2"
    done = ask(FLATSHARD_CPU=foreign)
    assert f"NotImplementedError: FLATSHARD_CPU={foreign}" in done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="register names of x86")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump reads the machine code")
def test_each_table_is_made_of_its_instructions() -> None:
    """The update kernel of each set uses that set's registers: pragmas took effect."""
    done = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(_core.__file__)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    code: dict[str, str] = {}
    for found in re.finditer(r"<fs_update_task__(\w+)>:\n(.*?)\n\n", done.stdout + "\n\n", re.S):
        code[found.group(1)] = found.group(2)
    if not code:
        pytest.skip("the module was stripped of its symbols")
    # The rules may be inlined or called: take what follows up to the next set's kernels.
    widths = {
        isa: set(re.findall(r"%([xyz]mm)\d", everything(done.stdout, isa)))
        for isa in ("baseline", "avx2", "avx512")
    }
    assert widths["baseline"] == {"xmm"}
    assert "ymm" in widths["avx2"] and "zmm" not in widths["avx2"]
    assert "zmm" in widths["avx512"]


def everything(listing: str, isa: str) -> str:
    """Code from the first kernel of a set to its last one: one file's functions lie together."""
    marks = [m.start() for m in re.finditer(rf"^\w+ <fs_\w+__{isa}>:$", listing, re.MULTILINE)]
    return listing[marks[0] : listing.index("\n\n", marks[-1])]


def test_processors() -> None:
    count = _core.cpu_count()
    assert 1 <= count <= len(os.sched_getaffinity(0))


def test_affinity_counts() -> None:
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}})\n"
    code += "from flatshard import _core; print(_core.cpu_count())"
    assert ask(code).stdout.split() == ["1"]


def test_build_id() -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", _core.build_id())


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc's flags")
@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only"])
def test_fast_math_does_not_compile(flag: str, tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        ["gcc", flag, "-c", str(ROOT / "csrc/device/isa_baseline.c"), "-o", str(tmp_path / "x.o")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "built with -ffast-math" in done.stderr
