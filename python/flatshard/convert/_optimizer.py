"""Optimizer state in torch.optim's form, keyed by names or by numbers, into names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from .._folders import first_of
from ..errors import CheckpointError
from ._foreign import FLOATS, Array, Foreign, mapping, sequence
from ._pickles import Tensor, shown

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
KNOWN_KEYS = {key for keys in MOMENTS for key in keys}
#: Hyperparameters that would make our step another one.
_MUST_BE = {"maximize": (False, None), "dampening": (0, 0.0, None)}
_NUMBERS = ("lr", "weight_decay", "eps", "momentum", "lr_decay")


def take(
    foreign: Foreign,
    where: str,
    content: Any,
    array: Callable[[Tensor], Array],
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
        Where a tensor of the file lies.
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
        names = _names_of(foreign, where, groups, listed, state, ids)
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
    array: Callable[[Tensor], Array],
) -> None:
    """The state arrays and the step count of one parameter."""
    arrays = {}
    for key, value in values.items():
        if key == "step":
            number = array(value).scalar() if isinstance(value, Tensor) else value
            foreign.steps[name] = count_of(where, number, f"the step of {name}")
        elif isinstance(value, Tensor) and key in KNOWN_KEYS:
            arrays[str(key)] = array(value)
        elif value is not None:
            foreign.leave(f"{name} {shown(key)}", "a state that no optimizer here keeps")
    if arrays:
        foreign.state[name] = arrays


def count_of(where: str, value: Any, what: str) -> int:
    """A whole number from 0, which may come as a float."""
    if type(value) not in (int, float) or not 0 <= value < 2**53 or value != int(value):
        raise CheckpointError(f"{where}: {what} is {shown(value)}, a count was expected")
    return int(value)


def group_of(where: str, group: dict[Any, Any], array: Callable[[Tensor], Array]) -> dict[str, Any]:
    """The hyperparameters of a group that matter here, as plain numbers."""
    found: dict[str, Any] = {}
    for key, allowed in _MUST_BE.items():
        if not any(group.get(key) is value or group.get(key) == value for value in allowed):
            raise CheckpointError(
                f"{where}: an optimizer with {key}={shown(group[key])}, which is not offered here"
            )
    for key in _NUMBERS:
        value = group.get(key)
        if isinstance(value, Tensor):
            value = array(value).scalar()
        if value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise CheckpointError(f"{where}: {key} of a group is {shown(value)}")
        found[key] = float(value)
    betas = group.get("betas")
    if betas is not None:
        pair = sequence(where, betas, "betas")
        pair = [array(b).scalar() if isinstance(b, Tensor) else b for b in pair]
        if len(pair) != 2 or any(type(b) not in (int, float) or not 0 <= b < 1 for b in pair):
            raise CheckpointError(f"{where}: betas of a group are {', '.join(map(shown, pair))}")
        found["betas"] = [float(b) for b in pair]
    for key in ("nesterov", "decoupled_weight_decay"):
        if type(group.get(key)) is bool:
            found[key] = group[key]
    if "step" in group:  # fused optimizers count for a whole group
        value = group["step"]
        value = array(value).scalar() if isinstance(value, Tensor) else value
        found["step"] = count_of(where, value, "step of a group")
    return found


def _names_of(
    foreign: Foreign,
    where: str,
    groups: list[dict[Any, Any]],
    listed: list[list[Any]],
    state: dict[Any, Any],
    ids: Sequence[str] | None,
) -> dict[Any, str]:
    """From numbers to names: as told, as the groups say, or as the weights are ordered."""
    keys = [key for params in listed for key in params]
    if ids is None and all(type(group.get("param_names")) in (list, tuple) for group in groups):
        ids = [name for group in groups for name in group["param_names"]]
    order = None if ids is None else list(ids)
    how = "the names that were given"
    if order is None:
        order, how = _order_of(foreign, [len(params) for params in listed])
    if order is None:
        raise CheckpointError(
            f"{where}: numbers its parameters, and {how}; give their names in the order of the "
            "numbers (names=, --names)"
        )
    if len(order) != len(keys) or any(type(name) is not str for name in order):
        raise CheckpointError(
            f"{where}: numbers {len(keys)} parameters, {how} has {len(order)}; give their names in "
            "the order of the numbers (names=, --names)"
        )
    found = dict(zip(keys, order, strict=True))
    wrong = []
    for key, values in state.items():
        weight = foreign.weights.get(found.get(key, ""))
        if weight is None or type(values) is not dict:
            continue
        for name, value in values.items():
            if name in KNOWN_KEYS and isinstance(value, Tensor) and value.shape != weight.shape:
                wrong.append(
                    f"{found[key]} is {list(weight.shape)}, its {name} is {list(value.shape)}"
                )
    if wrong:
        raise CheckpointError(
            f"{where}: {how} is not that of its numbers: {first_of(wrong)}; give their names in "
            "the order of the numbers (names=, --names)"
        )
    foreign.notes.append(f"the optimizer numbers its parameters: named by {how}")
    return found


#: The order in which transformers registers what a layer of the Llama family holds.
_LLAMA = (
    *("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.", "self_attn.o_proj."),
    *("mlp.gate_proj.", "mlp.up_proj.", "mlp.down_proj."),
    *("input_layernorm.", "post_attention_layernorm."),
)
_LLAMA_NAME = re.compile(
    r"model\.(?:(embed_tokens)|layers\.(\d{1,9})\.(.+)|(norm))\.(weight|bias)|(lm_head)\.weight"
)


def _order_of(foreign: Foreign, groups: list[int]) -> tuple[list[str] | None, str]:
    """The order of a model's parameters where it is known, and how; else why it is not."""
    order = [n for n, a in foreign.weights.items() if a.dtype in FLOATS]
    how = "the order of the weights"
    if not foreign.ordered:
        known = (foreign.config or {}).get("model_type") in ("llama", "mistral", "granite")
        places = {name: _llama_place(name) for name in order} if known else {}
        if not places or None in places.values():
            return None, "safetensors does not keep their order"
        order.sort(key=lambda name: places[name] or ())
        if (foreign.config or {}).get("tie_word_embeddings") is True and "lm_head.weight" in places:
            order.remove("lm_head.weight")
        how = f"the order of a {(foreign.config or {})['model_type']} model"
    if len(groups) == 2:
        # The Trainer of transformers: weights that decay, then norms and biases.
        plain = [n for n in order if "norm" in n.lower() or n.endswith(".bias")]
        order = [n for n in order if n not in set(plain)] + plain
        if len(plain) != groups[1]:
            return None, "its two groups are not those of the Trainer of transformers"
        how += ", in the Trainer's two groups"
    elif len(groups) > 2:
        return None, f"in {len(groups)} groups"
    return order, how


def _llama_place(name: str) -> tuple[int, ...] | None:
    match = _LLAMA_NAME.fullmatch(name)
    if match is None:
        return None
    embed, layer, part, norm, _, _ = match.groups()
    if layer is None:
        return (0,) if embed else (2,) if norm else (3,)
    what = f"{part}."
    found = next((i for i, known in enumerate(_LLAMA) if what == known), None)
    return None if found is None else (1, int(layer), found, int(name.endswith(".bias")))


def moments_of(foreign: Foreign, where: str) -> tuple[str, ...]:
    """The state arrays that parameters have, in our order; all must have the same."""
    found: dict[tuple[str, ...], str] = {}
    for name, arrays in foreign.state.items():
        keys = tuple(sorted(arrays, key=lambda k: (k == "max_exp_avg_sq", k)))
        found.setdefault(keys, name)
    if not found:
        return ()
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
