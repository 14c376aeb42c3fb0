"""Files to one stream of token ids: text, folders, JSONL, memory-mapped token files.

A :class:`Corpus` is the tokens of all documents end to end, each document followed by the
tokenizer's separator, and where each document begins. Token files and single text files under the
byte tokenizer stay in their files, mapped, and so do corpora that were cached; everything else is
held in memory at one to four bytes a token.
"""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

__all__ = ["Corpus", "read_corpus"]

TOKEN_DTYPES = ("uint8", "uint16", "int32")
SKIPPED_FOLDERS = ("__pycache__", ".*")
STDLIB_SKIPPED = ("test", "tests", "idle_test", "site-packages", "dist-packages")
CHUNK = 1 << 22  # bytes or tokens looked at in one piece when a whole file is checked
CACHE_FORMAT = 1


@dataclass(frozen=True)
class Corpus:
    """Tokens of all documents, end to end.

    Attributes
    ----------
    stream : (tokens,) ndarray of uint8, uint16 or int32
        May be a read-only memory map.
    begins : (documents,) ndarray of int64
        Where each document begins; it ends where the next begins, separator included.
    vocab_size : int or None
        Of the tokenizer; None for token files, which know no vocabulary.
    source : str
        What was read, for messages.
    """

    stream: NDArray[Any]
    begins: NDArray[np.int64]
    vocab_size: int | None
    source: str

    def largest(self) -> int:
        """The largest token id in the stream; reads all of it, in pieces."""
        largest = 0
        for begin in range(0, len(self.stream), CHUNK):
            piece = self.stream[begin : begin + CHUNK]
            low = int(piece.min())
            if low < 0:
                at = begin + int(piece.argmin())
                raise ConfigError(f"{self.source}: token {at} is {low}; ids are at least 0")
            largest = max(largest, int(piece.max()))
        return largest


def read_corpus(
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    glob: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
    encoding: str = "utf-8",
    token_dtype: str = "uint16",
    cache: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Reads a corpus.

    Parameters
    ----------
    path : str or path
        A text file; a ``.jsonl`` file with one ``{"text": ...}`` a line; a ``.npy`` or ``.bin``
        file of token ids; a folder of text and JSONL files, read in the order of their names. The
        word ``stdlib``, where no file of that name exists, means the ``*.py`` files of Python's own
        standard library without its tests.
    tokenizer : Tokenizer
    glob, exclude : str or sequence of str
        In a folder: patterns of the file names to read, and of file and folder names to leave out.
        Hidden folders and ``__pycache__`` are always left out.
    encoding : str
        Of text files.
    token_dtype : str
        Of ``.bin`` files, which do not say: ``uint8``, ``uint16`` or ``int32``, little-endian.
    cache : str or path, optional
        A folder in which the tokens are kept and mapped from next time. Keyed by the files' names,
        sizes and times and the tokenizer.

    Returns
    -------
    Corpus

    Raises
    ------
    ConfigError
        If nothing is there, it is empty, no text in this encoding, or no tokens of this type.
    """
    root = Path(path)
    if not root.exists() and os.fspath(path) == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        glob, exclude = "*.py", (*_patterns(exclude), *STDLIB_SKIPPED)
    if not root.exists():
        raise ConfigError(f"data {os.fspath(path)!r}: no such file or folder")
    if root.is_file() and root.suffix in (".npy", ".bin"):
        stream = _map_tokens(root, token_dtype)
        return Corpus(stream, np.zeros(1, np.int64), None, str(root))
    files = list(_walk(root, _patterns(glob), _patterns(exclude))) if root.is_dir() else [root]
    if not files:
        raise ConfigError(
            f"data {str(root)!r}: no file matches {' '.join(_patterns(glob))!r}; "
            "give another pattern with glob="
        )
    for file in files:
        if not os.access(file, os.R_OK):
            raise ConfigError(f"data {str(file)!r}: not readable by this user")
        if root.is_dir() and file.suffix in (".npy", ".bin"):
            raise ConfigError(
                f"data {str(file)!r}: a token file in a folder of text; give the file itself, "
                "or leave it out with glob= or exclude="
            )
    if cache is not None:
        return _cached(Path(cache), files, root, tokenizer, encoding)
    single = files[0]
    text = len(files) == 1 and single.suffix != ".jsonl"
    if text and isinstance(tokenizer, ByteTokenizer) and _is_utf8(encoding):
        return _map_text(single, tokenizer)
    return _tokenize(files, root, tokenizer, encoding)


def _patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _is_utf8(encoding: str) -> bool:
    try:
        return codecs.lookup(encoding).name == "utf-8"
    except LookupError:
        raise ConfigError(f"encoding {encoding!r} is unknown to Python") from None


def _walk(root: Path, glob: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
    """Files below root in an order that depends on their names alone."""
    leave_out = (*exclude, *SKIPPED_FOLDERS)

    def left_out(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in leave_out)

    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not left_out(name))
        for name in sorted(names):
            if not left_out(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in glob):
                yield Path(folder, name)


# Token files ----------------------------------------------------------------------------------


def _map_tokens(file: Path, token_dtype: str) -> NDArray[Any]:
    if token_dtype not in TOKEN_DTYPES:
        raise ConfigError(f"token_dtype {token_dtype!r}: expected one of {', '.join(TOKEN_DTYPES)}")
    nbytes = file.stat().st_size
    if nbytes == 0:
        raise ConfigError(f"data {str(file)!r} is empty")
    if file.suffix == ".bin":
        dtype = np.dtype(token_dtype).newbyteorder("<")
        if nbytes % dtype.itemsize:
            raise ConfigError(
                f"data {str(file)!r}: {nbytes} bytes are no whole number of {token_dtype} tokens; "
                "say the type with token_dtype="
            )
        return np.memmap(file, dtype=dtype, mode="r")
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"data {str(file)!r} is no readable .npy file: {error}") from None
    if array.ndim != 1 or array.dtype.name not in TOKEN_DTYPES:
        raise ConfigError(
            f"data {str(file)!r}: {array.dtype.name} of shape {array.shape}; "
            f"expected one dimension of {', '.join(TOKEN_DTYPES)}"
        )
    if array.size == 0:
        raise ConfigError(f"data {str(file)!r} is empty")
    return array  # type: ignore[no-any-return]


# Text -----------------------------------------------------------------------------------------


def _map_text(file: Path, tokenizer: ByteTokenizer) -> Corpus:
    """A text file is its own token file under the byte tokenizer: mapped, checked, not copied."""
    if file.stat().st_size == 0:
        raise ConfigError(f"data {str(file)!r} is empty")
    stream = np.memmap(file, dtype=np.uint8, mode="r")
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(stream), CHUNK):
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(stream[begin : begin + CHUNK].tobytes(), begin + CHUNK >= len(stream))
        except UnicodeDecodeError as error:
            raise _not_text(
                file, "utf-8", begin - pending + error.start, error, stream[:2]
            ) from None
    return Corpus(stream, np.zeros(1, np.int64), tokenizer.vocab_size, str(file))


def _not_text(
    file: Path, encoding: str, at: int, error: UnicodeError, head: NDArray[np.uint8]
) -> ConfigError:
    reason = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
    cure = "give its encoding (--encoding latin-1 reads any bytes), or leave the file out"
    if head[:2].tobytes() in (b"\xff\xfe", b"\xfe\xff"):
        cure = "it begins like UTF-16: --encoding utf-16"
    return ConfigError(f"data {str(file)!r} is not {encoding} text: byte {at}: {reason}; {cure}")


def _read_text(file: Path, encoding: str) -> str:
    raw = file.read_bytes()
    try:
        return raw.decode(encoding)
    except UnicodeError as error:
        at = error.start if isinstance(error, UnicodeDecodeError) else 0
        raise _not_text(file, encoding, at, error, np.frombuffer(raw[:2], np.uint8)) from None


def _documents(file: Path, encoding: str) -> Iterator[str]:
    """The texts of a file: itself, or one a line of JSONL. Empty ones are left out."""
    text = _read_text(file, encoding)
    if file.suffix != ".jsonl":
        if text:
            yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"data {str(file)!r} line {number}: no JSON: {error}") from None
        value = record.get("text") if isinstance(record, dict) else None
        if not isinstance(value, str):
            found = f"keys {sorted(record)}" if isinstance(record, dict) else type(record).__name__
            raise ConfigError(
                f'data {str(file)!r} line {number}: expected {{"text": "..."}}, got {found}'
            )
        if value:
            yield value


def _tokenize(files: Sequence[Path], root: Path, tokenizer: Tokenizer, encoding: str) -> Corpus:
    _is_utf8(encoding)  # an unknown encoding is an error whatever the files hold
    end: NDArray[Any] | None = None
    pieces: list[NDArray[Any]] = []
    begins: list[int] = []
    total = 0
    for file in files:
        for text in _documents(file, encoding):
            ids = tokenizer.encode(text)
            if ids.size == 0:
                continue
            begins.append(total)
            pieces.append(ids)
            total += ids.size
            if tokenizer.separator is not None:
                if end is None:
                    end = np.full(1, tokenizer.separator, ids.dtype)
                pieces.append(end)
                total += 1
    if not pieces:
        raise ConfigError(f"data {str(root)!r} is empty: {len(files)} file(s) without any text")
    return Corpus(
        np.concatenate(pieces), np.asarray(begins, np.int64), tokenizer.vocab_size, str(root)
    )


# Cache ----------------------------------------------------------------------------------------


def _cached(
    cache: Path, files: Sequence[Path], root: Path, tokenizer: Tokenizer, encoding: str
) -> Corpus:
    key = hashlib.sha256(f"{CACHE_FORMAT} {encoding} {sys.byteorder}".encode())
    if isinstance(tokenizer, FileTokenizer):
        key.update(Path(tokenizer.name).read_bytes())
    else:
        key.update(tokenizer.name.encode())
    for file in files:
        stat = file.stat()
        key.update(f"\0{file}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    name = key.hexdigest()[:32]
    tokens, begins = cache / f"{name}.tokens.npy", cache / f"{name}.begins.npy"
    if not (tokens.is_file() and begins.is_file()):
        corpus = _tokenize(files, root, tokenizer, encoding)
        cache.mkdir(parents=True, exist_ok=True)
        # Begins first: whoever finds the tokens finds both. Ranks that race write the same bytes.
        for target, array in ((begins, corpus.begins), (tokens, corpus.stream)):
            hidden = cache / f".{target.name}.{os.getpid()}-{id(array):x}"
            with open(hidden, "wb") as handle:
                np.save(handle, array)
            os.replace(hidden, target)
    return Corpus(np.load(tokens, mmap_mode="r"), np.load(begins), tokenizer.vocab_size, str(root))
