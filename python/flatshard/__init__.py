"""Sharded training for models too big for one device: ZeRO and FSDP over ranks, in C.

See the README for a first script. Importing starts no thread, loads no BLAS and no CUDA; the native
models, data, and checkpoints are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import schedule
from ._later import LATER, sentence
from ._version import __version__
from .errors import (
    CheckpointError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    FlatshardError,
    MemoryBudgetError,
    NonFiniteError,
    PeerLost,
    WorldError,
)
from .job import LocalWorld, init, local_world
from .optim import SGD, Adagrad, Adam, AdamW, Lion, Optimizer, ParamGroup, StepResult
from .plan import Plan, describe, memory, plan
from .policy import LossScale, MixedPrecision, Offload, Sharding
from .shard import Parameter, Shards, Unit, shard, state_sha256, weights_sha256
from .trace import Log
from .world import World

if TYPE_CHECKING:
    from . import checkpoint, config, models
    from .models import data

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CheckpointError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConfigError",
    "FlatshardError",
    "Lion",
    "LocalWorld",
    "Log",
    "LossScale",
    "MemoryBudgetError",
    "MixedPrecision",
    "NonFiniteError",
    "Offload",
    "Optimizer",
    "ParamGroup",
    "Parameter",
    "PeerLost",
    "Plan",
    "Sharding",
    "Shards",
    "StepResult",
    "Unit",
    "World",
    "WorldError",
    "__version__",
    "checkpoint",
    "config",
    "data",
    "describe",
    "init",
    "local_world",
    "memory",
    "models",
    "plan",
    "schedule",
    "shard",
    "state_sha256",
    "weights_sha256",
]

_LAZY = {
    "checkpoint": ".checkpoint",
    "config": ".config",
    "data": ".models.data",
    "models": ".models",
    "torch": ".torch",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module(_LAZY[name], __name__)
        globals()[name] = module
        return module
    if name in LATER:
        raise AttributeError(sentence(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
