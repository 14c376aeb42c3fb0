"""Folders of ``torch.distributed.checkpoint``: FSDP2, ``get_state_dict``, torchtitan, Accelerate.

``.metadata`` says which box of which tensor lies where; each box is a small archive of
``torch.save`` inside a ``.distcp`` file. Boxes are read in place, whatever the number of ranks.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._folders import first_of
from ..errors import CheckpointError
from . import _foreign, _optimizer, _pickles
from ._foreign import FLOATS, Array, Folder, Foreign
from ._numbers import KNOWN_KEYS
from ._pickle_values import DTYPES, Name, Record, Tensor, shown
from ._sources import Blocks, Source
from ._torch_zip import TorchFile

__all__ = ["folders_of", "read"]

METADATA = ".metadata"
_CLASS = "torch.distributed.checkpoint.metadata."
#: Boxes of one tensor: more than any job has ranks.
_BOXES_MAX = 20_000
#: Accelerate keeps model and optimizer in two folders.
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
#: How the state of an optimizer is spelled when it was flattened.
_KEYS = "|".join(sorted(KNOWN_KEYS | {"step"}, key=len, reverse=True))
_STATE = re.compile(rf"(?:(.*optim\w*)\.)?state\.(.+)\.({_KEYS})")
_GROUP = re.compile(r"(?:(.*optim\w*)\.)?param_groups\.(.+)\.(\w+)")
_MODELS = ("model", "module", "model_state_dict", "state_dict", "weights")


@dataclass(frozen=True)
class _Entry:
    """Something that a folder holds under a name."""

    folder: Folder
    where: str
    name: str
    path: tuple[Any, ...]
    meta: Record
    #: By the offset of the box; None for what is no tensor.
    places: dict[tuple[int, ...] | None, Record]

    @property
    def is_tensor(self) -> bool:
        return self.meta.name == _CLASS + "TensorStorageMetadata"


def folders_of(folder: Folder) -> list[str]:
    """The folders with ``.metadata`` that belong to a source; empty when it is none."""
    if folder.has(METADATA):
        return [folder.path]
    inner = [name for name in folder.names() if _ACCELERATE.fullmatch(name)]
    paths = [os.path.join(folder.path, name) for name in inner]
    return [
        path
        for path in paths
        if os.path.isfile(os.path.join(path, METADATA)) and not os.path.islink(path)
    ]


def read(folders: Sequence[Folder], ids: Sequence[str] | None) -> Foreign:
    """The content of one folder, or of Accelerate's two."""
    foreign = Foreign("DCP folder")
    entries: list[_Entry] = []
    for folder in folders:
        entries += _entries(folder)
    seen: dict[str, str] = {}
    for entry in entries:
        if seen.setdefault(entry.name, entry.where) != entry.where:
            raise CheckpointError(f"{entry.name} is in {seen[entry.name]} and in {entry.where}")
    where = entries[0].where if entries else folders[0].path
    content, roots, others = _sort_out(foreign, where, entries)
    weights, left = _weights_of(others, set(content["state"]))
    for name, entry in weights.items():
        array = _array(foreign, entry)
        if array.dtype not in FLOATS:
            foreign.leave(name, f"{array.dtype}: not a floating-point weight")
        else:
            foreign.weights[name] = array
    for entry in left:
        foreign.leave(entry.name, "neither weights nor state of the optimizer")
    if roots:
        _optimizer.take(foreign, where, content, lambda value: value, ids)
    return foreign


# -- the metadata ----------------------------------------------------------------------------------


def _record(where: str, value: Any, names: tuple[str, ...], what: str) -> Record:
    if not isinstance(value, Record) or value.name.rpartition(".")[2] not in names:
        raise CheckpointError(f"{where}: {what} is {shown(value)}")
    return value


def _entries(folder: Folder) -> list[_Entry]:
    file = folder.file(METADATA)
    where = file.path
    if file.nbytes > _pickles.NBYTES_MAX:
        raise CheckpointError(f"{where}: {file.nbytes} bytes of metadata")
    value = _pickles.load(where, file.read(0, file.nbytes))
    fields = _record(where, value, ("Metadata",), "the content").fields
    metas = _foreign.mapping(where, fields.get("state_dict_metadata"), "state_dict_metadata")
    storage = _foreign.mapping(where, fields.get("storage_data"), "storage_data")
    planner = fields.get("planner_data")
    paths = planner if type(planner) is dict else {}
    places: dict[str, dict[tuple[int, ...] | None, Record]] = {}
    for key, info in storage.items():
        index = _record(where, key, ("MetadataIndex",), "a key of storage_data").fields
        place = _record(where, info, ("_StorageInfo",), "an entry of storage_data")
        name, offset = index.get("fqn"), index.get("offset")
        if type(name) is not str or name not in metas:
            raise CheckpointError(f"{where}: data of {shown(name)}, which is not listed")
        at = None if offset is None else _foreign.shape(where, offset, f"an offset of {name}")
        if at in places.setdefault(name, {}):
            raise CheckpointError(f"{where}: {name} has the same box twice")
        places[name][at] = place
    found = []
    for name, meta in metas.items():
        _foreign.text(where, name, "a name")
        _record(where, meta, ("TensorStorageMetadata", "BytesStorageMetadata"), name)
        path = paths.get(name)
        if type(path) is not tuple or not path:
            path = (name,)
        if len(path) > 16 or any(type(part) not in (str, int) for part in path):
            raise CheckpointError(f"{where}: the path of {name} is {shown(path)}")
        found.append(_Entry(folder, where, name, path, meta, places.get(name, {})))
    return found


def _archive(entry: _Entry, place: Record) -> tuple[TorchFile, Any]:
    """The archive of a box or value, and its content."""
    fields = place.fields
    name = _foreign.text(entry.where, fields.get("relative_path"), f"the file of {entry.name}")
    offset = _foreign.size(entry.where, fields.get("offset"), f"the place of {entry.name}")
    length = _foreign.size(entry.where, fields.get("length"), f"the length of {entry.name}")
    if fields.get("transform_descriptors"):
        raise CheckpointError(f"{entry.where}: {entry.name} is compressed or transformed")
    opened = TorchFile(entry.folder.file(name), offset, length)
    return opened, opened.load()


def _array(foreign: Foreign, entry: _Entry) -> Array:
    """A whole tensor of its boxes, which must fill it."""
    where, name = entry.where, entry.name
    shape = _foreign.shape(where, entry.meta.fields.get("size"), f"the size of {name}")
    chunks = _foreign.sequence(where, entry.meta.fields.get("chunks"), f"the chunks of {name}")
    dtype = _dtype(entry)
    if len(chunks) > _BOXES_MAX:
        raise CheckpointError(f"{where}: {name} is in {len(chunks)} boxes")
    blocks: list[tuple[tuple[int, ...], tuple[int, ...], Source]] = []
    for chunk in chunks:
        fields = _record(where, chunk, ("ChunkStorageMetadata",), f"a chunk of {name}").fields
        offsets = _foreign.shape(where, fields.get("offsets"), f"an offset of {name}")
        sizes = _foreign.shape(where, fields.get("sizes"), f"a size of {name}")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CheckpointError(f"{where}: a box of {name} with other dimensions")
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise CheckpointError(
                f"{where}: a box of {name} at {list(offsets)} with sizes {list(sizes)} reaches "
                f"beyond {list(shape)}"
            )
        place = entry.places.get(offsets)
        if place is None and not (len(chunks) == 1 and None in entry.places):
            raise CheckpointError(f"{where}: no file holds the box of {name} at {list(offsets)}")
        file, value = _archive(entry, place or entry.places[None])
        if not isinstance(value, Tensor) or value.shape != sizes or value.dtype != dtype:
            raise CheckpointError(
                f"{file.where}: a box of {name} of {dtype}, {list(sizes)} was expected, got "
                f"{shown(value)}"
            )
        array = _foreign.array_of(foreign, file, value)
        if array.numel:
            blocks.append((offsets, sizes, array.source))
    _check_boxes(where, name, shape, [(o, s) for o, s, _ in blocks])
    if not blocks:
        raise CheckpointError(f"{where}: {name} is {list(shape)} and has no elements")
    if len(blocks) == 1:
        return Array(shape, blocks[0][2])
    return Array(shape, Blocks(shape, blocks))


def _dtype(entry: _Entry) -> str:
    properties = entry.meta.fields.get("properties")
    fields = properties.fields if isinstance(properties, Record) else {}
    state = fields.get("state")
    value = state[0] if type(state) is tuple and state else fields.get("dtype")
    text = value.text.removeprefix("torch.") if isinstance(value, Name) else ""
    if text not in DTYPES:
        raise CheckpointError(f"{entry.where}: {entry.name} is of dtype {shown(value)}")
    return text


def _check_boxes(
    where: str,
    name: str,
    shape: tuple[int, ...],
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """Boxes must fill the tensor: as many elements, and none twice."""
    held = sum(math.prod(sizes) for _, sizes in boxes)
    if held != math.prod(shape):
        raise CheckpointError(
            f"{where}: boxes of {name} hold {held} of {math.prod(shape)} elements"
        )
    boxes.sort()
    for i, (offsets, sizes) in enumerate(boxes):
        for other, extent in boxes[i + 1 :]:
            if other and other[0] >= offsets[0] + sizes[0]:
                break  # sorted by rows: no later one meets this
            meets = zip(offsets, sizes, other, extent, strict=True)
            if all(a < c + d and c < a + b for a, b, c, d in meets):
                raise CheckpointError(
                    f"{where}: boxes of {name} at {list(offsets)} and {list(other)} overlap"
                )


# -- whose is what ---------------------------------------------------------------------------------


def _sort_out(
    foreign: Foreign, where: str, entries: list[_Entry]
) -> tuple[dict[str, Any], set[Any], list[_Entry]]:
    """The optimizer's state, as its state_dict() would be; where it lay; and what is left."""
    state: dict[Any, dict[Any, Any]] = {}
    groups: dict[int, dict[Any, Any]] = {}
    single: dict[str, dict[Any, Any]] = {}
    roots, others = set(), []
    for entry in entries:
        path = entry.path
        last = path[-1] if type(path[-1]) is str else ""
        flat, group = _STATE.fullmatch(last), _GROUP.fullmatch(last)
        if len(path) >= 3 and path[-3] == "state":
            roots.add(path[:-3])
            state.setdefault(path[-2], {})[path[-1]] = _value(foreign, entry)
        elif len(path) >= 3 and path[-3] == "param_groups" and type(path[-2]) is int:
            roots.add(path[:-3])
            groups.setdefault(path[-2], {})[path[-1]] = _value(foreign, entry)
        elif len(path) >= 2 and path[-2] == "param_groups" and type(path[-1]) is int:
            roots.add(path[:-2])
            groups[path[-1]] = _foreign.mapping(where, _value(foreign, entry), entry.name)
        elif last == "param_groups":
            roots.add(path[:-1])
            found = _foreign.sequence(where, _value(foreign, entry), entry.name)
            groups.update((i, _foreign.mapping(where, g, entry.name)) for i, g in enumerate(found))
        elif flat is not None and (flat[1] or _is_optimizer(path)):
            roots.add((*path[:-1], *((flat[1],) if flat[1] else ())))
            state.setdefault(flat[2], {})[flat[3]] = _value(foreign, entry)
        elif group is not None and (group[1] or _is_optimizer(path)):
            roots.add((*path[:-1], *((group[1],) if group[1] else ())))
            if group[2].isdigit() and len(group[2]) < 6:  # a place in a list
                groups.setdefault(int(group[2]), {})[group[3]] = _value(foreign, entry)
            else:
                single.setdefault(group[2], {})[group[3]] = _value(foreign, entry)
        else:
            others.append(entry)
    if len(roots) > 1:
        names = sorted(".".join(map(str, root)) for root in roots)
        raise CheckpointError(f"{where}: holds several optimizers: {first_of(names)}")
    listed = [groups[i] for i in sorted(groups)] or _gathered(single)
    if not listed and state:
        listed = [{"params": list(state)}]
    return {"state": state, "param_groups": listed}, roots, others


def _is_optimizer(path: tuple[Any, ...]) -> bool:
    return any(type(part) is str and "optim" in part.lower() for part in path[:-1])


def _gathered(single: dict[str, dict[Any, Any]]) -> list[dict[Any, Any]]:
    """Groups of hyperparameters that were flattened: one for each set of equal ones."""
    found: dict[str, dict[Any, Any]] = {}
    for name, values in single.items():
        plain = {k: _number(v) for k, v in values.items() if k != "params"}
        key = repr(sorted((str(k), shown(v) if type(v) is not tuple else v[:4]) for k, v in
                          plain.items()))  # fmt: skip
        found.setdefault(key, {**plain, "params": []})["params"].append(name)
    return list(found.values())


def _number(value: Any) -> Any:
    if isinstance(value, Array) and value.numel == 1:
        return value.scalar()
    return tuple(value) if type(value) is list else value


def _value(foreign: Foreign, entry: _Entry) -> Any:
    """A tensor as an Array, anything else as its pickle gives it."""
    if entry.is_tensor:
        return _array(foreign, entry)
    if len(entry.places) != 1:
        raise CheckpointError(f"{entry.where}: no file holds {entry.name}")
    return _archive(entry, next(iter(entry.places.values())))[1]


def _prefix(held: dict[str, _Entry], names: set[str]) -> str:
    """What stands before the optimizer's names in those of a state dict; "" where nothing does."""
    if not names or names <= set(held):
        return ""
    first = min(names)
    found = [name[: -len(first)] for name in held if name.endswith(f".{first}")]
    return next((p for p in found if all(p + name in held for name in names)), "")


def _weights_of(entries: list[_Entry], trained: set[Any]) -> tuple[dict[str, _Entry], list[_Entry]]:
    """The state dict of the model among what is no optimizer's, and the rest."""
    boxes: dict[tuple[Any, ...], dict[str, _Entry]] = {}
    rest = []
    for entry in entries:
        if entry.is_tensor and type(entry.path[-1]) is str:
            boxes.setdefault(entry.path[:-1], {})[entry.path[-1]] = entry
        else:
            rest.append(entry)
    names = {name for name in trained if type(name) is str}
    for path, held in list(boxes.items()):
        prefix = _prefix(held, names)
        if prefix:  # no paths are told: "model." is part of each name
            inside = {n.removeprefix(prefix): e for n, e in held.items() if n.startswith(prefix)}
            boxes[path] = {n: e for n, e in held.items() if not n.startswith(prefix)}
            boxes[path + (prefix,)] = inside

    def rank(item: tuple[tuple[Any, ...], dict[str, _Entry]]) -> tuple[bool, bool, int]:
        path, held = item
        named = bool(path) and path[-1] in _MODELS
        return (bool(names) and names <= set(held), named, len(held))

    best = max(boxes.items(), key=rank, default=((), {}))
    for path, held in boxes.items():
        if path != best[0]:
            rest += held.values()
    return best[1], rest
