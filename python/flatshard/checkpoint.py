"""Checkpoints: saved atomically, verified by checksums, loaded at any number of ranks.

A checkpoint is a folder ``DIR/step-000100`` with one safetensors file per rank and an
``index.json``. It is written into a hidden folder beside it, synced, and renamed: a kill at any
point leaves the last good one. The newest is the one with the highest serial number in its index.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import _core, blas
from ._export import WeightsRead, export, read_weights
from ._folders import (
    BLOCK_NBYTES,
    FORMAT,
    Index,
    catalog_of,
    committed,
    first_of,
    parse_index,
    read_index,
    write_index,
)
from ._together import exchange, on_first
from ._verify import Damage, verify
from ._version import __version__
from .errors import CheckpointError

if TYPE_CHECKING:
    from .optim import Optimizer
    from .shard import Shards

__all__ = [
    "Damage",
    "Loaded",
    "Saving",
    "WeightsRead",
    "export",
    "load",
    "read_weights",
    "save",
    "steps",
    "verify",
]

_log = logging.getLogger("flatshard")

_HIDDEN = ".saving-"
_REMOVED = ".removing-"


@dataclass(frozen=True)
class Saving:
    """A save that was asked for.

    Parameters
    ----------
    folder : str
        The committed folder.
    step : int
        Its step.
    """

    folder: str
    step: int

    def wait(self) -> Saving:
        """Return when the checkpoint is committed: at once, saves do not run behind training."""
        return self


@dataclass(frozen=True)
class Loaded:
    """What :func:`load` found beside weights and state.

    Parameters
    ----------
    step : int
        The step that was saved.
    user : Any
        What was given to :func:`save` as ``user``, as JSON gives it back; None with weights_only.
    skipped : tuple of str
        Newer checkpoints that were passed over, each with the reason.
    missing, unexpected : tuple of str
        With ``strict=False``: parameters that the checkpoint lacks (left as they were), and
        parameters that the target lacks.
    """

    step: int
    user: Any
    skipped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


# -- what a target is ------------------------------------------------------------------------------


def _shards_of(target: Any) -> Shards:
    shards = getattr(target, "shards", None)
    if shards is None or not hasattr(shards, "parameters"):
        raise TypeError(f"expected Shards, or anything with .shards, got {type(target).__name__}")
    found: Shards = shards
    return found


def _stored_dtype(shards: Shards, trainable: bool) -> str:
    """The dtype in which a weight is written: the master's where there is one."""
    precision = shards.policy.precision
    return precision.master if precision.master is not None and trainable else precision.param


# -- save ------------------------------------------------------------------------------------------


def save(
    directory: str | os.PathLike[str],
    target: Any,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    user: Any = None,
    kind: Literal["sharded"] = "sharded",
    keep: int | None = None,
    background: bool = False,
) -> Saving:
    """Write a checkpoint of weights and optimizer state. Collective.

    Parameters
    ----------
    directory : path
        The run's folder; created if missing. The checkpoint becomes ``step-NNNNNN`` in it.
    target : Shards or anything with ``.shards``
        What to save.
    optimizer : Optimizer, optional
        Its moments, step counts and groups are saved too.
    step : int
        The step that the weights are at, equal on all ranks.
    user : JSON-able, optional
        Anything to get back from :func:`load`: data position, schedule, random state. Ranks may
        give different values; then each gets its own back, at the same number of ranks.
    kind : "sharded"
        One file per rank. For plain Hugging Face files see :func:`export`.
    keep : int, optional
        Keep the last ``keep`` checkpoints of the folder; older ones go after this one is committed.
    background : bool
        Not offered yet.

    Returns
    -------
    Saving
        Committed.

    Raises
    ------
    OSError
        The disk is full (checked before anything is written, and while writing), a quota is
        reached, or the folder cannot be written. Earlier checkpoints are untouched and the half one
        is removed.
    RuntimeError
        A step did not finish: what would be saved is torn.
    TypeError, ValueError
        ``user`` is not JSON-able, ``step`` is negative or differs between ranks.
    NotImplementedError
        ``background=True`` or another kind.

    Notes
    -----
    Writes masters (compute copies are their rounding) and moments once over all ranks: with Adam in
    bf16 12 bytes per parameter. Each rank needs 4 MiB of buffer. Ends when all files are synced.
    """
    shards = _shards_of(target)
    if kind != "sharded":
        raise NotImplementedError(
            f"save(kind={kind!r}): only one file per rank is offered; checkpoint.export writes "
            "plain Hugging Face files"
        )
    if background:
        raise NotImplementedError("save(background=True) is not offered yet")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep}: expected at least 1, or None to keep all")
    world = shards.world
    parent = os.path.abspath(os.fspath(directory))
    try:
        shards._core.check_whole()  # local: only a job that is over for everyone leaves a torn step
    except RuntimeError as error:
        good = steps(parent)
        last = (
            f"the last good checkpoint there is of step {good[0]}" if good else "there is none yet"
        )
        raise RuntimeError(f"{error}; not saved to {parent}: {last}") from None
    told = exchange(world, lambda: _local_part(step, user))
    if any(each["step"] != step for each in told):
        steps_told = ", ".join(str(each["step"]) for each in told)
        raise ValueError(f"save: ranks are at different steps: {steps_told}")
    users = [each["user"] for each in told]
    if all(each == users[0] for each in users):
        users = users[:1]
    with contextlib.ExitStack() as stack:
        begun = on_first(world, lambda: stack.enter_context(_hidden_folder(parent, step)))
        moments = 0 if optimizer is None else len(shards._moments)
        blocks = _core.shards_save(shards._core, begun["hidden"], moments)
        text = b""
        if world.rank == 0:
            values = _index_of(shards, optimizer, begun["serial"], step, users, blocks)
            text = write_index({**values, "model": _model_of(target, shards)})
        _core.io_commit(world._core, begun["hidden"], begun["final"], parent, text)
    if keep is not None:
        on_first(world, lambda: _prune(parent, keep))
    return Saving(begun["final"], step)


def _local_part(step: int, user: Any) -> dict[str, Any]:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step={step!r}: a whole number from 0 was expected")
    try:
        back = json.loads(json.dumps(user, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"user: cannot be saved as JSON: {error}") from None
    return {"step": step, "user": back}


@contextlib.contextmanager
def _hidden_folder(parent: str, step: int) -> Iterator[dict[str, Any]]:
    """On rank 0: a hidden folder to write into, locked while its save lives, removed at its end."""
    os.makedirs(parent, exist_ok=True)
    _remove_leftovers(parent)
    serial = 1 + max((i.serial for i in _readable(parent)), default=0)
    name = f"step-{step:06d}"
    final, again = os.path.join(parent, name), 1
    while os.path.lexists(final):  # saved before at this step; the serial tells which is newer
        again += 1
        final = os.path.join(parent, f"{name}-{again}")
    hidden = os.path.join(parent, f"{_HIDDEN}{os.path.basename(final)}-{serial}-{os.getpid()}")
    os.mkdir(hidden)
    lock = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: leftovers stay
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield {"hidden": hidden, "final": final, "serial": serial}
    finally:
        # Committed, it has its other name by now, and nothing is here to remove.
        shutil.rmtree(hidden, ignore_errors=True)
        os.close(lock)


def _remove_leftovers(parent: str) -> None:
    """Remove half checkpoints of jobs that were killed: those that nobody holds locked."""
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        if name.startswith(_REMOVED):
            shutil.rmtree(path, ignore_errors=True)
        if not name.startswith(_HIDDEN) or os.path.islink(path) or not os.path.isdir(path):
            continue
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # another job is saving right now, or the file system has no locks
        finally:
            os.close(lock)


def _readable(parent: str) -> list[Index]:
    """Indexes of the committed checkpoints whose index is whole, newest first."""
    found = []
    for folder in committed(parent):
        with contextlib.suppress(CheckpointError, OSError):
            found.append(read_index(folder))
    return sorted(found, key=lambda index: -index.serial)


def _prune(parent: str, keep: int) -> None:
    for index in _readable(parent)[keep:]:
        # Renamed first: a kill while removing must not leave a half one under its good name.
        removed = os.path.join(parent, _REMOVED + os.path.basename(index.folder))
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(index.folder, removed)
        shutil.rmtree(removed, ignore_errors=True)


def _index_of(
    shards: Shards,
    optimizer: Optimizer | None,
    serial: int,
    step: int,
    users: list[Any],
    blocks: tuple[tuple[int, bytes], ...],
) -> dict[str, Any]:
    policy, world = shards.policy, shards.world
    return {
        "format": FORMAT,
        "writer": f"flatshard {__version__}",
        "serial": serial,
        "step": step,
        "world_size": world.size,
        "stage": policy.sharding.stage,
        "partition": policy.sharding.partition,
        "param_dtype": policy.precision.param,
        "moments_dtype": None if optimizer is None else policy.precision.moments,
        "crc32c_block_nbytes": BLOCK_NBYTES,
        "machine": _machine(),
        "optimizer": None if optimizer is None else optimizer.state(),
        "user": users,
        "parameters": [
            {
                "name": p.name,
                "tied_name": p.tied_name,
                "shape": list(p.shape),
                "dtype": _stored_dtype(shards, p.trainable),
                "trainable": p.trainable,
                "group": p.group,
            }
            for p in shards.parameters
        ],
        "files": [
            {
                "name": f"rank-{rank:05d}-of-{world.size:05d}.safetensors",
                "nbytes": nbytes,
                "crc32c": crcs.hex(),
            }
            for rank, (nbytes, crcs) in enumerate(blocks)
        ],
    }


def _model_of(target: Any, shards: Shards) -> dict[str, Any] | None:
    """The config.json of a target that has one: an export then needs the checkpoint alone."""
    to_hf = getattr(getattr(target, "config", None), "to_hf", None)
    return None if to_hf is None else to_hf(dtype=shards.policy.precision.param)


def _machine() -> dict[str, Any]:
    """What the bits of a run depend on beside its configuration."""
    return {
        "isa": _core.cpu_isa(),
        "blas": blas.load() if _core.gemm_is_loaded() else None,
        "build": _core.build_id(),
    }


# -- load ------------------------------------------------------------------------------------------


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Steps of the committed checkpoints under ``directory`` whose index is whole, newest first.

    Parameters
    ----------
    directory : path
        A run's folder.
    """
    return [index.step for index in _readable(os.path.abspath(os.fspath(directory)))]


def load(
    directory: str | os.PathLike[str],
    target: Any,
    optimizer: Optimizer | None = None,
    *,
    step: int | Literal["latest"] = "latest",
    strict: bool = True,
    weights_only: bool = False,
    cast: bool = False,
) -> Loaded:
    """Read a checkpoint into weights and optimizer state. Collective.

    Parameters
    ----------
    directory : path
        A run's folder, or the folder of one checkpoint.
    target : Shards or anything with ``.shards``
        What to load into.
    optimizer : Optimizer, optional
        Gets its state back. None leaves optimizer state alone.
    step : int or "latest"
        "latest" takes the checkpoint with the highest serial and, where that one is damaged, falls
        back to the newest good one and says so. A number takes that step or fails.
    strict : bool
        False allows parameters that only one side has.
    weights_only : bool
        Do not restore the optimizer, nor the user data.
    cast : bool
        Allow dtypes to differ from the saved ones; widening is exact, narrowing rounds to nearest.

    Returns
    -------
    Loaded
        The step, the user data, and what was passed over.

    Raises
    ------
    CheckpointError
        Nothing there; every candidate damaged (the damage is named); another model (the first
        differences are named); a newer format; other dtypes without ``cast``. Where damage is found
        while reading and nothing older is good, the weights are part old, part new.
    ValueError
        The optimizer has another rule or other parameters.

    Notes
    -----
    Each rank reads its own ranges, in whole blocks of a MiB, each checked. Any number of ranks,
    stage and partition may load what any other saved.
    """
    shards = _shards_of(target)
    world = shards.world
    parent = os.path.abspath(os.fspath(directory))
    found = on_first(world, lambda: _candidates(parent, step))
    skipped: list[str] = list(found["skipped"])
    for folder in found["folders"]:
        answer = on_first(world, functools.partial(_read_text, folder))
        if "damage" in answer:
            skipped.append(answer["damage"])
            continue
        index = parse_index(folder, answer["text"].encode())
        missing, unexpected = _compare(index, shards, strict=strict, cast=cast)
        state = None if weights_only else _optimizer_state(index, optimizer, cast=cast)
        # Before anything is written: what cannot be given back must not be half loaded.
        user = None if weights_only else index.user(world.rank, world.size)
        before = None if state is None or optimizer is None else optimizer.state()
        if state is not None and optimizer is not None:
            optimizer.restore(state)
        try:
            _read(index, shards, missing, moments=0 if state is None else len(state["moments"]))
        except BaseException as error:
            if before is not None and optimizer is not None:
                optimizer.restore(before)
            if step != "latest" or not isinstance(error, (CheckpointError, FileNotFoundError)):
                raise
            skipped.append(f"step {index.step}: {error}")
            continue
        if world.rank == 0:
            for reason in skipped:
                _log.warning("checkpoint passed over: %s", reason)
            if skipped:
                _log.warning("loaded step %d from %s instead", index.step, folder)
        return Loaded(index.step, user, tuple(skipped), missing, unexpected)
    raise CheckpointError(f"{parent}: no checkpoint can be loaded:\n  " + "\n  ".join(skipped))


def _candidates(parent: str, step: int | str) -> dict[str, Any]:
    """Committed folders to try, best first, and those whose index is damaged."""
    folders = committed(parent)
    if not folders:
        reason = (
            "there is no such folder"
            if not os.path.isdir(parent)
            else "nothing was committed there"
        )
        raise CheckpointError(f"{parent}: no checkpoint to load: {reason}")
    indexes, skipped = [], []
    for folder in folders:
        try:
            indexes.append(read_index(folder))
        except CheckpointError as error:
            if "is newer than this version reads" in str(error):
                raise
            skipped.append(str(error))
        except OSError as error:
            skipped.append(f"{folder}: {error}")
    indexes.sort(key=lambda index: -index.serial)
    if step != "latest":
        chosen = [index for index in indexes if index.step == step][:1]
        if not chosen:
            there = first_of([str(index.step) for index in indexes], 20) or "none that is whole"
            lines = "".join(f"\n  {reason}" for reason in skipped)
            raise CheckpointError(
                f"{parent}: no checkpoint of step {step}; there are: {there}{lines}"
            )
        return {"folders": [chosen[0].folder], "skipped": []}
    return {"folders": [index.folder for index in indexes], "skipped": skipped}


def _read_text(folder: str) -> dict[str, str]:
    """The text of an index, for all ranks: they may not each find another one."""
    try:
        with open(os.path.join(folder, "index.json"), "rb") as file:
            text = file.read()
        parse_index(folder, text)
    except (OSError, CheckpointError) as error:
        return {"damage": str(error)}
    return {"text": text.decode()}


def _compare(
    index: Index, shards: Shards, *, strict: bool, cast: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parameters that only one side has; CheckpointError where the two are not the same model."""
    saved = {p.name: p for p in index.parameters}
    ours = {p.name: p for p in shards.parameters}
    missing = [name for name in ours if name not in saved]
    unexpected = [name for name in saved if name not in ours]
    shapes = [
        f"{name} is {list(saved[name].shape)} there and {list(ours[name].shape)} here"
        for name in ours
        if name in saved and saved[name].shape != ours[name].shape
    ]
    lines = []
    if shapes:
        lines.append(f"shapes differ: {first_of(shapes)}")
    if strict and missing:
        lines.append(f"it lacks {first_of(missing)}")
    if strict and unexpected:
        lines.append(f"it has besides {first_of(unexpected)}")
    if lines:
        raise CheckpointError(f"{index.folder}: a checkpoint of another model: {'; '.join(lines)}")
    dtypes = [
        f"{name} is {saved[name].dtype} there and {_stored_dtype(shards, p.trainable)} here"
        for name, p in ours.items()
        if name in saved and saved[name].dtype != _stored_dtype(shards, p.trainable)
    ]
    if dtypes and not cast:
        raise CheckpointError(
            f"{index.folder}: dtypes differ: {first_of(dtypes)}; load(cast=True) converts"
        )
    return tuple(missing), tuple(unexpected)


def _optimizer_state(
    index: Index, optimizer: Optimizer | None, *, cast: bool
) -> Mapping[str, Any] | None:
    """The optimizer's part of an index, checked against the optimizer before anything is read."""
    if optimizer is None:
        return None
    if index.optimizer is None:
        raise CheckpointError(
            f"{index.folder}: was saved without an optimizer; load it with weights_only=True"
        )
    ours, saved = optimizer.state(), index.optimizer
    for key in ("rule", "moments"):
        if saved.get(key) != ours[key]:
            raise ValueError(
                f"{index.folder}: the saved optimizer has {key} {saved.get(key)}, this one "
                f"{ours[key]}"
            )
    moments = optimizer._shards.policy.precision.moments
    if ours["moments"] and index.moments_dtype != moments and not cast:
        raise CheckpointError(
            f"{index.folder}: moments are {index.moments_dtype} there and {moments} here; "
            "load(cast=True) converts"
        )
    return saved


def _read(index: Index, shards: Shards, missing: tuple[str, ...], *, moments: int) -> None:
    lacking = set(missing)
    names = tuple(p.name for p in shards.parameters)
    skip = bytes(name in lacking for name in names) if lacking else None
    _core.catalog_read(shards._core, catalog_of(index).core, names, skip, moments)
