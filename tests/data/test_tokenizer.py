"""Tokenizers: bytes, tokenizer.json, and the byte tokenizer written as one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from flatshard.errors import ConfigError
from flatshard.models.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer

pytestmark = pytest.mark.quick

TEXT = "def größe(x):\n    return x + 1  # €, 漢字, \x7f, 😀\n"


def test_bytes_round_trip() -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.uint8 and bytes(ids.tolist()) == TEXT.encode()
    assert tokenizer.decode(ids.tolist()) == tokenizer.decode(ids) == TEXT


def test_bytes_decode_never_raises() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0x61, 0xE2, 0x82, 0x62]) == "a\ufffdb"
    assert tokenizer.decode([0x61, 300, -1, 0x62]) == "a\ufffd\ufffdb"


def test_saved_bytes_are_a_tokenizer_json(tmp_path: Path) -> None:
    engine = pytest.importorskip("tokenizers")
    ByteTokenizer().save(tmp_path)
    other = engine.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert other.encode(TEXT, add_special_tokens=False).ids == list(TEXT.encode())
    assert other.decode(list(TEXT.encode())) == TEXT
    assert other.get_vocab_size() == 256
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer(tmp_path / "tokenizer.json"), ByteTokenizer)


def trained(folder: Path, **special: list[str]) -> Path:
    engine = pytest.importorskip("tokenizers")
    tokenizer = engine.Tokenizer(engine.models.BPE())
    tokenizer.pre_tokenizer = engine.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = engine.decoders.ByteLevel()
    trainer = engine.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=engine.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special.get("special", []),
    )
    tokenizer.train_from_iterator([TEXT * 4], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_file_tokenizer(tmp_path: Path) -> None:
    file = trained(tmp_path, special=["<eos>"])
    for source in (file, tmp_path):
        tokenizer = load_tokenizer(source)
        assert isinstance(tokenizer, FileTokenizer)
        ids = tokenizer.encode(TEXT)
        assert ids.dtype == np.uint16 and ids.max() < tokenizer.vocab_size <= 300
        assert tokenizer.decode(ids.tolist()) == TEXT
        assert tokenizer.separator == 0
    copy = tmp_path / "copy"
    copy.mkdir()
    tokenizer.save(copy)
    assert load_tokenizer(copy).encode(TEXT).tolist() == ids.tolist()


def test_long_text_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(trained(tmp_path))
    assert tokenizer.separator is None
    whole = tokenizer.encode(TEXT * 30)
    monkeypatch.setattr("flatshard.models.tokenizer.PART_CHARACTERS", 100)
    parts = tokenizer.encode(TEXT * 30)
    assert tokenizer.decode(parts.tolist()) == TEXT * 30
    assert parts.tolist() == whole.tolist()  # this tokenizer never merges across a line's end
    assert tokenizer.decode(tokenizer.encode("x" * 1_001).tolist()) == "x" * 1_001


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such file; give 'bytes'"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        load_tokenizer(tmp_path)
