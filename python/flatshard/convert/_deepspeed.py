"""Folders of DeepSpeed: ZeRO stages 1, 2 and 3, and no ZeRO.

Each rank's file of optimizer state holds its part of flat fp32 buffers: masters, and moments of the
same layout. ``_deepspeed_files`` reads the files, ``_deepspeed_layouts`` finds the parameters in
the buffers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..errors import CheckpointError
from . import _foreign, _optimizer
from ._deepspeed_files import RankFile, read_files, shapes_of, stage_of, state_of
from ._deepspeed_layouts import frozen_parts, layout3, layout12
from ._foreign import FLOATS, Array, Folder, Foreign
from ._pickle_values import Record, Tensor, shown

__all__ = ["read"]

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


def read(folder: Folder, ids: Sequence[str] | None) -> Foreign:
    """The content of a folder of one step."""
    foreign = Foreign("DeepSpeed folder")
    models, optimizers = read_files(folder)
    first = models[0]
    _refuse(first)
    module = _foreign.mapping(first.where, first.content.get("module"), "module")
    if optimizers:
        stage = stage_of(optimizers[0])
        foreign.kind = f"DeepSpeed ZeRO-{stage} folder"
        layout = layout3 if stage == 3 else layout12
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


def _refuse(model: RankFile) -> None:
    if model.content.get("mp_world_size") not in (None, 1):
        raise CheckpointError(f"{model.where}: tensor parallelism is not read")
    if model.content.get("num_experts"):
        raise CheckpointError(f"{model.where}: mixtures of experts are not read")


def _weights(
    foreign: Foreign,
    models: Sequence[RankFile],
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
    frozen = frozen_parts(foreign, models) if stage == 3 else {}
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


def _groups(foreign: Foreign, model: RankFile, optimizer: RankFile, stage: int) -> None:
    """Hyperparameters, one set a group of param_shapes, and the state of loss scaling."""
    state = state_of(optimizer)
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    shapes = shapes_of(model)
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


def _decoupled(model: RankFile) -> bool | None:
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


def _plain_optimizer(foreign: Foreign, model: RankFile, ids: Sequence[str] | None) -> None:
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
