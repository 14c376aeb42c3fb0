"""PyTorch modules over flatshard: the same module, the same Parameters, sharded state.

``fully_shard(module)`` replaces ``torch.distributed.fsdp.fully_shard``, DistributedDataParallel and
DeepSpeed's initialize; the optimizers here replace those of ``torch.optim``.
"""

from __future__ import annotations

import importlib
from typing import Any

try:
    importlib.import_module("torch")
except ImportError as error:
    raise ImportError(
        "flatshard.torch needs PyTorch, which is not installed: pip install 'flatshard[torch]'"
    ) from error

from .._later import LATER, sentence
from ._about import describe, plan
from ._access import full_grads, full_params, get, put
from ._adopt import adopt
from ._backward import backward
from ._clip import clip_grad_norm_
from ._meta import empty_weights, from_pretrained, materialize
from ._module import fully_shard, is_sharded, shards, unshard
from ._optim import SGD, Adagrad, Adam, AdamW, Lion
from ._recompute import activation_checkpointing
from ._rounds import accumulate, no_sync
from ._save import load, save
from ._state import (
    load_optimizer_state_dict,
    load_state_dict,
    optimizer_state_dict,
    state_dict,
)

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "accumulate",
    "activation_checkpointing",
    "adopt",
    "backward",
    "clip_grad_norm_",
    "describe",
    "empty_weights",
    "from_pretrained",
    "full_grads",
    "full_params",
    "fully_shard",
    "get",
    "is_sharded",
    "load",
    "load_optimizer_state_dict",
    "load_state_dict",
    "materialize",
    "no_sync",
    "optimizer_state_dict",
    "plan",
    "put",
    "save",
    "shards",
    "state_dict",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name in LATER:
        raise AttributeError(sentence(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
