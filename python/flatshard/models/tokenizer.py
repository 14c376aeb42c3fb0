"""Text to token ids and back: bytes, or any ``tokenizer.json``.

The byte tokenizer needs no package and no file. Saved beside a model it is written as an ordinary
``tokenizer.json``, so that the folder opens with a tokenizer elsewhere too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer"]

# Text longer than this is given to a tokenizer in parts that end at a line's end: whole books in
# one string make some tokenizers quadratic.
PART_CHARACTERS = 1 << 18

# Names under which tokenizers keep the token that ends a document, the likeliest first.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


@runtime_checkable
class Tokenizer(Protocol):
    """What the data, the trainer and ``flatshard sample`` ask of a tokenizer."""

    @property
    def name(self) -> str:
        """``"bytes"`` or the path of the file."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def separator(self) -> int | None:
        """The id put after every document; None where the vocabulary has none."""

    def encode(self, text: str) -> NDArray[Any]:
        """Ids of a text, without the separator; (n,) uint8, uint16 or int32."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Never raises: what is no text becomes U+FFFD."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json`` into an existing folder."""


class ByteTokenizer:
    """One token per byte of UTF-8; 256 ids, 0 (no text contains it) ends a document."""

    name = "bytes"
    vocab_size = 256
    separator = 0

    def encode(self, text: str) -> NDArray[np.uint8]:
        """The bytes of a text, (n,) uint8."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of bytes; ids above 255, which a larger model may give, become U+FFFD."""
        if isinstance(ids, np.ndarray) and ids.dtype == np.uint8:
            return ids.tobytes().decode("utf-8", "replace")
        text: list[str] = []
        run = bytearray()
        for token in ids:
            if 0 <= token < 256:
                run.append(token)
            else:
                text += [run.decode("utf-8", "replace"), "\ufffd"]
                run.clear()
        text.append(run.decode("utf-8", "replace"))
        return "".join(text)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the byte tokenizer in the format of the ``tokenizers`` package."""
        _write_json(Path(folder, "tokenizer.json"), byte_tokenizer_json())
        _write_config(Path(folder), _printable_bytes()[self.separator])


class FileTokenizer:
    """A ``tokenizer.json``, read by the ``tokenizers`` package.

    Parameters
    ----------
    path : str or path
        The file, or a folder that holds it.

    Raises
    ------
    ConfigError
        If the file is missing or damaged, or the package is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"tokenizer {os.fspath(path)!r}: no such file; give 'bytes', "
                "a tokenizer.json, or a folder with one"
            )
        try:
            from tokenizers import Tokenizer as Engine
        except ImportError:
            raise ConfigError(
                f"tokenizer {str(file)!r} needs the package 'tokenizers': "
                "pip install tokenizers, or use 'bytes'"
            ) from None
        try:
            self._engine: Any = Engine.from_file(str(file))
        except Exception as error:  # the package raises plain Exception
            raise ConfigError(f"tokenizer {str(file)!r} cannot be read: {error}") from None
        self._file = file
        self.name = str(file)
        ids = self._engine.get_vocab(with_added_tokens=True)
        if not ids:
            raise ConfigError(f"tokenizer {str(file)!r} has an empty vocabulary")
        self.vocab_size = max(ids.values()) + 1
        self.separator: int | None = next((ids[name] for name in END_NAMES if name in ids), None)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest of uint16 and int32 that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    def encode(self, text: str) -> NDArray[Any]:
        """Ids of a text, (n,) uint16 or int32; no special tokens are added."""
        parts = [
            np.asarray(encoded.ids, dtype=self.dtype)
            for encoded in self._engine.encode_batch(list(_parts(text)), add_special_tokens=False)
        ]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; ids outside the vocabulary are left out."""
        known: Sequence[int] = [int(token) for token in ids if 0 <= token < self.vocab_size]
        return str(self._engine.decode(known, skip_special_tokens=True))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Copies the file."""
        Path(folder, "tokenizer.json").write_bytes(self._file.read_bytes())
        _write_config(
            Path(folder),
            None if self.separator is None else self._engine.id_to_token(self.separator),
        )


def load_tokenizer(source: str | os.PathLike[str] | Tokenizer = "bytes") -> Tokenizer:
    """The tokenizer that a name, a file or a folder means.

    Parameters
    ----------
    source : str, path or Tokenizer
        ``"bytes"``, a ``tokenizer.json``, or a folder that holds one. A folder that the byte
        tokenizer was saved to gives the byte tokenizer, which needs no package.

    Returns
    -------
    Tokenizer

    Raises
    ------
    ConfigError
        If nothing readable is there.
    """
    if not isinstance(source, (str, os.PathLike)):
        return source
    if os.fspath(source) == "bytes":
        return ByteTokenizer()
    file = Path(source)
    if file.is_dir():
        file = file / "tokenizer.json"
    try:
        if json.loads(file.read_text("utf-8")) == byte_tokenizer_json():
            return ByteTokenizer()
    except (OSError, ValueError):
        pass  # FileTokenizer says what is wrong with it
    return FileTokenizer(source)


def _parts(text: str) -> Iterable[str]:
    """Cuts a long text after line ends; the parts joined are the text."""
    begin = 0
    while len(text) - begin > PART_CHARACTERS:
        end = text.rfind("\n", begin, begin + PART_CHARACTERS) + 1 or begin + PART_CHARACTERS
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _printable_bytes() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 stands for itself, the other 68 bytes for the characters from U+0100 on, in
    order. Source: Radford et al. 2019 (GPT-2), ``bytes_to_unicode``.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def byte_tokenizer_json() -> dict[str, Any]:
    """The byte tokenizer as ``tokenizers`` describes it: a byte-level BPE without merges."""
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_printable_bytes())},
            "merges": [],
        },
    }


def _write_config(folder: Path, end: str | None) -> None:
    """The file that makes ``transformers.AutoTokenizer`` open the folder."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if end is not None:
        config["eos_token"] = end
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
