"""When a checkpoint folder is whole: a marker that is written last, and that resuming looks for.

Trainer and Accelerate fill a folder with several calls of several ranks; a kill between them leaves
one that looks like a checkpoint. The marker lists every file with its size.
"""

from __future__ import annotations

import json
import logging
import os
import re
from typing import TYPE_CHECKING

from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..world import World

__all__ = ["MARKER", "begin", "check", "damage", "finish", "newest"]

MARKER = "flatshard-complete.json"
_FORMAT = 1

_log = logging.getLogger("flatshard")


def _files(folder: str) -> dict[str, int]:
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if name != MARKER:
                found[os.path.relpath(path, folder)] = os.path.getsize(path)
    return found


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin(folder: str | os.PathLike[str], world: World) -> None:
    """Before anything is written: a folder that is written again is not whole meanwhile.
    Collective."""
    if world.is_main:
        try:
            os.unlink(os.path.join(folder, MARKER))
        except FileNotFoundError:
            pass
    world.barrier()


def finish(folder: str | os.PathLike[str], world: World) -> None:
    """After every rank has written: syncs the files, then writes the marker. Collective.

    Parameters
    ----------
    folder : path
        The checkpoint.
    world : World
        The ranks that wrote to it.
    """
    world.barrier()
    if world.is_main:
        folder = os.fspath(folder)
        files = _files(folder)
        for name in files:
            _sync(os.path.join(folder, name))
        path = os.path.join(folder, MARKER)
        text = json.dumps(
            {"format": _FORMAT, "world_size": world.size, "files": files}, indent=1, sort_keys=True
        )
        with open(f"{path}.part", "w", encoding="utf-8") as stream:
            stream.write(f"{text}\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(f"{path}.part", path)
        _sync(folder)
    world.barrier()


def damage(folder: str | os.PathLike[str]) -> str | None:
    """What is wrong with a folder, in words; None if it was saved to its end and is as it was.

    Parameters
    ----------
    folder : path
        A checkpoint.
    """
    folder = os.fspath(folder)
    try:
        with open(os.path.join(folder, MARKER), encoding="utf-8") as stream:
            marker = json.load(stream)
        wanted = {str(name): int(nbytes) for name, nbytes in marker["files"].items()}
    except FileNotFoundError:
        return f"there is no {MARKER}: it was not saved to its end, or not by flatshard"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MARKER} cannot be read: {error}"
    there = _files(folder)
    for name, nbytes in sorted(wanted.items()):
        if name not in there:
            return f"{name} is missing"
        if there[name] != nbytes:
            return f"{name} has {there[name]} bytes instead of {nbytes}"
    return None


def check(folder: str | os.PathLike[str]) -> None:
    """Raises CheckpointError for a folder that is damaged; says of one without a marker that nobody
    knows whether it is whole."""
    wrong = damage(folder)
    if wrong is None:
        return
    if not os.path.isdir(folder):
        return  # who loads it says so
    if os.path.exists(os.path.join(folder, MARKER)):
        raise CheckpointError(f"{os.fspath(folder)}: {wrong}")
    _log.warning("%s: %s; taken as it is", os.fspath(folder), wrong)


def newest(parent: str | os.PathLike[str], prefix: str) -> str:
    """The folder ``parent/prefixN`` with the highest N that is whole.

    Parameters
    ----------
    parent : path
        Where checkpoints lie.
    prefix : str
        "checkpoint-" of the Trainer, "checkpoint_" of Accelerate.

    Returns
    -------
    str
        Its path. Newer ones that are not whole are named in the log.

    Raises
    ------
    CheckpointError
        None is.
    """
    parent = os.fspath(parent)
    names = os.listdir(parent) if os.path.isdir(parent) else []
    numbered = sorted(
        (int(match[1]), name)
        for name in names
        if (match := re.fullmatch(re.escape(prefix) + r"(\d+)", name))
        and os.path.isdir(os.path.join(parent, name))
    )
    for _, name in reversed(numbered):
        path = os.path.join(parent, name)
        wrong = damage(path)
        if wrong is None:
            return path
        _log.warning("%s is passed over: %s", path, wrong)
    raise CheckpointError(
        f"{parent}: no complete checkpoint among {len(numbered)}"
        + (f"; to use one all the same, name it: {os.path.join(parent, numbered[-1][1])}"
           if numbered else "")
    )  # fmt: skip
