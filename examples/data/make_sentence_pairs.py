"""Makes ``sentence_pairs.tsv``: pairs of sentences, and whether they stand next to each other.

    python examples/data/make_sentence_pairs.py > examples/data/sentence_pairs.tsv

The columns are those of MRPC: ``sentence1``, ``sentence2``, ``label``, ``idx``; ``split`` comes
before them. The rule is in ``RULE`` below, and in the file that this writes. Another version of
Python has other docstrings: the file says which one it was made from.
"""

from __future__ import annotations

import ast
import inspect
import pydoc_data.topics
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

SEED = 42
TRAIN, VALIDATION = 800, 200
WORDS = range(6, 33)
VERSION = sys.version.split()[0]
OUTSIDE = {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo"}
HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
RULE = f"""\
The sentences are whole sentences of plain prose, 6 to 32 words each, from the language reference
(pydoc_data/topics.py) and the docstrings of the standard library of Python {VERSION}.
label 1: sentence2 follows sentence1 within a paragraph.
label 0: sentence2 has been exchanged for the second sentence of a pair from another module, topic.
Every second pair has been exchanged, so half of each split has label 1, and the second sentences of
both labels are drawn alike. No sentence stands in two pairs, no paragraph in both splits.
Made by make_sentence_pairs.py. Licence of the sentences: Python Software Foundation License
Version 2, in LICENSE-PSF.txt; Copyright (c) 2001-2023 Python Software Foundation; All Rights
Reserved. Changes: split into sentences, quotation marks and line breaks made plain, pairs exchanged
as said."""


def paragraphs(text: str) -> list[str]:
    """The paragraphs of prose: not indented, no title, no grammar, no listing."""
    blocks = [block.strip("\n") for block in text.split("\n\n")]
    return [
        " ".join(block.split())
        for block in blocks
        if not re.search(r"^[ *+|=\-]|::=|>>>|^\*\*|\t", block, re.MULTILINE)
    ]


def plain(text: str) -> str:
    """ASCII quotation marks and dashes; footnote marks out."""
    marks = dict(zip(range(0x2013, 0x201E), """--\0\0\0''\0\0\"\"""", strict=False))
    return re.sub(r" \[\d+\]", "", text.translate(marks))


def good(sentence: str) -> bool:
    """A whole sentence of plain words."""
    return (
        sentence.isascii()
        and "X" * 3 not in sentence  # a placeholder, or a note of somebody's
        and len(sentence.split()) in WORDS
        and re.fullmatch(r"[A-Z][^|{}<>=\\]*[a-z\"')]\.", sentence) is not None
    )


def texts() -> Iterator[tuple[str, str]]:
    """The topics of the language reference and the docstrings of the modules, with their places."""
    yield from pydoc_data.topics.topics.items()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library).parts
        if set(place) & OUTSIDE:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, HAVE_DOCSTRINGS) and (text := ast.get_docstring(node)):
                yield place[0], inspect.cleandoc(text)


def pairs() -> list[tuple[str, str, frozenset[str]]]:
    """The pairs of neighbours, each with the places that hold its paragraph, shuffled.

    Pairs of one paragraph stay together, so that one cut makes two splits without a common one.
    """
    places: dict[str, set[str]] = {}
    for place, text in texts():
        for paragraph in paragraphs(plain(text)):
            places.setdefault(paragraph, set()).add(place)
    order = sorted(places)
    random.Random(SEED).shuffle(order)
    found: list[tuple[str, str, frozenset[str]]] = []
    seen: set[str] = set()
    for paragraph in order:
        sentences = re.split(r"(?<=[a-z\"')]\.)\s+(?=[A-Z])", paragraph)
        for one, two in zip(sentences[::2], sentences[1::2], strict=False):
            if good(one) and good(two) and not {one, two} & seen:
                seen |= {one, two}
                found.append((one, two, frozenset(places[paragraph])))
    return found


def exchanged(rows: list[tuple[str, str, frozenset[str]]]) -> list[tuple[str, str, int]]:
    """Gives every second row the second sentence of another one, from other places."""
    donors = rows[::2]
    for row, donor in zip(donors, moved(donors), strict=True):
        assert not row[2] & donor[2]
    out = [(one, two, 1) for one, two, _ in rows]
    out[::2] = [(row[0], donor[1], 0) for row, donor in zip(donors, moved(donors), strict=True)]
    return out


def moved(rows: list[tuple[str, str, frozenset[str]]]) -> list[tuple[str, str, frozenset[str]]]:
    """The rows in an order that gives none a donor of its own places."""
    half = len(rows) // 2
    out = rows[half:] + rows[:half]
    for place, row in enumerate(rows):
        if row[2] & out[place][2]:
            other = next(
                n
                for n, there in enumerate(rows)
                if not row[2] & out[n][2] and not there[2] & out[place][2]
            )
            out[place], out[other] = out[other], out[place]
    return out


def main() -> None:
    found = pairs()
    print(f"{len(found)} pairs of neighbours", file=sys.stderr)
    cut = TRAIN
    while found[cut][2] == found[cut - 1][2]:
        cut += 1
    for line in RULE.splitlines():
        print(f"# {line}")
    print("split\tsentence1\tsentence2\tlabel\tidx")
    idx = 0
    for split, rows in (("train", found[:TRAIN]), ("validation", found[cut : cut + VALIDATION])):
        for one, two, label in exchanged(rows):
            print(split, one, two, label, idx, sep="\t")
            idx += 1


if __name__ == "__main__":
    main()
