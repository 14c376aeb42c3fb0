"""What scripts may do with a sharded module, one case each: see cases_rules.py."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable

import pytest
from gang import Gang

pytest.importorskip("torch")
pytest.importorskip("transformers")

TREE = ast.parse(pathlib.Path(__file__).with_name("cases_rules.py").read_text(encoding="utf-8"))
#: Every function there that takes the world and nothing else.
CASES = [
    node.name
    for node in TREE.body
    if isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args] == ["world"]
]
#: With other numbers of ranks than two: what depends on it.
MORE = [(1, "legal_writes"), (1, "unused"), (1, "handles"), (3, "unused"), (3, "handles"),
        (3, "counted"), (3, "loads"), (3, "edited")]  # fmt: skip


@pytest.mark.parametrize(("size", "case"), [*((2, name) for name in CASES), *MORE])
def test_rule(gang: Callable[[int], Gang], size: int, case: str) -> None:
    gang(size).run(f"cases_rules:{case}")


def test_checkpoints(gang: Callable[[int], Gang], tmp_path: pathlib.Path) -> None:
    gang(2).run("cases_rules:saves", folder=str(tmp_path))
