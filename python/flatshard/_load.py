"""Reading a checkpoint: which one, is it this model, and what when it is damaged."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from . import _core
from ._folders import Index, catalog_of, committed, first_of, parse_index, read_index
from ._save import settle
from ._together import on_first, shards_of, stored_dtype
from .errors import CheckpointError

if TYPE_CHECKING:
    from .optim import Optimizer
    from .shard import Shards

__all__ = ["Loaded", "load"]

_log = logging.getLogger("flatshard")

#: What the core leaves of a parameter: FS_SKIP_ALL, FS_SKIP_MOMENTS.
_SKIP_ALL, _SKIP_MOMENTS = 1, 2


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
    changed : tuple of str
        Parameters that play another part: trained there and frozen here or the other way round,
        tied there and not here; in words.
    stateless : tuple of str
        With ``strict=False`` and an optimizer: parameters that are trained here and have no state
        there. Their moments stay as they were, zeros in a new optimizer; their steps count from 0.
    """

    step: int
    user: Any
    skipped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    stateless: tuple[str, ...] = ()


# -- load ------------------------------------------------------------------------------------------


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
        False allows parameters that only one side has, or that only one side trains.
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
        differences are named); a newer format; other dtypes without ``cast``. Nothing was changed:
        every byte is checked before the first one is used.
    ValueError
        The optimizer has another rule or other parameters.

    Notes
    -----
    Each rank reads its own ranges twice, in whole blocks of a MiB, each checked: once to find
    damage, and, when all ranks have found none, from the system's cache into weights and state. Any
    number of ranks, stage and partition may load what any other saved.
    """
    shards = shards_of(target)
    world = shards.world
    settle(shards)
    parent = os.path.abspath(os.fspath(directory))
    found = on_first(world, lambda: _candidates(parent, step))
    skipped: list[str] = list(found["skipped"])
    for folder in found["folders"]:
        answer = on_first(world, functools.partial(_read_text, folder))
        if "damage" in answer:
            skipped.append(answer["damage"])
            continue
        there = parse_index(folder, answer["text"].encode())
        index, names = _as_here(there, shards)
        missing, unexpected = _compare(index, shards, strict=strict, cast=cast)
        changed = _changed(index, shards)
        stateless: tuple[str, ...] = ()
        state = None if weights_only else _optimizer_state(index, optimizer, cast=cast)
        if state is not None and optimizer is not None and not strict:
            state, stateless = _partial(index, state, optimizer.state())
        # Before anything is written: what cannot be given back must not be half loaded.
        user = None if weights_only else index.user(world.rank, world.size)
        before = None if state is None or optimizer is None else optimizer.state()
        if state is not None and optimizer is not None:
            _restore(optimizer, state, index)
        try:
            moments = 0 if state is None else len(state["moments"])
            _read(there, names, shards, missing, stateless, moments=moments)
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
            if changed:
                _log.warning("%s: %s", folder, first_of(changed))
        return Loaded(index.step, user, tuple(skipped), missing, unexpected, changed, stateless)
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


def _as_here(index: Index, shards: Shards) -> tuple[Index, tuple[str, ...]]:
    """The index with the first name that a tie has here, and what each parameter is called there.

    A tie is saved under its first name, which a model built in another order does not share.
    """
    ours = {p.name for p in shards.parameters}
    saved = {n: p for p in index.parameters for n in (p.tied_name, p.name) if n is not None}
    firsts = {p.name for p in index.parameters}
    renamed: dict[str, str] = {}
    for p in shards.parameters:
        other = saved.get(p.name) or (saved.get(p.tied_name) if p.tied_name is not None else None)
        if p.name not in firsts and other is not None and other.name not in ours:
            renamed.setdefault(other.name, p.name)
    if not renamed:
        return index, tuple(p.name for p in shards.parameters)

    def here(name: Any) -> Any:
        return renamed.get(name, name) if isinstance(name, str) else name

    parameters = tuple(
        replace(p, name=renamed[p.name], tied_name=p.name) if p.name in renamed else p
        for p in index.parameters
    )
    state = index.optimizer
    if state is not None:
        with contextlib.suppress(TypeError, AttributeError, KeyError):  # _restore will say so
            state = {
                **state,
                "steps": {here(name): n for name, n in state["steps"].items()},
                "groups": [{**g, "params": [*map(here, g["params"])]} for g in state["groups"]],
                "frozen": [*map(here, state.get("frozen", ()))],
            }
    there = {new: old for old, new in renamed.items()}
    names = tuple(there.get(p.name, p.name) for p in shards.parameters)
    return replace(index, parameters=parameters, optimizer=state), names


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
        ties = {p.tied_name: f"{p.tied_name} (tied to {p.name} there)" for p in index.parameters}
        lines.append(f"it lacks {first_of([ties.get(name, name) for name in missing])}")
    if strict and unexpected:
        lines.append(f"it has besides {first_of(unexpected)}")
    if lines:
        raise CheckpointError(f"{index.folder}: a checkpoint of another model: {'; '.join(lines)}")
    dtypes = [
        f"{name} is {saved[name].dtype} there and {stored_dtype(shards, p.trainable)} here"
        for name, p in ours.items()
        if name in saved and saved[name].dtype != stored_dtype(shards, p.trainable)
    ]
    if dtypes and not cast:
        raise CheckpointError(
            f"{index.folder}: dtypes differ: {first_of(dtypes)}; load(cast=True) converts"
        )
    return tuple(missing), tuple(unexpected)


def _changed(index: Index, shards: Shards) -> tuple[str, ...]:
    """Parameters of both sides that play another part here, in words."""
    saved = {p.name: p for p in index.parameters}
    found = []
    for p in shards.parameters:
        before = saved.get(p.name)
        if before is None:
            continue
        if before.trainable != p.trainable:
            parts = ("trained", "frozen") if before.trainable else ("frozen", "trained")
            found.append(f"{p.name} is {parts[0]} there and {parts[1]} here")
        if before.tied_name != p.tied_name:
            ties = [f"tied to {n}" if n else "not tied" for n in (before.tied_name, p.tied_name)]
            found.append(f"{p.name} is {ties[0]} there and {ties[1]} here")
    return tuple(found)


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


def _restore(optimizer: Optimizer, state: Mapping[str, Any], index: Index) -> None:
    """Give the optimizer its state; what does not have the form of one is damage."""
    before = optimizer.state()
    try:
        optimizer.restore(state)
    except Exception as error:
        optimizer.restore(before)
        if isinstance(error, ValueError):  # another optimizer: says so itself
            raise
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{index.folder}: its optimizer state is not understood: {what}"
        ) from None


def _partial(
    index: Index, saved: Mapping[str, Any], ours: Mapping[str, Any]
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The saved state for the parameters that are trained here, and those it says nothing of."""
    try:
        steps = {name: saved["steps"].get(name, 0) for name in ours["steps"]}
        new = [name for name in steps if name not in saved["steps"]]
        groups = [{**g, "params": [n for n in g["params"] if n in steps]} for g in saved["groups"]]
        for group in ours["groups"]:
            wanted = [name for name in group["params"] if name in new]
            same = next((g for g in groups if g["name"] == group["name"]), None)
            if wanted and same is not None:
                same["params"] += wanted
            elif wanted:
                groups.append({**group, "params": wanted})
        frozen = [name for name in saved.get("frozen", ()) if name in steps]
    except (TypeError, AttributeError, KeyError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{index.folder}: its optimizer state is not understood: {what}"
        ) from None
    return {**saved, "steps": steps, "groups": groups, "frozen": frozen}, tuple(new)


def _read(
    index: Index,
    there: tuple[str, ...],
    shards: Shards,
    missing: tuple[str, ...],
    stateless: tuple[str, ...],
    *,
    moments: int,
) -> None:
    names = tuple(p.name for p in shards.parameters)
    left = {**dict.fromkeys(stateless, _SKIP_MOMENTS), **dict.fromkeys(missing, _SKIP_ALL)}
    skip = bytes(left.get(name, 0) for name in names) if left else None
    _core.catalog_read(shards._core, catalog_of(index).core, there, skip, moments)
