"""Folders that hold weights: our checkpoints with their index, and Hugging Face ones.

Everything that an index says is checked here, before anything else looks at it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _core
from .errors import CheckpointError

__all__ = [
    "BLOCK_NBYTES",
    "FLOATS",
    "FORMAT",
    "Catalog",
    "Index",
    "Saved",
    "catalog_of",
    "committed",
    "first_of",
    "foreign_catalog",
    "is_plain",
    "parse_index",
    "parse_json",
    "read_index",
    "readable",
    "steps",
    "weight_map",
    "write_index",
]

#: The format that this version writes, and the newest that it reads.
FORMAT = 1
#: Dtypes of weights and moments, and how safetensors spells them.
FLOATS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
#: Bytes of the file that one checksum covers.
BLOCK_NBYTES = 1 << 20
INDEX = "index.json"

_STEP_FOLDER = re.compile(r"step-\d{6,}(-\d+)?")
_SEAL = re.compile(rb',\n "crc32c": "([0-9a-f]{8})"\n}\n\Z')
_HEX = re.compile(r"([0-9a-f]{8})*")
_DIMS_MAX = 8


@dataclass(frozen=True)
class Saved:
    """A parameter as an index describes it."""

    name: str
    tied_name: str | None
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: str | None

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Index:
    """What index.json of a committed checkpoint says, checked."""

    folder: str
    serial: int
    step: int
    world_size: int
    parameters: tuple[Saved, ...]
    files: tuple[tuple[str, int, bytes], ...]
    moments_dtype: str | None
    param_dtype: str
    #: config.json of the model, where the target that was saved has one.
    model: dict[str, Any] | None
    optimizer: dict[str, Any] | None
    users: tuple[Any, ...]
    raw: dict[str, Any]

    def user(self, rank: int, world_size: int) -> Any:
        """The user data of a rank of a job of ``world_size``."""
        if len(self.users) == 1:
            return self.users[0]
        if world_size != self.world_size:
            raise CheckpointError(
                f"{self.folder}: each of its {self.world_size} ranks saved user data of its own, "
                f"which {world_size} ranks cannot share out; load with weights_only=True"
            )
        return self.users[rank]


@dataclass(frozen=True)
class Catalog:
    """A folder's files, as the core takes them."""

    folder: str
    files: tuple[tuple[str, int, bytes | None], ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...] | None
    #: Files named by the index of a Hugging Face folder: tensor to file.
    weight_map: Mapping[str, str] | None = None

    @property
    def core(self) -> tuple[Any, ...]:
        """The tuple that the core takes."""
        return (self.folder, self.files, self.shapes)

    def pieces(self) -> list[tuple[str, str, str, int, int, tuple[int, ...], int]]:
        """(name, state, dtype, begin, end, shape of the parameter, index of the file), sorted."""
        found: list[tuple[str, str, str, int, int, tuple[int, ...], int]]
        found = _core.catalog_pieces(self.core)
        return found


# -- JSON from strangers ---------------------------------------------------------------------------


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key comes twice")
    return made


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def parse_json(where: str, text: bytes) -> Any:
    """Strict JSON: no duplicate keys, no NaN; CheckpointError names ``where``."""
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constants,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON: {error}") from None


class _Reader:
    """Takes values of known type out of a mapping, or says what is wrong."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise CheckpointError(f"{where}: an object was expected")
        self.where = where
        self.values = values

    def take(self, key: str, *types: type) -> Any:
        """The value of ``key``, of one of these types exactly (a bool is no int)."""
        value = self.values.get(key)
        if type(value) not in types:
            raise CheckpointError(
                f"{self.where}: {key}: {' or '.join(t.__name__ for t in types)} was expected, got "
                f"{type(value).__name__}"
            )
        return value

    def size(self, key: str) -> int:
        """A whole number from 0 that fits 63 bits."""
        value = self.take(key, int)
        if not 0 <= value < 2**63:
            raise CheckpointError(f"{self.where}: {key}: {value} is no size")
        return int(value)


# -- our index -------------------------------------------------------------------------------------


def write_index(values: Mapping[str, Any]) -> bytes:
    """The text of an index, sealed with its own checksum."""
    text = json.dumps(values, indent=1, allow_nan=False, ensure_ascii=True).encode()
    body = text[: -len(b"\n}")]
    return body + f',\n "crc32c": "{_core.crc32c(body):08x}"\n}}\n'.encode()


def is_plain(name: str) -> bool:
    """Whether a name from an index is that of a file in its folder, and nothing else."""
    return (
        0 < len(name.encode("utf-8", "surrogatepass")) <= 255
        and not name.startswith(".")
        and not any(c in "/\\" or ord(c) < 0x20 or ord(c) == 0x7F for c in name)
    )


def _parameter(where: str, values: Any) -> Saved:
    read = _Reader(where, values)
    shape = read.take("shape", list)
    name = read.take("name", str)
    if len(shape) > _DIMS_MAX or any(type(n) is not int or n < 0 for n in shape):
        raise CheckpointError(f"{where}: {name}: shape {shape!r:.100}")
    if math.prod(shape) >= 2**60:
        raise CheckpointError(f"{where}: {name}: shape {shape!r:.100} has too many elements")
    return Saved(
        name=name,
        tied_name=read.take("tied_name", str, type(None)),
        shape=tuple(shape),
        dtype=read.take("dtype", str),
        trainable=read.take("trainable", bool),
        group=read.take("group", str, type(None)),
    )


def _file(where: str, values: Any) -> tuple[str, int, bytes]:
    read = _Reader(where, values)
    name, nbytes, crcs = read.take("name", str), read.size("nbytes"), read.take("crc32c", str)
    if not is_plain(name):
        raise CheckpointError(f"{where}: {name!r:.100} is not a plain file name")
    if _HEX.fullmatch(crcs) is None or len(crcs) // 8 != -(-nbytes // BLOCK_NBYTES):
        raise CheckpointError(f"{where}: {name}: its checksums do not cover {nbytes} bytes")
    return name, nbytes, bytes.fromhex(crcs)


def parse_index(folder: str, text: bytes) -> Index:
    """Check and take apart the text of ``folder``'s index.

    Raises
    ------
    CheckpointError
        Damaged, not an index of ours, or of a newer format (which is named).
    """
    where = os.path.join(folder, INDEX)
    seal = _SEAL.search(text)
    if seal is None:
        raise CheckpointError(f"{where}: cut short or damaged: it does not end with its checksum")
    if int(seal.group(1), 16) != _core.crc32c(text[: seal.start()]):
        raise CheckpointError(f"{where}: damaged: its checksum does not match")
    read = _Reader(where, parse_json(where, text))
    form = read.take("format", int)
    if form > FORMAT:
        raise CheckpointError(
            f"{where}: format {form} is newer than this version reads (format {FORMAT}): upgrade "
            "flatshard to load it"
        )
    if form < 1:
        raise CheckpointError(f"{where}: format {form} does not exist")
    parameters = tuple(_parameter(where, value) for value in read.take("parameters", list))
    files = tuple(_file(where, value) for value in read.take("files", list))
    names = [n for p in parameters for n in (p.name, p.tied_name) if n is not None]
    if len(set(names)) != len(names) or len({name for name, _, _ in files}) != len(files):
        raise CheckpointError(f"{where}: a name comes twice")
    world_size, users = read.size("world_size"), read.take("user", list)
    if len(files) != world_size or len(users) not in (1, world_size):
        raise CheckpointError(
            f"{where}: {len(files)} files and {len(users)} user entries of {world_size} ranks"
        )
    return Index(
        folder=folder,
        serial=read.size("serial"),
        step=read.size("step"),
        world_size=world_size,
        parameters=parameters,
        files=files,
        moments_dtype=read.take("moments_dtype", str, type(None)),
        param_dtype=read.take("param_dtype", str),
        model=read.take("model", dict, type(None)),
        optimizer=read.take("optimizer", dict, type(None)),
        users=tuple(users),
        raw=read.values,
    )


def read_index(folder: str) -> Index:
    """Read and check the index of a committed checkpoint."""
    path = os.path.join(folder, INDEX)
    with open(path, "rb") as file:
        return parse_index(folder, file.read())


def catalog_of(index: Index) -> Catalog:
    """The catalog of a checkpoint of ours."""
    return Catalog(index.folder, index.files, tuple((p.name, p.shape) for p in index.parameters))


def committed(directory: str) -> list[str]:
    """Folders of committed checkpoints under ``directory``, in no order; itself, if it is one.

    A folder without an index was never committed and is not listed.
    """
    if os.path.isfile(os.path.join(directory, INDEX)):
        return [directory]
    if not os.path.isdir(directory):
        return []
    return [
        os.path.join(directory, name)
        for name in sorted(os.listdir(directory))
        if _STEP_FOLDER.fullmatch(name) and os.path.isfile(os.path.join(directory, name, INDEX))
    ]


def readable(parent: str) -> list[Index]:
    """Indexes of the committed checkpoints whose index is whole, newest first."""
    found = []
    for folder in committed(parent):
        with contextlib.suppress(CheckpointError, OSError):
            found.append(read_index(folder))
    return sorted(found, key=lambda index: -index.serial)


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Steps of the committed checkpoints under ``directory`` whose index is whole, newest first.

    Parameters
    ----------
    directory : path
        A run's folder.
    """
    return [index.step for index in readable(os.path.abspath(os.fspath(directory)))]


# -- Hugging Face folders --------------------------------------------------------------------------


def weight_map(
    path: str, *, suffix: str = ".safetensors", size_max: int = 100_000_000
) -> dict[str, str]:
    """From tensor to file, as the index of a sharded Hugging Face folder says.

    Raises
    ------
    CheckpointError
        Not such an index, or a name in it is not that of a ``suffix`` file inside the folder.
    """
    if os.path.getsize(path) > size_max:
        raise CheckpointError(f"{path}: over {size_max} bytes, not an index of weights")
    with open(path, "rb") as file:
        found = _Reader(path, parse_json(path, file.read())).take("weight_map", dict)
    for name, target in found.items():
        if type(target) is not str or not target.endswith(suffix) or not is_plain(target):
            raise CheckpointError(f"{path}: {name!r:.100} is said to be in {target!r:.100}")
    return {str(name): str(target) for name, target in found.items()}


def foreign_catalog(directory: str) -> Catalog:
    """The catalog of a folder with Hugging Face safetensors, single or sharded, or of one file.

    Raises
    ------
    CheckpointError
        Nothing of the kind is there, or files that the index names are missing (they are listed,
        with the tensors that would be).
    """
    if os.path.isfile(directory):
        # Named by the caller: a link that it is leads where they want.
        folder, name = os.path.split(os.path.realpath(directory))
        return Catalog(folder or ".", ((name, -1, None),), None)
    single = os.path.join(directory, "model.safetensors")
    if os.path.isfile(single):
        return Catalog(directory, (("model.safetensors", -1, None),), None)
    index = single + ".index.json"
    if not os.path.isfile(index):
        raise CheckpointError(
            f"{directory}: holds no weights: neither step-NNNNNN folders, nor model.safetensors, "
            "nor model.safetensors.index.json"
        )
    places = weight_map(index)
    names = sorted(set(places.values()))
    missing = [name for name in names if not os.path.isfile(os.path.join(directory, name))]
    if missing:
        lost = sorted(name for name, target in places.items() if target in missing)
        raise CheckpointError(
            f"{directory}: {', '.join(missing)} is missing, and with it {first_of(lost)}"
        )
    return Catalog(directory, tuple((name, -1, None) for name in names), None, places)


def first_of(items: Sequence[str], shown: int = 5) -> str:
    """The first few of a list, and how many more there are."""
    text = ", ".join(items[:shown])
    return f"{text} and {len(items) - shown} more" if len(items) > shown else text
