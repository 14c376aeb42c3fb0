"""The binding and the GIL: what may wait for other ranks runs without it.

Ranks may be threads of one process. A rank that waits with the GIL held waits for a rank that needs
the GIL to come: for ever, Ctrl-C included. So every call of the core that may wait, or that moves a
whole model, stands in a region without the GIL, or in a helper that uses no Python at all; and no
Python is called in such a region.
"""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINDING = sorted((ROOT / "csrc" / "binding").glob("*.c"))

pytestmark = pytest.mark.quick

WAITING = (
    *("fs_wait", "fs_meet", "fs_barrier", "fs_all_gather", "fs_reduce_scatter", "fs_all_reduce"),
    *("fs_broadcast", "fs_all_to_all", "fs_world_open", "fs_world_split", "fs_region_open"),
    *("fs_job_join", "fs_share", "fs_commit", "fs_save", "fs_read"),
    *("fs_shards_open", "fs_shards_open_moments", "fs_unit_gather"),
    *("fs_store_begin", "fs_store_end", "fs_store", "fs_load"),
    *("fs_grad_open", "fs_grad_put", "fs_grad_publish", "fs_grad_drop", "fs_round_end"),
    *("fs_step_agree", "fs_step_finish"),
    *("fs_llama_init", "fs_llama_forward", "fs_llama_forward_backward"),
)

TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
# The GIL itself, and reading the address of a bytes object that the caller holds.
HARMLESS = re.compile(r"Py(Eval_(Save|Restore)Thread|GILState_\w+|Bytes_AS_STRING)\(")
# Macros that release the GIL around their arguments; each is checked below.
RELEASING = ("FS_CALL", "SHARDS_CALL", "FS_OPERATE")


def clean(text: str) -> str:
    """C text without comments and strings; lines stay where they are."""
    return TOKEN.sub(lambda match: '""' + "\n" * match.group().count("\n"), text)


def functions(text: str) -> list[tuple[str, int, str]]:
    """(name, line, body) of each function definition: its name begins a line, its brace too."""
    found = []
    for match in re.finditer(r"^(\w+)\([^;{}]*\)\n\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start(2)) + 1
        found.append((match.group(1), line, match.group(2)))
    return found


def closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at start."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)


def released(body: str) -> list[tuple[int, int]]:
    """Parts of a body that run without the GIL."""
    parts = [
        (match.start(), match.end())
        for match in re.finditer(
            r"(Py_BEGIN_ALLOW_THREADS|PyEval_SaveThread).*?"
            r"(Py_END_ALLOW_THREADS|PyEval_RestoreThread)",
            body,
            re.DOTALL,
        )
    ]
    for macro in RELEASING:
        for match in re.finditer(rf"\b{macro}\(", body):
            parts.append((match.start(), closing(body, match.end() - 1)))
    return parts


def calls(body: str) -> list[tuple[str, int]]:
    pattern = r"\b(" + "|".join(WAITING) + r")\s*\("
    return [(match.group(1), match.start()) for match in re.finditer(pattern, body)]


def faults(text: str, file: str) -> list[str]:
    """What is wrong with the GIL in a file of the binding."""
    wrong = []
    for name, line, body in functions(clean(text)):
        parts = released(body)
        uses_python = re.search(r"\bPy[A-Z_]\w*|\bfs_(raise|buffer|array|dtype_take)\w*\(", body)
        for called, place in calls(body):
            inside = any(begin <= place < end for begin, end in parts)
            if not inside and uses_python:
                at = line + body.count("\n", 0, place)
                wrong.append(f"{file}:{at}: {name} calls {called} with the GIL")
        for begin, end in parts:
            for match in re.finditer(r"\bPy[A-Z]\w*\(", body[begin:end]):
                if not HARMLESS.match(match.group()):
                    at = line + body.count("\n", 0, begin + match.start())
                    wrong.append(f"{file}:{at}: {name} uses {match.group()}...) without the GIL")
    return wrong


@pytest.mark.parametrize("path", BINDING, ids=lambda path: path.name)
def test_no_wait_with_the_gil(path: pathlib.Path) -> None:
    wrong = faults(path.read_text(encoding="utf-8"), path.name)
    assert not wrong, "\n".join(wrong)


def test_every_waiting_function_exists_and_is_bound() -> None:
    headers = "\n".join(p.read_text() for p in (ROOT / "csrc").rglob("*.h"))
    unknown = [name for name in WAITING if not re.search(rf"\b{name}\(", headers)]
    assert not unknown, f"the list names what no header declares: {unknown}"
    bound = sum(len(calls(clean(path.read_text()))) for path in BINDING)
    assert bound >= 20, f"only {bound} calls found: does this test still read the binding?"


@pytest.mark.parametrize("macro", RELEASING)
def test_macros_release_the_gil(macro: str) -> None:
    texts = [p.read_text() for p in (ROOT / "csrc" / "binding").glob("*.[ch]")]
    definition = re.search(rf"#define {macro}\((?:[^\n]*\\\n)*[^\n]*", "\n".join(texts))
    assert definition is not None, f"{macro} is gone: take it off the list"
    assert re.search(r"Py_BEGIN_ALLOW_THREADS|FS_CALL\(", definition.group()), macro


def test_a_planted_fault_is_found() -> None:
    planted = """
static PyObject *
bad(PyObject *self, PyObject *none)
{
    fs_status st = fs_barrier(world); /* FS_CALL(world, st, fs_barrier(world)) */
    Py_BEGIN_ALLOW_THREADS
    st = fs_barrier(world);
    PyList_New(0);
    Py_END_ALLOW_THREADS
    FS_CALL(world, st, fs_meet(world, &(fs_what){.op = FS_OP_LOSS}, NULL, NULL, 0));
    return st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, world);
}

static fs_status
good(fs_world *world)
{
    return fs_barrier(world);
}
"""
    wrong = faults(planted, "planted.c")
    assert [fault.split(": ")[0] for fault in wrong] == ["planted.c:5", "planted.c:8"], wrong
