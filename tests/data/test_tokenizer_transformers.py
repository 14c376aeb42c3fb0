"""The byte tokenizer, saved, opens in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatshard.models.tokenizer import ByteTokenizer

TEXT = "def größe(x):\n    return x + 1  # €, 漢字, \x7f, 😀\n"


def test_saved_bytes_open_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ByteTokenizer().save(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert other(TEXT)["input_ids"] == list(TEXT.encode())
    assert other.eos_token_id == 0
