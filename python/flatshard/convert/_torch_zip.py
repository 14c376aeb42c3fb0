"""Files of ``torch.save``: a zip of stored members, one pickle and one member for each storage.

The directory is read strictly: members are stored as they are (nothing inflates), have plain names
under one folder, do not overlap and come once. Data are read where they lie.
"""

from __future__ import annotations

import itertools
import re
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from . import _pickles
from ._pickle_values import DTYPES, Storage, Tensor, storage_of
from ._sources import File, Source, Stretch, Strided, Zeros

__all__ = ["TorchFile"]

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_DIRECTORY_MAX = 1 << 28
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True)
class _Member:
    at: int
    nbytes: int
    crc: int


class TorchFile:
    """What ``torch.save`` wrote, in a file or in a stretch of one.

    Parameters
    ----------
    file : File
        The file.
    begin, nbytes : int
        The stretch; by default the whole file.

    Raises
    ------
    CheckpointError
        Not such a file, damaged, or hostile.
    """

    def __init__(self, file: File, begin: int = 0, nbytes: int | None = None) -> None:
        self.file = file
        self.begin = begin
        self.end = file.nbytes if nbytes is None else begin + nbytes
        self.where = file.path if nbytes is None else f"{file.path} at {begin}"
        if not 0 <= begin <= self.end <= file.nbytes:
            raise self._bad(f"{nbytes} bytes at {begin} of a file of {file.nbytes}: cut short")
        self.members = self._directory()
        if "constants.pkl" in self.members:
            raise self._bad("a TorchScript program, which holds code; save its state_dict()")
        if "data.pkl" not in self.members:
            raise self._bad("a zip without data.pkl: not written by torch.save")
        order = self.members.get("byteorder")
        if order is not None and file.read(order.at, min(order.nbytes, 16)) != b"little":
            raise self._bad("written on a big-endian machine")
        #: False where torch was told to write no checksums.
        self.checked = any(member.crc for member in self.members.values())

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}")

    def _read(self, at: int, nbytes: int) -> bytes:
        """Bytes of the stretch, counted from its begin."""
        if at < 0 or nbytes < 0 or at + nbytes > self.end - self.begin:
            raise self._bad(f"its directory points at bytes {at} to {at + nbytes}, outside of it")
        return self.file.read(self.begin + at, nbytes)

    # The directory.

    def _ends(self) -> tuple[int, int, int, int]:
        """Entries, bytes and place of the directory, and where it must end."""
        length = self.end - self.begin
        if length < _END.size or self._read(length - _END.size, 4) != b"PK\5\6":
            head = self._read(0, min(length, 16))
            if head.startswith(_LEGACY):
                raise self._bad("written by torch before 1.6; load and save it with a newer one")
            if head.startswith(b"PK\3\4"):
                raise self._bad("a zip that is cut short, or has a comment")
            raise self._bad("not a file of torch.save (no zip)")
        at = length - _END.size
        fields = _END.unpack(self._read(at, _END.size))
        disks, count, nbytes, place = fields[1:3], fields[3:5], fields[5], fields[6]
        if fields[7] != 0 or any(n not in (0, 0xFFFF) for n in disks) or count[0] != count[1]:
            raise self._bad("a zip in several volumes, or with a comment")
        large = 0xFFFF in count or 0xFFFFFFFF in (nbytes, place)
        if not large and place + nbytes == at:
            return count[1], nbytes, place, at
        # torch writes the 64-bit record always, needed or not.
        locator = _LOCATOR.unpack(self._read(at - _LOCATOR.size, _LOCATOR.size))
        if locator[0] != b"PK\6\7" or locator[2] + _END64.size + _LOCATOR.size != at:
            raise self._bad("a zip whose directory is damaged")
        at = locator[2]
        long = _END64.unpack(self._read(at, _END64.size))
        if long[0] != b"PK\6\6" or long[6] != long[7]:
            raise self._bad("a zip whose large directory is damaged")
        return long[7], long[8], long[9], at

    def _directory(self) -> dict[str, _Member]:
        count, nbytes, place, at = self._ends()
        if place + nbytes != at or count * _ENTRY.size > nbytes or nbytes > _DIRECTORY_MAX:
            raise self._bad("a zip whose directory is damaged")
        text = self._read(place, nbytes)
        found: dict[str, _Member] = {}
        spans = []
        folder = None
        at = 0
        for _ in range(count):
            name, offset, crc, size, at = self._entry(text, at)
            head, _, rest = name.partition("/")
            if _NAME.fullmatch(name) is None or not rest or {".", ".."} & set(name.split("/")):
                raise self._bad(f"member {name!r:.100} is no name of torch.save")
            if folder not in (None, head):
                raise self._bad(f"members in two folders, {folder!r:.100} and {head!r:.100}")
            folder = head
            if rest in found:
                raise self._bad(f"member {name!r:.100} comes twice")
            data = self._data(name, offset)
            if data + size > place:
                raise self._bad(f"member {name!r:.100} reaches into the directory")
            spans.append((offset, data + size, name))
            found[rest] = _Member(self.begin + data, size, crc)
        if at != nbytes:
            raise self._bad("a zip whose directory is damaged")
        spans.sort()
        for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:
                raise self._bad(f"members {name!r:.100} and {other!r:.100} overlap")
        return found

    def _entry(self, text: bytes, at: int) -> tuple[str, int, int, int, int]:
        """Name, place, checksum and size of a member, and where the next entry begins."""
        if at + _ENTRY.size > len(text):
            raise self._bad("a zip whose directory is damaged")
        fields = _ENTRY.unpack_from(text, at)
        flags, method, crc = fields[3], fields[4], fields[7]
        packed, size, offset = fields[8], fields[9], fields[16]
        name_n, extra_n, comment_n = fields[10:13]
        end = at + _ENTRY.size + name_n + extra_n + comment_n
        if fields[0] != b"PK\1\2" or end > len(text):
            raise self._bad("a zip whose directory is damaged")
        at += _ENTRY.size
        raw = text[at : at + name_n]
        name = raw.decode("utf-8", "replace")
        if method != 0:
            raise self._bad(f"member {name!r:.100} is compressed; torch.save stores")
        if flags & ~0x0808:
            raise self._bad(f"member {name!r:.100} is encrypted, or worse (flags 0x{flags:x})")
        saturated = [value == 0xFFFFFFFF for value in (size, packed, offset)]
        long = self._long(text[at + name_n : at + name_n + extra_n], sum(saturated))
        values = iter(long)
        size, packed, offset = (
            next(values) if large else value
            for large, value in zip(saturated, (size, packed, offset), strict=True)
        )
        if size != packed:
            raise self._bad(f"member {name!r:.100} has {packed} bytes that claim to be {size}")
        return name, offset, crc, size, end

    def _long(self, extra: bytes, count: int) -> tuple[int, ...]:
        """The first ``count`` 64-bit values of an entry."""
        at = 0
        while count and at + 4 <= len(extra):
            kind, nbytes = struct.unpack_from("<2H", extra, at)
            if kind == 1 and nbytes >= 8 * count and at + 4 + nbytes <= len(extra):
                found: tuple[int, ...] = struct.unpack_from(f"<{count}Q", extra, at + 4)
                return found
            at += 4 + nbytes
        if count:
            raise self._bad("a zip whose directory is damaged")
        return ()

    def _data(self, name: str, offset: int) -> int:
        """Where a member's bytes begin."""
        fields = _LOCAL.unpack(self._read(offset, _LOCAL.size))
        raw = self._read(offset + _LOCAL.size, fields[9])
        if fields[0] != b"PK\3\4" or raw != name.encode() or fields[3] != 0:
            raise self._bad(f"member {name!r:.100} is not where the directory says")
        return offset + _LOCAL.size + int(fields[9]) + int(fields[10])

    # The content.

    def load(self) -> Any:
        """The value that was saved, tensors as :class:`Tensor`."""
        member = self.members["data.pkl"]
        if member.nbytes > _pickles.NBYTES_MAX:
            raise self._bad(f"a pickle of {member.nbytes} bytes")
        text = self.file.read(member.at, member.nbytes)
        if self.checked and zlib.crc32(text) != member.crc:
            raise self._bad("data.pkl does not match its checksum")

        def persistent(given: Any) -> Storage:
            return storage_of(given, self._nbytes)

        return _pickles.load(self.where, text, persistent=persistent)

    def _nbytes(self, key: str) -> int:
        member = self.members.get(f"data/{key}")
        return -1 if member is None else member.nbytes

    def source(self, tensor: Tensor) -> Source:
        """Where the elements of a tensor of this file lie, in order."""
        numel = tensor.numel
        if numel == 0:
            return Zeros(0, tensor.dtype)
        member = self.members[f"data/{tensor.storage.key}"]
        at = member.at + tensor.offset * DTYPES[tensor.dtype]
        step, contiguous = 1, True
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
            contiguous = contiguous and (size == 1 or stride == step)
            step *= size
        if contiguous:
            return Stretch(self.file, at, numel, tensor.dtype)
        return Strided(self.file, at, tensor.shape, tensor.stride, tensor.dtype)

    def check(self, tensor: Tensor) -> None:
        """Compare the storage of a tensor with its checksum, where there is one."""
        if tensor.numel and self.checked:
            member, crc, at = self.members[f"data/{tensor.storage.key}"], 0, 0
            while at < member.nbytes:
                part = self.file.read(member.at + at, min(4 << 20, member.nbytes - at))
                crc = zlib.crc32(part, crc)
                at += len(part)
            if crc != member.crc:
                raise self._bad(f"data/{tensor.storage.key} does not match its checksum")
