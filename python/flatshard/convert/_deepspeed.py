"""Folders of DeepSpeed: ZeRO stages 1, 2 and 3, and no ZeRO.

Each rank's file of optimizer state holds its part of flat fp32 buffers: masters, and moments of the
same layout. At stages 1 and 2 a group's buffer is its parameters end to end, cut into equal parts;
newer versions also say which parameter lies where. At stage 3 each parameter is cut by itself.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._folders import is_plain
from ..errors import CheckpointError
from . import _foreign, _optimizer
from ._foreign import FLOATS, Array, Folder, Foreign
from ._numbers import KNOWN_KEYS
from ._pickles import Record, Tensor, shown
from ._sources import Joined, Part, Source
from ._torch_zip import TorchFile

__all__ = ["folder_of", "read"]

_LATEST = "latest"
_MODEL = re.compile(r"mp_rank_(\d{1,6})_model_states\.pt")
_MODEL3 = re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_OTHER = re.compile(r"(layer_\d+|expert_|layer_\d+_expert).*\.pt")
#: What a model's file says that is not taken over.
_LEFT = {
    "lr_scheduler": "the schedule: give the new run its own",
    "data_sampler": "the position in another system's data",
    "random_ltd": "not weights or state",
}
_USED = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version", "sparse_tensor_module_names", "csr_tensor_module_names"),
    *("num_experts", "micro_steps", "mp_sharding_info"),
}


@dataclass(frozen=True)
class _File:
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


def read(folder: Folder, ids: Sequence[str] | None) -> Foreign:
    """The content of a folder of one step."""
    foreign = Foreign("DeepSpeed folder")
    models, optimizers = _files(folder)
    first = models[0]
    _refuse(first)
    module = _foreign.mapping(first.where, first.content.get("module"), "module")
    if optimizers:
        stage = _stage(optimizers[0])
        foreign.kind = f"DeepSpeed ZeRO-{stage} folder"
        layout = _layout3 if stage == 3 else _layout12
        masters, state = layout(foreign, models, optimizers)
        _groups(foreign, first, optimizers[0], stage)
        for name, arrays in state.items():
            foreign.state[name] = arrays
    elif os.path.basename(first.file.file.path).startswith("zero_pp_rank"):
        raise CheckpointError(
            f"{folder.path}: stage 3 keeps weights in the files of optimizer state, and none is "
            "there"
        )
    else:
        stage, masters = 0, {}
        if first.content.get("param_shapes"):
            foreign.notes.append("no files of optimizer state: weights are the compute copies")
    _weights(foreign, models, module, masters, stage)
    if not optimizers:
        _plain_optimizer(foreign, first, ids)
    count = first.content.get("global_steps")
    if count is not None:
        foreign.step = _optimizer.count_of(first.where, count, "global_steps")
    for key, value in first.content.items():
        if key in _LEFT and value is not None:
            foreign.leave(str(key), _LEFT[key])
        elif key not in _USED and key not in _LEFT:
            foreign.leave(shown(key) if type(key) is not str else key, "data of the program's own")
    return foreign


# -- files -----------------------------------------------------------------------------------------


def _files(folder: Folder) -> tuple[list[_File], list[_File]]:
    """Files of the model and of the optimizer, by rank."""
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

    def load(name: str) -> _File:
        file, content = folder.torch(name)
        return _File(file, _foreign.mapping(file.where, content, "the content"))

    return (
        [load(models[rank]) for rank in sorted(models)],
        [load(found["optimizer"][rank]) for rank in sorted(found["optimizer"])],
    )


def _refuse(model: _File) -> None:
    if model.content.get("mp_world_size") not in (None, 1):
        raise CheckpointError(f"{model.where}: tensor parallelism is not read")
    if model.content.get("num_experts"):
        raise CheckpointError(f"{model.where}: mixtures of experts are not read")


def _state(optimizer: _File) -> dict[Any, Any]:
    found = optimizer.content.get("optimizer_state_dict")
    return _foreign.mapping(optimizer.where, found, "optimizer_state_dict")


def _stage(optimizer: _File) -> int:
    state = _state(optimizer)
    value = state.get("zero_stage")
    if isinstance(value, Record):
        value = value.args[0] if value.args else None
    if value is None:
        value = 3 if "fp32_flat_groups" in state else 1
    if value not in (0, 1, 2, 3) or type(value) is not int:
        raise CheckpointError(f"{optimizer.where}: zero_stage is {shown(value)}")
    return max(value, 1)


def _shapes(model: _File) -> list[dict[str, tuple[int, ...]]]:
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


def _flat(foreign: Foreign, file: _File, value: Any, what: str) -> Array:
    """A buffer: one dimension."""
    if not isinstance(value, Tensor) or value.dtype not in FLOATS:
        raise CheckpointError(f"{file.where}: {what} is {shown(value)}, a tensor was expected")
    if len(value.shape) != 1 or (value.numel > 1 and value.stride != (1,)):
        raise CheckpointError(f"{file.where}: {what} is {list(value.shape)}, no flat buffer")
    return _foreign.array_of(foreign, file.file, value)


def _whole(file: str, name: str, shape: tuple[int, ...], parts: Sequence[Source]) -> Array:
    """A parameter of its parts, which must be all of it."""
    held = sum(part.numel for part in parts)
    if held != math.prod(shape):
        raise CheckpointError(f"{file}: parts of {name} hold {held} of {math.prod(shape)} elements")
    if len({part.dtype for part in parts}) > 1:
        raise CheckpointError(f"{file}: parts of {name} have several dtypes")
    return Array(shape, Joined(list(parts)))


def _buffers(
    foreign: Foreign, files: Sequence[_File], key: str, inner: str, count: int | None
) -> list[list[dict[str, Array]]]:
    """Of each rank and group: masters ("weight"), and moments of the same layout."""
    found = []
    for file in files:
        state = _state(file)
        masters = _foreign.sequence(file.where, state.get(key), key)
        base = state.get(inner)
        if isinstance(base, list):  # "elastic": states by group, nothing else
            states: dict[Any, Any] = dict(enumerate(base))
        else:
            base = _foreign.mapping(file.where, base, inner)
            states = _foreign.mapping(file.where, base.get("state"), "state")
        if count is not None and len(masters) != count:
            raise CheckpointError(f"{file.where}: {len(masters)} buffers of {count} groups")
        rank = []
        for i, value in enumerate(masters):
            arrays = {"weight": _flat(foreign, file, value, f"buffer {i} of {key}")}
            values = states.get(i, {})
            for name, moment in _foreign.mapping(file.where, values, f"state {i}").items():
                if name in KNOWN_KEYS and moment is not None:
                    arrays[name] = _flat(foreign, file, moment, f"{name} of buffer {i}")
            # Masters may be written without the padding at the end that moments have.
            if any(array.numel < arrays["weight"].numel for array in arrays.values()):
                raise CheckpointError(f"{file.where}: buffer {i} is longer than its state")
            rank.append(arrays)
        found.append(rank)
    return found


def _step_of(foreign: Foreign, file: _File, inner: str, index: int) -> int | None:
    """The step count that a rank keeps for a buffer."""
    base = _state(file).get(inner)
    states = dict(enumerate(base)) if isinstance(base, list) else (base or {}).get("state", {})
    values = states.get(index, {}) if type(states) is dict else {}
    value = values.get("step") if type(values) is dict else None
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = _foreign.array_of(foreign, file.file, value).scalar()
    return _optimizer.count_of(file.where, value, "step")


_Layout = tuple[dict[str, Array], dict[str, dict[str, Array]]]


# -- stages 1 and 2 --------------------------------------------------------------------------------


def _layout12(foreign: Foreign, models: Sequence[_File], files: Sequence[_File]) -> _Layout:
    """Masters and state of each parameter."""
    shapes = _shapes(models[0])
    inner = "base_optimizer_state"
    buffers = _buffers(foreign, files, "single_partition_of_fp32_groups", inner, len(shapes))
    masters: dict[str, Array] = {}
    state: dict[str, dict[str, Array]] = {}
    for g, group in enumerate(shapes):
        ranks = [rank[g] for rank in buffers]
        places = _mapped(files, g, group, ranks) or _in_order(files, g, group, ranks)
        step = _step_of(foreign, files[0], inner, g)
        keys = set.intersection(*(set(rank) for rank in ranks))
        for name, shape in group.items():
            for key in keys:
                parts = [Part(ranks[r][key].source, at, n) for r, at, n in places[name]]
                array = _whole(files[0].where, name, shape, parts)
                if key == "weight":
                    masters[name] = array
                else:
                    state.setdefault(name, {})[key] = array
            if step is not None:
                foreign.steps[name] = step
    return masters, state


_Places = dict[str, list[tuple[int, int, int]]]


def _mapped(
    files: Sequence[_File],
    g: int,
    group: dict[str, tuple[int, ...]],
    ranks: Sequence[dict[str, Array]],
) -> _Places | None:
    """(rank, first element, elements) of each parameter, as newer versions say."""
    places: _Places = {name: [] for name in group}
    for r, file in enumerate(files):
        given = _state(file).get("param_slice_mappings")
        if given is None:
            return None
        slices = _foreign.sequence(file.where, given, "param_slice_mappings")
        if len(slices) <= g:
            raise CheckpointError(f"{file.where}: param_slice_mappings lacks group {g}")
        taken = []
        for name, address in _foreign.mapping(file.where, slices[g], "a slice mapping").items():
            fields = address.fields if isinstance(address, Record) else {}
            at = _foreign.size(file.where, fields.get("start"), f"the place of {shown(name)}")
            n = _foreign.size(file.where, fields.get("numel"), f"the length of {shown(name)}")
            if name not in places:
                raise CheckpointError(
                    f"{file.where}: a slice of {shown(name)}, which param_shapes does not list"
                )
            if at + n > ranks[r]["weight"].numel:
                raise CheckpointError(
                    f"{file.where}: the slice of {name} reaches beyond its buffer"
                )
            places[name].append((r, at, n))
            taken.append((at, at + n))
        taken.sort()
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(taken)):
            raise CheckpointError(f"{file.where}: slices of group {g} overlap")
    return places


def _in_order(
    files: Sequence[_File],
    g: int,
    group: dict[str, tuple[int, ...]],
    ranks: Sequence[dict[str, Array]],
) -> _Places:
    """The same where nothing is said: end to end over all ranks, with padding at the end."""
    ends = list(itertools.accumulate(rank["weight"].numel for rank in ranks))
    needed = sum(math.prod(shape) for shape in group.values())
    # The buffer is rounded up to two elements a rank.
    if not needed <= ends[-1] < needed + 2 * len(files):
        raise CheckpointError(
            f"{files[0].where}: group {g} has {needed} elements, its buffers {ends[-1]}: the "
            "layout of this version is not known"
        )
    places: _Places = {}
    at = 0
    for name, shape in group.items():
        stop = at + math.prod(shape)
        found = []
        for r, end in enumerate(ends):
            begin = end - ranks[r]["weight"].numel
            low, high = max(at, begin), min(stop, end)
            if low < high:
                found.append((r, low - begin, high - low))
        places[name] = found
        at = stop
    return places


# -- stage 3 ---------------------------------------------------------------------------------------


def _layout3(foreign: Foreign, models: Sequence[_File], files: Sequence[_File]) -> _Layout:
    """Masters and state of each parameter: each is cut into equal parts of its own."""
    shapes = {name: shape for group in _shapes(models[0]) for name, shape in group.items()}
    inner = "optimizer_state_dict"
    buffers = _buffers(foreign, files, "fp32_flat_groups", inner, None)
    if len({len(rank) for rank in buffers}) > 1:
        raise CheckpointError(f"{files[0].where}: ranks hold different numbers of buffers")
    sizes = [[group["weight"].numel for group in rank] for rank in buffers]
    if any(rank != sizes[0] for rank in sizes):
        raise CheckpointError(f"{files[0].where}: ranks hold buffers of different lengths")
    masters: dict[str, Array] = {}
    state: dict[str, dict[str, Array]] = {}
    index, at = 0, 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // len(files))
        while index < len(sizes[0]) and at == sizes[0][index]:
            index, at = index + 1, 0
        if index == len(sizes[0]) or at + part > sizes[0][index]:
            raise CheckpointError(
                f"{files[0].where}: {name} does not lie where {len(files)} ranks keep it"
            )
        keys = set.intersection(*(set(rank[index]) for rank in buffers))
        for key in keys:
            parts = [
                Part(rank[index][key].source, at, max(min(part, numel - r * part), 0))
                for r, rank in enumerate(buffers)
            ]
            array = _whole(files[0].where, name, shape, parts)
            if key == "weight":
                masters[name] = array
            else:
                state.setdefault(name, {})[key] = array
        step = _step_of(foreign, files[0], inner, index)
        if step is not None:
            foreign.steps[name] = step
        at += part
    rest = sum(sizes[0][index:]) - at if index < len(sizes[0]) else 0
    if rest != 0:
        raise CheckpointError(
            f"{files[0].where}: buffers hold {rest} elements a rank more than the parameters"
        )
    return masters, state


def _fragments(foreign: Foreign, models: Sequence[_File]) -> dict[str, Array]:
    """Frozen parameters of stage 3: a part on each rank."""
    given = models[0].content.get("frozen_param_shapes")
    found: dict[str, Array] = {}
    if given is None:
        return found
    for name, size in _foreign.mapping(models[0].where, given, "frozen_param_shapes").items():
        shape = _foreign.shape(models[0].where, size, f"the shape of {shown(name)}")
        numel, parts = math.prod(shape), []
        part = -(-numel // len(models))
        for r, model in enumerate(models):
            held = model.content.get("frozen_param_fragments")
            held = _foreign.mapping(model.where, held, "frozen_param_fragments")
            flat = _flat(foreign, model, held.get(name), f"the part of {shown(name)}")
            if flat.numel != part:
                raise CheckpointError(f"{model.where}: a part of {name} with {flat.numel} elements")
            parts.append(Part(flat.source, 0, max(min(part, numel - r * part), 0)))
        found[_foreign.text(models[0].where, name, "a name")] = _whole(
            models[0].where, name, shape, parts
        )
    return found


# -- the rest --------------------------------------------------------------------------------------


def _weights(
    foreign: Foreign,
    models: Sequence[_File],
    module: dict[Any, Any],
    masters: dict[str, Array],
    stage: int,
) -> None:
    """Every parameter, in the order of the module: masters where there are, else what it holds."""
    model = models[0]
    buffers = set(_foreign.names(model.where, model.content.get("buffer_names") or [], "buffers"))
    shared = _foreign.mapping(
        model.where, model.content.get("shared_params") or {}, "shared_params"
    )
    frozen = _fragments(foreign, models) if stage == 3 else {}
    compute: Counter[str] = Counter()
    for name, value in module.items():
        if type(name) is not str:
            raise CheckpointError(f"{model.where}: an entry of the module called {shown(name)}")
        if isinstance(value, Tensor) and name in masters:
            compute[value.dtype] += 1
        if name in buffers:
            foreign.leave(name, "a buffer, not a parameter")
        elif name in masters:
            foreign.weights[name] = masters[name]
        elif name in shared:
            foreign.ties[name] = _foreign.text(model.where, shared[name], f"the tie of {name}")
        elif name in frozen:
            foreign.weights[name] = frozen[name]
            foreign.frozen.add(name)
        elif not isinstance(value, Tensor) or value.dtype not in FLOATS:
            foreign.leave(name, "not a floating-point weight")
        elif stage == 3:
            foreign.nameless.add(name)
            foreign.leave(name, "stage 3 keeps no value: a second name? (ties=, --tie)")
        else:
            foreign.weights[name] = _foreign.array_of(foreign, model.file, value)
            if masters:
                foreign.frozen.add(name)
    for name, array in {**masters, **frozen}.items():
        foreign.weights.setdefault(name, array)
    wrong = next((n for n in foreign.ties.values() if n not in foreign.weights), None)
    if wrong is not None:
        raise CheckpointError(f"{model.where}: a tie of {wrong}, which it does not hold")
    if compute:
        foreign.param_dtype = compute.most_common(1)[0][0]


def _groups(foreign: Foreign, model: _File, optimizer: _File, stage: int) -> None:
    """Hyperparameters, one set a group of param_shapes, and the state of loss scaling."""
    state = _state(optimizer)
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    shapes = _shapes(model)
    given = base.get("param_groups") if type(base) is dict else None
    groups: list[Any] = [{}] * len(shapes)
    if given is not None:
        groups = _foreign.sequence(optimizer.where, given, "param_groups")
    if len(groups) != len(shapes):
        raise CheckpointError(
            f"{optimizer.where}: {len(groups)} groups of hyperparameters, {len(shapes)} of "
            "parameters"
        )
    decoupled = _decoupled(model)
    for group, names in zip(groups, shapes, strict=True):
        values = _foreign.mapping(optimizer.where, group, "a param_group")
        found = _optimizer.group_of(
            optimizer.where, values, lambda t: _foreign.array_of(foreign, optimizer.file, t)
        )
        if decoupled is not None:
            found.setdefault("decoupled_weight_decay", decoupled)
        found["params"] = list(names)
        if "step" in found:
            for name in names:
                foreign.steps.setdefault(name, found["step"])
        foreign.groups.append(found)
    scaler = state.get("loss_scaler")
    fields = scaler.fields if isinstance(scaler, Record) else {}
    if fields.get("dynamic") is True:
        foreign.scaler = _scaler(optimizer.where, fields)


def _decoupled(model: _File) -> bool | None:
    """Whether the configuration's Adam decays weights apart from the gradient."""
    config = model.content.get("ds_config")
    optimizer = config.get("optimizer") if type(config) is dict else None
    if type(optimizer) is not dict or type(optimizer.get("type")) is not str:
        return None
    params = optimizer.get("params")
    apart = params.get("adam_w_mode", True) if type(params) is dict else True
    kind = optimizer["type"].lower()
    return True if kind == "adamw" else bool(apart) if kind == "adam" else None


def _scaler(where: str, fields: dict[str, Any]) -> dict[str, float]:
    """The state of a dynamic loss scale, in our words."""
    found = {}
    for key in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window", "cur_hysteresis"):
        value: Any = fields.get(key)
        if type(value) not in (int, float) or not abs(value) < 2**62:
            raise CheckpointError(f"{where}: {key} of the loss scaler is {shown(value)}")
        found[key] = value
    since = max(int(found["cur_iter"] - found["last_overflow_iter"]) - 1, 0)
    window = max(int(found["scale_window"]), 1)
    return {
        "scale": float(found["cur_scale"]),
        "clean": since % window,
        "patience": int(found["cur_hysteresis"]),
    }


def _plain_optimizer(foreign: Foreign, model: _File, ids: Sequence[str] | None) -> None:
    """Without ZeRO: torch's own state, in the file of the model."""
    content = model.content.get("optimizer")
    if content is None:
        return
    if type(content) is not dict or not {"state", "param_groups"} <= set(content):
        foreign.leave("optimizer", "a wrapped optimizer without ZeRO: its layout is not read")
        return
    _optimizer.take(
        foreign, model.where, content, lambda t: _foreign.array_of(foreign, model.file, t), ids
    )
