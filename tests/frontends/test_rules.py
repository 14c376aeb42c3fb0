"""What scripts may do with a sharded module, and what they are told when they may not."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable

import pytest
from gang import Gang

pytest.importorskip("torch")
pytest.importorskip("transformers")

HERE = pathlib.Path(__file__).parent
#: Name of a case to its file: every function there that takes the world and nothing else.
CASES = {
    node.name: file
    for file in ("cases_parameters", "cases_gradients", "cases_optimizers", "cases_module")
    for node in ast.parse((HERE / f"{file}.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args] == ["world"]
}
#: With other numbers of ranks than two: what depends on it.
MORE = [(1, "legal_writes"), (1, "unused"), (1, "handles"), (3, "unused"), (3, "handles"),
        (3, "counted"), (3, "loads"), (3, "edited")]  # fmt: skip


@pytest.mark.parametrize(("size", "case"), [*((2, name) for name in CASES), *MORE])
def test_rule(gang: Callable[[int], Gang], size: int, case: str) -> None:
    gang(size).run(f"{CASES[case]}:{case}")


def test_checkpoints(gang: Callable[[int], Gang], tmp_path: pathlib.Path) -> None:
    gang(2).run("cases_module:saves", folder=str(tmp_path))


def test_buffers_that_changed(gang: Callable[[int], Gang], tmp_path: pathlib.Path) -> None:
    gang(2).run("cases_module:changed_buffers", folder=str(tmp_path))
