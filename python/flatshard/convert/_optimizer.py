"""Optimizer state in torch.optim's form, keyed by names or by numbers, into names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CheckpointError
from ._foreign import Array, Foreign, mapping, sequence
from ._numbers import KNOWN_KEYS, TENSORS, names_of
from ._pickle_values import Tensor, shown

__all__ = ["MOMENTS", "group_of", "moments_of", "rule_of", "take"]

#: State arrays in the order of our moments, and the rule that keeps them.
MOMENTS = {
    ("exp_avg", "exp_avg_sq"): "AdamW",
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"): "AdamW",
    ("exp_avg",): "Lion",
    ("momentum_buffer",): "SGD",
    ("sum",): "Adagrad",
    (): "SGD",
}
_KEEPS = {
    "AdamW": 2,
    "Adam": 2,
    "Lion": 1,
    "SGD": 1,
    "Adagrad": 1,
}
#: Hyperparameters that would make our step another one.
_MUST_BE = {"maximize": (False, None), "dampening": (0, 0.0, None)}
_NUMBERS = ("lr", "weight_decay", "eps", "momentum", "lr_decay")


def take(
    foreign: Foreign,
    where: str,
    content: Any,
    array: Callable[[Any], Array],
    ids: Sequence[str] | None,
) -> None:
    """Take over a ``state_dict()`` of an optimizer: {"state": ..., "param_groups": ...}.

    Parameters
    ----------
    foreign : Foreign
        Gets state, steps and groups; has the weights.
    where : str
        The file, for messages.
    content : Any
        What the file holds.
    array : callable
        Where a tensor of the file lies; an Array is one already.
    ids : sequence of str, optional
        Names in the order of the numbers; None works them out.
    """
    content = mapping(where, content, "the content")
    for key in ("optimizer", "optimizer_state_dict", "optim"):  # one level of wrapping
        if "state" not in content and type(content.get(key)) is dict:
            content = content[key]
    if not {"state", "param_groups"} <= set(content):
        raise CheckpointError(f"{where}: not the state of an optimizer: no state and param_groups")
    state = mapping(where, content["state"], "state")
    groups = [
        mapping(where, group, "a param_group")
        for group in sequence(where, content["param_groups"], "param_groups")
    ]
    listed = [sequence(where, group.get("params"), "params") for group in groups]
    keys = [key for params in listed for key in params]
    bad = next((key for key in [*keys, *state] if type(key) not in (int, str)), None)
    if bad is not None:
        raise CheckpointError(f"{where}: a parameter called {shown(bad)}")
    if len(set(keys)) != len(keys):
        raise CheckpointError(f"{where}: a parameter is in two groups")
    if any(type(key) is int for key in [*keys, *state]):
        names = names_of(foreign, where, groups, listed, state, ids)
    else:
        names = {key: key for key in [*keys, *state]}
    for key, values in state.items():
        if key not in names:
            raise CheckpointError(f"{where}: state of parameter {shown(key)}, which no group has")
        take_state(foreign, where, names[key], mapping(where, values, "a state"), array)
    for group, params in zip(groups, listed, strict=True):
        found = group_of(where, group, array)
        found["params"] = [names[key] for key in params]
        foreign.groups.append(found)


def take_state(
    foreign: Foreign,
    where: str,
    name: str,
    values: dict[Any, Any],
    array: Callable[[Any], Array],
) -> None:
    """The state arrays and the step count of one parameter."""
    arrays = {}
    for key, value in values.items():
        if key == "step":
            number = array(value).scalar() if isinstance(value, TENSORS) else value
            foreign.steps[name] = count_of(where, number, f"the step of {name}")
        elif isinstance(value, TENSORS) and key in KNOWN_KEYS:
            arrays[str(key)] = array(value)
        elif value is not None:
            foreign.leave(f"{name} {shown(key)}", "a state that no optimizer here keeps")
    places: dict[tuple[Any, ...], str] = {}
    for key in arrays:
        value = values[key]
        if isinstance(value, Tensor) and value.numel:
            other = places.setdefault((value.storage.key, value.offset), key)
            if other != key:
                raise CheckpointError(
                    f"{where}: {other} and {key} of {name} are the same elements: the program that "
                    "wrote them lost one (FSDP1 does, offloading to the CPU on a CPU)"
                )
    if arrays:
        foreign.state[name] = arrays


def count_of(where: str, value: Any, what: str) -> int:
    """A whole number from 0, which may come as a float."""
    if type(value) not in (int, float) or not 0 <= value < 2**53 or value != int(value):
        raise CheckpointError(f"{where}: {what} is {shown(value)}, a count was expected")
    return int(value)


def group_of(where: str, group: dict[Any, Any], array: Callable[[Any], Array]) -> dict[str, Any]:
    """The hyperparameters of a group that matter here, as plain numbers."""
    found: dict[str, Any] = {}
    for key, allowed in _MUST_BE.items():
        if not any(group.get(key) is value or group.get(key) == value for value in allowed):
            raise CheckpointError(
                f"{where}: an optimizer with {key}={shown(group[key])}, which is not offered here"
            )
    for key in _NUMBERS:
        value = group.get(key)
        if isinstance(value, TENSORS):
            value = array(value).scalar()
        if value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise CheckpointError(f"{where}: {key} of a group is {shown(value)}")
        found[key] = float(value)
    betas = group.get("betas")
    if betas is not None:
        pair = sequence(where, betas, "betas")
        pair = [array(b).scalar() if isinstance(b, TENSORS) else b for b in pair]
        if len(pair) != 2 or any(type(b) not in (int, float) or not 0 <= b < 1 for b in pair):
            raise CheckpointError(f"{where}: betas of a group are {', '.join(map(shown, pair))}")
        found["betas"] = [float(b) for b in pair]
    for key in ("nesterov", "decoupled_weight_decay", "amsgrad"):
        if type(group.get(key)) is bool:
            found[key] = group[key]
    if "step" in group:  # fused optimizers count for a whole group
        value = group["step"]
        value = array(value).scalar() if isinstance(value, TENSORS) else value
        found["step"] = count_of(where, value, "step of a group")
    return found


def moments_of(foreign: Foreign, where: str) -> tuple[str, ...]:
    """The state arrays that parameters have, in our order; all must have the same."""
    found: dict[tuple[str, ...], str] = {}
    for name, arrays in foreign.state.items():
        keys = tuple(sorted(arrays, key=lambda k: (k == "max_exp_avg_sq", k)))
        found.setdefault(keys, name)
    if not found:  # saved before the first step: all of it is zeros
        if any("betas" in group for group in foreign.groups):
            amsgrad = any(group.get("amsgrad") for group in foreign.groups)
            return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
        return ("momentum_buffer",) if any(g.get("momentum") for g in foreign.groups) else ()
    if len(found) > 1:
        (one, a), (two, b) = list(found.items())[:2]
        raise CheckpointError(
            f"{where}: parameters with different state: {a} has {', '.join(one) or 'none'}, "
            f"{b} has {', '.join(two) or 'none'}"
        )
    keys = next(iter(found))
    if keys not in MOMENTS:
        raise CheckpointError(f"{where}: an optimizer that keeps {', '.join(keys)}: none here does")
    return keys


def rule_of(foreign: Foreign, where: str, moments: tuple[str, ...], rule: str | None) -> str:
    """The name of our rule: as told, or what the state and the groups say."""
    if rule is not None:
        if _KEEPS[rule] < len(moments) - ("max_exp_avg_sq" in moments):
            raise CheckpointError(f"{where}: keeps {', '.join(moments)}, which {rule} does not")
        return rule
    found = MOMENTS[moments]
    if found == "AdamW":
        said = {group.get("decoupled_weight_decay") for group in foreign.groups}
        if said == {False}:
            return "Adam"
        if said != {True}:
            foreign.notes.append(
                "the folder does not say whether it was Adam or AdamW: AdamW (rule=, --rule)"
            )
    return found
