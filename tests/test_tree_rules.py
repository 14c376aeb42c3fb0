"""The rules of the tree: who may include whom, of what there is only one, which words stay out."""

import ast
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "flatshard"

pytestmark = pytest.mark.quick

# ---- reading ------------------------------------------------------------------------------------


def c_files() -> list[pathlib.Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".c", ".h", ".inc"))


def cuda_files() -> list[pathlib.Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh"))


def python_files() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Comments and string literals, whichever begins first.
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)


def code(path: pathlib.Path) -> str:
    """A C file without comments and without what strings hold; lines stay where they are."""

    def blank(match: re.Match[str]) -> str:
        text = match.group()
        return '""' if text.startswith('"') else "\n" * text.count("\n")

    return TOKEN.sub(blank, path.read_text(encoding="utf-8"))


def where(pattern: str, paths: list[pathlib.Path]) -> dict[str, list[int]]:
    """Files whose code matches pattern -> line numbers."""
    found: dict[str, list[int]] = {}
    for path in paths:
        text = code(path)
        lines = [text.count("\n", 0, match.start()) + 1 for match in re.finditer(pattern, text)]
        if lines:
            found[name(path)] = lines
    return found


def test_reading_finds_what_is_planted(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "planted.c"
    path.write_text(
        '// malloc(1)\nchar *s = "malloc(1) // \\" /* ";\n/* free(x)\n*/ x = malloc(1);\n'
    )
    text = code(path)
    assert text.count("malloc(") == 1
    assert text.count("\n") == 4
    assert "free" not in text


# ---- C: who knows whom --------------------------------------------------------------------------

MAY_INCLUDE = {
    "base": {"base"},
    "device": {"base", "device"},
    "comm": {"base", "device", "comm"},
    "shard": {"base", "device", "comm", "shard"},
    "model": {"base", "device", "comm", "shard", "model"},
    "io": {"base", "device", "comm", "shard", "io"},
    "binding": {"base", "device", "comm", "shard", "model", "io", "binding"},
    "cuda": {"base", "device", "cuda"},
}


def includes(path: pathlib.Path) -> list[str]:
    return re.findall(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', path.read_text(), re.MULTILINE)


def test_includes_walk_one_way() -> None:
    wrong = []
    for path in [*c_files(), *cuda_files()]:
        room = path.relative_to(CSRC).parts[0]
        assert room in MAY_INCLUDE, f"{name(path)}: a room without a rule: say who it may include"
        for included in includes(path):
            target = (path.parent / included).resolve()
            if not target.is_file():
                wrong.append(f"{name(path)}: {included} is not found beside it")
                continue
            other = target.relative_to(CSRC).parts[0]
            if other not in MAY_INCLUDE[room]:
                wrong.append(f"{name(path)} ({room}) includes {included} ({other})")
    assert not wrong, "\n".join(wrong)


def test_only_the_binding_knows_python() -> None:
    texts = {name(path): path.read_text() for path in c_files()}
    python = [p for p, t in texts.items() if re.search(r"include\s*<Python\.h>|\bPy[A-Z]\w+\(", t)]
    assert python, "no file includes Python.h: is the tree complete?"
    assert all(path.startswith("csrc/binding/") for path in python), python
    numpy = [p for p, t in texts.items() if re.search(r"include\s*[<\"]numpy/", t)]
    assert numpy == ["csrc/binding/py_numpy.c"]


# ---- C: one of each -----------------------------------------------------------------------------

ONE_FILE = {
    "the wait on a futex": r"\bSYS_futex\b|\bFUTEX_WAIT\w*",
    "taking room in the data file": r"(?<!\w)(posix_)?fallocate\(",
    "a status becomes an exception": (
        r"\bPyErr_Set(String|Object|FromErrno\w*)\(|\bfs_status_message\(\)"
    ),
    "streaming stores": r"\b_mm\d*_stream_\w+|__builtin_nontemporal_store",
    "reading the environment": r"\b(secure_)?getenv\(",
    "loading a library": r"\bdlopen\(",
}
EXPECTED_FILE = {
    "the wait on a futex": "csrc/comm/",
    "taking room in the data file": "csrc/comm/",
    "a status becomes an exception": "csrc/binding/raise.c",
    "streaming stores": "csrc/device/",
    "reading the environment": "csrc/base/env.c",
    "loading a library": "csrc/base/library.c",
}


@pytest.mark.parametrize("what", ONE_FILE)
def test_one_of_each(what: str) -> None:
    outside = [path for path in c_files() if name(path) != "csrc/base/status.c"]
    found = where(ONE_FILE[what], outside)
    found.pop("csrc/base/status.h", None)  # declares the message that raise.c reads
    assert len(found) == 1, f"{what}: in {found}, and must be in one file"
    assert next(iter(found)).startswith(EXPECTED_FILE[what]), found


ALLOCATORS = (
    r"(?<![\w.>])(malloc|calloc|realloc|reallocarray|free|strdup|strndup|aligned_alloc|"
    r"posix_memalign|alloca|asprintf|mremap)\s*\("
)


def test_one_allocator() -> None:
    found = where(ALLOCATORS, c_files())
    assert set(found) == {"csrc/base/arena.c"}, f"memory is had from fs_calloc or an arena: {found}"
    mapped = where(r"(?<![\w.>])(mmap|munmap)\s*\(", c_files())
    mapped.pop("csrc/base/arena.c", None)
    assert all(path.startswith("csrc/comm/") for path in mapped), (
        f"only world memory is mapped outside the arena: {mapped}"
    )


def test_the_core_does_not_print_or_exit() -> None:
    loud = (
        r"(?<![\w.>])(printf|fprintf|vfprintf|dprintf|puts|fputs|putchar|perror|exit|_exit|_Exit|"
        r"quick_exit|abort|assert)\s*\("
    )
    assert where(loud, c_files()) == {}


# ---- C: form ------------------------------------------------------------------------------------


def test_failures_cannot_be_ignored() -> None:
    """Every declaration in a header that returns a status makes the compiler watch its use."""
    wrong = []
    declared = 0
    for path in c_files():
        if path.suffix != ".h":
            continue
        text = code(path)
        for match in re.finditer(
            r"^([^\n;{}#]*\n)?([^\n;{}#]*\bfs_status)\s+(fs_\w+)\(", text, re.M
        ):
            before, start, function = match.groups()
            declared += 1
            if function in ("fs_status_fail", "fs_status_fail_errno", "fs_status_tell"):
                continue  # their value is the caller's return
            if "FS_NODISCARD" not in (before or "") + start:
                wrong.append(f"{name(path)}: {function}")
    assert declared > 20
    assert not wrong, f"declare with FS_NODISCARD: {wrong}"


def test_headers_stand_alone_and_are_guarded(tmp_path: pathlib.Path) -> None:
    headers = [p for p in c_files() if p.suffix == ".h" and "binding" not in p.parts]
    wrong = []
    for path in headers:
        if not re.search(r"^#ifndef FS_\w+_H\n#define FS_\w+_H\n", path.read_text(), re.MULTILINE):
            wrong.append(f"{name(path)}: no guard FS_..._H")
    assert not wrong, wrong
    # A file a header: each includes one twice, first thing.
    for number, path in enumerate(headers):
        relative = path.relative_to(CSRC).as_posix()
        line = f'#include "{relative}"\n'
        (tmp_path / f"h{number}.c").write_text(line * 2)
    sources = sorted(str(path) for path in tmp_path.glob("h*.c"))
    compiler = os.environ.get("CC", "cc").split()
    done = subprocess.run(
        [*compiler, "-std=c11", "-Wall", "-Werror", "-Wno-unused", "-fsyntax-only", f"-I{CSRC}"]
        + sources,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_names_of_test_modules_are_one_each() -> None:
    """Folders of tests are no packages: two modules of one name cannot be imported together."""
    paths = [p for p in (ROOT / "tests").rglob("*.py") if p.name != "conftest.py"]
    names = [path.name for path in paths if "fixtures" not in path.parts]
    twice = sorted({each for each in names if names.count(each) > 1})
    assert not twice, twice


COLUMNS = 100


def test_lines() -> None:
    """Columns, no tabs, no blanks at the end, one newline at the end of a file."""
    wrong = []
    tests = [p for p in (ROOT / "tests").rglob("*") if p.suffix in (".c", ".h", ".cpp")]
    for path in [*c_files(), *cuda_files(), *python_files(), *tests]:
        text = path.read_text(encoding="utf-8")
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            wrong.append(f"{name(path)}: ends without a newline, or with several")
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > COLUMNS or "\t" in line or line != line.rstrip():
                wrong.append(
                    f"{name(path)}:{number}: {len(line)} columns, a tab, or a blank at the end"
                )
    assert not wrong, "\n".join(wrong)


LONGEST = 800


def test_files_hold_one_topic() -> None:
    """A file that grows past this is two; the aim is half of it."""
    long = {
        name(path): count
        for path in [*c_files(), *python_files()]
        if (count := path.read_text().count("\n")) > LONGEST
    }
    assert not long, f"longer than {LONGEST} lines: {long}"


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by name, from folders that are no packages."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name != "conftest.py":
            places.setdefault(path.name, []).append(name(path))
    twice = [where for where in places.values() if len(where) > 1]
    assert not twice, f"the same name in two folders: {twice}"


# ---- Python -------------------------------------------------------------------------------------

REQUIRED = {"numpy", "ml_dtypes", "safetensors", "scipy_openblas32", "tqdm"}
OPTIONAL = {"tokenizers", "matplotlib", "yaml"}  # imported where they are used, never at import
FRONT_ENDS = {"torch", "transformers", "accelerate"}  # in torch/ and hf/ alone
AT_IMPORT = {"numpy", "ml_dtypes"}


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Top-level package of every import, and whether it runs when the module is imported."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name.partition(".")[0], at_import
            elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
                yield child.module.partition(".")[0], at_import
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from visit(child, at_import and not later and not typing)

    yield from visit(tree, True)


def test_python_imports() -> None:
    wrong = []
    for path in python_files():
        room = path.relative_to(PACKAGE).parts[0]
        allowed = REQUIRED | OPTIONAL | {"flatshard"}
        if room in ("torch", "hf"):
            allowed = allowed | FRONT_ENDS
        for package, at_import in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if package in sys.stdlib_module_names:
                continue
            if package not in allowed:
                wrong.append(f"{name(path)}: imports {package}")
            elif at_import and package in (REQUIRED | OPTIONAL) - AT_IMPORT:
                wrong.append(f"{name(path)}: imports {package} at import; do it where it is used")
    assert not wrong, "\n".join(wrong)


def test_every_module_lists_its_names() -> None:
    missing = []
    for path in python_files():
        if path.name.startswith("_") and path.name != "__init__.py":
            continue  # private modules
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defines = any(
            isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ImportFrom) for node in tree.body
        )
        if defines and not re.search(r"^__all__\b.*=", path.read_text(), re.MULTILINE):
            missing.append(name(path))
    assert not missing, f"no __all__: {missing}"


PROBE = """
import os, sys, time
def threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
import numpy
before = threads()
started = time.perf_counter()
import flatshard
print(f"{time.perf_counter() - started:.3f} s after numpy", file=sys.stderr)
maps = open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else ""
print(threads() - before)
print(sorted(m for m in %r if m in sys.modules))
print("scipy_openblas32" in maps or "libcuda" in maps)
"""


def test_import_is_light() -> None:
    """Importing loads no torch, no BLAS of ours and no CUDA, and starts no thread."""
    unwanted = sorted(FRONT_ENDS | OPTIONAL | REQUIRED - AT_IMPORT | {"multiprocessing", "asyncio"})
    done = subprocess.run(
        [sys.executable, "-c", PROBE % (unwanted,)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    print("import flatshard:", done.stderr.strip())
    assert done.stdout.split("\n")[:3] == ["0", "[]", "False"], done.stdout


# ---- words that stay out ------------------------------------------------------------------------


def tree_files() -> list[pathlib.Path]:
    """Every text file of the project: what git knows, or all of an unpacked distribution."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    if done.returncode == 0 and done.stdout:
        found = [ROOT / word for word in done.stdout.decode().split("\0") if word]
    else:
        skipped = {".venv", "build", "dist", "runs", "__pycache__", ".git"}
        found = [p for p in ROOT.rglob("*") if not skipped.intersection(p.relative_to(ROOT).parts)]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


# Written in pieces, so that this file does not hold them.
FORBIDDEN = {
    "a path of some machine": r"(?<![\w.])/" + r"(work|root|home|mnt|Users)/\w",
    "the host of a package registry": r"\b(pypi\."
    + r"org|python"
    + r"hosted|npm"
    + r"js\.|debian\."
    r"org|down" + r"load\.pytorch|conda\." + r"anaconda|proxy\." + r"golang)",
    "unfinished work": r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b",
    "a note that is not in the tree": r"\b(haz" + r"ards|acc" + r"eptance|front" + r"ends|spe"
    r"ed|mis" + r"sion|bu" + r"gs)\.md\b|\bissue [0-9]",
    "a number of a note": r"(?<![\w.#\"'])[FHMSLBQ][0-9]{2,3}\b(?!['\"])",
}
# Dtypes, registers, chips and format names look like numbers of notes.
LOOKS_ALIKE = re.compile(r"^(F16|F32|F64|F8|H100|H200|B200|L40|M10|M20)$")


@pytest.mark.parametrize("what", FORBIDDEN)
def test_words_that_stay_out(what: str) -> None:
    wrong = []
    for path in tree_files():
        if path.name == "LICENSE":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture, a golden file
        for match in re.finditer(FORBIDDEN[what], text):
            if not LOOKS_ALIKE.match(match.group()):
                line = text.count("\n", 0, match.start()) + 1
                wrong.append(f"{name(path)}:{line}: {match.group()!r}")
    assert not wrong, f"{what}:\n" + "\n".join(wrong)
