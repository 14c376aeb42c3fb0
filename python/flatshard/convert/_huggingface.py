"""Hugging Face folders, single files, and the optimizer files that lie beside them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from .. import _core
from .._export import _whole_tensors
from .._folders import first_of, foreign_catalog, parse_json, weight_map
from ..errors import CheckpointError
from . import _optimizer
from ._foreign import FLOATS, Array, Folder, Foreign, array_of, mapping
from ._pickle_values import Tensor, shown
from ._sources import File, Stretch

__all__ = ["read"]

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_ZIP = b"PK\3\4"
#: Files of torch.save that hold weights, in this order.
_TORCH = ("pytorch_model.bin", "pytorch_model_fsdp.bin", "pytorch_model.bin.index.json")
WEIGHTS = (*_SAFETENSORS, *_TORCH)
OPTIMIZERS = ("optimizer.bin", "optimizer.pt")
#: What lies beside and is not taken over.
_BESIDE = (
    (re.compile(r"scheduler.*\.(bin|pt)"), "the schedule: give the new run its own"),
    (re.compile(r"(rng_state|random_states).*"), "the random state of another program"),
    (re.compile(r"(scaler|sampler|dl_state).*\.(pt|bin)"), "not weights or state"),
    (re.compile(r"training_args\.bin"), "arguments of another trainer"),
)
_SAFE = {short: name for name, short in FLOATS.items()}


def read(
    folder: Folder, name: str | None, optimizer: str | None, ids: Sequence[str] | None
) -> Foreign:
    """The content of a folder.

    Parameters
    ----------
    folder : Folder
        The folder.
    name : str, optional
        The one file of it that was named; None finds the weights.
    optimizer : str, optional
        Path of an optimizer's file; None takes what lies beside.
    ids : sequence of str, optional
        Names of parameters in the order of an optimizer's numbers.
    """
    foreign = Foreign("Hugging Face folder")
    chosen = name or next((n for n in WEIGHTS if folder.has(n)), None)
    if chosen is None:
        raise CheckpointError(f"{folder.path}: holds no weights: none of {', '.join(WEIGHTS)}")
    if chosen in _SAFETENSORS and name is None:
        _safetensors(foreign, folder, None)
    elif chosen.endswith(".safetensors.index.json"):
        raise CheckpointError(f"{folder.path}: name the folder, not the index in it")
    elif name is not None and folder.file(name).read(0, min(4, folder.file(name).nbytes)) != _ZIP:
        _safetensors(foreign, folder, name)
    elif chosen.endswith(".index.json"):
        _sharded(foreign, folder, chosen)
    else:
        _torch(foreign, folder, chosen, None)
    if chosen == "pytorch_model_fsdp.bin":
        foreign.kind = "FSDP folder"
    if name is None:
        _beside(foreign, folder, chosen)
    beside = next((n for n in OPTIMIZERS if name is None and folder.has(n)), None)
    if optimizer is not None:
        path, file_name = os.path.split(os.path.realpath(optimizer))
        _take_optimizer(foreign, folder.other(path), file_name, ids)
    elif beside is not None:
        _take_optimizer(foreign, folder, beside, ids)
    return foreign


def _safetensors(foreign: Foreign, folder: Folder, name: str | None) -> None:
    catalog = foreign_catalog(folder.path if name is None else os.path.join(folder.path, name))
    foreign.ordered = False
    _whole_tensors(catalog)  # names come once, and where the index says
    for file_name, _, _ in catalog.files:
        file = folder.file(file_name)
        _, tensors = _core.safetensors_header(file.path)
        for tensor, dtype, shape, begin, _ in sorted(tensors, key=lambda entry: entry[3]):
            if dtype not in _SAFE:
                foreign.leave(tensor, f"{dtype}: not a floating-point weight")
                continue
            numel = 1
            for n in shape:
                numel *= n
            foreign.weights[tensor] = Array(tuple(shape), Stretch(file, begin, numel, _SAFE[dtype]))


def _sharded(foreign: Foreign, folder: Folder, index: str) -> None:
    places = weight_map(os.path.join(folder.path, index), suffix=".bin")
    files = sorted(set(places.values()))
    missing = [name for name in files if not folder.has(name)]
    if missing:
        lost = sorted(tensor for tensor, file in places.items() if file in missing)
        raise CheckpointError(
            f"{folder.path}: {', '.join(missing)} is missing, and with it {first_of(lost)}"
        )
    for file in files:
        _torch(foreign, folder, file, places)
    known = {*foreign.weights, *foreign.ties, *(what for what, _ in foreign.left_out)}
    absent = sorted(set(places) - known)
    if absent:
        raise CheckpointError(f"{folder.path}: its index lists {first_of(absent)}, no file has it")


def state_dict(where: str, content: Any) -> dict[Any, Any]:
    """The names and tensors of a file: its content, or what lies one level down."""
    found = mapping(where, content, "the content")
    for key in ("state_dict", "model_state_dict", "model", "module"):
        inner: Any = found.get(key)
        if isinstance(inner, dict) and any(isinstance(value, Tensor) for value in inner.values()):
            return inner
    return found


def _torch(foreign: Foreign, folder: Folder, name: str, places: dict[str, str] | None) -> None:
    file, content = folder.torch(name)
    content = state_dict(file.where, content)
    take_tensors(foreign, file.where, content, lambda t: array_of(foreign, file, t))
    if places is None:
        return
    for tensor in content:
        if tensor not in places or places[tensor] != name:
            told = places.get(tensor, "no file")
            raise CheckpointError(f"{folder.path}: {shown(tensor)} is in {name}, its index: {told}")


def take_tensors(foreign: Foreign, where: str, content: dict[Any, Any], array: Any) -> None:
    """Weights of a state dict; two names of the same elements are a tie."""
    seen: dict[tuple[Any, ...], str] = {}
    for key, value in content.items():
        if type(key) is not str:
            raise CheckpointError(f"{where}: an entry called {shown(key)}")
        if not isinstance(value, Tensor):
            foreign.leave(key, f"{shown(value)}: not a tensor")
            continue
        if value.dtype not in FLOATS:
            foreign.leave(key, f"{value.dtype}: not a floating-point weight")
            continue
        if key in foreign.weights or key in foreign.ties:
            raise CheckpointError(f"{where}: {shown(key)} is in two files")
        place = (value.storage.key, value.offset, value.shape, value.stride, value.dtype)
        first = seen.setdefault(place, key)
        if first != key and value.numel > 0:
            foreign.ties[key] = first
        else:
            foreign.weights[key] = array(value)


def _take_optimizer(foreign: Foreign, folder: Folder, name: str, ids: Sequence[str] | None) -> None:
    file, content = folder.torch(name)
    _optimizer.take(foreign, file.where, content, lambda t: array_of(foreign, file, t), ids)


def _beside(foreign: Foreign, folder: Folder, chosen: str) -> None:
    """config.json, the step of a Trainer, and what is left out."""
    for name in folder.names():
        for pattern, why in _BESIDE:
            if pattern.fullmatch(name):
                foreign.leave(name, why)
        if name in WEIGHTS and name != chosen:
            foreign.leave(name, f"{chosen} was read")
    if folder.has("config.json"):
        config = _json(folder.file("config.json"))
        if isinstance(config, dict):
            foreign.config = config
    if folder.has("trainer_state.json"):
        state = _json(folder.file("trainer_state.json"))
        step = state.get("global_step") if isinstance(state, dict) else None
        if type(step) is int and 0 <= step < 2**53:
            foreign.step = step
        foreign.leave("trainer_state.json", "history of another trainer; its step is kept")


def _json(file: File) -> Any:
    if file.nbytes > 100_000_000:
        raise CheckpointError(f"{file.path}: over 100 MB of JSON")
    return parse_json(file.path, file.read(0, file.nbytes))
