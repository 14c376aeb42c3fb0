"""Settings in the form of FSDP, DeepSpeed or Accelerate, and what that form cannot say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..policy import LossScale, MixedPrecision, Offload
from .own import KINDS, to_dict
from .settings import LATER, Settings

__all__ = ["Written", "write"]

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Written:
    """A configuration in another form.

    Parameters
    ----------
    values : dict
        Plain values for a JSON or YAML file.
    left_out : tuple of str
        What the form cannot say, a sentence each: where it is said instead, or what is nearest.
    """

    values: dict[str, Any]
    left_out: tuple[str, ...]


def write(settings: Settings, form: str) -> Written:
    """Settings in another form; reading it back gives the same fields, but for what was left out.

    Parameters
    ----------
    settings : Settings
    form : {"flatshard", "fsdp", "deepspeed", "accelerate"}
        Which one.

    Returns
    -------
    Written

    Raises
    ------
    ConfigError
        An unknown form, or a value that was left open.
    """
    if form not in KINDS:
        raise ConfigError(f"form={form!r:.60}: expected one of {', '.join(KINDS)}")
    for part in (settings.optimizer, settings.schedule):
        for name, value in (part.options if part else {}).items():
            if value is LATER:
                raise ConfigError(f"{settings.source}: {name} was left open; give its value")
    if form == "flatshard":
        return Written(to_dict(settings), ())
    left: list[str] = []
    makers: Mapping[str, Callable[[Settings, list[str]], dict[str, Any]]] = {
        "fsdp": _fsdp,
        "deepspeed": _deepspeed,
        "accelerate": _accelerate,
    }
    return Written(makers[form](settings, left), tuple(left))


# ---- FSDP ---------------------------------------------------------------------------------------


def _fsdp(settings: Settings, left: list[str]) -> dict[str, Any]:
    sharding = settings.sharding
    first = sharding.partition == "flat" or sharding.stage < 3
    kept = not sharding.reshard_after_forward or sharding.stage in (1, 2)
    made: dict[str, Any] = {"version": 1 if first else 2}
    if first:
        name = "SHARD_GRAD_OP" if kept else "FULL_SHARD"
        made["reshard_after_forward"] = "NO_SHARD" if sharding.stage == 0 else name
    else:
        made["reshard_after_forward"] = sharding.reshard_after_forward
    if sharding.stage in (1, 2):
        left.append(
            f"stage {sharding.stage}: FSDP always shards weights; SHARD_GRAD_OP, the nearest, "
            "keeps them gathered from forward to backward"
        )
    if sharding.replicate > 1:
        left.append(f"replicate={sharding.replicate}: dp_replicate_size of a parallelism_config")
    if sharding.offload is not None:
        made["cpu_offload"] = True
        if sharding.offload != Offload(params="cpu", grads="cpu", state="cpu"):
            left.append(f"{sharding.offload}: FSDP offloads everything or nothing")
    _units(settings, made)
    if settings.ignored_modules:
        ignored = settings.ignored_modules
        made["ignored_modules"] = ignored if isinstance(ignored, str) else list(ignored)
    if settings.activation_checkpointing:
        made["activation_checkpointing"] = True
    made["state_dict_type"] = f"{settings.save.upper()}_STATE_DICT"
    if settings.efficient_loading:
        made["cpu_ram_efficient_loading"] = True
    if settings.precision != MixedPrecision():
        made["mixed_precision_policy"] = _policy(settings.precision, left)
    _only_elsewhere(settings, left)
    return made


def _units(settings: Settings, made: dict[str, Any]) -> None:
    units = settings.units
    if units.by == "size":
        made["auto_wrap_policy"] = "SIZE_BASED_WRAP"
        made["min_num_params"] = units.min_num_params
    elif units.by == "whole":
        made["auto_wrap_policy"] = "NO_WRAP"
    else:
        made["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        if units.classes:
            made["transformer_layer_cls_to_wrap"] = list(units.classes)


def _policy(precision: MixedPrecision, left: list[str]) -> dict[str, str]:
    made = {"param_dtype": _SHORT[precision.param]}
    if precision.reduce is not None:
        made["reduce_dtype"] = _SHORT[precision.reduce]
    for name, usual in (("accumulate", "float32"), ("moments", "float32"), ("rounding", "nearest")):
        if getattr(precision, name) != usual:
            left.append(f'{name}="{getattr(precision, name)}": FSDP\'s policy has no such field')
    if precision.param != "float32" and precision.master != "float32":
        left.append(f"master={precision.master!r}: FSDP keeps the module's own dtype as master")
    if precision.loss_scale not in (None, LossScale()):
        left.append(f"{precision.loss_scale}: with FSDP torch's GradScaler scales the loss")
    return made


def _only_elsewhere(settings: Settings, left: list[str]) -> None:
    """Fields that only a DeepSpeed file has."""
    batch = settings.batch
    for name, there, where in (
        ("optimizer", settings.optimizer is not None, "optim= and learning_rate="),
        ("schedule", settings.schedule is not None, "lr_scheduler_type= and warmup_steps="),
        ("max_norm", settings.max_norm is not None, "max_grad_norm="),
        ("batch.micro", batch.micro is not None, "per_device_train_batch_size="),
        ("batch.accumulate", batch.accumulate is not None, "gradient_accumulation_steps="),
        ("steps_per_print", settings.steps_per_print is not None, "logging_steps="),
    ):
        if there:
            left.append(f"{name}: TrainingArguments({where})")
    for name in ("save_16bit", "timing", "allow_untested_optimizer"):
        if getattr(settings, name):
            left.append(f"{name}: FSDP has no such key")
    if not settings.allow_unused:
        left.append("allow_unused=False: FSDP has no such key")
    if settings.tag_validation != "warn":
        left.append(f'tag_validation="{settings.tag_validation}": FSDP has no such key')


# ---- DeepSpeed ----------------------------------------------------------------------------------


def _deepspeed(settings: Settings, left: list[str]) -> dict[str, Any]:
    sharding = settings.sharding
    zero: dict[str, Any] = {"stage": sharding.stage}
    if sharding.partition != "flat":
        left.append('partition="per_parameter": ZeRO cuts flat memory; bits differ by rounding')
    if not sharding.reshard_after_forward:
        left.append("reshard_after_forward=False: stage3_max_reuse_distance is the nearest")
    if sharding.replicate > 1:
        left.append(f"replicate={sharding.replicate}: DeepSpeed's is mics_shard_size")
    offload = sharding.offload
    if offload is not None:
        if offload.state == "cpu" or offload.grads == "cpu":
            zero["offload_optimizer"] = {"device": "cpu"}
        if offload.params == "cpu" and sharding.stage == 3:
            zero["offload_param"] = {"device": "cpu"}
        elif offload.params == "cpu":
            left.append(f"params on the CPU at stage {sharding.stage}: ZeRO needs stage 3")
        if offload.state != offload.grads:
            left.append(f"{offload}: ZeRO moves gradients and state together")
    if settings.save_16bit:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if not settings.allow_unused:
        zero["ignore_unused_parameters"] = False
    made: dict[str, Any] = {"zero_optimization": zero}
    made["gradient_clipping"] = settings.max_norm or 0
    for key, value in (
        ("train_batch_size", settings.batch.train),
        ("train_micro_batch_size_per_gpu", settings.batch.micro),
        ("gradient_accumulation_steps", settings.batch.accumulate),
        ("steps_per_print", settings.steps_per_print),
        ("wall_clock_breakdown", settings.timing or None),
        ("zero_allow_untested_optimizer", settings.allow_untested_optimizer or None),
    ):
        if value is not None:
            made[key] = value
    if settings.tag_validation != "warn":
        made["checkpoint"] = {"tag_validation": settings.tag_validation.capitalize()}
    _precision(settings.precision, made, left)
    if settings.optimizer is not None:
        made["optimizer"] = _optimizer(settings)
    if settings.schedule is not None:
        options = {k: v for k, v in settings.schedule.options.items() if v != "lr"}
        made["scheduler"] = {"type": settings.schedule.name, "params": options}
    if settings.units.by != "auto":
        left.append("units: ZeRO gathers module by module")
    if settings.ignored_modules:
        left.append("ignored_modules: ZeRO has no such key")
    if settings.activation_checkpointing:
        left.append(
            "activation_checkpointing: the script calls model.gradient_checkpointing_enable()"
        )
    if settings.save != "sharded":
        left.append('save="full": zero_to_fp32.py, or stage3_gather_16bit_weights_on_model_save')
    if settings.efficient_loading != (sharding.stage == 3):
        left.append(
            f"efficient_loading={settings.efficient_loading}: with DeepSpeed it goes with stage 3"
        )
    return made


def _optimizer(settings: Settings) -> dict[str, Any]:
    assert settings.optimizer is not None
    name, options = settings.optimizer.name, dict(settings.optimizer.options)
    if "betas" in options:
        options["betas"] = list(options["betas"])
    if name == "Adam":
        options["adam_w_mode"] = False
    return {"type": "Lamb" if name == "LAMB" else name, "params": options}


def _precision(precision: MixedPrecision, made: dict[str, Any], left: list[str]) -> None:
    p = precision
    if p.param == "bfloat16":
        made["bf16"] = {"enabled": True}
        if p.master is None:
            made["bf16"]["bf16_master_weights_and_grads"] = True
            if p.accumulate != "bfloat16":
                left.append(f'accumulate="{p.accumulate}" without masters: ZeRO sums in bf16 then')
        if p.moments == "bfloat16":
            made["bf16"]["bf16_optimizer_states"] = True
    elif p.moments == "bfloat16":
        left.append('moments="bfloat16" goes with bf16 in ZeRO')
    if p.param == "float16":
        made["fp16"] = {"enabled": True, **_loss_scale(p.loss_scale, left)}
    elif p.loss_scale is not None:
        left.append(f"{p.loss_scale}: ZeRO scales the loss with fp16 alone")
    if p.reduce is not None:
        made["communication_data_type"] = _SHORT[p.reduce]
    if p.accumulate == "bfloat16" and p.master is not None:
        made["data_types"] = {"grad_accum_dtype": "bf16"}
    if p.master == "split":
        left.append('master="split": ZeRO\'s masters are float32')
    if p.rounding != "nearest":
        left.append(f'rounding="{p.rounding}": ZeRO rounds to nearest')


def _loss_scale(scale: LossScale | float | None, left: list[str]) -> dict[str, Any]:
    if isinstance(scale, (int, float)):
        return {"loss_scale": scale}
    assert scale is not None
    if not scale.dynamic:
        return {"loss_scale": scale.initial}
    if scale.factor != 2.0:
        left.append(f"LossScale(factor={scale.factor:g}): DeepSpeed's is 2")
    if scale.hysteresis > 1 and scale.restore == "shrink":
        left.append('LossScale(restore="shrink"): DeepSpeed restores the count when it grows')
    consecutive = {"consecutive_hysteresis": True} if scale.restore == "applied" else {}
    return {
        **consecutive,
        "loss_scale": 0,
        "initial_scale_power": math.frexp(scale.initial)[1] - 1,
        "loss_scale_window": scale.window,
        "hysteresis": scale.hysteresis,
        "min_loss_scale": scale.minimum,
    }


# ---- Accelerate ---------------------------------------------------------------------------------


def _accelerate(settings: Settings, left: list[str]) -> dict[str, Any]:
    """A YAML of FSDP, or of DDP at stage 0."""
    made: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    if settings.world_size is not None:
        made["num_processes"] = settings.world_size
    if settings.sharding.stage == 0:
        made["distributed_type"] = "MULTI_CPU"
        _only_elsewhere(settings, left)
        if settings.precision != MixedPrecision():
            left.append("precision: with DDP mixed_precision is the Accelerator's autocast")
        return made
    made["distributed_type"] = "FSDP"
    fsdp = _fsdp(settings, left)
    made["fsdp_config"] = {f"fsdp_{key}": value for key, value in fsdp.items()}
    classes = made["fsdp_config"].get("fsdp_transformer_layer_cls_to_wrap")
    if classes:
        made["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = ",".join(classes)
    if settings.sharding.replicate > 1 and settings.sharding.partition == "per_parameter":
        left[:] = [text for text in left if not text.startswith("replicate=")]
        mesh = {"parallelism_config_dp_replicate_size": settings.sharding.replicate}
        if settings.world_size is not None:
            size = settings.world_size // settings.sharding.replicate
            mesh["parallelism_config_dp_shard_size"] = size
        made["parallelism_config"] = mesh
    if settings.batch.accumulate is not None:
        left[:] = [text for text in left if not text.startswith("batch.accumulate")]
        left.append("batch.accumulate: Accelerator(gradient_accumulation_steps=)")
    return made
