"""The files of a DeepSpeed folder of one step: which there are, and what each rank's says."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from typing import Any

from .._folders import is_plain
from ..errors import CheckpointError
from . import _foreign
from ._foreign import Folder
from ._pickle_values import Record, shown
from ._torch_zip import TorchFile

__all__ = ["RankFile", "folder_of", "read_files", "shapes_of", "stage_of", "state_of"]

_LATEST = "latest"
_MODEL = re.compile(r"mp_rank_(\d{1,6})_model_states\.pt")
_MODEL3 = re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_OTHER = re.compile(r"(layer_\d+|expert_|layer_\d+_expert).*\.pt")


@dataclass(frozen=True)
class RankFile:
    """A file of a rank and what it holds."""

    file: TorchFile
    content: dict[Any, Any]

    @property
    def where(self) -> str:
        return self.file.where


def folder_of(folder: Folder) -> str | None:
    """The folder with the files, of a run's folder or itself; None when it is no DeepSpeed's."""
    if any(_MODEL.fullmatch(n) or _MODEL3.fullmatch(n) for n in folder.names()):
        return folder.path
    if not folder.has(_LATEST):
        tags = [n for n in folder.names() if re.fullmatch(r"global_step\d+", n)]
        if not tags:
            return None
        raise CheckpointError(
            f"{folder.path}: no file {_LATEST!r}: name one of {', '.join(tags[:10])}"
        )
    file = folder.file(_LATEST)
    raw = file.read(0, min(file.nbytes, 1024))
    tag = raw.decode("utf-8", "replace").strip()
    if not is_plain(tag):
        raise CheckpointError(f"{file.path}: {tag!r:.100} is not the name of a folder")
    path = os.path.join(folder.path, tag)
    if not os.path.isdir(path) or os.path.islink(path):
        raise CheckpointError(f"{file.path}: names {tag!r:.100}, and there is no such folder")
    return path


def read_files(folder: Folder) -> tuple[list[RankFile], list[RankFile]]:
    """Files of the model and of the optimizer, by rank.

    Raises CheckpointError where one is missing, doubled, or of a kind that is not read.
    """
    names = folder.names()
    other = next((name for name in names if _OTHER.fullmatch(name)), None)
    if other is not None:
        raise CheckpointError(f"{folder.path}: {other}: pipelines and experts are not read")
    found: dict[str, dict[int, str]] = {"model": {}, "model3": {}, "optimizer": {}}
    for name in names:
        for kind, pattern in (("model", _MODEL), ("model3", _MODEL3), ("optimizer", _OPTIMIZER)):
            match = pattern.fullmatch(name)
            if match is None:
                continue
            if int(match[match.re.groups]) != 0:
                raise CheckpointError(f"{folder.path}: {name}: tensor parallelism is not read")
            rank = int(match[1]) if match.re.groups == 2 else 0
            if rank in found[kind]:
                raise CheckpointError(f"{folder.path}: {name} and {found[kind][rank]} of one rank")
            found[kind][rank] = name
    for kind, files in found.items():
        if sorted(files) != list(range(len(files))):
            lost = next(rank for rank in itertools.count() if rank not in files)
            raise CheckpointError(f"{folder.path}: the file of rank {lost} is missing ({kind})")
    models = found["model3"] or found["model"]
    if not models:
        raise CheckpointError(f"{folder.path}: no file of the model")

    def load(name: str) -> RankFile:
        file, content = folder.torch(name)
        return RankFile(file, _foreign.mapping(file.where, content, "the content"))

    return (
        [load(models[rank]) for rank in sorted(models)],
        [load(found["optimizer"][rank]) for rank in sorted(found["optimizer"])],
    )


def state_of(optimizer: RankFile) -> dict[Any, Any]:
    """What ZeRO keeps of an optimizer: buffers, their state, settings."""
    found = optimizer.content.get("optimizer_state_dict")
    return _foreign.mapping(optimizer.where, found, "optimizer_state_dict")


def stage_of(optimizer: RankFile) -> int:
    """1, 2 or 3. A file that names no stage is of 3 if it has that stage's buffers."""
    state = state_of(optimizer)
    value = state.get("zero_stage")
    if isinstance(value, Record):
        value = value.args[0] if value.args else None
    if value is None:
        value = 3 if "fp32_flat_groups" in state else 1
    if value not in (0, 1, 2, 3) or type(value) is not int:
        raise CheckpointError(f"{optimizer.where}: zero_stage is {shown(value)}")
    return max(value, 1)


def shapes_of(model: RankFile) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the trained parameters, by group, in their order in the buffers."""
    given = _foreign.sequence(model.where, model.content.get("param_shapes"), "param_shapes")
    found: list[dict[str, tuple[int, ...]]] = []
    for group in given:
        shapes = _foreign.mapping(model.where, group, "a group of param_shapes")
        found.append(
            {
                _foreign.text(model.where, name, "a name"): _foreign.shape(
                    model.where, size, f"the shape of {name}"
                )
                for name, size in shapes.items()
            }
        )
    names = [name for group in found for name in group]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{model.where}: param_shapes lists a parameter twice")
    return found
