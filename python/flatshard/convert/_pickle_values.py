"""What a pickle may hold here: plain values, tensors and records, and the names they come by.

A class or function that a pickle names is looked up in the tables below; every other name is
refused. Nothing is imported or called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CALLS",
    "DTYPES",
    "RECORDS",
    "BadPickle",
    "Name",
    "Record",
    "Storage",
    "Tensor",
    "find",
    "key_of",
    "shown",
    "storage_of",
]

_KEY_DEPTH_MAX = 4
_DIMS_MAX = 32

#: Bytes of an element.
DTYPES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}


@dataclass(frozen=True)
class Name:
    """A class or function that a pickle names: the name alone."""

    text: str


@dataclass(eq=False)
class Record:
    """An object of a listed class: what its pickle gave, as plain values."""

    name: str
    args: tuple[Any, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Storage:
    """The bytes of one or several tensors, by their key in the archive."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor as a view of a storage, checked to lie inside it. Offset and strides in elements."""

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class BadPickle(Exception):
    """What is wrong with a pickle, without the place: `_pickles.load` adds it."""


def shown(value: Any) -> str:
    """A value of a stranger, fit for a message: never long, never walked through."""
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 2**64 else "a number beyond 2^64"
    if isinstance(value, str):
        return ascii(value[:100]) + ("..." if len(value) > 100 else "")
    if isinstance(value, (Name, Record)):
        return value.text if isinstance(value, Name) else f"a {value.name}"
    return f"a {type(value).__name__}"


# -- what names stand for --------------------------------------------------------------------------


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    if type(value) not in (tuple, list) or len(value) > _DIMS_MAX:
        raise BadPickle(f"a tensor whose {what} is {shown(value)}")
    for n in value:
        if type(n) is not int or not 0 <= n < 2**62:
            raise BadPickle(f"a tensor with {shown(n)} in its {what}")
    return tuple(value)


def _tensor(storage: Any, dtype: str, offset: Any, size: Any, stride: Any) -> Tensor:
    if not isinstance(storage, Storage):
        raise BadPickle(f"a tensor whose storage is {shown(storage)}")
    shape, strides = _sizes(size, "shape"), _sizes(stride, "stride")
    if type(offset) is not int or not 0 <= offset < 2**62:
        raise BadPickle(f"a tensor whose offset is {shown(offset)}")
    if len(shape) != len(strides):
        raise BadPickle(f"a tensor of {len(shape)} dimensions with {len(strides)} strides")
    itemsize = DTYPES[dtype]
    room = storage.numel * DTYPES[storage.dtype] // itemsize
    numel = math.prod(shape)
    if numel > 0:
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if last >= room or numel > room:
            raise BadPickle(
                f"a tensor of shape {list(shape)}, stride {list(strides)} and offset {offset}, "
                f"which reaches beyond the {room} elements of storage {shown(storage.key)}"
            )
    return Tensor(storage, dtype, shape, offset, strides)


def _rebuild_v2(args: tuple[Any, ...]) -> Tensor:
    if len(args) not in (4, 6, 7):
        raise BadPickle(f"a tensor of {len(args)} arguments")
    dtype = args[0].dtype if isinstance(args[0], Storage) else ""
    return _tensor(args[0], dtype, args[1], args[2], args[3])


def _rebuild_v3(args: tuple[Any, ...]) -> Tensor:
    if len(args) not in (7, 8):
        raise BadPickle(f"a tensor of {len(args)} arguments")
    return _tensor(args[0], _dtype(args[6]), args[1], args[2], args[3])


def _dtype(value: Any) -> str:
    text = value.text.removeprefix("torch.") if isinstance(value, Name) else ""
    if text not in DTYPES:
        raise BadPickle(f"a tensor of dtype {shown(value)}")
    return text


def _parameter(args: tuple[Any, ...]) -> Tensor:
    if not args or not isinstance(args[0], Tensor):
        raise BadPickle("a parameter without a tensor")
    return args[0]


def _ordered(args: tuple[Any, ...]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    if len(args) > 1 or (args and not isinstance(args[0], (list, tuple, dict))):
        raise BadPickle("an OrderedDict of something else")
    pairs = args[0].items() if args and isinstance(args[0], dict) else args[0] if args else ()
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadPickle("an OrderedDict of something else than pairs")
        found[key_of(pair[0])] = pair[1]
    return found


def _sequence(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(args) > 1 or (args and not isinstance(args[0], (list, tuple))):
        raise BadPickle("a sequence of something else")
    return tuple(args[0]) if args else ()


def _encode(args: tuple[Any, ...]) -> bytes:
    """Bytes as protocol 2 writes them."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        raise BadPickle("_codecs.encode of something else than bytes")
    return args[0].encode("latin-1")


def _nothing(args: tuple[Any, ...]) -> Any:
    """A layout or device: not needed."""
    return None


def _called(name: str) -> Callable[[tuple[Any, ...]], Record]:
    return lambda args: Record(name, args)


#: Functions and classes that make plain values, to what makes them of the arguments.
CALLS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": lambda args: _from_type(args),
    "torch.Size": _sequence,
    "torch.device": _nothing,
    "torch.serialization._get_layout": _nothing,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda args: {},
    "_codecs.encode": _encode,
    **{f"{m}.{n}": _sequence for m in ("builtins", "__builtin__") for n in ("set", "frozenset")},
}


def _from_type(args: tuple[Any, ...]) -> Any:
    """A tensor with attributes: (function, type, arguments, state)."""
    if len(args) != 4 or not isinstance(args[0], Name) or not isinstance(args[2], tuple):
        raise BadPickle("a tensor of a type of its own")
    call = CALLS.get(args[0].text)
    if call not in (_rebuild_v2, _rebuild_v3, _parameter) or args[1] not in (
        Name("torch.Tensor"),
        Name("torch.nn.parameter.Parameter"),
    ):
        raise BadPickle(f"a tensor made by {shown(args[0])} of type {shown(args[1])}")
    assert call is not None
    return call(args[2])


_DCP = "torch.distributed.checkpoint."
#: Classes whose objects become records of plain values.
RECORDS = {
    *(
        f"{_DCP}metadata.{name}"
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
            *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    *(f"{_DCP}filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *(f"deepspeed.runtime.fp16.loss_scaler.{s}" for s in ("LossScaler", "DynamicLossScaler")),
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    # Of random states, which are left out.
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    "pathlib.PosixPath",
    "argparse.Namespace",
    "datetime.timedelta",
}
#: Names that are only values.
_VALUES = {
    *(f"torch.{name}" for name in (*_STORAGES, *DTYPES)),
    *("torch.storage.UntypedStorage", "torch.storage.TypedStorage"),
    *("torch.Tensor", "torch.nn.parameter.Parameter"),
}


def find(module: str, name: str) -> Name:
    """The name, if it is in one of the tables; BadPickle if not."""
    text = f"{module}.{name}"
    if text in CALLS or text in RECORDS or text in _VALUES:
        return Name(text)
    raise BadPickle(
        f"names {shown(text)}, which is not on the list of what a checkpoint may hold: "
        "refused, and not run"
    )


def key_of(value: Any, depth: int = 0) -> Any:
    """A key of a dict: of few types, so that comparing keys is cheap and cannot recurse."""
    if type(value) in (str, bytes, bool, float) or value is None or isinstance(value, Record):
        return value
    if type(value) is int and abs(value) < 2**60:
        return value
    if isinstance(value, Name):
        return value.text
    if type(value) is tuple and depth < _KEY_DEPTH_MAX and len(value) <= 64:
        return tuple(key_of(part, depth + 1) for part in value)
    raise BadPickle(f"a dict with {shown(value)} as key")


def storage_of(given: Any, numel_of: Callable[[str], int]) -> Storage:
    """The storage that a persistent id of ``torch.save`` names.

    Parameters
    ----------
    given : Any
        ("storage", type, key, device, elements).
    numel_of : callable
        Bytes of the member of that key; raises what there is to raise.
    """
    if type(given) is not tuple or len(given) != 5 or given[0] != "storage":
        raise BadPickle(f"refers to {shown(given)}, which is no storage")
    _, kind, key, _, numel = given
    text = kind.text.rpartition(".")[2] if isinstance(kind, Name) else ""
    if text not in _STORAGES:
        raise BadPickle(f"a storage of type {shown(kind)}")
    if type(key) is not str or not 0 < len(key) < 64 or not key.replace("_", "").isalnum():
        raise BadPickle(f"a storage with key {shown(key)}")
    if type(numel) is not int or not 0 <= numel < 2**62:
        raise BadPickle(f"a storage of {shown(numel)} elements")
    dtype = _STORAGES[text]
    nbytes = numel_of(key)
    if numel * DTYPES[dtype] != nbytes:
        raise BadPickle(f"storage {key} claims {numel} elements of {dtype}; it has {nbytes} bytes")
    return Storage(key, dtype, numel)
