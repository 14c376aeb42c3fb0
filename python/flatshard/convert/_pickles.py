"""Pickles of strangers, read without running anything.

Python's own unpickler calls what a pickle names, and takes the memory that it claims. This one is
an interpreter of the opcodes that ``torch.save`` and DCP write. It imports and calls nothing: a
class or function that a pickle names is looked up in a table, where it stands for building a
list, a :class:`Tensor`, or a :class:`Record` of plain values; every other name is refused. Lengths
are compared with the bytes that are there before anything is made of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError

__all__ = ["DTYPES", "Name", "Record", "Storage", "Tensor", "load", "shown"]

#: Longest pickle: a few million tensors. The values take some tens of times its length.
NBYTES_MAX = 1 << 28
OBJECTS_MAX = 40_000_000
#: Whole numbers beyond this are no size of anything.
_INT_NBYTES_MAX = 16
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


class _Bad(Exception):
    """What is wrong, without the place."""


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
        raise _Bad(f"a tensor whose {what} is {shown(value)}")
    for n in value:
        if type(n) is not int or not 0 <= n < 2**62:
            raise _Bad(f"a tensor with {shown(n)} in its {what}")
    return tuple(value)


def _tensor(storage: Any, dtype: str, offset: Any, size: Any, stride: Any) -> Tensor:
    if not isinstance(storage, Storage):
        raise _Bad(f"a tensor whose storage is {shown(storage)}")
    shape, strides = _sizes(size, "shape"), _sizes(stride, "stride")
    if type(offset) is not int or not 0 <= offset < 2**62:
        raise _Bad(f"a tensor whose offset is {shown(offset)}")
    if len(shape) != len(strides):
        raise _Bad(f"a tensor of {len(shape)} dimensions with {len(strides)} strides")
    itemsize = DTYPES[dtype]
    room = storage.numel * DTYPES[storage.dtype] // itemsize
    numel = math.prod(shape)
    if numel > 0:
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if last >= room or numel > room:
            raise _Bad(
                f"a tensor of shape {list(shape)}, stride {list(strides)} and offset {offset}, "
                f"which reaches beyond the {room} elements of storage {shown(storage.key)}"
            )
    return Tensor(storage, dtype, shape, offset, strides)


def _rebuild_v2(args: tuple[Any, ...]) -> Tensor:
    if len(args) not in (4, 6, 7):
        raise _Bad(f"a tensor of {len(args)} arguments")
    dtype = args[0].dtype if isinstance(args[0], Storage) else ""
    return _tensor(args[0], dtype, args[1], args[2], args[3])


def _rebuild_v3(args: tuple[Any, ...]) -> Tensor:
    if len(args) not in (7, 8):
        raise _Bad(f"a tensor of {len(args)} arguments")
    return _tensor(args[0], _dtype(args[6]), args[1], args[2], args[3])


def _dtype(value: Any) -> str:
    text = value.text.removeprefix("torch.") if isinstance(value, Name) else ""
    if text not in DTYPES:
        raise _Bad(f"a tensor of dtype {shown(value)}")
    return text


def _parameter(args: tuple[Any, ...]) -> Tensor:
    if not args or not isinstance(args[0], Tensor):
        raise _Bad("a parameter without a tensor")
    return args[0]


def _ordered(args: tuple[Any, ...]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    if len(args) > 1 or (args and not isinstance(args[0], (list, tuple, dict))):
        raise _Bad("an OrderedDict of something else")
    pairs = args[0].items() if args and isinstance(args[0], dict) else args[0] if args else ()
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise _Bad("an OrderedDict of something else than pairs")
        found[_key(pair[0])] = pair[1]
    return found


def _sequence(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(args) > 1 or (args and not isinstance(args[0], (list, tuple))):
        raise _Bad("a sequence of something else")
    return tuple(args[0]) if args else ()


def _encode(args: tuple[Any, ...]) -> bytes:
    """Bytes as protocol 2 writes them."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        raise _Bad("_codecs.encode of something else than bytes")
    return args[0].encode("latin-1")


def _nothing(args: tuple[Any, ...]) -> Any:
    """A layout or device: not needed."""
    return None


def _called(name: str) -> Callable[[tuple[Any, ...]], Record]:
    return lambda args: Record(name, args)


_CALLS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
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
        raise _Bad("a tensor of a type of its own")
    call = _CALLS.get(args[0].text)
    if call not in (_rebuild_v2, _rebuild_v3, _parameter) or args[1] not in (
        Name("torch.Tensor"),
        Name("torch.nn.parameter.Parameter"),
    ):
        raise _Bad(f"a tensor made by {shown(args[0])} of type {shown(args[1])}")
    assert call is not None
    return call(args[2])


_DCP = "torch.distributed.checkpoint."
#: Classes whose objects become records of plain values.
_RECORDS = {
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


def _find(module: str, name: str) -> Name:
    text = f"{module}.{name}"
    if text in _CALLS or text in _RECORDS or text in _VALUES:
        return Name(text)
    raise _Bad(
        f"names {shown(text)}, which is not on the list of what a checkpoint may hold: "
        "refused, and not run"
    )


def _key(value: Any, depth: int = 0) -> Any:
    """A key of a dict: of few types, so that comparing keys is cheap and cannot recurse."""
    if type(value) in (str, bytes, bool, float) or value is None or isinstance(value, Record):
        return value
    if type(value) is int and abs(value) < 2**60:
        return value
    if isinstance(value, Name):
        return value.text
    if type(value) is tuple and depth < _KEY_DEPTH_MAX and len(value) <= 64:
        return tuple(_key(part, depth + 1) for part in value)
    raise _Bad(f"a dict with {shown(value)} as key")


# -- the machine -----------------------------------------------------------------------------------

_MARK = object()


class _Machine:
    def __init__(self, data: bytes, persistent: Callable[[Any], Any] | None) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.persistent = persistent
        #: Elements that calls may still copy: each is in the pickle, and is copied once.
        self.copies = 2 * len(data) + 1024

    # Bytes.

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise _Bad(f"claims {n} bytes where {len(self.data) - self.at} are left")
        found = self.data[self.at : self.at + n]
        self.at += n
        return found

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 1024)
        if end < 0:
            raise _Bad("a name without an end")
        found = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return found

    # The stack.

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise _Bad("takes more values than there are")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise _Bad("takes more values than there are")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        at = len(self.stack) - 1
        while at >= 0 and self.stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise _Bad("takes values back to a mark that is not there")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def push(self, value: Any) -> None:
        self.stack.append(value)

    # Opcodes of some length.

    def integer(self, nbytes: int) -> None:
        if nbytes > _INT_NBYTES_MAX:
            raise _Bad(f"a whole number of {nbytes} bytes")
        self.push(int.from_bytes(self.take(nbytes), "little", signed=True))

    def text(self, nbytes: int) -> None:
        self.push(self.take(nbytes).decode("utf-8"))

    def remember(self, index: int) -> None:
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise _Bad(f"recalls value {index}, which was never kept")
        self.push(self.memo[index])

    def extend(self, values: list[Any]) -> None:
        into = self.top()
        if type(into) is not list:
            raise _Bad(f"appends to {shown(into)}")
        into.extend(values)

    def items(self, values: list[Any]) -> None:
        into = self.top()
        if type(into) is not dict or len(values) % 2 != 0:
            raise _Bad(f"sets {len(values)} keys and values of {shown(into)}")
        for i in range(0, len(values), 2):
            into[_key(values[i])] = values[i + 1]

    def call(self, args: Any) -> None:
        name = self.pop()
        if not isinstance(name, Name) or type(args) is not tuple:
            raise _Bad(f"calls {shown(name)}")
        if args and isinstance(args[0], (list, tuple, dict, str)):
            self.copies -= len(args[0])
            if self.copies < 0:
                raise _Bad("makes the same values again and again")
        if name.text in _RECORDS:
            self.push(Record(name.text, args))
        elif name.text in _CALLS:
            self.push(_CALLS[name.text](args))
        else:
            raise _Bad(f"calls {name.text}")

    def build(self) -> None:
        state = self.pop()
        value = self.top()
        if isinstance(value, (dict, Tensor)):
            return  # attributes beside the items: a module's _metadata
        if not isinstance(value, Record):
            raise _Bad(f"sets the state of {shown(value)}")
        if type(state) is tuple and len(state) == 2 and state[0] is None:
            state = state[1]  # (__dict__, __slots__)
        if type(state) is dict and all(type(key) is str for key in state):
            value.fields = state
        else:
            value.fields = {"state": state}

    def persist(self) -> None:
        given = self.pop()
        if self.persistent is None:
            raise _Bad("refers to a storage, and there is none")
        self.push(self.persistent(given))

    def frame(self, nbytes: int) -> None:
        if nbytes > len(self.data) - self.at:
            raise _Bad(f"a frame of {nbytes} bytes where {len(self.data) - self.at} are left")

    def protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            raise _Bad(f"pickle protocol {version}; 2 to 5 are read")

    def stack_name(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise _Bad("a name that is no text")
        self.push(_find(module, name))

    def tuple_of(self, n: int) -> None:
        values = [self.pop() for _ in range(n)]
        self.push(tuple(reversed(values)))

    def keyword_object(self) -> None:
        keywords, args = self.pop(), self.pop()
        if type(keywords) is not dict or keywords:
            raise _Bad("an object made with keywords")
        self.call(args)

    def set_items(self, values: list[Any]) -> None:
        # A set is a list here: nothing hashes what comes from a stranger without need.
        self.extend(values)

    def drop(self) -> None:
        if not self.stack:
            raise _Bad("takes more values than there are")
        self.stack.pop()


_STOP = ord(".")
_OPCODES: dict[int, Callable[[_Machine], Any]] = {
    ord("("): lambda m: m.stack.append(_MARK),
    ord("0"): _Machine.drop,
    ord("1"): lambda m: m.marked(),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.integer(4),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    0x8A: lambda m: m.integer(m.number(1)),
    0x8B: lambda m: m.integer(m.number(4)),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("X"): lambda m: m.text(m.number(4)),
    0x8C: lambda m: m.text(m.number(1)),
    0x8D: lambda m: m.text(m.number(8)),
    ord("B"): lambda m: m.push(m.take(m.number(4))),
    ord("C"): lambda m: m.push(m.take(m.number(1))),
    0x8E: lambda m: m.push(m.take(m.number(8))),
    0x96: lambda m: m.push(m.take(m.number(8))),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: m.extend([m.pop()]),
    ord("e"): lambda m: m.extend(m.marked()),
    ord(")"): lambda m: m.push(()),
    ord("t"): lambda m: m.push(tuple(m.marked())),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("}"): lambda m: m.push({}),
    ord("s"): lambda m: m.items([*reversed((m.pop(), m.pop()))]),
    ord("u"): lambda m: m.items(m.marked()),
    0x8F: lambda m: m.push([]),
    0x90: lambda m: m.set_items(m.marked()),
    0x91: lambda m: m.push(tuple(m.marked())),
    ord("q"): lambda m: m.remember(m.number(1)),
    ord("r"): lambda m: m.remember(m.number(4)),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("h"): lambda m: m.recall(m.number(1)),
    ord("j"): lambda m: m.recall(m.number(4)),
    ord("c"): lambda m: m.push(_find(m.line(), m.line())),
    0x93: _Machine.stack_name,
    ord("R"): lambda m: m.call(m.pop()),
    0x81: lambda m: m.call(m.pop()),
    0x92: _Machine.keyword_object,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persist,
    0x80: lambda m: m.protocol(m.number(1)),
    0x95: lambda m: m.frame(m.number(8)),
}


def load(where: str, data: bytes, *, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value that a pickle holds.

    Parameters
    ----------
    where : str
        The file, for messages.
    data : bytes
        The pickle.
    persistent : callable, optional
        Makes a :class:`Storage` of what the pickle gives as a storage's id.

    Returns
    -------
    Any
        None, bool, int, float, str, bytes, list, tuple, dict, :class:`Tensor`, :class:`Record`,
        :class:`Name`. It may refer to itself: look at what is expected, never walk through all.

    Raises
    ------
    CheckpointError
        Damaged; a class or function that is not on the list (which is named); a tensor that
        reaches beyond its storage; more than can be read here.
    """
    if len(data) > NBYTES_MAX:
        raise CheckpointError(f"{where}: a pickle of {len(data)} bytes; {NBYTES_MAX} are read")
    if data[:1] != b"\x80":
        raise CheckpointError(f"{where}: not a pickle of protocol 2 or newer")
    machine = _Machine(data, persistent)
    at = 0
    try:
        for _ in range(OBJECTS_MAX):
            at = machine.at
            if at == len(data):
                raise _Bad("ends without its end mark")
            code = data[at]
            machine.at = at + 1
            if code == _STOP:
                value = machine.pop()
                if machine.stack:
                    raise _Bad("ends with values left over")
                if machine.at != len(data):
                    raise _Bad("goes on behind its end")
                return value
            operation = _OPCODES.get(code)
            if operation is None:
                raise _Bad(f"opcode 0x{code:02x}, which neither torch.save nor DCP write")
            operation(machine)
    except _Bad as error:
        raise CheckpointError(f"{where}: pickle, byte {at}: {error}") from None
    except UnicodeError:
        raise CheckpointError(f"{where}: pickle, byte {at}: a text that is not UTF-8") from None
    raise CheckpointError(f"{where}: a pickle of more than {OBJECTS_MAX} operations")


def storage(given: Any, numel_of: Callable[[str], int]) -> Storage:
    """The storage that a persistent id of ``torch.save`` names.

    Parameters
    ----------
    given : Any
        ("storage", type, key, device, elements).
    numel_of : callable
        Bytes of the member of that key; raises what there is to raise.
    """
    if type(given) is not tuple or len(given) != 5 or given[0] != "storage":
        raise _Bad(f"refers to {shown(given)}, which is no storage")
    _, kind, key, _, numel = given
    text = kind.text.rpartition(".")[2] if isinstance(kind, Name) else ""
    if text not in _STORAGES:
        raise _Bad(f"a storage of type {shown(kind)}")
    if type(key) is not str or not 0 < len(key) < 64 or not key.replace("_", "").isalnum():
        raise _Bad(f"a storage with key {shown(key)}")
    if type(numel) is not int or not 0 <= numel < 2**62:
        raise _Bad(f"a storage of {shown(numel)} elements")
    dtype = _STORAGES[text]
    nbytes = numel_of(key)
    if numel * DTYPES[dtype] != nbytes:
        raise _Bad(f"storage {key} claims {numel} elements of {dtype}; it has {nbytes} bytes")
    return Storage(key, dtype, numel)
