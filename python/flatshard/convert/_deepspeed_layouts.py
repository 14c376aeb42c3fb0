"""Where each parameter's masters and moments lie in the flat buffers of DeepSpeed's ranks.

At stages 1 and 2 a group's buffer is its parameters end to end, cut into equal parts; newer
versions also say which parameter lies where. At stage 3 each parameter is cut by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..errors import CheckpointError
from . import _foreign, _optimizer
from ._deepspeed_files import RankFile, shapes_of, state_of
from ._foreign import FLOATS, Array, Foreign
from ._numbers import KNOWN_KEYS
from ._pickle_values import Record, Tensor, shown
from ._sources import Joined, Part, Source

__all__ = ["frozen_parts", "layout3", "layout12"]


def _flat(foreign: Foreign, file: RankFile, value: Any, what: str) -> Array:
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
    foreign: Foreign, files: Sequence[RankFile], key: str, inner: str, count: int | None
) -> list[list[dict[str, Array]]]:
    """Of each rank and group: masters ("weight"), and moments of the same layout."""
    found = []
    for file in files:
        state = state_of(file)
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


def _step_of(foreign: Foreign, file: RankFile, inner: str, index: int) -> int | None:
    """The step count that a rank keeps for a buffer."""
    base = state_of(file).get(inner)
    states = dict(enumerate(base)) if isinstance(base, list) else (base or {}).get("state", {})
    values = states.get(index, {}) if type(states) is dict else {}
    value = values.get("step") if type(values) is dict else None
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = _foreign.array_of(foreign, file.file, value).scalar()
    return _optimizer.count_of(file.where, value, "step")


#: Masters by parameter, and the other state by parameter and key.
_Layout = tuple[dict[str, Array], dict[str, dict[str, Array]]]


# -- stages 1 and 2 --------------------------------------------------------------------------------


def layout12(foreign: Foreign, models: Sequence[RankFile], files: Sequence[RankFile]) -> _Layout:
    """Masters and state of each parameter at stages 1 and 2; notes their step counts."""
    shapes = shapes_of(models[0])
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
    files: Sequence[RankFile],
    g: int,
    group: dict[str, tuple[int, ...]],
    ranks: Sequence[dict[str, Array]],
) -> _Places | None:
    """(rank, first element, elements) of each parameter, as newer versions say."""
    places: _Places = {name: [] for name in group}
    for r, file in enumerate(files):
        given = state_of(file).get("param_slice_mappings")
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
    files: Sequence[RankFile],
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


def layout3(foreign: Foreign, models: Sequence[RankFile], files: Sequence[RankFile]) -> _Layout:
    """Masters and state of each parameter at stage 3; notes their step counts.

    Each parameter is cut into equal parts of its own.
    """
    shapes = {name: shape for group in shapes_of(models[0]) for name, shape in group.items()}
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


def frozen_parts(foreign: Foreign, models: Sequence[RankFile]) -> dict[str, Array]:
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
