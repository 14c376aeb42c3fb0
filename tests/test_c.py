"""Compiles and runs every program of tests/c: plainly and without processes; under sanitizers in
make test-full, which .ci/run does in a stage of its own."""

import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "c"
DEADLINE = 900.0  # seconds for one call of make: the first compiles a whole flavour


def declared(source: pathlib.Path, key: str) -> set[str]:
    """Words after '// KEY:' in a source."""
    return set(" ".join(re.findall(rf"^// {key}: *(.*)$", source.read_text(), re.M)).split())


def cases() -> list[tuple[str, str]]:
    """Every pair of a flavour and a program that is worth running."""
    found = []
    for source in sorted(FOLDER.glob("test_*.c")):
        flavours = {"plain", "asan"} | declared(source, "sanitizers") | declared(source, "flavours")
        # Those for Arm need a cross compiler and an emulator: .ci/run has them.
        found += [(flavour, source.stem) for flavour in flavours - {"neon"}]
    return sorted(found)


def marked() -> list[object]:
    """The cases; those of sanitizers are for make test-full."""
    full = {"asan": [pytest.mark.full], "tsan": [pytest.mark.full]}
    return [pytest.param(*case, marks=full.get(case[0], [])) for case in cases()]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.fail("C tests are compiled by make, which is not on the path")
    # make -j1 unless asked: this may run inside a make that has its own job server.
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", "-s", "-f", "tests/c/Makefile", f"-j{os.cpu_count() or 1}", *words],
        cwd=ROOT,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )


def sanitizer_missing(flavour: str) -> str:
    """Why this compiler cannot make programs of a flavour; empty when it can."""
    flag = {"asan": "-fsanitize=address,undefined", "tsan": "-fsanitize=thread"}.get(flavour)
    if flag is None:
        return ""
    compiler = os.environ.get("CC", "cc").split()
    done = subprocess.run(
        [*compiler, "-x", "c", flag, "-", "-o", os.devnull],
        input="int main(void) { return 0; }\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return "" if done.returncode == 0 else f"{compiler[0]} {flag}: {done.stdout.strip()[-200:]}"


def needs_missing(name: str) -> str:
    """Why a program's other compiler is not there; empty when it needs none."""
    if "c++" not in declared(FOLDER / f"{name}.c", "needs"):
        return ""
    compiler = os.environ.get("CXX", "g++").split()[0]
    return "" if shutil.which(compiler) else f"it needs a C++ compiler, and there is no {compiler}"


class Programs:
    """Builds one flavour after the other, and meanwhile runs what is built, a program a core: most
    of them keep one core busy, or none."""

    def __init__(self, wanted: list[tuple[str, str]]) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self._builder = ThreadPoolExecutor(1)
        self._missing = {flavour: sanitizer_missing(flavour) for flavour, _ in wanted}
        self._built = {
            flavour: self._builder.submit(self._build, flavour)
            for flavour, missing in self._missing.items()
            if not missing
        }
        self._ran = {
            (flavour, name): self._pool.submit(self._run, flavour, name)
            for flavour, name in wanted
            if not self.missing(flavour, name)
        }

    def _build(self, flavour: str) -> str:
        here = [program for other, program in cases() if other == flavour]
        tests = " ".join(program for program in here if not needs_missing(program))
        done = make(f"FLAVOUR={flavour}", f"TESTS={tests}", "programs")
        return "" if done.returncode == 0 else done.stdout[-4000:]

    def _run(self, flavour: str, name: str) -> str:
        said = self._built[flavour].result()
        if said:
            return said
        done = make(f"FLAVOUR={flavour}", f"TESTS={name}", "run")
        return "" if done.returncode == 0 else done.stdout[-4000:]

    def missing(self, flavour: str, name: str) -> str:
        """Why a program cannot be made here; empty when it can."""
        return needs_missing(name) or self._missing[flavour]

    def said(self, flavour: str, name: str) -> str:
        """What went wrong; empty when nothing did."""
        return self._ran[flavour, name].result()

    def close(self) -> None:
        """Waits for what is running; nothing else begins."""
        self._pool.shutdown(cancel_futures=True)
        self._builder.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest, nothing_stays: None) -> Iterator[Programs]:
    """Those that this run of tests asks for."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    asked = [call.params for call in chosen if call and {"flavour", "name"} == set(call.params)]
    of_all = Programs([(params["flavour"], params["name"]) for params in asked])
    yield of_all
    of_all.close()


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("flavour", "name"), marked(), ids=lambda value: str(value))
def test_program(flavour: str, name: str, programs: Programs) -> None:
    missing = programs.missing(flavour, name)
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    said = programs.said(flavour, name)
    assert said == "", said


def test_there_are_programs() -> None:
    assert len(cases()) >= 3, "tests/c holds no program: is the tree complete?"
