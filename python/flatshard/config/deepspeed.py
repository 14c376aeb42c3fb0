"""DeepSpeed's configuration: JSON with batch sizes, precision, ZeRO, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..policy import PRESETS, LossScale, MixedPrecision, Offload, Sharding
from .deepspeed_keys import OPTIMIZERS, RULES, SCHEDULES
from .reading import Reader, load
from .settings import LATER, Batch, OptimizerSettings, ScheduleSettings, Settings

__all__ = ["AUTO_NAMES", "SHAPES", "TAKES", "deepspeed", "offered", "read_deepspeed"]

#: What ``auto=`` may hold: names of ``transformers.TrainingArguments`` and of the model.
AUTO_NAMES = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm"),
    *("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
    *("warmup_steps", "max_steps", "fp16", "bf16", "hidden_size"),
)
#: Clipping is on in DeepSpeed where nothing is said of it.
_DEFAULT_CLIPPING = 1.0

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
#: Parameters that an optimizer takes, with DeepSpeed's defaults.
TAKES: Mapping[str, Mapping[str, Any]] = {
    "Adam": {**_ADAM, "amsgrad": False},
    "AdamW": {**_ADAM, "amsgrad": False},
    "SGD": {"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "Adagrad": {
        "lr": 1e-2,
        "lr_decay": 0.0,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "initial_accumulator_value": 0.0,
    },
    "LAMB": {**_ADAM, "max_coeff": 10.0, "min_coeff": 0.01},
}
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
#: Parameters that a schedule takes, with DeepSpeed's defaults; None: it must be given.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": "lr", **_WARMUP},
    "WarmupDecayLR": {
        "total_num_steps": None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 1e-3,
        **_WARMUP,
    },
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "cos_min_ratio": 1e-4,
        **_WARMUP,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
    "OneCycle": {
        "cycle_min_lr": None,
        "cycle_max_lr": None,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": "cycle_first_step_size",
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": "cycle_first_stair_count",
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
}


def deepspeed(
    source: Any,
    *,
    world_size: int | None,
    auto: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Settings:
    """Reads a DeepSpeed configuration, strictly.

    Parameters
    ----------
    source : path, str or mapping
        A JSON file, JSON text, or a dict.
    world_size : int or None
        Ranks, which the batch sizes are checked against; None where they are not known, and then
        batch sizes that need them stay open.
    auto : mapping, optional
        Values for what is "auto", by names of ``TrainingArguments``: ``learning_rate``,
        ``per_device_train_batch_size``, ``max_grad_norm``, ``warmup_steps``, ``max_steps``,
        ``bf16``, ... and the model's ``hidden_size``. A value that the file says otherwise is a
        contradiction. ``LATER`` leaves open what depends on it.
    device : {"cpu", "cuda"}
        Where the model computes. What may be said here does not depend on it.

    Returns
    -------
    Settings
        What is not in the file has DeepSpeed's defaults, clipping at 1 among them.

    Raises
    ------
    ConfigError
        A key that is unknown, refused or there twice, a value of another type or out of range, an
        "auto" that nothing fills, or keys that contradict each other. The text names the key and
        what would do.
    """
    values, name = load(source)
    return read_deepspeed(values, name, world_size=world_size, auto=auto)


def read_deepspeed(
    values: Mapping[str, Any],
    name: str,
    *,
    world_size: int | None,
    auto: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from a parsed configuration."""
    for known in auto or {}:
        if known not in AUTO_NAMES:
            raise ConfigError(f"auto= has {known!r:.60}: expected {', '.join(AUTO_NAMES)}")
    reader = Reader(name, auto=auto)
    if _refuse_type(reader, values.get("optimizer")):
        values = {key: value for key, value in values.items() if key != "optimizer"}
    found = reader.read(values, RULES)
    if "bf16" in found and "bfloat16" in found:
        reader.fail("bfloat16", "is the old name of bf16, which is there too; leave it out")
    zero = found.get("zero_optimization", {})
    batch = _batch(reader, found, world_size)
    optimizer = _optimizer(reader, found.get("optimizer"))
    schedule = _schedule(reader, found.get("scheduler"), optimizer)
    clip = found.get("gradient_clipping", _DEFAULT_CLIPPING)
    if "gradient_clipping" not in found:
        reader.row("gradient_clipping", clip, "done", "step(max_norm=1): DeepSpeed's default")
    checkpoint = found.get("checkpoint", {})
    fields = (
        ("precision", any(_precision_keys(found))),
        ("batch", batch != Batch()),
        ("optimizer", optimizer is not None),
        ("schedule", schedule is not None),
        ("save_16bit", "stage3_gather_16bit_weights_on_model_save" in zero),
        ("steps_per_print", "steps_per_print" in found),
        ("timing", "wall_clock_breakdown" in found),
        ("allow_unused", "ignore_unused_parameters" in zero),
        ("allow_untested_optimizer", "zero_allow_untested_optimizer" in found),
        ("tag_validation", "tag_validation" in checkpoint),
        ("world_size", None not in (batch.train, batch.micro, batch.accumulate)),
    )
    given = {"sharding", "max_norm", "save", *(field for field, there in fields if there)}
    implied = None
    if batch.train and batch.micro and batch.accumulate:
        implied = batch.train // (batch.micro * batch.accumulate)
    return Settings(
        source=name,
        kind="deepspeed",
        sharding=Sharding(stage=zero.get("stage", 0), offload=_offload(reader, zero)),
        precision=_precision(reader, found),
        batch=batch,
        max_norm=None if clip in (0, LATER) else clip,
        optimizer=optimizer,
        schedule=schedule,
        save="sharded",
        save_16bit=zero.get("stage3_gather_16bit_weights_on_model_save", False),
        efficient_loading=zero.get("stage", 0) == 3,
        steps_per_print=found.get("steps_per_print"),
        timing=found.get("wall_clock_breakdown", False),
        allow_unused=zero.get("ignore_unused_parameters", True),
        allow_untested_optimizer=found.get("zero_allow_untested_optimizer", False),
        tag_validation=checkpoint.get("tag_validation", "Warn").lower(),
        world_size=implied,
        given=frozenset(given),
        keys=tuple(reader.rows),
    )


# ---- batch sizes --------------------------------------------------------------------------------

_TRIANGLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _batch(reader: Reader, found: dict[str, Any], world_size: int | None) -> Batch:
    """Completes train = micro x accumulation x ranks, or says what does not divide."""
    asked = "train_batch_size" in found
    values = [found.get(name) for name in _TRIANGLE]
    train, micro, steps = values
    if LATER in values:
        return Batch(*(None if value is LATER else value for value in values))
    if world_size is None:
        if train and micro and steps and train % (micro * steps):
            reader.fail(
                "train_batch_size",
                f"is {train}, no multiple of train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {steps}",
            )
        return Batch(train, micro, steps)
    if train is None:
        if micro is None:
            if asked:
                reader.fail(
                    "train_batch_size",
                    'is "auto", and without train_micro_batch_size_per_gpu it cannot be computed',
                )
            return Batch(None, None, steps)
        steps = steps or 1
        train = int(micro) * steps * world_size
        _fill_train(reader, train, asked)
        return Batch(train, micro, steps)
    text = f"is {train}, and that is not"
    if micro is not None and steps is not None:
        if train != micro * steps * world_size:
            reader.fail(
                "train_batch_size",
                f"{text} train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
                f"{steps} x {world_size} ranks = {micro * steps * world_size}",
            )
        return Batch(train, micro, steps)
    parts: int = (micro or steps or 1) * world_size
    if train % parts:
        name, part = ("train_micro_batch_size_per_gpu", micro)
        if micro is None:
            name, part = ("gradient_accumulation_steps", steps or 1)
        reader.fail(
            "train_batch_size", f"{text} a multiple of {name} {part} x {world_size} ranks = {parts}"
        )
    if micro is None:
        return Batch(train, train // parts, steps or 1)
    return Batch(train, micro, train // parts)


def _fill_train(reader: Reader, train: int, asked: bool) -> None:
    """The row of an "auto" that the other two decided."""
    for i, key in enumerate(reader.rows):
        if asked and key.path == "train_batch_size":
            reader.rows[i] = type(key)(
                key.path, train, "done", key.text, " (auto, from the other two)"
            )


# ---- precision ----------------------------------------------------------------------------------


def _precision_keys(found: Mapping[str, Any]) -> list[bool]:
    named = ("fp16", "bf16", "bfloat16")
    return [
        *(isinstance(found.get(name, {}).get("enabled"), bool) for name in named),
        bool(found.get("data_types")),
        "communication_data_type" in found,
    ]


def _precision(reader: Reader, found: Mapping[str, Any]) -> MixedPrecision:
    half = found.get("fp16", {})
    brain_name = "bfloat16" if "bfloat16" in found else "bf16"
    brain = found.get(brain_name, {})
    if half.get("enabled") is True and brain.get("enabled") is True:
        reader.fail("fp16.enabled", f"and {brain_name}.enabled are both true; one of them can be")
    types = found.get("data_types", {})
    param = "float16" if half.get("enabled") is True else "float32"
    if brain.get("enabled") is True:
        param = "bfloat16"
    if types.get("param_dtype", param) != param:
        reader.fail(
            "data_types.param_dtype",
            f"is {types['param_dtype']}, and fp16 and bf16 make it {param}; leave it out",
        )
    pure = brain.get("bf16_master_weights_and_grads", False)
    moments = brain.get("bf16_optimizer_states", False)
    for name, on in (("bf16_master_weights_and_grads", pure), ("bf16_optimizer_states", moments)):
        if on and param != "bfloat16":
            reader.fail(f"{brain_name}.{name}", f"is true, but {brain_name}.enabled is not")
    accumulate = "bfloat16" if pure else "float32"
    if "grad_accum_dtype" in types:
        asked = types["grad_accum_dtype"]
        if pure and asked != "bfloat16":
            reader.fail(
                "data_types.grad_accum_dtype",
                f"is {asked}, but {brain_name}.bf16_master_weights_and_grads sums in bfloat16",
            )
        if asked == "float16":
            reader.fail(
                "data_types.grad_accum_dtype",
                "is float16, in which small sums vanish; the nearest that is offered is bf16",
            )
        accumulate = asked
    reduce = found.get("communication_data_type")
    scaled = "float16" in (param, reduce)
    if param == "float32" and reduce is None and accumulate == "float32":
        return PRESETS["fp32"]
    return MixedPrecision(
        param=param,
        reduce=reduce,
        accumulate=accumulate,
        master=None if pure or param == "float32" else "float32",
        moments="bfloat16" if moments else "float32",
        loss_scale=_loss_scale(reader, half) if scaled else None,
    )


def _loss_scale(reader: Reader, half: Mapping[str, Any]) -> LossScale:
    static = half.get("loss_scale", 0.0)
    if static:
        return LossScale(initial=static, dynamic=False, minimum=static)
    least = half.get("min_loss_scale", 1.0)
    initial = 2.0 ** half.get("initial_scale_power", 16)
    if least == 0.0 or initial < least:
        reader.fail(
            "fp16.min_loss_scale",
            f"is {least:g}: expected a power of two up to the first scale, {initial:g}",
        )
    hysteresis = half.get("hysteresis", 2)
    made = LossScale(
        initial=initial,
        window=half.get("loss_scale_window", 1000),
        hysteresis=hysteresis,
        minimum=least,
    )
    if hysteresis == 1:
        return made  # there is no count to restore
    return replace(made, restore="applied" if half.get("consecutive_hysteresis") else "growth")


# ---- offload ------------------------------------------------------------------------------------


def _offload(reader: Reader, zero: Mapping[str, Any]) -> Offload | None:
    homes = {}
    for part, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        path = f"zero_optimization.{part}"
        home = zero.get(part, {}).get("device", "none")
        if zero.get(old):
            if home == "none" and "device" in zero.get(part, {}):
                reader.fail(f"zero_optimization.{old}", f"is true, but {path}.device is none")
            home, path = ("cpu" if home == "none" else home), f"zero_optimization.{old}"
        homes[part] = home
    if homes["offload_param"] == "cpu" and zero.get("stage", 0) != 3:
        reader.fail(
            "zero_optimization.offload_param",
            f"needs stage 3, and stage is {zero.get('stage', 0)}: below, parameters are whole",
        )
    if set(homes.values()) == {"none"}:
        return None
    return Offload(
        params="cpu" if homes["offload_param"] == "cpu" else "device",
        grads="cpu" if homes["offload_optimizer"] == "cpu" else "device",
        state="cpu" if homes["offload_optimizer"] == "cpu" else "device",
    )


# ---- optimizer and schedule ---------------------------------------------------------------------


def _refuse_type(reader: Reader, section: object) -> bool:
    """Whether an optimizer is refused by its name: its parameters, then, are not looked at."""
    asked = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(asked, str) or asked == "auto" or _is_offered(asked):
        return False
    text = f'is "{asked:.60}", which is not offered; there are {_listed()}'
    reader.refuse("optimizer.type", asked, text)
    return True


def _is_offered(asked: str) -> bool:
    return OPTIMIZERS.get(asked.lower(), "") in offered()


def _optimizer(reader: Reader, found: Mapping[str, Any] | None) -> OptimizerSettings | None:
    if found is None:
        return None
    if "type" not in found:
        reader.fail("optimizer.type", f"is missing: expected one of {', '.join(offered())}")
    asked = str(found["type"])
    name = OPTIMIZERS[asked.lower()]
    given = dict(found.get("params", {}))
    decoupled = given.pop("adam_w_mode", True)
    if name == "Adam" and decoupled:
        name = "AdamW"
        _say_type(reader, "the optimizer AdamW: adam_w_mode is true unless it is said")
    takes = TAKES[name]
    for key in given:
        if key not in takes:
            reader.fail(
                f"optimizer.params.{key}", f"is no parameter of {asked}; it has {', '.join(takes)}"
            )
    options = {**takes, **given}
    if options.get("nesterov") and not options["momentum"]:
        reader.fail("optimizer.params.nesterov", "is true, and momentum is 0")
    return OptimizerSettings(name, options)


def offered() -> list[str]:
    """The optimizers that there are."""
    from .. import optim

    return [name for name in OPTIMIZERS.values() if hasattr(optim, name)]


def _listed() -> str:
    return ", ".join("Lamb" if name == "LAMB" else name for name in offered())


def _say_type(reader: Reader, text: str) -> None:
    for i, key in enumerate(reader.rows):
        if key.path == "optimizer.type":
            reader.rows[i] = type(key)(key.path, key.value, "done", text)


def _schedule(
    reader: Reader, found: Mapping[str, Any] | None, optimizer: OptimizerSettings | None
) -> ScheduleSettings | None:
    if found is None:
        return None
    if "type" not in found:
        reader.fail("scheduler.type", f"is missing: expected one of {', '.join(SCHEDULES)}")
    name = found["type"]
    shape = SHAPES[name]
    given = found.get("params", {})
    for key in given:
        if key not in shape:
            reader.fail(
                f"scheduler.params.{key}", f"is no parameter of {name}; it has {', '.join(shape)}"
            )
    options = {**shape, **given}
    for key, value in shape.items():
        if value is None and key not in given:
            reader.fail(f"scheduler.params.{key}", f"is missing, and {name} needs it")
        if isinstance(value, str) and value in shape and key not in given:
            options[key] = options[value]
    if name == "OneCycle":
        moves = optimizer is None or "betas" in optimizer.options
        if options["cycle_momentum"] and not moves:
            options["cycle_momentum"] = False
            reader.row(
                "scheduler.params.cycle_momentum", False, "noted", "the optimizer has no betas"
            )
    return ScheduleSettings(name, options)
