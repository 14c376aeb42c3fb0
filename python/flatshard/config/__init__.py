"""Readers of FSDP, DeepSpeed and Accelerate configurations. No torch is needed.

Every key is done, noted (with the mechanism that takes its place) or refused by name; nothing is
ignored. ``Settings.table()`` shows what became of each.
"""

from __future__ import annotations

from .deepspeed import deepspeed
from .fsdp import fsdp
from .settings import LATER, Batch, Key, OptimizerSettings, ScheduleSettings, Settings, Units

__all__ = [
    "LATER",
    "Batch",
    "Key",
    "OptimizerSettings",
    "ScheduleSettings",
    "Settings",
    "Units",
    "deepspeed",
    "fsdp",
]
