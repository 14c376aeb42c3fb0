"""Whole weights: out to Hugging Face folders, and in from them or from checkpoints."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _core
from ._folders import (
    FLOATS,
    Catalog,
    Index,
    catalog_of,
    committed,
    first_of,
    foreign_catalog,
    read_index,
)
from ._together import on_first
from .errors import CheckpointError

if TYPE_CHECKING:
    from .shard import Parameter, Shards
    from .world import World

__all__ = ["WeightsRead", "check_weights", "export", "read_weights"]

_FLOATS = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_SHORT = {short: name for name, short in FLOATS.items()}

#: (name in the file, dtype, shape, where it comes from)
_Tensor = tuple[str, str, tuple[int, ...], Any]


# -- in --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightsRead:
    """What :func:`read_weights` found.

    Parameters
    ----------
    missing : tuple of str
        Parameters that the folder lacks; left as they were.
    unexpected : tuple of str
        Tensors that the target lacks; not read.
    dtypes : tuple of str
        Dtypes of the tensors that were read.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    dtypes: tuple[str, ...]


def read_weights(
    shards: Shards,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    ignore: Iterable[str] = ("*.rotary_emb.inv_freq",),
) -> WeightsRead:
    """Read weights alone, from a Hugging Face folder or a checkpoint, into shards. Collective.

    Parameters
    ----------
    shards : Shards
        What to fill: masters and compute copies, by name.
    directory : path
        A folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and its files;
        a single safetensors file; a run's folder or one checkpoint (the newest good index counts).
    strict : bool
        Parameters that the folder lacks, or tensors that the shards lack, are an error.
    rename : callable, optional
        From a parameter's name to the tensor's name in the folder, where they differ.
    ignore : iterable of str
        Shell patterns of tensors that may be there and are not read.

    Returns
    -------
    WeightsRead
        What was missing and unexpected, and the dtypes read.

    Raises
    ------
    CheckpointError
        Nothing there; a file is missing, cut short or damaged; shapes differ or names are missing
        (found before anything is written).

    Notes
    -----
    Any floating dtype is taken: widening is exact, a narrower compute dtype is the rounded value. A
    parameter with two names is found under either; where both are there the first counts. Each rank
    reads only its own ranges.
    """
    path = os.path.abspath(os.fspath(directory))
    to_name = rename or (lambda name: name)
    plan = on_first(
        shards.world, lambda: _plan_read(shards.parameters, path, strict, to_name, tuple(ignore))
    )
    catalog = _catalog_from(plan["catalog"])
    skip = bytes(plan["skip"]) if any(plan["skip"]) else None
    _core.catalog_read(shards._core, catalog.core, tuple(plan["names"]), skip, 0)
    return WeightsRead(tuple(plan["missing"]), tuple(plan["unexpected"]), tuple(plan["dtypes"]))


def check_weights(
    world: World,
    parameters: Sequence[Parameter],
    directory: str | os.PathLike[str],
    *,
    ignore: Iterable[str] = ("*.rotary_emb.inv_freq",),
) -> None:
    """Look whether :func:`read_weights` will find these parameters, before there are shards.
    Collective.

    Parameters
    ----------
    world : World
        The ranks; the first one looks.
    parameters : sequence of Parameter
        What must be there, with these shapes.
    directory, ignore
        As for :func:`read_weights`.

    Raises
    ------
    CheckpointError
        As :func:`read_weights` with ``strict``.
    """
    path = os.path.abspath(os.fspath(directory))
    on_first(
        world,
        lambda: _plan_read(parameters, path, True, lambda name: name, tuple(ignore))["missing"],
    )


def _open_folder(path: str) -> tuple[Catalog, Index | None]:
    """A folder's catalog, and its index where it is one of ours."""
    folders = committed(path) if os.path.isdir(path) else []
    if not folders:
        return foreign_catalog(path), None
    indexes, reasons = [], []
    for folder in folders:
        try:
            indexes.append(read_index(folder))
        except (CheckpointError, OSError) as error:
            reasons.append(str(error))
    if not indexes:
        raise CheckpointError("; ".join(reasons))
    index = max(indexes, key=lambda found: found.serial)
    return catalog_of(index), index


def _catalog_to(catalog: Catalog) -> dict[str, Any]:
    return {
        "folder": catalog.folder,
        "files": [[name, n, None if crc is None else crc.hex()] for name, n, crc in catalog.files],
        "shapes": catalog.shapes,
    }


def _catalog_from(told: dict[str, Any]) -> Catalog:
    shapes = told["shapes"]
    return Catalog(
        told["folder"],
        tuple(
            (name, n, None if crc is None else bytes.fromhex(crc)) for name, n, crc in told["files"]
        ),
        None if shapes is None else tuple((name, tuple(shape)) for name, shape in shapes),
    )


def _whole_tensors(catalog: Catalog) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name to shape and dtype of every weight; files and index must agree on where they are."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, state, dtype, _, _, shape, file in catalog.pieces():
        if state != "weight":
            continue
        found[name] = (shape, dtype)
        target = None if catalog.weight_map is None else catalog.weight_map.get(name)
        if target is not None and target != catalog.files[file][0]:
            raise CheckpointError(
                f"{catalog.folder}: {name} is in {catalog.files[file][0]}, its index says {target}"
            )
    lost = sorted(set(catalog.weight_map or ()) - set(found))
    if lost:
        raise CheckpointError(f"{catalog.folder}: its index lists {first_of(lost)}, no file has it")
    return found


def _plan_read(
    parameters: Sequence[Parameter],
    path: str,
    strict: bool,
    rename: Callable[[str], str],
    ignore: Sequence[str],
) -> dict[str, Any]:
    catalog, _ = _open_folder(path)
    there = _whole_tensors(catalog)
    names, skip, missing, shapes, dtypes = [], [], [], [], set()
    known: set[str] = set()
    for p in parameters:
        aliases = [rename(name) for name in p.names]
        known.update(aliases)
        name = next((alias for alias in aliases if alias in there), None)
        names.append(name or aliases[0])
        skip.append(name is None)
        if name is None:
            missing.append(p.name)
            continue
        shape, dtype = there[name]
        dtypes.add(dtype)
        if tuple(shape) != p.shape:
            shapes.append(f"{name} is {list(shape)} there and {list(p.shape)} here")
        elif dtype not in _SHORT:
            shapes.append(f"{name} is {dtype} there, not a floating-point type")
    unexpected = [
        name
        for name in there
        if name not in known and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
    ]
    lines = []
    if shapes:
        lines.append(first_of(shapes))
    if strict and missing:
        lines.append(f"it lacks {first_of(missing)}")
    if strict and unexpected:
        lines.append(f"it has besides {first_of(unexpected)}")
    if lines:
        raise CheckpointError(f"{catalog.folder}: weights of another model: {'; '.join(lines)}")
    return {
        "catalog": _catalog_to(catalog),
        "names": names,
        "skip": [int(flag) for flag in skip],
        "missing": missing,
        "unexpected": unexpected,
        "dtypes": sorted(dtypes),
    }


# -- out -------------------------------------------------------------------------------------------


def export(
    source: Any,
    directory: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    file_nbytes: int = 5_000_000_000,
) -> None:
    """Write whole weights as Hugging Face safetensors.

    Parameters
    ----------
    source : path, Shards, or anything with ``.shards``
        A checkpoint or run's folder (local, no world needed), or a live model (collective; rank 0
        writes).
    directory : path
        Gets ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and their index where
        the weights are longer than ``file_nbytes``. Earlier files of these names are replaced, each
        in one rename, when all new ones are complete.
    dtype : {"float32", "bfloat16", "float16", "float64"}, optional
        None: the model's compute dtype. "float32" is the master where there is one; every weight
        gets this dtype, frozen ones too.
    file_nbytes : int
        Longest file.

    Raises
    ------
    OSError
        No room (checked first), or the folder cannot be written; earlier files are then untouched.
    CheckpointError
        The source is damaged or missing.
    RuntimeError
        The model's last step did not finish.

    Notes
    -----
    A parameter with two names is written once, under its first. Streams: memory 4 MiB (10 MiB from
    a checkpoint) whatever the size of the model.
    """
    if dtype is not None and dtype not in _FLOATS:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(_FLOATS)}, or None")
    if file_nbytes < 1:
        raise ValueError(f"file_nbytes={file_nbytes}: expected at least 1")
    target = os.path.abspath(os.fspath(directory))
    if isinstance(source, (str, os.PathLike)):
        path = os.path.abspath(os.fspath(source))
        tensors, write, config = _from_folder(path, dtype)
        _write(target, file_nbytes, tensors, write)
        if config is not None:
            _write_json(target, "config.json", config)
        return
    shards = getattr(source, "shards", None)
    if shards is None:
        raise TypeError(
            f"source: a path or a sharded model was expected, got {type(source).__name__}"
        )
    # The two exchanges are fences: no rank moves its weights while rank 0 reads them.
    on_first(shards.world, lambda: shards._core.check_whole())
    on_first(shards.world, lambda: _write(target, file_nbytes, *_from_shards(shards, dtype)))


_Writer = Callable[[str, str, tuple[_Tensor, ...], dict[str, str]], None]


def _from_folder(
    path: str, dtype: str | None
) -> tuple[list[_Tensor], _Writer, dict[str, Any] | None]:
    catalog, index = _open_folder(path)
    compute = None if index is None else index.param_dtype
    tensors: list[_Tensor] = []
    there = _whole_tensors(catalog)
    # In the order of the model where it is known, so that a checkpoint gives what its model gave.
    names = list(there) if index is None else [p.name for p in index.parameters]
    for p in () if index is None else index.parameters:
        if p.numel == 0:  # in no file
            there.setdefault(p.name, (p.shape, FLOATS.get(p.dtype, p.dtype)))
    lost = [name for name in names if name not in there]
    if lost:
        raise CheckpointError(f"{catalog.folder}: no file holds {first_of(lost)}")
    for name in names:
        shape, stored = there[name]
        if stored not in _SHORT:
            raise CheckpointError(
                f"{catalog.folder}: {name} is {stored}, not a floating-point type"
            )
        tensors.append((name, dtype or compute or _SHORT[stored], tuple(shape), name))

    def write(folder: str, name: str, part: tuple[_Tensor, ...], metadata: dict[str, str]) -> None:
        _core.catalog_export(catalog.core, folder, name, part, metadata)

    config = None if index is None else index.model
    if config is not None:
        config = {**config, "torch_dtype": dtype or compute}
    return tensors, write, config


def _from_shards(shards: Shards, dtype: str | None) -> tuple[list[_Tensor], _Writer]:
    compute = shards.policy.precision.param
    tensors: list[_Tensor] = [
        (p.name, dtype or compute, p.shape, i) for i, p in enumerate(shards.parameters)
    ]
    master = dtype is not None and dtype != compute

    def write(folder: str, name: str, part: tuple[_Tensor, ...], metadata: dict[str, str]) -> None:
        _core.shards_export(shards._core, master, folder, name, part, metadata)

    return tensors, write


def _nbytes(tensor: _Tensor) -> int:
    total = _FLOATS[tensor[1]]
    for size in tensor[2]:
        total *= size
    return total


def _split(tensors: Sequence[_Tensor], file_nbytes: int) -> list[list[_Tensor]]:
    """Tensors in order, cut into files of at most ``file_nbytes`` (or one tensor)."""
    files: list[list[_Tensor]] = [[]]
    used = 0
    for tensor in tensors:
        n = _nbytes(tensor)
        if files[-1] and used + n > file_nbytes:
            files.append([])
            used = 0
        files[-1].append(tensor)
        used += n
    return files


def _write(target: str, file_nbytes: int, tensors: list[_Tensor], write: _Writer) -> None:
    files = _split(tensors, file_nbytes)
    total = sum(map(_nbytes, tensors))
    if len(files) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    os.makedirs(target, exist_ok=True)
    _core.io_room_check(target, total)
    hidden = [f".{name}.{os.getpid()}" for name in names]
    index = ".model.safetensors.index.json"
    try:
        for name, part in zip(hidden, files, strict=True):
            # Wider dtypes first, so that every tensor begins aligned.
            ordered = sorted(part, key=lambda tensor: -_FLOATS[tensor[1]])
            write(target, name, tuple(ordered), {"format": "pt"})
        if len(files) > 1:
            places = {t[0]: name for name, part in zip(names, files, strict=True) for t in part}
            content = {"metadata": {"total_size": total}, "weight_map": places}
            _write_json(target, index, content)
        _replace(target, names, hidden, index if len(files) > 1 else None)
    finally:
        for name in [*hidden, index]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(target, name))


def _write_json(target: str, name: str, content: dict[str, Any]) -> None:
    hidden = os.path.join(target, f".{name}.{os.getpid()}")
    try:
        with open(hidden, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, os.path.join(target, name))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(hidden)


def _replace(target: str, names: list[str], hidden: list[str], index: str | None) -> None:
    for name, new in zip(names, hidden, strict=True):
        os.replace(os.path.join(target, new), os.path.join(target, name))
    if index is not None:
        os.replace(os.path.join(target, index), os.path.join(target, index[1:]))
    # What an earlier export left and this one did not replace would be read in its place.
    stale = fnmatch.filter(os.listdir(target), "model*.safetensors*")
    for name in stale:
        ours = name == "model.safetensors" or fnmatch.fnmatch(
            name, "model-?????-of-?????.safetensors"
        )
        if (ours and name not in names) or (
            name == "model.safetensors.index.json" and index is None
        ):
            os.unlink(os.path.join(target, name))
