"""From what a script says of sharding to one Settings, whichever of the ways it says it in."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import config
from ..config import Settings
from ..config.deepspeed import AUTO_NAMES
from ..errors import ConfigError
from ..policy import PRESETS, MixedPrecision, Sharding

__all__ = ["compute_policy", "read", "read_accelerator"]

_FRAMEWORKS = ("fsdp", "deepspeed", "accelerate")
_WAYS = (
    'a stage, {"stage": 3, "precision": "bf16", ...}, {"fsdp": {...}}, {"deepspeed": {...}}, '
    "or the path of an fsdp_config, a DeepSpeed JSON or an Accelerate YAML"
)


def read(
    spec: Any,
    *,
    world_size: int | None,
    auto: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
) -> Settings:
    """What ``flatshard=`` asks for.

    Parameters
    ----------
    spec : Settings, Sharding, int, str, dict or None
        None: stage 3 with the module's own dtype. A str is a path, or JSON text.
    world_size : int or None
        Ranks.
    auto : mapping, optional
        Fills what a DeepSpeed file leaves to "auto", by names of ``TrainingArguments``.
    gradient_checkpointing : bool
        Whether the Trainer's own is on.

    Raises
    ------
    ConfigError
        An unknown key, or one that is refused.
    """
    if isinstance(spec, Settings):
        return spec
    if spec is None:
        return Settings("defaults", "flatshard")
    if isinstance(spec, Sharding):
        return Settings("Sharding", "flatshard", spec, given=frozenset({"sharding"}))
    if isinstance(spec, int) and not isinstance(spec, bool):
        spec = {"stage": spec}
    kind = None
    if isinstance(spec, Mapping) and set(spec) & set(_FRAMEWORKS):
        if len(spec) > 1:
            raise ConfigError(f"{', '.join(sorted(map(str, spec)))} together; give {_WAYS}")
        ((kind, spec),) = spec.items()
        if kind == "fsdp" and isinstance(spec, Mapping) and set(spec) == {"options", "config"}:
            # An fsdp= that is more than True.
            return config.fsdp(
                spec["config"],
                world_size=world_size,
                options=spec["options"],
                gradient_checkpointing=gradient_checkpointing,
            )
    return config.read(
        spec,
        kind=kind,
        world_size=world_size,
        auto=auto,
        gradient_checkpointing=gradient_checkpointing,
    )


def read_accelerator(
    spec: Any, asked: bool, given: Mapping[str, Any], *, world_size: int
) -> Settings:
    """For Accelerate: ``flatshard=``, else what ``accelerate launch`` left in the environment.

    Parameters
    ----------
    spec : object
        As for `read`.
    asked : bool
        Whether the environment asks for sharding.
    given : mapping
        Arguments of the Accelerator, which fill what a DeepSpeed file leaves to "auto". What only
        the script knows stays open; clipping is at 1, as Accelerate fills it.
    world_size : int
        Ranks.
    """
    if spec is None and not asked:
        return read(None, world_size=world_size)
    mixed = str(given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    auto: dict[str, Any] = dict.fromkeys(AUTO_NAMES, config.LATER)
    if mixed in ("bf16", "fp16"):
        auto[mixed] = True
    if "gradient_accumulation_steps" in given:
        auto["gradient_accumulation_steps"] = given["gradient_accumulation_steps"]
    if spec is None:
        settings = config.accelerate(os.environ, world_size=world_size, auto=auto)
    else:
        settings = read(spec, world_size=world_size, auto=auto)
    if any(key.path.endswith("gradient_clipping") and key.auto for key in settings.keys):
        return dataclasses.replace(settings, max_norm=1.0)
    return settings


def compute_policy(settings: Settings, mixed_precision: str) -> MixedPrecision | None:
    """How weights are held: None for the module's own dtype.

    Parameters
    ----------
    settings : Settings
        A configuration that says a precision decides.
    mixed_precision : str
        Accelerate's. "bf16" alone is autocast around the module's own weights, as with DDP; beside
        a configuration of FSDP or DeepSpeed it is what both do there: bf16 weights to compute
        with, fp32 masters. "fp16" always has fp16 weights, masters and loss scaling.
    """
    if "precision" in settings.given:
        return settings.precision
    if mixed_precision == "fp16":
        return PRESETS["fp16"]
    sharded = settings.kind != "flatshard" and settings.sharding.stage > 0
    if mixed_precision == "bf16" and sharded:
        return PRESETS["bf16"]
    return None


def field_of(value: Any) -> Any:
    """A file's path, or what it holds, as a field of TrainingArguments: copied, never shared."""
    if isinstance(value, Mapping):
        return json.loads(json.dumps(value))
    return os.fspath(value) if isinstance(value, Path) else value
