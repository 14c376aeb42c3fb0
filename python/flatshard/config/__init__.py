"""Readers of FSDP, DeepSpeed and Accelerate configurations. No torch is needed.

Every key is done, noted (with the mechanism that takes its place) or refused by name; nothing is
ignored. ``Settings.table()`` shows what became of each.
"""

from __future__ import annotations

from .accelerate import accelerate
from .deepspeed import deepspeed
from .fsdp import fsdp
from .own import flatshard, read, to_dict
from .settings import LATER, Batch, Key, OptimizerSettings, ScheduleSettings, Settings, Units
from .writing import Written, write

__all__ = [
    "LATER",
    "Batch",
    "Key",
    "OptimizerSettings",
    "ScheduleSettings",
    "Settings",
    "Units",
    "Written",
    "accelerate",
    "deepspeed",
    "flatshard",
    "fsdp",
    "read",
    "to_dict",
    "write",
]
