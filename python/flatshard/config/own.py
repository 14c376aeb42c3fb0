"""flatshard's own form of a configuration: the fields of Settings, and which form a file has."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from ..policy import PRESETS, LossScale, MixedPrecision, Offload, Sharding
from . import checks
from .accelerate import accelerate
from .accelerate_keys import is_environment
from .deepspeed import SHAPES, TAKES, deepspeed, offered
from .deepspeed_keys import RULES as DEEPSPEED_RULES
from .fsdp import RULES as FSDP_RULES
from .fsdp import fsdp
from .reading import Reader, Rule, done, load, section
from .settings import Batch, OptimizerSettings, ScheduleSettings, Settings, Units

__all__ = ["KINDS", "flatshard", "kind_of", "read", "to_dict"]

KINDS = ("flatshard", "fsdp", "deepspeed", "accelerate")


def _is(type_: type, expected: str) -> checks.Check:
    def check(value: object, from_text: bool) -> object:
        if value is None and type_ is not bool:
            return None
        if type_ is int and isinstance(value, bool):
            raise checks.Wrong(expected)
        if type_ is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, type_):
            raise checks.Wrong(expected)
        return value

    return check


_flag = checks.flag
_count = checks.integer(1)
_word = _is(str, "a string, or null")


def _fields(**rules: checks.Check) -> dict[str, Rule]:
    return {name: done(check, name.replace("_", " ")) for name, check in rules.items()}


def _or_section(check: checks.Check) -> checks.Check:
    """A word or number, or an object that is read by rules of its own."""

    def either(value: object, from_text: bool) -> object:
        return dict(value) if isinstance(value, Mapping) else check(value, from_text)

    return either


SHARDING = _fields(
    stage=checks.integer(0, 3),
    partition=checks.choice("flat", "per_parameter"),
    gather=checks.choice("auto", "view", "copy"),
    reshard_after_forward=_flag,
    replicate=_count,
    prefetch=checks.integer(0),
    offload=_or_section(_word),
    reduce_order=checks.choice("rank", "ring"),
)
OFFLOAD = _fields(
    params=checks.choice("device", "cpu", "disk"),
    grads=checks.choice("device", "cpu", "disk"),
    state=checks.choice("device", "cpu", "disk"),
    path=_word,
)
PRECISION = _fields(
    param=_word,
    reduce=_word,
    accumulate=_word,
    master=_word,
    moments=_word,
    loss_scale=_or_section(_is(float, "a number, an object, or null")),
    rounding=_word,
    rounding_seed=checks.integer(0),
)
LOSS_SCALE = _fields(
    initial=checks.number(above=True),
    dynamic=_flag,
    window=_count,
    factor=checks.number(1.0, above=True),
    hysteresis=_count,
    minimum=checks.number(above=True),
    restore=checks.choice("shrink", "growth", "applied"),
)
UNITS = _fields(
    by=checks.choice("auto", "classes", "size", "whole"),
    classes=checks.names,
    min_num_params=checks.integer(0),
)

RULES: Mapping[str, Rule] = {
    **_fields(
        stage=checks.integer(0, 3),
        sharding=checks.mapping,
        precision=_or_section(_word),
        units=checks.anything,
        ignored_modules=checks.modules,
        batch=checks.mapping,
        max_norm=_is(float, "a number, or null"),
        activation_checkpointing=_flag,
        save=checks.choice("full", "sharded"),
        save_16bit=_flag,
        efficient_loading=_flag,
        steps_per_print=_is(int, "a whole number, or null"),
        timing=_flag,
        allow_unused=_flag,
        allow_untested_optimizer=_flag,
        tag_validation=checks.choice("warn", "ignore", "fail"),
        world_size=_is(int, "a whole number, or null"),
    ),
    "optimizer": section(_fields(name=checks.text, options=checks.mapping)),
    "schedule": section(_fields(name=checks.text, options=checks.mapping)),
}


def flatshard(source: Any, *, world_size: int | None = None) -> Settings:
    """Reads flatshard's own form: what ``to_dict`` writes, as JSON, YAML or a dict.

    Parameters
    ----------
    source : path, str or mapping
        ``{"stage": 3, "precision": "bf16", "units": ["LlamaDecoderLayer"], ...}``; keys are fields
        of ``Settings``, and ``stage`` is short for ``sharding.stage``.
    world_size : int, optional
        Ranks, which ``world_size`` in the file must be.

    Returns
    -------
    Settings

    Raises
    ------
    ConfigError
        A key that is unknown or there twice, or a value that no field takes; the text names it.
    """
    values, name = load(source)
    reader = Reader(name, fills=False)
    found = reader.read(values, RULES)
    read = Settings(
        source=name,
        kind="flatshard",
        sharding=_sharding(reader, found),
        precision=_precision(reader, found.get("precision", "fp32")),
        units=_units(reader, found.get("units", "auto")),
        batch=_batch(reader, found.get("batch", {})),
        optimizer=_optimizer(reader, found.get("optimizer")),
        schedule=_schedule(reader, found.get("schedule")),
        given=frozenset("sharding" if key == "stage" else key for key in values),
        **{
            key: found[key]
            for key in found
            if key not in (*_BUILT, "stage") and (found[key] is not None or key in _MAY_BE_NONE)
        },
    )
    keys = tuple(reader.rows)
    if world_size is not None:
        read.check_world(world_size)
    return dataclasses.replace(read, keys=keys)


_BUILT = ("sharding", "precision", "units", "batch", "optimizer", "schedule")
_MAY_BE_NONE = ("max_norm", "steps_per_print", "world_size")


def _made(reader: Reader, path: str, make: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    try:
        return make(**values)
    except (ValueError, TypeError, NotImplementedError) as error:
        reader.fail(path, f"cannot be: {error}")


def _inner(reader: Reader, path: str, values: Any, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """A section read after its own rules, in place of the row that it had."""
    reader.rows = [key for key in reader.rows if key.path != path]
    return reader.read(values, rules, path)


def _sharding(reader: Reader, found: Mapping[str, Any]) -> Sharding:
    values = _inner(reader, "sharding", found.get("sharding", {}), SHARDING)
    if "stage" in found and values.setdefault("stage", found["stage"]) != found["stage"]:
        reader.fail("stage", f"is {found['stage']}, and sharding.stage is {values['stage']}")
    if isinstance(values.get("offload"), dict):
        homes = _inner(reader, "sharding.offload", values["offload"], OFFLOAD)
        values["offload"] = _made(reader, "sharding.offload", Offload, homes)
    elif values.get("offload") is not None:
        reader.fail("sharding.offload", "is a string: expected an object with params, grads, state")
    made: Sharding = _made(reader, "sharding", Sharding, values)
    return made


def _precision(reader: Reader, value: Any) -> MixedPrecision:
    if value is None or isinstance(value, str):
        if value not in PRESETS:
            reader.fail("precision", f'is "{value}": expected one of {", ".join(PRESETS)}')
        return PRESETS[value]
    values = _inner(reader, "precision", value, PRECISION)
    if isinstance(values.get("loss_scale"), dict):
        path = "precision.loss_scale"
        scale = _inner(reader, path, values["loss_scale"], LOSS_SCALE)
        values["loss_scale"] = _made(reader, path, LossScale, scale)
    made: MixedPrecision = _made(reader, "precision", MixedPrecision, values)
    return made


def _units(reader: Reader, value: Any) -> Units:
    if isinstance(value, Mapping):
        read = Units(**_inner(reader, "units", value, UNITS))
        if (read.by == "classes") != bool(read.classes):
            reader.fail("units.classes", 'and units.by "classes" go together')
        if (read.by == "size") != bool(read.min_num_params):
            reader.fail("units.min_num_params", 'above 0 and units.by "size" go together')
        return read
    if value in ("auto", "whole"):
        return Units(value)
    try:
        classes = checks.names(value, False)
    except checks.Wrong as wrong:
        reader.fail("units", f'is wrong: expected "auto", "whole", or {wrong}')
    if not classes:
        reader.fail("units", 'is empty: expected "auto", "whole", or names of classes')
    return Units("classes", classes)


def _batch(reader: Reader, value: Mapping[str, Any]) -> Batch:
    rules = {name: done(_count, name) for name in ("train", "micro", "accumulate")}
    return Batch(**_inner(reader, "batch", value, rules))


def _optimizer(reader: Reader, found: Mapping[str, Any] | None) -> OptimizerSettings | None:
    """By the rules of a DeepSpeed optimizer, whose names are the same but for Adam."""
    if found is None:
        return None
    rules = DEEPSPEED_RULES["optimizer"].rules
    assert rules is not None and rules["params"].rules is not None
    name = found.get("name")
    if name not in offered():
        reader.fail("optimizer.name", f'is "{name!s:.60}": expected one of {", ".join(offered())}')
    options = _inner(reader, "optimizer.options", found.get("options", {}), rules["params"].rules)
    for key in options:
        if key not in TAKES[str(name)]:
            reader.fail(f"optimizer.options.{key}", f"is no option of {name}")
    return OptimizerSettings(str(name), options)


def _schedule(reader: Reader, found: Mapping[str, Any] | None) -> ScheduleSettings | None:
    if found is None:
        return None
    rules = DEEPSPEED_RULES["scheduler"].rules
    assert rules is not None and rules["params"].rules is not None
    name, given = found.get("name"), dict(found.get("options", {}))
    if name not in SHAPES:
        reader.fail("schedule.name", f'is "{name!s:.60}": expected one of {", ".join(SHAPES)}')
    if given.get("warmup_max_lr") == "lr":
        del given["warmup_max_lr"]  # what it is without being said
    options = _inner(reader, "schedule.options", given, rules["params"].rules)
    shape = SHAPES[str(name)]
    for key in options:
        if key not in shape:
            reader.fail(f"schedule.options.{key}", f"is no option of {name}")
    full = {**shape, **options}
    for key, value in shape.items():
        if value is None and key not in options:
            reader.fail(f"schedule.options.{key}", f"is missing, and {name} needs it")
        if isinstance(value, str) and value in shape and key not in options:
            full[key] = full[value]
    return ScheduleSettings(str(name), full)


def to_dict(settings: Settings) -> dict[str, Any]:
    """Settings in flatshard's own form: what was given, every field written out.

    Parameters
    ----------
    settings : Settings

    Returns
    -------
    dict
        Plain JSON values; ``flatshard`` reads them back to equal fields.
    """
    made: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        if field.name not in settings.given:
            continue
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if field.name in ("sharding", "precision", "batch") and isinstance(value, dict):
            value = {key: inner for key, inner in value.items() if inner is not None}
        if value is not None or field.name in _MAY_BE_NONE:
            made[field.name] = _plain(value)
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return value


# ---- any form -----------------------------------------------------------------------------------

_TELLING: Mapping[str, set[str]] = {
    "flatshard": set(RULES) - {"ignored_modules", "activation_checkpointing", "optimizer"},
    "deepspeed": set(DEEPSPEED_RULES) - {"activation_checkpointing", "optimizer"},
    "fsdp": set(FSDP_RULES) - {"ignored_modules", "activation_checkpointing"},
}


def kind_of(values: Mapping[str, Any]) -> str:
    """Whose form a parsed configuration has: the one that knows most of its keys.

    Parameters
    ----------
    values : mapping
        Its top level.

    Returns
    -------
    str
        One of ``KINDS``; "fsdp" where nothing tells.
    """
    keys = {key for key in values if isinstance(key, str)}
    if keys & {"compute_environment", "distributed_type"} or is_environment(values):
        return "accelerate"
    scores = dict.fromkeys(("fsdp", "deepspeed", "flatshard"), 0)
    for key in keys:
        plain = key.removeprefix("fsdp_") if key != "fsdp_size" else key
        for kind, known in _TELLING.items():
            if plain in known or difflib.get_close_matches(plain, known, n=1, cutoff=0.85):
                scores[kind] += 1
    both = values.get("optimizer")
    if isinstance(both, Mapping):
        scores["flatshard" if "name" in both else "deepspeed"] += 1
    if isinstance(values.get("activation_checkpointing"), Mapping):
        scores["deepspeed"] += 1
    return max(scores, key=lambda kind: scores[kind])


def read(
    source: Any,
    *,
    kind: str | None = None,
    world_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    device: str = "cpu",
) -> Settings:
    """Reads a configuration of any form.

    Parameters
    ----------
    source : path, str or mapping
        A JSON or YAML file, JSON text, a dict, or ``os.environ`` under ``accelerate launch``.
    kind : {"flatshard", "fsdp", "deepspeed", "accelerate"}, optional
        Its form; by default told by its keys.
    world_size, auto, gradient_checkpointing, device
        See the reader of the form.

    Returns
    -------
    Settings

    Raises
    ------
    ConfigError
        See the reader of the form.
    """
    if kind is None:
        kind = kind_of(source if isinstance(source, Mapping) else load(source)[0])
    if kind == "flatshard":
        return flatshard(source, world_size=world_size)
    if kind == "deepspeed":
        return deepspeed(source, world_size=world_size, auto=auto, device=device)
    if kind == "fsdp":
        return fsdp(
            source,
            world_size=world_size,
            gradient_checkpointing=gradient_checkpointing,
            device=device,
        )
    if kind != "accelerate":
        raise ConfigError(f"kind={kind!r:.60}: expected one of {', '.join(KINDS)}")
    return accelerate(
        source,
        world_size=world_size,
        auto=auto,
        gradient_checkpointing=gradient_checkpointing,
        device=device,
    )
