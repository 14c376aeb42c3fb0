"""Optimizers that number their parameters: whose number is whose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .._folders import first_of
from ..errors import CheckpointError
from ._foreign import FLOATS, Array, Foreign
from ._pickle_values import Tensor

__all__ = ["KNOWN_KEYS", "TENSORS", "names_of"]

#: State arrays that are taken over.
KNOWN_KEYS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
TENSORS = (Tensor, Array)


def names_of(
    foreign: Foreign,
    where: str,
    groups: list[dict[Any, Any]],
    listed: list[list[Any]],
    state: dict[Any, Any],
    ids: Sequence[str] | None,
) -> dict[Any, str]:
    """From numbers to names: as told, as the groups say, or as the weights are ordered."""
    keys = [key for params in listed for key in params]
    if any(type(key) is not int for key in keys):
        raise CheckpointError(f"{where}: some parameters have names and some numbers")
    # torch.optim counts along the groups; FSDP's rekey_optim_state_dict along the model.
    along_groups = keys == sorted(keys)
    order = None if ids is None else list(ids)
    how = "the names that were given"
    if order is None and all(type(g.get("param_names")) in (list, tuple) for g in groups):
        along_groups = True
        order = [name for group in groups for name in group["param_names"]]
        how = "the names in its groups"
    if order is None:
        order, how = _order_of(foreign, [len(p) for p in listed] if along_groups else [len(keys)])
    if order is None:
        raise CheckpointError(
            f"{where}: numbers its parameters, and {how}; give their names in the order of the "
            "numbers (names=, --names)"
        )
    keys = keys if along_groups else sorted(keys)
    skips = bool(keys) and max(keys) >= len(keys)  # then numbers are places in the model
    fits = max(keys) < len(order) if skips else len(order) == len(keys)
    if not fits or any(type(name) is not str for name in order):
        raise CheckpointError(
            f"{where}: numbers {len(keys)} parameters, {how} has {len(order)}; give their names in "
            "the order of the numbers (names=, --names)"
        )
    if skips and min(keys) >= 0:
        found = {key: order[key] for key in keys}
    else:
        found = dict(zip(keys, order, strict=True))
    wrong = []
    for key, values in state.items():
        weight = foreign.weights.get(found.get(key, ""))
        if weight is None or type(values) is not dict:
            continue
        for name, value in values.items():
            if name in KNOWN_KEYS and isinstance(value, TENSORS) and value.shape != weight.shape:
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
