"""The sentence pairs that the project ships obey the rule in their header."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

DATA = Path(__file__).resolve().parents[2] / "examples" / "data"
TEXT = (DATA / "sentence_pairs.tsv").read_text("ascii")
HEADER = "".join(line for line in TEXT.splitlines(True) if line.startswith("#"))
LINES = [line.split("\t") for line in TEXT.splitlines() if not line.startswith("#")]
ROWS = [dict(zip(LINES[0], line, strict=True)) for line in LINES[1:]]


def test_columns() -> None:
    assert LINES[0] == ["split", "sentence1", "sentence2", "label", "idx"]
    assert [int(row["idx"]) for row in ROWS] == list(range(len(ROWS)))
    assert all(row["sentence1"] and row["sentence2"] for row in ROWS)
    assert len(TEXT) < 300_000


def test_the_header_says_the_rule_and_the_licence() -> None:
    for word in ("label 1:", "label 0:", "PSF", "Copyright", "make_sentence_pairs.py"):
        assert word in HEADER
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (DATA / "LICENSE-PSF.txt").read_text()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_balance(split: str) -> None:
    """No classifier beats one half by answering one label, or by reading one sentence alone."""
    rows = [row for row in ROWS if row["split"] == split]
    assert Counter(row["label"] for row in rows) == {"0": len(rows) // 2, "1": len(rows) // 2}
    seconds = {row["sentence2"] for row in rows if row["label"] == "0"}
    assert len(seconds) == len(rows) // 2


def test_no_sentence_stands_in_two_pairs() -> None:
    for column in ("sentence1", "sentence2"):
        assert len({row[column] for row in ROWS}) == len(ROWS)


def test_the_script_makes_the_file() -> None:
    """Byte for byte on the Python that made it; on others the docstrings differ."""
    version = sys.version.split()[0]
    if f"Python {version}" not in HEADER.replace("\n# ", " "):
        pytest.skip(f"made by another Python than {version}")
    done = subprocess.run(
        [sys.executable, str(DATA / "make_sentence_pairs.py")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == TEXT


def test_the_label_is_what_the_header_says() -> None:
    """Neighbours stand together in some text of this Python; exchanged ones do not. Other Pythons
    than the one that the texts are from have changed some of them."""
    import pydoc_data.topics
    import sysconfig
    import warnings

    texts = list(pydoc_data.topics.topics.values())
    library = Path(sysconfig.get_path("stdlib"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in library.glob("[a-h]*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    texts.append(ast.get_docstring(node) or "")
    whole = "\n".join(" ".join(text.split()) for text in texts)
    found = {
        label: [
            f"{row['sentence1']} {row['sentence2']}" in whole
            for row in ROWS
            if row["label"] == label and row["sentence1"] in whole and "'" not in row["sentence1"]
        ]
        for label in "01"
    }
    version = sys.version.split()[0]
    its_own = f"Python {version}" in HEADER.replace("\n# ", " ")
    assert sum(found["1"]) > (0.9 if its_own else 0.75) * len(found["1"]) > 75
    assert not any(found["0"]) and len(found["0"]) > 90
