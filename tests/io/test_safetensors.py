"""Our safetensors against the package, both ways; checksums against the definition."""

import json
import pathlib
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from flatshard import _core
from flatshard.errors import CheckpointError

DTYPES = {
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "U8": np.dtype(np.uint8),
}

names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tensors = st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=8)
metadata = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=10),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=10),
    max_size=4,
)


def arrays_of(spec: dict[str, tuple[str, tuple[int, ...]]], seed: int) -> dict[str, np.ndarray]:
    """Arrays of random bytes: every bit pattern, NaN payloads too."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, (code, shape) in spec.items():
        dtype = DTYPES[code]
        raw = rng.bytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        made[name] = np.frombuffer(raw, dtype).reshape(shape)
    return made


def write(path: pathlib.Path, arrays: dict[str, np.ndarray], meta: dict[str, str]) -> None:
    """Writes with our writer, wider dtypes first."""
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    _core.safetensors_write(path, tuple(order), tuple(arrays[name] for name in order), meta)


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Arrays at the places that our reader names."""
    content = path.read_bytes()
    _, entries = _core.safetensors_header(path)
    return {
        name: np.frombuffer(content[begin:end], DTYPES[code]).reshape(shape)
        for name, code, shape, begin, end in entries
    }


@settings(max_examples=60, deadline=None)
@given(tensors, metadata, st.integers(0, 2**32))
def test_package_reads_what_we_write(tmp_path_factory, spec, meta, seed) -> None:
    path = tmp_path_factory.mktemp("w") / "a.safetensors"
    arrays = arrays_of(spec, seed)
    write(path, arrays, meta)
    with safe_open(path, "np") as file:
        assert sorted(file.keys()) == sorted(arrays)
        assert (file.metadata() or {}) == meta
    for name, entry in safetensors.deserialize(path.read_bytes()):
        assert bytes(entry["data"]) == arrays[name].tobytes()
        assert tuple(entry["shape"]) == arrays[name].shape
        assert entry["dtype"] == spec[name][0]


@settings(max_examples=60, deadline=None)
@given(tensors, metadata, st.integers(0, 2**32))
def test_we_read_what_package_writes(tmp_path_factory, spec, meta, seed) -> None:
    path = tmp_path_factory.mktemp("r") / "a.safetensors"
    arrays = arrays_of(spec, seed)
    safetensors.numpy.save_file(arrays, path, metadata=meta or None)
    found = read(path)
    assert sorted(found) == sorted(arrays)
    assert _core.safetensors_header(path)[0] == meta
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_the_package_refuses_we_refuse(tmp_path_factory, data) -> None:
    """Any single edit of a header: where the package refuses, so do we (we may be stricter)."""
    folder = tmp_path_factory.mktemp("e")
    path = folder / "a.safetensors"
    write(path, arrays_of({"a": ("F32", (2, 3)), "b": ("BF16", (5,))}, 1), {"k": "v"})
    content = bytearray(path.read_bytes())
    size = 8 + struct.unpack("<Q", content[:8])[0]
    at = data.draw(st.integers(0, size - 1))
    kind = data.draw(st.sampled_from(["replace", "delete", "insert"]))
    byte = data.draw(st.integers(0, 255))
    if kind == "replace":
        content[at] = byte
    elif kind == "delete":
        del content[at]
    else:
        content.insert(at, byte)
    path.write_bytes(content)
    try:
        safetensors.deserialize(bytes(content))
        package_accepts = True
    except Exception:  # the package's own class is not public in every version
        package_accepts = False
    try:
        _core.safetensors_header(path)
        we_accept = True
    except CheckpointError as error:
        assert str(path) in str(error)
        we_accept = False
    assert package_accepts or not we_accept


def test_header_over_several_blocks(tmp_path) -> None:
    """A header of some megabytes, longer than the reader's window."""
    path = tmp_path / "long.safetensors"
    arrays = {f"{'n' * 250}.{i:05d}": np.full(3, i, np.float32) for i in range(22000)}
    write(path, arrays, {})
    header_nbytes = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert header_nbytes > 6 * 2**20
    found = read(path)
    assert len(found) == len(arrays)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    assert safetensors.numpy.load_file(path).keys() == arrays.keys()


def test_other_dtypes_are_read_as_entries(tmp_path) -> None:
    """Types of the format that we have no arrays for are still checked and listed."""
    header = json.dumps(
        {
            "f8": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]},
            "bool": {"dtype": "BOOL", "shape": [2], "data_offsets": [3, 5]},
        }
    ).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(5))
    assert [entry[:3] for entry in _core.safetensors_header(path)[1]] == [
        ("bool", "BOOL", (2,)),
        ("f8", "F8_E4M3", (3,)),
    ]


def test_write_refuses(tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    one = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="control character 0x0a"):
        _core.safetensors_write(path, ("a\n",), (one,), {})
    with pytest.raises(ValueError, match='two tensors named "a"'):
        _core.safetensors_write(path, ("a", "a"), (one, one), {})
    with pytest.raises((TypeError, ValueError), match="contiguous"):
        _core.safetensors_write(path, ("a",), (np.zeros((4, 4), np.float32).T[1:],), {})
    assert not path.exists()
    _core.safetensors_write(path, ("a",), (one,), {})
    with pytest.raises(FileExistsError):
        _core.safetensors_write(path, ("a",), (one,), {})
    with pytest.raises(FileNotFoundError):
        _core.safetensors_header(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        _core.safetensors_header(tmp_path)


def crc32c_by_definition(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_crc32c(content: bytes, cut: int) -> None:
    expected = crc32c_by_definition(content)
    assert _core.crc32c(content) == _core.crc32c_table(content) == expected
    assert _core.crc32c(content[cut:], _core.crc32c(content[:cut])) == expected
    assert _core.crc32c_name() in ("sse4.2", "armv8-crc", "table")
