"""Finding damage in checkpoints, and saying which tensors it hits."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from . import _core
from ._folders import Index, catalog_of, committed, foreign_catalog, read_index
from .errors import CheckpointError

__all__ = ["Damage", "verify"]


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a checkpoint.

    Parameters
    ----------
    folder : str
        The checkpoint's folder.
    file : str
        The file in it.
    reason : str
        What is wrong, in words.
    step : int or None
        The checkpoint's step, where its index is whole.
    block : int or None
        Which MiB of the file does not match its checksum.
    parameter, state : str or None
        What lies there, where that is known; state is "weight", "moment1" or "moment2".
    rows : (int, int) or None
        First and last row of the parameter that the damage touches.
    rank : int or None
        The rank whose file it is.
    """

    folder: str
    file: str
    reason: str
    step: int | None = None
    block: int | None = None
    parameter: str | None = None
    state: str | None = None
    rows: tuple[int, int] | None = None
    rank: int | None = None

    def __str__(self) -> str:
        if self.parameter is None:
            return f"{os.path.join(self.folder, self.file)}: {self.reason}"
        what = self.parameter if self.state == "weight" else f"{self.parameter} {self.state}"
        first, last = self.rows or (0, 0)
        return (
            f"{what} rows {first}-{last}, rank {self.rank} "
            f"({os.path.join(self.folder, self.file)}: {self.reason})"
        )


def verify(directory: str | os.PathLike[str]) -> list[Damage]:
    """Read every byte of the checkpoints in a folder and compare it with its checksum.

    Parameters
    ----------
    directory : path
        A run's folder, the folder of one checkpoint, or one with Hugging Face safetensors, which
        have no checksums: of those only headers and sizes are checked.

    Returns
    -------
    list of Damage
        Empty when all is well; one entry for each parameter that a damaged block touches.

    Raises
    ------
    CheckpointError
        There is nothing to verify.

    Notes
    -----
    Local: no world is needed. Reads each file once; memory 6 MiB.
    """
    path = os.path.abspath(os.fspath(directory))
    folders = committed(path)
    if not folders:
        catalog = foreign_catalog(path)
        try:
            catalog.pieces()
        except CheckpointError as error:
            return [Damage(catalog.folder, "", str(error))]
        return []
    found: list[Damage] = []
    for folder in folders:
        try:
            index = read_index(folder)
        except (CheckpointError, OSError) as error:
            found.append(Damage(folder, "index.json", str(error)))
            continue
        damage = [d for rank in range(index.world_size) for d in _verify_file(index, rank)]
        found += damage or _verify_whole(index)
    return found


def _verify_file(index: Index, rank: int) -> list[Damage]:
    file = index.files[rank]
    name = file[0]
    try:
        bad = _core.blocks_check(index.folder, file)
    except (CheckpointError, OSError) as error:
        return [Damage(index.folder, name, str(error), index.step, rank=rank)]
    return [damage for block in bad for damage in _in_block(index, rank, block)]


def _in_block(index: Index, rank: int, block: int) -> list[Damage]:
    """What lies in a damaged block. The header is read unchecked: it may be damaged itself."""
    name = index.files[rank][0]
    reason = f"block {block} does not match its checksum"
    shapes = tuple((p.name, p.shape) for p in index.parameters)
    try:
        parts = _core.catalog_pieces((index.folder, ((name, -1, None),), shapes), 0, block)
    except CheckpointError:
        parts = []
    if not parts:
        return [Damage(index.folder, name, reason + " (its header)", index.step, block, rank=rank)]
    found = []
    if block == 0:
        reason += ", which holds the file's header too"
    for parameter, state, _, begin, end, shape, _ in parts:
        row = math.prod(shape[1:]) or 1
        rows = (begin // row, (end - 1) // row)
        found.append(
            Damage(index.folder, name, reason, index.step, block, parameter, state, rows, rank)
        )
    return found


def _verify_whole(index: Index) -> list[Damage]:
    """Files that match their checksums must also hold every element once."""
    try:
        pieces = catalog_of(index).pieces()
    except CheckpointError as error:
        return [Damage(index.folder, "index.json", str(error), index.step)]
    held: dict[tuple[str, str], int] = {}
    for name, state, _, begin, end, _, _ in pieces:  # disjoint: the catalog refuses overlaps
        held[name, state] = held.get((name, state), 0) + end - begin
    names = (index.optimizer or {}).get("moments", [])
    moments = min(len(names), 2) if isinstance(names, list) else 0
    found = []
    for p in index.parameters:
        states = ["weight", *(f"moment{m + 1}" for m in range(moments if p.trainable else 0))]
        for state in states:
            if held.get((p.name, state), 0) != p.numel:
                reason = f"{held.get((p.name, state), 0)} of {p.numel} elements of {p.name} {state}"
                found.append(Damage(index.folder, "index.json", reason, index.step))
    return found
