"""Accelerate's configuration: the YAML of ``accelerate config``, or what its launcher exports."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigError
from ..policy import PRESETS, Sharding
from .accelerate_keys import DEEPSPEED, ENVIRONMENT, PARALLEL, TOP, VARIABLES, is_environment
from .accelerate_keys import is_ours as decides
from .deepspeed import read_deepspeed
from .fsdp import Defaults, read_fsdp, without_prefix
from .reading import Reader, load
from .settings import Batch, Settings

__all__ = ["accelerate"]

_DEFAULTS = Defaults(
    version=1, wrap="NO_WRAP", save_by_version=("FULL_STATE_DICT", "SHARDED_STATE_DICT")
)
_SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config")
#: What may stand beside a ``deepspeed_config_file``, which says all the rest.
_BESIDE_A_FILE = (
    *("deepspeed_config_file", "zero3_init_flag", "deepspeed_moe_layer_cls_names"),
    *("deepspeed_hostfile", "deepspeed_multinode_launcher"),
    *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
)


@dataclass
class _Asked:
    """A configuration in one form, whether it came from a file or from an environment."""

    reader: Reader
    kind: str  # "fsdp", "deepspeed" or "ddp"
    mixed: str
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_mesh: bool = False


def accelerate(
    source: Any,
    *,
    world_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    device: str = "cpu",
) -> Settings:
    """Reads an Accelerate configuration, strictly.

    Parameters
    ----------
    source : path, str or mapping
        A YAML or JSON file, a dict of its keys, or ``os.environ`` under ``accelerate launch``:
        ``ACCELERATE_USE_FSDP``, ``FSDP_*``, ``ACCELERATE_USE_DEEPSPEED``,
        ``ACCELERATE_DEEPSPEED_*``, ``PARALLELISM_CONFIG_*``.
    world_size : int, optional
        Ranks; by default ``num_processes`` of the file.
    auto : mapping, optional
        Values for what a DeepSpeed file leaves to "auto"; see ``deepspeed``.
    gradient_checkpointing : bool
        Whether the Trainer's own is on, which excludes ``activation_checkpointing``.
    device : {"cpu", "cuda"}
        Where the model computes.

    Returns
    -------
    Settings
        Defaults are Accelerate's: FSDP of version 1 without wrapping, ZeRO of stage 2. Without FSDP
        and DeepSpeed it is DDP, stage 0.

    Raises
    ------
    ConfigError
        A key or variable that is unknown, refused or there twice, a value of another type or out
        of range, or two that contradict each other. The text names it and what would do.

    Warns
    -----
    UserWarning
        ``PARALLELISM_CONFIG_CP_SIZE`` without ``ACCELERATE_USE_PARALLELISM_CONFIG``: it is 1.
    """
    if source is os.environ or (isinstance(source, Mapping) and is_environment(source)):
        asked = _of_environment(source)
    else:
        asked = _of_file(source, auto)
        world_size = _ranks(asked, world_size)
    settings = _settings(asked, world_size, auto, gradient_checkpointing, device)
    settings = _on_mesh(asked, settings, world_size)
    return replace(settings, source=asked.reader.source, kind="accelerate")


# ---- a file -------------------------------------------------------------------------------------


def _of_file(source: Any, auto: Mapping[str, Any] | None) -> _Asked:
    values, name = load(source)
    reader = Reader(name, auto=auto)
    first = {key: values[key] for key in ("compute_environment",) if key in values}
    reader.read(first, TOP)
    rest = {key: value for key, value in values.items() if key not in (*first, *_SECTIONS)}
    found = reader.read(rest, TOP)
    sections = {
        key: reader.section(TOP[key], key, values[key]) for key in _SECTIONS if key in values
    }
    kind = found.get("distributed_type")
    if kind is None:
        reader.fail("distributed_type", "is missing: expected NO, MULTI_CPU, FSDP or DEEPSPEED")
    mixed = found.get("mixed_precision", "fp16" if found.get("fp16") else "no")
    if found.get("fp16") and mixed != "fp16":
        reader.fail("fp16", f"is true, and mixed_precision is {mixed}; leave fp16 out")
    asked = _Asked(reader, {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}.get(kind, "ddp"), mixed)
    asked.is_mesh = bool(sections.get("parallelism_config"))
    asked.sections = {
        "fsdp_config": without_prefix(reader, sections.get("fsdp_config", {})),
        "deepspeed_config": sections.get("deepspeed_config", {}),
        "parallelism_config": {
            key.removeprefix("parallelism_config_"): value
            for key, value in sections.get("parallelism_config", {}).items()
        },
    }
    for key, other in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        if asked.sections[key] and kind != other:
            reader.fail(
                key, f"is there, but distributed_type is {kind}: write {other}, or leave it out"
            )
    asked.sections["top"] = found
    return asked


def _ranks(asked: _Asked, world_size: int | None) -> int | None:
    """The world's size: as given, else the file's number of processes."""
    processes = asked.sections["top"].get("num_processes", -1)
    if processes == 0:
        asked.reader.fail("num_processes", "is 0: expected at least 1")
    if processes < 1:
        return world_size
    if world_size is None:
        return int(processes)
    if processes != world_size:
        for i, key in enumerate(asked.reader.rows):
            if key.path == "num_processes":
                text = f"the launcher's: this world has {world_size} ranks"
                asked.reader.rows[i] = replace(key, fate="noted", text=text)
    return world_size


# ---- an environment -----------------------------------------------------------------------------


def _of_environment(source: Mapping[str, str]) -> _Asked:
    names = {f"{section}.{key}": name for name, (section, key) in VARIABLES.items()}
    reader = Reader("environment", from_text=True, names=names)
    switches: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {key: {} for key in _SECTIONS}
    deciding = [*VARIABLES, *ENVIRONMENT]
    for name, value in source.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"environment: {name!r:.60} is {value!r:.60}: expected strings")
        if value in ("", "None"):
            continue  # what the launcher exports for nothing
        if name in VARIABLES:
            section, key = VARIABLES[name]
            sections[section][key] = value
        elif name in ENVIRONMENT:
            switches[name] = value
        elif decides(name) or name.startswith("ACCELERATE_"):
            near = difflib.get_close_matches(name, deciding, n=1, cutoff=0.6)
            nearly = difflib.get_close_matches(name, deciding, n=1, cutoff=0.9)
            if decides(name) or nearly:
                hint = f"; did you mean {near[0]}?" if near else ""
                reader.fail(name, f"is no variable of Accelerate's{hint}")
            reader.row(name, value, "noted", "decides nothing about sharding")
    found = reader.read(switches, ENVIRONMENT)
    if found.get("ACCELERATE_USE_FSDP") and found.get("ACCELERATE_USE_DEEPSPEED"):
        reader.fail("ACCELERATE_USE_FSDP", "and ACCELERATE_USE_DEEPSPEED are both true")
    kind = "ddp"
    if found.get("ACCELERATE_USE_FSDP"):
        kind = "fsdp"
    elif found.get("ACCELERATE_USE_DEEPSPEED"):
        kind = "deepspeed"
    asked = _Asked(reader, kind, found.get("ACCELERATE_MIXED_PRECISION", "no"), sections)
    asked.is_mesh = bool(found.get("ACCELERATE_USE_PARALLELISM_CONFIG"))
    _launchers_strategy(asked)
    _unused(asked)
    return asked


def _launchers_strategy(asked: _Asked) -> None:
    """The launcher exports a strategy and reshard_after_forward, whichever was asked for."""
    fsdp, reader = asked.sections["fsdp_config"], asked.reader
    strategy, reshard = fsdp.get("sharding_strategy"), fsdp.get("reshard_after_forward")
    if asked.kind != "fsdp" or strategy is None or reshard is None:
        return
    newer = fsdp.get("version", "1").strip() == "2"
    boolean = reshard.strip().lower() in ("true", "false")
    if newer:
        drop, text = "sharding_strategy", "version 2 goes by FSDP_RESHARD_AFTER_FORWARD"
    elif boolean:
        drop, text = "reshard_after_forward", "version 1 goes by FSDP_SHARDING_STRATEGY"
    elif strategy.upper() in ("FULL_SHARD", "1"):
        drop, text = "sharding_strategy", "the launcher's default; FSDP_RESHARD_AFTER_FORWARD holds"
    else:
        return
    reader.row(reader.where("fsdp_config", drop), fsdp.pop(drop), "noted", text)


def _unused(asked: _Asked) -> None:
    """Variables of a mode that is off: noted, but for sizes that would be ignored in silence."""
    reader = asked.reader
    for section, on in (("fsdp_config", "fsdp"), ("deepspeed_config", "deepspeed")):
        values = asked.sections[section]
        kept = {}
        for key, value in values.items():
            if asked.kind == on or key == "gradient_accumulation_steps":
                kept[key] = value
            else:
                text = f"ignored: {on} is off"
                reader.row(reader.where(section, key), value, "noted", text)
        asked.sections[section] = kept
    if asked.is_mesh:
        return
    values, asked.sections["parallelism_config"] = asked.sections["parallelism_config"], {}
    for key, value in values.items():
        name = reader.where("parallelism_config", key)
        if key == "cp_size" and value.strip() != "1":
            text = "ignored without ACCELERATE_USE_PARALLELISM_CONFIG: cp_size is 1"
            warnings.warn(f"{name}={value} is {text}", stacklevel=4)
            reader.row(name, value, "noted", text)
        elif key.endswith("_size") and value.strip() != "1":
            reader.fail(name, f"is {value}, but ACCELERATE_USE_PARALLELISM_CONFIG is not true")
        else:
            reader.row(name, value, "noted", "ignored: ACCELERATE_USE_PARALLELISM_CONFIG is off")


# ---- both ---------------------------------------------------------------------------------------


def _settings(
    asked: _Asked,
    world_size: int | None,
    auto: Mapping[str, Any] | None,
    gradient_checkpointing: bool,
    device: str,
) -> Settings:
    reader = asked.reader
    if asked.kind == "deepspeed":
        return _of_deepspeed(asked, world_size, auto)
    steps = reader.read(
        {
            key: value
            for key, value in asked.sections["deepspeed_config"].items()
            if key == "gradient_accumulation_steps"
        },
        DEEPSPEED,
        "deepspeed_config",
    ).get("gradient_accumulation_steps")
    batch = Batch(accumulate=steps)
    if asked.kind == "ddp":
        return Settings(
            source=reader.source,
            kind="accelerate",
            sharding=Sharding(stage=0),
            batch=batch,
            given=frozenset({"sharding", *(("batch",) if steps else ())}),
            keys=tuple(reader.rows),
        )
    read = read_fsdp(
        reader,
        asked.sections["fsdp_config"],
        defaults=_DEFAULTS,
        world_size=world_size,
        path="fsdp_config",
        gradient_checkpointing=gradient_checkpointing,
        device=device,
    )
    given, precision = {*read.given, *(("batch",) if steps else ())}, read.precision
    if "precision" not in given and asked.mixed != "no":
        precision = PRESETS[asked.mixed]
        given.add("precision")
    return replace(read, precision=precision, batch=batch, given=frozenset(given))


def _of_deepspeed(
    asked: _Asked, world_size: int | None, auto: Mapping[str, Any] | None
) -> Settings:
    reader, mixed = asked.reader, asked.mixed
    found = reader.read(asked.sections["deepspeed_config"], DEEPSPEED, "deepspeed_config")
    file = found.get("deepspeed_config_file")
    if file is not None:
        for key in asked.sections["deepspeed_config"]:
            if key not in _BESIDE_A_FILE:
                reader.fail(
                    reader.where("deepspeed_config", key),
                    f"and deepspeed_config_file are both there: say it in {file}",
                )
        values, name = load(file)
        known = {"fp16": mixed == "fp16", "bf16": mixed == "bf16"} if mixed != "no" else {}
        read = read_deepspeed(values, name, world_size=world_size, auto={**known, **(auto or {})})
        if mixed != "no" and read.precision.param == "float32":
            reader.fail("", f"mixed_precision is {mixed}, and {name} has float32")
        return replace(read, keys=(*reader.rows, *read.keys))
    zero: dict[str, Any] = {"stage": found.get("zero_stage", 2)}
    for part, short in (("offload_optimizer", "optimizer"), ("offload_param", "param")):
        home = found.get(f"offload_{short}_device", "none")
        zero[part] = {"device": home}
    zero["stage3_gather_16bit_weights_on_model_save"] = found.get("zero3_save_16bit_model", False)
    values = {"zero_optimization": zero, "gradient_clipping": found.get("gradient_clipping", 1.0)}
    if found.get("gradient_accumulation_steps"):
        values["gradient_accumulation_steps"] = found["gradient_accumulation_steps"]
    if mixed != "no":
        values[mixed] = {"enabled": True}
    read = read_deepspeed(values, reader.source, world_size=world_size)
    if "zero_stage" not in found:
        path = reader.where("deepspeed_config", "zero_stage")
        reader.row(path, 2, "done", "Sharding(stage=2): Accelerate's default")
    if "gradient_clipping" not in found:
        path = reader.where("deepspeed_config", "gradient_clipping")
        reader.row(path, 1.0, "done", "step(max_norm=1): Accelerate's default")
    return replace(read, keys=tuple(reader.rows))


def _on_mesh(asked: _Asked, settings: Settings, world_size: int | None) -> Settings:
    """Replicas and shards of a parallelism_config."""
    if not asked.is_mesh:
        return settings
    reader = asked.reader
    already = len(reader.rows)
    sizes = reader.read(asked.sections["parallelism_config"], PARALLEL, "parallelism_config")
    replicate, cut = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    where = reader.where("parallelism_config", "dp_shard_size")
    if asked.kind != "fsdp" and cut > 1:
        reader.fail(where, f"is {cut}, and only FSDP shards over a mesh")
    if asked.kind == "fsdp" and settings.sharding.partition == "flat":
        reader.fail(where, "goes with version 2 of FSDP, and version is 1")
    if world_size is not None and replicate * cut != world_size:
        reader.fail(
            where,
            f"is {cut} and dp_replicate_size {replicate}: together {replicate * cut}, and the "
            f"world has {world_size} ranks",
        )
    sharding = replace(settings.sharding, replicate=replicate)
    if asked.kind != "fsdp":
        sharding = settings.sharding
    return replace(
        settings,
        sharding=sharding,
        world_size=replicate * cut,
        given=settings.given | {"world_size"},
        keys=(*settings.keys, *reader.rows[already:]),
    )
