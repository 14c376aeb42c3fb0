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
from ._clip import clip_grad_norm_
from ._module import fully_shard, is_sharded, shards
from ._optim import SGD, Adagrad, Adam, AdamW, Lion
from ._rounds import accumulate, no_sync

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "accumulate",
    "clip_grad_norm_",
    "fully_shard",
    "is_sharded",
    "no_sync",
    "shards",
]


def __getattr__(name: str) -> Any:
    if name in LATER:
        raise AttributeError(sentence(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
