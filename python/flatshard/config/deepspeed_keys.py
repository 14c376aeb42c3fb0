"""What becomes of each key of a DeepSpeed configuration, by section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import checks
from .reading import Auto, Rule, done, noted, refused, section
from .zero_keys import FILES, REDUCED, SCHEDULED, ZERO

__all__ = ["OPTIMIZERS", "RULES", "SCHEDULES"]

flag = checks.flag
_size = checks.integer(1)
_size_or_off = checks.integer(0)

#: DeepSpeed's names of optimizers in lower case, to flatshard's.
OPTIMIZERS = {
    "adam": "Adam",
    "adamw": "AdamW",
    "sgd": "SGD",
    "lion": "Lion",
    "adagrad": "Adagrad",
    "lamb": "LAMB",
}
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle")


def _named(name: str, make: Callable[[Any], Any] = lambda value: value) -> Auto:
    return Auto((name,), make)


_BETAS = ("adam_beta1", "adam_beta2")

OPTIMIZER_PARAMS: Mapping[str, Rule] = {
    "lr": done(checks.number(), "lr", auto=_named("learning_rate")),
    "betas": done(checks.betas, "betas", auto=Auto(_BETAS, lambda one, two: [one, two])),
    "eps": done(checks.number(), "eps", auto=_named("adam_epsilon")),
    "weight_decay": done(checks.number(), "weight_decay", auto=_named("weight_decay")),
    "momentum": done(checks.number(), "momentum"),
    "nesterov": done(flag, "nesterov"),
    "lr_decay": done(checks.number(), "lr_decay"),
    "initial_accumulator_value": done(checks.number(), "initial_accumulator_value"),
    "amsgrad": done(flag, "amsgrad"),
    "max_coeff": done(checks.number(above=True), "clamp of the trust ratio"),
    "min_coeff": done(checks.number(), "clamp of the trust ratio"),
    "adam_w_mode": done(flag, lambda v: "decoupled weight decay" if v else "weight decay as L2"),
    "bias_correction": refused(
        flag,
        "moments are always corrected",
        near="optimizer.params.betas",
        off=lambda v: v,
        off_text="always",
    ),
    "dampening": refused(
        checks.number(), "momentum is not dampened", near="optimizer.params.momentum"
    ),
    "maximize": refused(flag, "losses are minimized", near="optimizer.params.lr"),
    "eps_inside_sqrt": refused(flag, "eps is added to the root", near="optimizer.params.eps"),
    "fp32_optimizer_states": refused(
        flag,
        "moments follow the precision",
        near="bf16.bf16_optimizer_states",
        off=lambda v: v,
        off_text="unless bf16.bf16_optimizer_states",
    ),
    "max_grad_norm": refused(
        checks.number(), "the optimizer does not clip", near="gradient_clipping"
    ),
    **{
        name: noted(flag, "every step is fused")
        for name in ("torch_adam", "fused", "foreach", "set_grad_none", "capturable")
    },
}

SCHEDULER_PARAMS: Mapping[str, Rule] = {
    "warmup_min_lr": done(
        checks.number(), "first rate", auto=Auto((), lambda: 0, must_match=False)
    ),
    "warmup_max_lr": done(checks.number(), "rate after the warm-up", auto=_named("learning_rate")),
    "warmup_num_steps": done(
        _size, "steps of warm-up", auto=_named("warmup_steps", lambda n: max(1, int(n)))
    ),
    "warmup_type": done(checks.choice("log", "linear"), "form of the warm-up"),
    "total_num_steps": done(_size, "steps of the run", auto=_named("max_steps")),
    "warmup_min_ratio": done(checks.number(most=1.0), "first rate, as a part of lr"),
    "cos_min_ratio": done(checks.number(most=1.0), "last rate, as a part of lr"),
    "lr_range_test_min_lr": done(checks.number(), "first rate"),
    "lr_range_test_step_size": done(_size, "steps between rises"),
    "lr_range_test_step_rate": done(checks.number(), "rise, as a part of the first rate"),
    "lr_range_test_staircase": done(flag, "rise in stairs"),
    "cycle_min_lr": done(checks.number(), "first and last rate of the cycle"),
    "cycle_max_lr": done(checks.number(), "rate at its peak"),
    "decay_lr_rate": done(checks.number(), "decay after the cycle"),
    "cycle_first_step_size": done(_size, "steps up"),
    "cycle_second_step_size": done(_size_or_off, "steps down"),
    "cycle_first_stair_count": done(_size_or_off, "stairs up; 0: smooth"),
    "cycle_second_stair_count": done(_size_or_off, "stairs down"),
    "decay_step_size": done(_size_or_off, "steps of a decay; 0: none"),
    "cycle_momentum": done(flag, "betas[0] cycles against the rate"),
    "cycle_min_mom": done(checks.number(below=1.0), "betas[0] at the peak of the rate"),
    "cycle_max_mom": done(checks.number(below=1.0), "betas[0] at its ends"),
    "decay_mom_rate": done(checks.number(), "growth of betas[0] after the cycle"),
    "last_batch_iteration": refused(
        checks.integer(-1),
        "a checkpoint knows its step",
        near="scheduler.params.warmup_num_steps",
        off=lambda v: v == -1,
        off_text="a checkpoint knows its step",
    ),
}

_ELSEWHERE = "report_to of the Trainer does it, and StepResult holds the values"


def _is_off(value: Mapping[str, Any]) -> bool:
    """A section that asks for nothing: empty, or switched off."""
    return not value or value.get("enabled") is False


def _whole(text: str, near: str) -> Rule:
    """A section that is refused unless it is empty or says enabled: false."""
    return refused(checks.mapping, text, near=near, off=_is_off)


_PARALLEL = "flatshard shards over data-parallel ranks alone"
_SIZED = ("autotp_size", "autoep_size", "tp_size", "ep_size", "size", "stages")


def _parallel_off(value: Mapping[str, Any]) -> bool:
    sizes = [value[name] for name in _SIZED if name in value]
    sized = sizes and all(isinstance(size, int) and size <= 1 for size in sizes)
    return _is_off(value) or bool(sized)


RULES: Mapping[str, Rule] = {
    "train_batch_size": done(
        _size, "micro-batch x accumulation x ranks", auto=Auto((), lambda: None, must_match=False)
    ),
    "train_micro_batch_size_per_gpu": done(
        _size, "samples of a rank's micro-batch", auto=_named("per_device_train_batch_size")
    ),
    "gradient_accumulation_steps": done(
        _size, "micro-batches of a step", auto=_named("gradient_accumulation_steps")
    ),
    "managed_gradient_accumulation": noted(flag, "a step takes what was reduced before it"),
    "gradient_clipping": done(
        checks.number(),
        lambda v: f"step(max_norm={v:g})",
        auto=_named("max_grad_norm"),
        off=lambda v: v == 0,
        off_text="gradients are not clipped",
    ),
    "steps_per_print": done(
        checks.integer(1, infinite=True),
        lambda v: f"a line every {v} steps",
        off=lambda v: v is None,
        off_text="no lines",
    ),
    "wall_clock_breakdown": done(
        flag, "where the time of a step goes: world.log()", off=lambda v: not v
    ),
    "zero_allow_untested_optimizer": done(
        flag,
        "the script's own optimizer may be of any class that adopt() knows",
        off=lambda v: not v,
        off_text="the script's own optimizer must be of a class that flatshard has",
    ),
    "zero_force_ds_cpu_optimizer": noted(flag, "there is one step for all homes"),
    "zero_optimization": section(ZERO),
    "optimizer": section(
        {
            "type": done(checks.text, lambda v: f"the optimizer {OPTIMIZERS.get(v.lower(), v)}"),
            "params": section(OPTIMIZER_PARAMS),
            "legacy_fusion": noted(flag, "every step is fused"),
        }
    ),
    "scheduler": section(
        {
            "type": done(checks.choice(*SCHEDULES), lambda v: f"the schedule {v}"),
            "params": section(SCHEDULER_PARAMS),
        }
    ),
    "fp16": section(
        {
            "enabled": done(
                flag,
                'MixedPrecision(param="float16", master="float32")',
                auto=_named("fp16"),
                off=lambda v: not v,
            ),
            "loss_scale": done(
                checks.power_of_two, lambda v: f"a static scale of {v:g}" if v else "dynamic scale"
            ),
            "initial_scale_power": done(
                checks.integer(0, 60), lambda v: f"LossScale(initial={2.0**v:g})"
            ),
            "loss_scale_window": done(
                _size,
                lambda v: f"LossScale(window={v}); newer DeepSpeeds wait one step more to grow",
            ),
            "hysteresis": done(_size, lambda v: f"LossScale(hysteresis={v})"),
            "consecutive_hysteresis": done(
                flag, lambda v: f'LossScale(restore="{"applied" if v else "growth"}")'
            ),
            "min_loss_scale": done(checks.power_of_two, lambda v: f"LossScale(minimum={v:g})"),
            "auto_cast": refused(
                flag, "inputs are cast by the module that takes them", near="fp16.enabled"
            ),
            "fp16_master_weights_and_grads": refused(
                flag,
                "masters and sums lose too much in fp16",
                near="bf16.bf16_master_weights_and_grads",
            ),
        }
    ),
    **{
        name: section(
            {
                "enabled": done(
                    flag,
                    'MixedPrecision(param="bfloat16", master="float32")',
                    auto=_named("bf16"),
                    off=lambda v: not v,
                ),
                "check_grad_overflow": done(
                    flag,
                    "a step whose gradient is not finite is skipped on every rank",
                    off=lambda v: not v,
                    off_text="always checked: the norm shows it at no cost",
                ),
                "bf16_master_weights_and_grads": done(
                    flag,
                    'MixedPrecision(master=None, accumulate="bfloat16")',
                    off=lambda v: not v,
                ),
                "bf16_optimizer_states": done(
                    flag, 'MixedPrecision(moments="bfloat16")', off=lambda v: not v
                ),
                "immediate_grad_update": noted(flag, REDUCED),
            }
        )
        for name in ("bf16", "bfloat16")
    },
    "data_types": section(
        {
            "grad_accum_dtype": done(checks.dtype, lambda v: f'MixedPrecision(accumulate="{v}")'),
            "param_dtype": done(checks.dtype, lambda v: f'MixedPrecision(param="{v}")'),
            "buffer_dtype": noted(checks.dtype, "buffers keep their dtype; they are not sharded"),
        }
    ),
    "communication_data_type": done(checks.dtype, lambda v: f'MixedPrecision(reduce="{v}")'),
    "seq_parallel_communication_data_type": noted(
        checks.dtype, "there is no sequence parallelism, which is refused"
    ),
    "prescale_gradients": refused(
        flag, "gradients are divided once, before rounding", near="communication_data_type"
    ),
    "gradient_predivide_factor": refused(
        checks.number(above=True),
        "gradients are divided once, before rounding",
        near="communication_data_type",
        off=lambda v: v == 1.0,
    ),
    "gradient_allreduce_op": refused(
        checks.choice("mean", "sum"),
        "gradients are averaged over ranks",
        near="gradient_accumulation_steps",
        off=lambda v: v == "mean",
        off_text="always",
    ),
    "disable_allgather": noted(flag, SCHEDULED),
    "checkpoint": section(
        {
            "tag_validation": done(
                checks.choice("Warn", "Ignore", "Fail"),
                lambda v: f"ranks that save under different names: {v.lower()}",
            ),
            "load_universal": noted(flag, FILES),
            "use_node_local_storage": noted(flag, "a world is one host: its folder is local"),
            "parallel_write": section(
                {"pipeline_stage": noted(flag, "every rank writes its own file at once")}
            ),
            "checkpoint_serialization": noted(flag, "files are safetensors and checksummed blocks"),
            "writer": noted(checks.mapping, "checkpoint.save(background=True)"),
        }
    ),
    "activation_checkpointing": section(
        {
            "partition_activations": refused(
                flag,
                "activations stay whole on their rank",
                near="activation_checkpointing of the front end",
            ),
            "cpu_checkpointing": refused(
                flag,
                "activations are not moved to another home",
                near="activation_checkpointing of the front end",
            ),
            "contiguous_memory_optimization": noted(
                flag, "recomputation allocates what forward did"
            ),
            "number_checkpoints": noted(
                checks.anything, "which layers recompute is said where they are made"
            ),
            "synchronize_checkpoint_boundary": noted(flag, "the CPU needs no synchronising"),
            "profile": noted(flag, "world.log() has the times"),
        }
    ),
    "aio": noted(checks.mapping, "homes on disk are refused"),
    "timers": noted(checks.mapping, "world.log() has the times"),
    "log_level": noted(checks.anything, "Python's logging: the logger is named flatshard"),
    "dump_state": noted(flag, "flatshard.describe() says it at any time"),
    "memory_breakdown": noted(flag, "flatshard.memory() says it at any time"),
    "comms_logger": noted(checks.mapping, "world.log() has every collective, its bytes and time"),
    "dataloader_drop_last": noted(flag, "the script makes its own loader"),
    "graph_harvesting": noted(flag, "there are no device graphs on the CPU"),
    "use_data_before_expert_parallelism": noted(flag, "there are no experts to place"),
    "amp": _whole("apex is not used", "bf16.enabled"),
    "torch_autocast": _whole("the front end casts by itself", "bf16.enabled"),
    "tensor_parallel": refused(
        checks.mapping, _PARALLEL, near="zero_optimization.stage", off=_parallel_off
    ),
    "expert_parallel": refused(
        checks.mapping, _PARALLEL, near="zero_optimization.stage", off=_parallel_off
    ),
    "sequence_parallel": refused(
        checks.mapping, _PARALLEL, near="zero_optimization.stage", off=_parallel_off
    ),
    "sequence_parallel_size": refused(
        _size, _PARALLEL, near="zero_optimization.stage", off=lambda v: v == 1
    ),
    "pipeline": refused(
        checks.mapping, _PARALLEL, near="zero_optimization.stage", off=_parallel_off
    ),
    "autotuning": _whole("nothing is tuned", "train_micro_batch_size_per_gpu"),
    "elasticity": _whole("the world keeps its size", "train_batch_size"),
    "compression_training": refused(
        checks.mapping, "models are not compressed", near="bf16.enabled"
    ),
    "weight_quantization": refused(
        checks.mapping, "weights are not quantized", near="bf16.enabled"
    ),
    "quantize_training": _whole("weights are not quantized", "bf16.enabled"),
    "eigenvalue": _whole("it belongs to quantization", "bf16.enabled"),
    "data_efficiency": _whole("the script makes its own data", "train_batch_size"),
    "curriculum_learning": _whole("the script makes its own data", "train_batch_size"),
    "progressive_layer_drop": _whole("no layer is dropped", "zero_optimization.stage"),
    "sparse_attention": refused(
        checks.mapping, "attention is the model's own", near="zero_optimization.stage"
    ),
    "sparse_gradients": refused(flag, "gradients are dense", near="zero_optimization.stage"),
    "hybrid_engine": _whole("there is one engine", "zero_optimization.stage"),
    "compile": refused(
        checks.mapping,
        "torch.compile(module) is called by the script",
        near="zero_optimization.stage",
        off=lambda v: not v or not any(v.values()),
    ),
    "nebula": _whole("checkpoint.save(background=True) is its like", "checkpoint"),
    "datastates": refused(
        checks.mapping, "checkpoint.save(background=True) is its like", near="checkpoint"
    ),
    "tensorboard": _whole(_ELSEWHERE, "steps_per_print"),
    "wandb": _whole(_ELSEWHERE, "steps_per_print"),
    "comet": _whole(_ELSEWHERE, "steps_per_print"),
    "csv_monitor": _whole(_ELSEWHERE, "steps_per_print"),
    "flops_profiler": _whole("the trainer shows the rate", "wall_clock_breakdown"),
}
