"""Where the elements of a converted tensor lie: stretches of files, read in small parts.

Everything is read with positioned reads of at most a few MiB, never mapped: a file that is cut
while it is read gives an error, not a signal.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import stat
from collections.abc import Sequence
from typing import Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .._folders import is_plain
from ..errors import CheckpointError
from ._pickle_values import DTYPES

__all__ = ["Blocks", "File", "Joined", "Part", "Source", "Stretch", "Strided", "Zeros", "same"]

#: The most bytes that a part of a tensor is read at once.
WINDOW_NBYTES = 4 << 20

_NUMPY: dict[str, npt.DTypeLike] = {"bfloat16": ml_dtypes.bfloat16}


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The NumPy dtype of a floating-point or integer type."""
    return np.dtype(_NUMPY.get(name, name))


class File:
    """A regular file of a folder, open for reading.

    Parameters
    ----------
    folder : str
        The folder, as the user gave it.
    name : str
        A plain name in it. A link may not lead out of the folder, the blobs of a Hugging Face cache
        excepted.
    ours : bool
        The name is no stranger's: it may begin with a dot.
    """

    def __init__(self, folder: str, name: str, *, ours: bool = False) -> None:
        self.path = os.path.join(folder, name)
        if not ours and not is_plain(name):
            raise CheckpointError(f"{folder}: {name!r:.100} is not a plain file name")
        target = self.path
        if os.path.islink(target):
            target = os.path.realpath(target)
            if not _inside(folder, target):
                raise CheckpointError(f"{self.path}: a link that leads out of its folder")
        self._fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        about = os.fstat(self._fd)
        if not stat.S_ISREG(about.st_mode):
            os.close(self._fd)
            raise CheckpointError(f"{self.path}: not a regular file")
        self.nbytes = about.st_size

    def read(self, at: int, nbytes: int) -> bytes:
        """Exactly these bytes; CheckpointError where the file ends before."""
        if at < 0 or nbytes < 0 or at + nbytes > self.nbytes:
            raise CheckpointError(
                f"{self.path}: {nbytes} bytes at {at} of a file of {self.nbytes}: cut short"
            )
        parts = []
        while nbytes > 0:
            part = os.pread(self._fd, min(nbytes, 1 << 30), at)
            if not part:
                raise CheckpointError(f"{self.path}: unexpected end of file at byte {at}")
            parts.append(part)
            at += len(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Gives the file back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _inside(folder: str, target: str) -> bool:
    """Whether a resolved path lies in the folder, or among the blobs of a Hugging Face cache."""
    real = os.path.realpath(folder)
    blobs = os.path.realpath(os.path.join(real, "..", "..", "blobs"))
    snapshot = os.path.basename(os.path.dirname(real)) == "snapshots"
    parent = os.path.dirname(target)
    return os.path.commonpath([real, target]) == real or (snapshot and parent == blobs)


class Source(Protocol):
    """Elements of one dtype, end to end."""

    dtype: str
    numel: int

    def read(self, begin: int, end: int) -> bytes:
        """The bytes of elements [begin, end)."""


class Stretch:
    """Elements that lie end to end in a file."""

    def __init__(self, file: File, at: int, numel: int, dtype: str) -> None:
        self.file, self.at, self.numel, self.dtype = file, at, numel, dtype

    def read(self, begin: int, end: int) -> bytes:
        n = DTYPES[self.dtype]
        return self.file.read(self.at + begin * n, (end - begin) * n)


class Strided:
    """A tensor that is not contiguous in its file. Held whole while it is read."""

    def __init__(
        self, file: File, at: int, shape: Sequence[int], stride: Sequence[int], dtype: str
    ) -> None:
        self.file, self.at, self.dtype = file, at, dtype
        self.shape, self.stride = tuple(shape), tuple(stride)
        self.numel = math.prod(shape)
        self._whole: bytes | None = None

    def read(self, begin: int, end: int) -> bytes:
        if self._whole is None:
            itemsize = DTYPES[self.dtype]
            span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
            raw = np.frombuffer(self.file.read(self.at, span * itemsize), f"V{itemsize}")
            view = np.lib.stride_tricks.as_strided(
                raw, self.shape, [s * itemsize for s in self.stride], writeable=False
            )
            self._whole = view.tobytes()
        n = DTYPES[self.dtype]
        found = self._whole[begin * n : end * n]
        if end == self.numel:
            self._whole = None  # read in order: done with
        return found


class Zeros:
    """Elements that are 0 and lie nowhere."""

    def __init__(self, numel: int, dtype: str) -> None:
        self.numel, self.dtype = numel, dtype

    def read(self, begin: int, end: int) -> bytes:
        return bytes((end - begin) * DTYPES[self.dtype])


class Part:
    """Elements [begin, begin + numel) of another source."""

    def __init__(self, source: Source, begin: int, numel: int) -> None:
        self.source, self.begin, self.numel, self.dtype = source, begin, numel, source.dtype

    def read(self, begin: int, end: int) -> bytes:
        return self.source.read(self.begin + begin, self.begin + end)


class Joined:
    """Several sources of one dtype, end to end."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.dtype = self.sources[0].dtype
        self.ends = list(itertools.accumulate(source.numel for source in self.sources))
        self.numel = self.ends[-1]

    def read(self, begin: int, end: int) -> bytes:
        parts = []
        at = bisect.bisect_right(self.ends, begin)
        while begin < end:
            source = self.sources[at]
            first = self.ends[at] - source.numel
            stop = min(end, self.ends[at])
            parts.append(source.read(begin - first, stop - first))
            begin = stop
            at += 1
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Blocks:
    """A tensor in boxes: (offsets, sizes, source) each, which fill it. Rows are put together."""

    def __init__(
        self,
        shape: Sequence[int],
        blocks: Sequence[tuple[tuple[int, ...], tuple[int, ...], Source]],
    ) -> None:
        self.shape = tuple(shape)
        self.blocks = list(blocks)
        self.dtype = blocks[0][2].dtype
        self.numel = math.prod(shape)
        self._rows = (0, 0)
        self._held: bytes = b""

    def read(self, begin: int, end: int) -> bytes:
        row = math.prod(self.shape[1:])
        first, last = begin // row, -(-end // row)
        if not (self._rows[0] <= first and last <= self._rows[1]):
            self._held = self._assemble(first, last)
            self._rows = (first, last)
        n = DTYPES[self.dtype]
        base = self._rows[0] * row
        return self._held[(begin - base) * n : (end - base) * n]

    def _assemble(self, first: int, last: int) -> bytes:
        raw = f"V{DTYPES[self.dtype]}"
        out = np.empty((last - first, *self.shape[1:]), raw)
        for offsets, sizes, source in self.blocks:
            low, high = max(first, offsets[0]), min(last, offsets[0] + sizes[0])
            if low >= high:
                continue
            width = math.prod(sizes[1:])
            content = source.read((low - offsets[0]) * width, (high - offsets[0]) * width)
            place = (slice(low - first, high - first),) + tuple(
                slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:], strict=True)
            )
            out[place] = np.frombuffer(content, raw).reshape((high - low, *sizes[1:]))
        return out.tobytes()


def windows(source: Source) -> list[tuple[int, int]]:
    """Ranges of at most WINDOW_NBYTES that cover a source in order."""
    n = max(WINDOW_NBYTES // DTYPES[source.dtype], 1)
    return [(at, min(at + n, source.numel)) for at in range(0, source.numel, n)]


def same(left: Source, right: Source) -> bool:
    """Whether two sources hold the same bytes."""
    if (left.dtype, left.numel) != (right.dtype, right.numel):
        return False
    return all(left.read(*window) == right.read(*window) for window in windows(left))
