"""Checkpoints: saved atomically, verified by checksums, loaded at any number of ranks.

A checkpoint is a folder ``DIR/step-000100`` with one safetensors file per rank and an
``index.json``. It is written into a hidden folder beside it, synced, and renamed: a kill at any
point leaves the last good one. The newest is the one with the highest serial number in its index.
"""

from __future__ import annotations

from ._export import WeightsRead, export, read_weights
from ._folders import steps
from ._load import Loaded, load
from ._save import Saving, save
from ._verify import Damage, verify
from .convert import Converted, convert

__all__ = [
    "Converted",
    "Damage",
    "Loaded",
    "Saving",
    "WeightsRead",
    "convert",
    "export",
    "load",
    "read_weights",
    "save",
    "steps",
    "verify",
]
