"""The build: what it compiles again, which flags win, and the sentence for whatever is missing.

On a small tree made here, so that a build takes a second: the project's own setup.py, with one file
of the core and one of a binding.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

MODULE = """
#include <Python.h>
#include "../base/twice.h"
static PyObject *build_id(PyObject *module, PyObject *none) {
    (void)module; (void)none;
    return Py_BuildValue("si", FS_BUILD_ID, twice(21));
}
static PyMethodDef functions[] = {{"build_id", build_id, METH_NOARGS, ""}, {0}};
static struct PyModuleDef definition = {
    .m_name = "_core", .m_size = 0, .m_methods = functions};
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
"""


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small tree with the project's setup.py, in a path with spaces."""
    pytest.importorskip("setuptools", minversion="77")
    top = tmp_path / "a path with spaces"
    (top / "csrc/base").mkdir(parents=True)
    (top / "csrc/binding").mkdir()
    (top / "python/flatshard").mkdir(parents=True)
    (top / "python/flatshard/__init__.py").write_text("")
    shutil.copy(ROOT / "setup.py", top)
    (top / "pyproject.toml").write_text(
        '[project]\nname = "flatshard"\nversion = "0"\n'
        '[tool.setuptools]\npackage-dir = {"" = "python"}\npackages = ["flatshard"]\n'
    )
    (top / "csrc/base/twice.h").write_text("int twice(int x);\n")
    (top / "csrc/base/twice.c").write_text(
        '#include "twice.h"\n'
        "#if defined(__FAST_MATH__) || !defined(__OPTIMIZE__)\n#error flags\n#endif\n"
        "int twice(int x) { return 2 * x; }\n"
    )
    (top / "csrc/base/other.c").write_text("int other_symbol;\n")
    (top / "csrc/binding/module.c").write_text(MODULE)
    return top


def build(
    tree: pathlib.Path, *, start: str = "", args: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs setup.py build_ext --inplace; start is Python text to run before it."""
    code = start + (
        "\nimport runpy, sys\n"
        f"sys.argv = ['setup.py', 'build_ext', '--inplace', *{list(args)!r}]\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    unset = ("FLATSHARD_WERROR", "FLATSHARD_SANITIZE", "FLATSHARD_DEBUG", "CFLAGS", "LDFLAGS")
    environment = {k: v for k, v in os.environ.items() if k not in unset} | variables
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def compiled(done: subprocess.CompletedProcess[str]) -> str:
    """How many files a build compiled, as it says: 'N of M', or nothing."""
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if "compiling" in line]
    return lines[0].split("compiling ")[1].split(" C files")[0] if lines else ""


def ask(tree: pathlib.Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import flatshard._core as c; print(*c.build_id())"],
        env={**os.environ, "PYTHONPATH": str(tree / "python")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_compiles_only_what_changed(tree: pathlib.Path) -> None:
    assert compiled(build(tree)) == "3 of 3"
    first, value = ask(tree).split()
    assert value == "42"
    assert compiled(build(tree)) == ""
    # A header: the files that include it, and no other.
    header = tree / "csrc/base/twice.h"
    header.write_text("int twice(int x); /* doubles */\n")
    assert compiled(build(tree)) == "2 of 3"
    second, _ = ask(tree).split()
    assert second != first, "an edit did not change the build id"
    # A file without the build id: itself, and the file that holds the id.
    (tree / "csrc/base/other.c").write_text("int another_symbol;\n")
    assert compiled(build(tree)) == "2 of 3"
    # Other flags have objects of their own: there and back compiles once.
    assert compiled(build(tree, FLATSHARD_DEBUG="1")) == "3 of 3"
    assert compiled(build(tree)) == ""
    assert ask(tree).split()[1] == "42"


def test_injected_flags_do_not_win(tree: pathlib.Path) -> None:
    done = build(tree, CFLAGS="-O0 -ffast-math")
    assert compiled(done) == "3 of 3"
    assert "without -ffast-math" in done.stdout


def test_a_warning_is_an_error_when_asked(tree: pathlib.Path) -> None:
    (tree / "csrc/base/other.c").write_text("int other(long x) { int y = x; return y; }\n")
    assert compiled(build(tree)) == "3 of 3"
    done = build(tree, FLATSHARD_WERROR="1")
    assert done.returncode != 0
    assert "could not compile csrc/base/other.c" in done.stdout


def test_no_compiler(tree: pathlib.Path) -> None:
    done = build(tree, CC="/nowhere/gcc")
    assert done.returncode != 0
    last = done.stdout.strip().splitlines()[-1]
    assert "no C compiler: '/nowhere/gcc'" in last
    assert "apt install build-essential" in last
    assert "Traceback" not in done.stdout


def test_no_python_headers(tree: pathlib.Path) -> None:
    start = (
        "import setuptools, distutils.sysconfig as s\ns.get_python_inc = lambda *a, **k: '/nowhere'"
    )
    done = build(tree, start=start)
    assert done.returncode != 0
    last = done.stdout.strip().splitlines()[-1]
    assert "Python's headers are missing" in last
    assert "apt install python3-dev" in last
    assert "Traceback" not in done.stdout


def tool(
    folder: pathlib.Path, python: str, *, user: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the step that makes the environment, in folder, with PYTHON."""
    return subprocess.run(
        ["sh", str(ROOT / "tools/venv.sh"), "make", ".venv"],
        cwd=folder,
        env={**os.environ, "PYTHON": python},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        user=user,
    )


def test_no_python(tmp_path: pathlib.Path) -> None:
    done = tool(tmp_path, "python-that-is-not-there")
    assert done.returncode != 0
    assert "there is no 'python-that-is-not-there'" in done.stdout
    assert "make PYTHON=" in done.stdout


@pytest.mark.parametrize(
    ("denied", "sentence"),
    [("version_info", "is too old"), ("ensurepip", "apt install python3-venv")],
)
def test_a_python_that_will_not_do(tmp_path: pathlib.Path, denied: str, sentence: str) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *{denied}*) exit 1 ;; esac\nexec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    done = tool(tmp_path, str(python))
    assert done.returncode != 0
    assert sentence in done.stdout, done.stdout
    assert not (tmp_path / ".venv").exists()


def test_no_permission_to_write(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "read only"
    folder.mkdir()
    folder.chmod(0o555)
    for above in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        above.chmod(above.stat().st_mode | 0o055)
    # root may write anywhere: be nobody.
    done = tool(folder, "/usr/bin/python3", user=65534 if os.geteuid() == 0 else None)
    assert done.returncode != 0
    assert "no permission to write" in done.stdout, done.stdout
