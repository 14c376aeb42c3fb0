"""What a foreign folder holds, whoever wrote it, before it becomes a checkpoint of ours."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._folders import FLOATS, first_of
from ..errors import CheckpointError
from ._pickle_values import Record, Tensor, shown
from ._sources import File, Source, numpy_dtype
from ._torch_zip import TorchFile

__all__ = ["FLOATS", "Array", "Folder", "Foreign", "nearest", "unwrapped"]

#: Parts of a name that wrappers put in.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class Array:
    """A whole tensor and where its elements lie."""

    shape: tuple[int, ...]
    source: Source

    @property
    def dtype(self) -> str:
        """Of the stored elements."""
        return self.source.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def scalar(self) -> float:
        """The only element."""
        if self.numel != 1:
            raise CheckpointError(f"a tensor of shape {list(self.shape)} where a number should be")
        (value,) = np.frombuffer(self.source.read(0, 1), numpy_dtype(self.dtype))
        return float(value)


@dataclass
class Foreign:
    """Weights, state and what else a folder says; names as the model has them."""

    kind: str
    weights: dict[str, Array] = field(default_factory=dict)
    #: Whether the weights come in the order of the model.
    ordered: bool = True
    #: Second names: alias to name.
    ties: dict[str, str] = field(default_factory=dict)
    #: Parameters known not to be trained.
    frozen: set[str] = field(default_factory=set)
    #: Names of which only the name is there: a tie may be said of them.
    nameless: set[str] = field(default_factory=set)
    #: State by parameter and key: "exp_avg" and the like.
    state: dict[str, dict[str, Array]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    #: Hyperparameters, as torch.optim spells them, and "params".
    groups: list[dict[str, Any]] = field(default_factory=list)
    step: int | None = None
    #: The dtype that the model computes in, where it is not that of the weights.
    param_dtype: str | None = None
    config: dict[str, Any] | None = None
    scaler: dict[str, float] | None = None
    left_out: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Compare what is read with its checksums, by file and storage.
    checks: dict[tuple[str, str], Callable[[], None]] = field(default_factory=dict)

    def leave(self, what: str, why: str) -> None:
        """Note something that is not taken over."""
        self.left_out.append((what, why))


class Folder:
    """A folder and the files in it that were opened, all closed at the end.

    Parameters
    ----------
    path : str
        The folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._files: dict[str, File] = {}
        self._loaded: dict[str, tuple[TorchFile, Any]] = {}
        self._others: list[Folder] = []

    def names(self) -> list[str]:
        """Names in the folder."""
        return sorted(os.listdir(self.path))

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return os.path.isfile(os.path.join(self.path, name))

    def file(self, name: str) -> File:
        """The file of a plain name."""
        if name not in self._files:
            self._files[name] = File(self.path, name, ours=name == ".metadata")
        return self._files[name]

    def torch(self, name: str) -> tuple[TorchFile, Any]:
        """A file of ``torch.save`` and its content."""
        if name not in self._loaded:
            opened = TorchFile(self.file(name))
            self._loaded[name] = (opened, opened.load())
        return self._loaded[name]

    def other(self, path: str) -> Folder:
        """Another folder, closed with this one."""
        self._others.append(Folder(path))
        return self._others[-1]

    def close(self) -> None:
        """Close every file."""
        for folder in self._others:
            folder.close()
        for file in self._files.values():
            file.close()
        self._files.clear()


@contextlib.contextmanager
def opened(path: str) -> Iterator[Folder]:
    """A folder, closed at the end."""
    folder = Folder(path)
    try:
        yield folder
    finally:
        folder.close()


def array_of(foreign: Foreign, file: TorchFile, tensor: Tensor) -> Array:
    """A tensor of a file, whose checksum will be compared."""
    key = (file.where, tensor.storage.key)
    foreign.checks.setdefault(key, lambda: file.check(tensor))
    return Array(tensor.shape, file.source(tensor))


# -- values of strangers ---------------------------------------------------------------------------


def mapping(where: str, value: Any, what: str) -> dict[Any, Any]:
    """A dict, or an error that says what was expected where."""
    if type(value) is not dict:
        raise CheckpointError(f"{where}: {what} is {shown(value)}, a dict was expected")
    return value


def sequence(where: str, value: Any, what: str) -> list[Any]:
    """A list or tuple, or an error that says what was expected where."""
    if type(value) not in (list, tuple):
        raise CheckpointError(f"{where}: {what} is {shown(value)}, a list was expected")
    return list(value)


def size(where: str, value: Any, what: str) -> int:
    """A whole number from 0, or an error that says what was expected where."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointError(f"{where}: {what} is {shown(value)}, a size was expected")
    return value


def text(where: str, value: Any, what: str) -> str:
    """A text, or an error that says what was expected where."""
    if type(value) is not str:
        raise CheckpointError(f"{where}: {what} is {shown(value)}, a text was expected")
    return value


def names(where: str, value: Any, what: str) -> list[str]:
    """A list of names, or an error that says what was expected where."""
    return [text(where, name, f"an entry of {what}") for name in sequence(where, value, what)]


def shape(where: str, value: Any, what: str) -> tuple[int, ...]:
    """A shape, or an error that says what was expected where."""
    if isinstance(value, Record):
        value = value.args[0] if value.args else None
    found = tuple(size(where, n, f"a size of {what}") for n in sequence(where, value, what))
    if len(found) > 8 or math.prod(found) >= 2**60:
        raise CheckpointError(f"{where}: {what} is {found!s:.200}, no shape that is read here")
    return found


# -- names -----------------------------------------------------------------------------------------


def nearest(name: str, known: Iterable[str]) -> str:
    """``; the nearest is X``, or nothing."""
    found = difflib.get_close_matches(name, list(known)[:20_000], n=1, cutoff=0.5)
    return f"; the nearest is {found[0]}" if found else ""


def unwrapped(where: str, given: Iterable[str]) -> dict[str, str]:
    """Names as the model has them: without what wrappers (DDP, FSDP, compile) put in.

    Returns
    -------
    dict
        From each given name to its plain one; CheckpointError where two become one.
    """
    plain = {
        name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in given
    }
    while plain and all(name.startswith("module.") for name in plain.values()):
        plain = {name: short.removeprefix("module.") for name, short in plain.items()}
    seen: dict[str, str] = {}
    for name, short in plain.items():
        if not short or seen.setdefault(short, name) != name:
            raise CheckpointError(f"{where}: {name} and {seen.get(short)} are both {short!r}")
    return plain


def renamed(foreign: Foreign, where: str) -> None:
    """Give every name its plain form, in weights and state alike."""
    plain = unwrapped(where, [*foreign.weights, *foreign.ties])
    state = {*foreign.state, *(name for group in foreign.groups for name in group["params"])}
    short = unwrapped(where, state)
    if all(name in plain for name in state):
        short = plain  # the same wrappers: "module." may be part of some names only

    def of(table: Mapping[str, str], name: str) -> str:
        return table.get(name, plain.get(name, name))

    foreign.weights = {plain[name]: array for name, array in foreign.weights.items()}
    foreign.ties = {plain[alias]: of(plain, name) for alias, name in foreign.ties.items()}
    foreign.frozen = {of(plain, name) for name in foreign.frozen}
    foreign.nameless = {*foreign.nameless, *(of(short, name) for name in foreign.nameless)}
    foreign.state = {of(short, name): value for name, value in foreign.state.items()}
    foreign.steps = {of(short, name): value for name, value in foreign.steps.items()}
    for group in foreign.groups:
        group["params"] = [of(short, name) for name in group["params"]]
    known = {*foreign.weights, *foreign.ties}
    lost = [name for name in {**foreign.state, **foreign.steps} if name not in known]
    lost += [n for group in foreign.groups for n in group["params"] if n not in known]
    if lost:
        hint = nearest(lost[0], known)
        raise CheckpointError(
            f"{where}: optimizer state of {first_of(sorted(set(lost)))}, which the weights lack"
            f"{hint}"
        )
