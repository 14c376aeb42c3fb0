"""Files as ``torch.save`` writes them, by hand: tests need no torch, and write what it would not.

Values are plain ones and NumPy arrays; an array becomes a tensor of its own storage, one that comes
again a tensor of the same.
"""

import pathlib
import struct
import zipfile
import zlib

import numpy as np

STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
}


class Made:
    """An object of a class that is only named, with these attributes."""

    def __init__(self, module: str, name: str, **fields: object) -> None:
        self.module, self.name, self.fields = module, name, fields


ORDERED = b"ccollections\nOrderedDict\n)R"


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def _sizes(values) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def _opcodes(value, data: list[np.ndarray]) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return _number(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (list, tuple)):
        inner = b"".join(_opcodes(part, data) for part in value)
        return b"](" + inner + b"e" if isinstance(value, list) else b"(" + inner + b"t"
    if isinstance(value, Made):
        named = f"c{value.module}\n{value.name}\n".encode()
        return named + b")\x81" + _opcodes(value.fields, data) + b"b"
    if isinstance(value, dict):
        items = (_opcodes(key, data) + _opcodes(part, data) for key, part in value.items())
        return b"}(" + b"".join(items) + b"u"
    assert isinstance(value, np.ndarray)
    place = next((i for i, array in enumerate(data) if array is value), len(data))
    data[place:] = [value] if place == len(data) else data[place:]
    key, name = str(place), STORAGES[value.dtype.name]
    strides = [s // value.itemsize for s in np.empty(value.shape, value.dtype).strides]
    storage = (
        b"(" + _text("storage") + f"ctorch\n{name}\n".encode() + _text(key) + _text("cpu")
        + _number(value.size) + b"tQ"
    )  # fmt: skip
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + _number(0) + _sizes(value.shape)
        + _sizes(strides) + b"\x89" + ORDERED + b"tR"
    )  # fmt: skip


def members(value) -> list[tuple[str, bytes]]:
    """Names and contents of the archive of a value."""
    data: list[np.ndarray] = []
    text = b"\x80\x02" + _opcodes(value, data) + b"."
    stored = [(f"a/data/{i}", array.tobytes()) for i, array in enumerate(data)]
    return [("a/data.pkl", text), ("a/byteorder", b"little"), *stored]


def write(path: pathlib.Path, value) -> None:
    """Writes the archive of a value."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members(value):
            file.writestr(name, content)


def write_large(path: pathlib.Path, value) -> None:
    """The same as if it were beyond 4 GiB: every size and place in its 64-bit field."""
    out, central, full = bytearray(), bytearray(), 0xFFFFFFFF
    entries = members(value)
    for name, content in entries:
        raw, crc, at = name.encode(), zlib.crc32(content), len(out)
        long = struct.pack("<2H3Q", 1, 24, len(content), len(content), at)
        out += struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, crc, full, full, len(raw), 20)
        out += raw + struct.pack("<2H2Q", 1, 16, len(content), len(content)) + content
        central += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 45, 45, 0, 0, 0, 0, crc, full, full, len(raw), len(long),
            0, 0, 0, 0, full,
        )  # fmt: skip
        central += raw + long
    n, at = len(entries), len(out)
    out += central
    end = len(out)
    out += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, n, n, len(central), at)
    out += struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    out += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, full, full, 0)
    path.write_bytes(out)
