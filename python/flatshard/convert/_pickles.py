"""Pickles of strangers, read without running anything.

Python's own unpickler calls what a pickle names, and takes the memory that it claims. This one is
an interpreter of the opcodes that ``torch.save`` and DCP write. It imports and calls nothing: what
a name may stand for is in ``_pickle_values``. Lengths are compared with the bytes that are there
before anything is made of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError
from ._pickle_values import CALLS, RECORDS, BadPickle, Name, Record, Tensor, find, key_of, shown

__all__ = ["NBYTES_MAX", "load"]

#: Longest pickle: a few million tensors. The values take some tens of times its length.
NBYTES_MAX = 1 << 28
OBJECTS_MAX = 40_000_000
#: Whole numbers beyond this are no size of anything.
_INT_NBYTES_MAX = 16

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
            raise BadPickle(f"claims {n} bytes where {len(self.data) - self.at} are left")
        found = self.data[self.at : self.at + n]
        self.at += n
        return found

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 1024)
        if end < 0:
            raise BadPickle("a name without an end")
        found = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return found

    # The stack.

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise BadPickle("takes more values than there are")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise BadPickle("takes more values than there are")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        at = len(self.stack) - 1
        while at >= 0 and self.stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise BadPickle("takes values back to a mark that is not there")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def push(self, value: Any) -> None:
        self.stack.append(value)

    # Opcodes of some length.

    def integer(self, nbytes: int) -> None:
        if nbytes > _INT_NBYTES_MAX:
            raise BadPickle(f"a whole number of {nbytes} bytes")
        self.push(int.from_bytes(self.take(nbytes), "little", signed=True))

    def text(self, nbytes: int) -> None:
        self.push(self.take(nbytes).decode("utf-8"))

    def remember(self, index: int) -> None:
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise BadPickle(f"recalls value {index}, which was never kept")
        self.push(self.memo[index])

    def extend(self, values: list[Any]) -> None:
        into = self.top()
        if type(into) is not list:
            raise BadPickle(f"appends to {shown(into)}")
        into.extend(values)

    def items(self, values: list[Any]) -> None:
        into = self.top()
        if type(into) is not dict or len(values) % 2 != 0:
            raise BadPickle(f"sets {len(values)} keys and values of {shown(into)}")
        for i in range(0, len(values), 2):
            into[key_of(values[i])] = values[i + 1]

    def call(self, args: Any) -> None:
        name = self.pop()
        if not isinstance(name, Name) or type(args) is not tuple:
            raise BadPickle(f"calls {shown(name)}")
        if args and isinstance(args[0], (list, tuple, dict, str)):
            self.copies -= len(args[0])
            if self.copies < 0:
                raise BadPickle("makes the same values again and again")
        if name.text in RECORDS:
            self.push(Record(name.text, args))
        elif name.text in CALLS:
            self.push(CALLS[name.text](args))
        else:
            raise BadPickle(f"calls {name.text}")

    def build(self) -> None:
        state = self.pop()
        value = self.top()
        if isinstance(value, (dict, Tensor)):
            return  # attributes beside the items: a module's _metadata
        if not isinstance(value, Record):
            raise BadPickle(f"sets the state of {shown(value)}")
        if type(state) is tuple and len(state) == 2 and state[0] is None:
            state = state[1]  # (__dict__, __slots__)
        if type(state) is dict and all(type(key) is str for key in state):
            value.fields = state
        else:
            value.fields = {"state": state}

    def persist(self) -> None:
        given = self.pop()
        if self.persistent is None:
            raise BadPickle("refers to a storage, and there is none")
        self.push(self.persistent(given))

    def frame(self, nbytes: int) -> None:
        if nbytes > len(self.data) - self.at:
            raise BadPickle(f"a frame of {nbytes} bytes where {len(self.data) - self.at} are left")

    def protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            raise BadPickle(f"pickle protocol {version}; 2 to 5 are read")

    def stack_name(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise BadPickle("a name that is no text")
        self.push(find(module, name))

    def tuple_of(self, n: int) -> None:
        values = [self.pop() for _ in range(n)]
        self.push(tuple(reversed(values)))

    def keyword_object(self) -> None:
        keywords, args = self.pop(), self.pop()
        if type(keywords) is not dict or keywords:
            raise BadPickle("an object made with keywords")
        self.call(args)

    def set_items(self, values: list[Any]) -> None:
        # A set is a list here: nothing hashes what comes from a stranger without need.
        self.extend(values)

    def drop(self) -> None:
        if not self.stack:
            raise BadPickle("takes more values than there are")
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
    ord("c"): lambda m: m.push(find(m.line(), m.line())),
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
                raise BadPickle("ends without its end mark")
            code = data[at]
            machine.at = at + 1
            if code == _STOP:
                value = machine.pop()
                if machine.stack:
                    raise BadPickle("ends with values left over")
                if machine.at != len(data):
                    raise BadPickle("goes on behind its end")
                return value
            operation = _OPCODES.get(code)
            if operation is None:
                raise BadPickle(f"opcode 0x{code:02x}, which neither torch.save nor DCP write")
            operation(machine)
    except BadPickle as error:
        raise CheckpointError(f"{where}: pickle, byte {at}: {error}") from None
    except UnicodeError:
        raise CheckpointError(f"{where}: pickle, byte {at}: a text that is not UTF-8") from None
    raise CheckpointError(f"{where}: a pickle of more than {OBJECTS_MAX} operations")
