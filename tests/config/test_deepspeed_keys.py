"""Each key of a DeepSpeed JSON, one by one: what it decides, that it moves nothing, or why not."""

from __future__ import annotations

from typing import Any

import pytest
from config_cases import done, meaning, nested, noted, paths, refused, row

from flatshard import ConfigError, LossScale, MixedPrecision, Offload, Sharding, config
from flatshard.config import Batch, OptimizerSettings, ScheduleSettings
from flatshard.config.deepspeed_keys import RULES

pytestmark = pytest.mark.quick

WORLD = 4
Z, O, S = "zero_optimization", "optimizer.params", "scheduler.params"
BF16 = MixedPrecision(param="bfloat16", master="float32")
PURE = MixedPrecision(param="bfloat16", accumulate="bfloat16")
ADAMW = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
}
SGD = {"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
ADAGRAD = {
    "lr": 1e-2,
    "lr_decay": 0.0,
    "eps": 1e-10,
    "weight_decay": 0.0,
    "initial_accumulator_value": 0.0,
}
WARM = {"warmup_num_steps": 1000, "warmup_type": "log"}
SHAPES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": "lr", **WARM},
    "WarmupDecayLR": {
        "total_num_steps": 5000,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 1e-3,
        **WARM,
    },
    "WarmupCosineLR": {
        "total_num_steps": 5000,
        "warmup_min_ratio": 0.0,
        "cos_min_ratio": 1e-4,
        **WARM,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
    "OneCycle": {
        "cycle_min_lr": 1e-4,
        "cycle_max_lr": 1e-3,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": 2000,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": 0,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
}
#: What a schedule cannot do without.
NEEDS = {
    "WarmupDecayLR": {"total_num_steps": 5000},
    "WarmupCosineLR": {"total_num_steps": 5000},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3},
}


def fp16(**scale: Any) -> MixedPrecision:
    made = LossScale(**{"hysteresis": 2, "restore": "growth", **scale})
    return MixedPrecision(param="float16", master="float32", loss_scale=made)


STATIC = MixedPrecision(
    param="float16",
    master="float32",
    loss_scale=LossScale(initial=128.0, dynamic=False, minimum=128.0),
)


def on_cpu(**homes: Any) -> Sharding:
    return Sharding(stage=3, offload=Offload(**homes))


def optimizer(key: str, value: Any, name: str = "AdamW", **defaults: Any) -> Any:
    """A case of optimizer.params, for an optimizer that has the key."""
    options = {**(defaults or ADAMW), key: tuple(value) if key == "betas" else value}
    case = done(f"{O}.{key}", value, optimizer=OptimizerSettings(name, options))
    return (*case, {"optimizer.type": name})


def schedule(name: str, key: str, value: Any, **also: Any) -> Any:
    """A case of scheduler.params."""
    settings = ScheduleSettings(name, {**SHAPES[name], key: value, **also})
    base = {"scheduler.type": name, **{f"{S}.{k}": v for k, v in NEEDS.get(name, {}).items()}}
    return (*done(f"{S}.{key}", value, schedule=settings), base)


def sharded(case: Any, **also: Any) -> Any:
    """A case that needs stage 3, or other keys, beside it."""
    return (*case[:4], {f"{Z}.stage": 3, **also})


CASES: list[Any] = [
    # batch sizes
    done("train_batch_size", 32, batch=Batch(32, 8, 1), world_size=4),
    refused("train_batch_size", 30, "not a multiple of gradient_accumulation_steps 1 x 4 ranks"),
    refused("train_batch_size", 0, "a whole number from 1"),
    refused("train_batch_size", "auto", 'train_batch_size is "auto", and without'),
    done("train_micro_batch_size_per_gpu", 2, batch=Batch(8, 2, 1), world_size=4),
    refused("train_micro_batch_size_per_gpu", -2, "a whole number from 1"),
    done("gradient_accumulation_steps", 3, batch=Batch(None, None, 3)),
    refused("gradient_accumulation_steps", 1.5, "a whole number from 1"),
    *noted("managed_gradient_accumulation", True, False),
    # the step
    done("gradient_clipping", 0.5, max_norm=0.5),
    done("gradient_clipping", 0, max_norm=None),
    refused("gradient_clipping", float("inf"), "a finite number from 0"),
    done("steps_per_print", 10, steps_per_print=10),
    done("steps_per_print", float("inf"), steps_per_print=None),
    refused("steps_per_print", 0, "a whole number from 1"),
    done("wall_clock_breakdown", True, timing=True),
    done("zero_allow_untested_optimizer", True, allow_untested_optimizer=True),
    *noted("zero_force_ds_cpu_optimizer", True, False),
    # ZeRO
    *[
        done(f"{Z}.stage", n, sharding=Sharding(stage=n), efficient_loading=n == 3)
        for n in range(4)
    ],
    refused(f"{Z}.stage", 4, "a whole number from 0 to 3"),
    refused(f"{Z}.stage", "auto", f'{Z}.stage is "auto", which nothing fills'),
    sharded(
        done(
            f"{Z}.offload_optimizer.device",
            "cpu",
            sharding=on_cpu(grads="cpu", state="cpu"),
        )
    ),
    sharded(done(f"{Z}.offload_optimizer.device", "none")),
    sharded(refused(f"{Z}.offload_optimizer.device", "nvme", "nvme: homes on disk .* cpu")),
    sharded(refused(f"{Z}.offload_optimizer.device", "gpu", "one of none, cpu, nvme")),
    sharded(done(f"{Z}.offload_param.device", "cpu", sharding=on_cpu(params="cpu"))),
    sharded(refused(f"{Z}.offload_param.device", "nvme", "nvme: homes on disk .* cpu")),
    refused(f"{Z}.offload_param.device", "cpu", "needs stage 3, and stage is 0"),
    sharded(done(f"{Z}.cpu_offload", True, sharding=on_cpu(grads="cpu", state="cpu"))),
    sharded(done(f"{Z}.cpu_offload_param", True, sharding=on_cpu(params="cpu"))),
    sharded(done(f"{Z}.cpu_offload_params", True, sharding=on_cpu(params="cpu"))),
    *noted(f"{Z}.cpu_offload_use_pin_memory", True, False),
    *[
        case
        for part in ("offload_optimizer", "offload_param")
        for case in (
            *noted(f"{Z}.{part}.nvme_path", "/local_nvme", None),
            *noted(f"{Z}.{part}.buffer_count", 1, 5),
            *noted(f"{Z}.{part}.buffer_size", 1e8),
            *noted(f"{Z}.{part}.pin_memory", True, False),
            refused(f"{Z}.{part}.buffer_count", 0, "a whole number from 1"),
        )
    ],
    *noted(f"{Z}.offload_param.max_in_cpu", 0, 1e9),
    *[
        case
        for name in ("pipeline", "pipeline_read", "pipeline_write", "fast_init")
        for case in noted(f"{Z}.offload_optimizer.{name}", True, False)
    ],
    *noted(f"{Z}.offload_optimizer.cpuadam_cores_perc", 0.5),
    *noted(f"{Z}.offload_optimizer.ratio", 1.0, 1),
    refused(f"{Z}.offload_optimizer.ratio", 0.3, "a part of the state cannot be offloaded"),
    *noted(f"{Z}.offload_optimizer.super_offload", False),
    refused(f"{Z}.offload_optimizer.super_offload", True, "no such mode"),
    done(f"{Z}.ignore_unused_parameters", False, allow_unused=False),
    done(f"{Z}.load_from_fp32_weights", True),
    *[
        done(f"{Z}.{name}_weights_on_model_save", True, save_16bit=True)
        for name in ("stage3_gather_16bit", "gather_16bit", "stage3_gather_fp16")
    ],
    *[
        case
        for name in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size")
        for case in (
            *noted(f"{Z}.{name}", 1, 5e8),
            refused(f"{Z}.{name}", 0, "a whole number from 1"),
            refused(f"{Z}.{name}", 2.5, "a whole number from 1"),
        )
    ],
    *[
        case
        for name in (
            *("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters"),
            *("model_persistence_threshold", "max_reuse_distance", "module_granularity_threshold"),
        )
        for prefix in ("", "stage3_")
        for case in noted(f"{Z}.{prefix}{name}", 0, 10**6)
    ],
    *[
        case
        for name in (
            *("use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params"),
            *("allgather_sequential", "stage3_allgather_sequential", "overlap_comm"),
            *("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce"),
            *("allgather_partitions", "round_robin_gradients", "elastic_checkpoint"),
            *("legacy_stage1", "memory_efficient_linear", "pipeline_loading_checkpoint"),
            *("override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks"),
            "save_muon_momentum_buffer_in_memory",
        )
        for case in noted(f"{Z}.{name}", True, False)
    ],
    *[
        case
        for name in ("classes", "names", "name_suffixes")
        for case in noted(f"{Z}.leaf_module.{name}", [], ["Experts"])
    ],
    *noted(f"{Z}.zero_hpz_partition_size", 0, 1),
    refused(f"{Z}.zero_hpz_partition_size", 8, "no second shards"),
    *[
        case
        for name in ("weights", "nontrainable_weights", "gradients")
        for case in (
            *noted(f"{Z}.zero_quantized_{name}", False),
            refused(f"{Z}.zero_quantized_{name}", True, "quantized collectives"),
        )
    ],
    *noted(f"{Z}.zeropp_loco_param", None, {}),
    refused(f"{Z}.zeropp_loco_param", {"err_beta": 0.8}, "quantized collectives"),
    *noted(f"{Z}.mics_shard_size", -1, 0),
    refused(f"{Z}.mics_shard_size", 8, "no second shards"),
    *noted(f"{Z}.mics_hierarchical_params_gather", False),
    refused(f"{Z}.mics_hierarchical_params_gather", True, "no second shards"),
    *noted(f"{Z}.zenflow", None, {}),
    refused(f"{Z}.zenflow", {"topk_ratio": 0.1}, "no such mode"),
    # optimizer
    *[
        done("optimizer.type", name, optimizer=OptimizerSettings(ours, options))
        for name, ours, options in (
            ("AdamW", "AdamW", ADAMW),
            ("adamw", "AdamW", ADAMW),
            ("Adam", "AdamW", ADAMW),
            ("SGD", "SGD", SGD),
            ("Adagrad", "Adagrad", ADAGRAD),
            ("Lion", "Lion", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        )
    ],
    *[
        refused("optimizer.type", name, "which is not offered; there are Adam, AdamW, SGD, Lion")
        for name in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuSGD", "Muon", "Adma")
    ],
    optimizer("lr", 0.25),
    optimizer("betas", [0.8, 0.95]),
    optimizer("eps", 1e-6),
    optimizer("weight_decay", 0.1),
    optimizer("amsgrad", True),
    optimizer("momentum", 0.9, "SGD", **SGD),
    (
        *done(
            f"{O}.nesterov",
            True,
            optimizer=OptimizerSettings("SGD", {**SGD, "momentum": 0.9, "nesterov": True}),
        ),
        {"optimizer.type": "SGD", f"{O}.momentum": 0.9},
    ),
    (*refused(f"{O}.nesterov", True, "true, and momentum is 0"), {"optimizer.type": "SGD"}),
    optimizer("lr_decay", 0.1, "Adagrad", **ADAGRAD),
    optimizer("initial_accumulator_value", 0.1, "Adagrad", **ADAGRAD),
    (*refused(f"{O}.lr", "1e-3", "a finite number from 0"), {"optimizer.type": "AdamW"}),
    (*refused(f"{O}.lr", "auto", "learning_rate"), {"optimizer.type": "AdamW"}),
    (*refused(f"{O}.betas", [0.9], "two numbers"), {"optimizer.type": "AdamW"}),
    (*refused(f"{O}.betas", [0.9, 1.0], "below 1"), {"optimizer.type": "AdamW"}),
    (*refused(f"{O}.momentum", 0.9, "no parameter of AdamW"), {"optimizer.type": "AdamW"}),
    (
        *done(f"{O}.adam_w_mode", False, optimizer=OptimizerSettings("Adam", ADAMW)),
        {"optimizer.type": "Adam"},
    ),
    *[
        (*refused(f"{O}.{name}", value, text), {"optimizer.type": type_})
        for name, value, text, type_ in (
            ("bias_correction", False, "always corrected", "Adam"),
            ("dampening", 0.5, "not dampened", "SGD"),
            ("maximize", True, "minimized", "AdamW"),
            ("eps_inside_sqrt", True, "added to the root", "Adam"),
            ("fp32_optimizer_states", False, "bf16_optimizer_states", "Adam"),
            ("max_grad_norm", 1.0, "nearest that is offered is gradient_clipping", "Adam"),
            ("max_coeff", 10.0, "no parameter of AdamW", "AdamW"),
            ("min_coeff", 0.1, "no parameter of AdamW", "AdamW"),
        )
    ],
    *[
        (*case, {"optimizer.type": "AdamW"})
        for name, value in (
            *(("bias_correction", True), ("dampening", 0.0), ("maximize", False)),
            *(("eps_inside_sqrt", False), ("fp32_optimizer_states", True), ("max_grad_norm", 0.0)),
            *(("torch_adam", True), ("fused", True), ("foreach", False), ("set_grad_none", True)),
            *(("capturable", False), ("torch_adam", False)),
        )
        for case in noted(f"{O}.{name}", value)
    ],
    (*noted("optimizer.legacy_fusion", True)[0], {"optimizer.type": "AdamW"}),
    # schedule
    *[
        (
            *done("scheduler.type", name, schedule=ScheduleSettings(name, SHAPES[name])),
            {f"{S}.{k}": v for k, v in NEEDS.get(name, {}).items()},
        )
        for name in SHAPES
    ],
    refused("scheduler.type", "CosineLR", "one of WarmupLR, WarmupDecayLR"),
    schedule("WarmupLR", "warmup_min_lr", 1e-5),
    schedule("WarmupLR", "warmup_max_lr", 1e-2),
    schedule("WarmupLR", "warmup_num_steps", 7),
    schedule("WarmupLR", "warmup_type", "linear"),
    schedule("WarmupDecayLR", "total_num_steps", 70),
    schedule("WarmupCosineLR", "warmup_min_ratio", 0.1),
    schedule("WarmupCosineLR", "cos_min_ratio", 0.2),
    schedule("LRRangeTest", "lr_range_test_min_lr", 0.1),
    schedule("LRRangeTest", "lr_range_test_step_size", 3),
    schedule("LRRangeTest", "lr_range_test_step_rate", 3.0),
    schedule("LRRangeTest", "lr_range_test_staircase", True),
    schedule("OneCycle", "cycle_min_lr", 0.5),
    schedule("OneCycle", "cycle_max_lr", 0.5),
    schedule("OneCycle", "cycle_first_step_size", 5, cycle_second_step_size=5),
    schedule("OneCycle", "cycle_second_step_size", 5),
    schedule("OneCycle", "cycle_first_stair_count", 5, cycle_second_stair_count=5),
    schedule("OneCycle", "cycle_second_stair_count", 5),
    schedule("OneCycle", "decay_lr_rate", 0.5),
    schedule("OneCycle", "decay_step_size", 5),
    schedule("OneCycle", "cycle_momentum", False),
    schedule("OneCycle", "cycle_min_mom", 0.5),
    schedule("OneCycle", "cycle_max_mom", 0.95),
    schedule("OneCycle", "decay_mom_rate", 0.5),
    (*refused(f"{S}.warmup_num_steps", 0, "number from 1"), {"scheduler.type": "WarmupLR"}),
    (*refused(f"{S}.total_num_steps", 9, "no parameter"), {"scheduler.type": "WarmupLR"}),
    (*refused(f"{S}.last_batch_iteration", 5, "knows its step"), {"scheduler.type": "WarmupLR"}),
    (
        *noted(f"{S}.last_batch_iteration", -1)[0],
        {"scheduler.type": "WarmupLR"},
    ),
    # precision
    done("fp16.enabled", True, precision=fp16()),
    done("fp16.enabled", False),
    *[
        (*done(f"fp16.{key}", value, precision=precision), {"fp16.enabled": True})
        for key, value, precision in (
            ("loss_scale", 0, fp16()),
            ("loss_scale", 128, STATIC),
            ("initial_scale_power", 10, fp16(initial=1024.0)),
            ("loss_scale_window", 20, fp16(window=20)),
            ("hysteresis", 3, fp16(hysteresis=3)),
            ("hysteresis", 1, fp16(hysteresis=1, restore="shrink")),
            ("consecutive_hysteresis", True, fp16(restore="applied")),
            ("consecutive_hysteresis", False, fp16()),
            ("min_loss_scale", 4, fp16(minimum=4.0)),
        )
    ],
    refused("fp16.loss_scale", 100, "0 .dynamic. or a power of two"),
    refused("fp16.initial_scale_power", 99, "a whole number from 0 to 60"),
    (*refused("fp16.min_loss_scale", 2**20, "up to the first scale"), {"fp16.enabled": True}),
    refused("fp16.consecutive_hysteresis", 1, "true or false"),
    *noted("fp16.auto_cast", False),
    refused("fp16.auto_cast", True, "cast by the module"),
    *noted("fp16.fp16_master_weights_and_grads", False),
    refused("fp16.fp16_master_weights_and_grads", True, "lose too much"),
    *[
        case
        for name in ("bf16", "bfloat16")
        for case in (
            done(f"{name}.enabled", True, precision=BF16),
            (*done(f"{name}.check_grad_overflow", True, precision=BF16), {f"{name}.enabled": True}),
            (
                *done(f"{name}.bf16_master_weights_and_grads", True, precision=PURE),
                {f"{name}.enabled": True},
            ),
            (
                *done(
                    f"{name}.bf16_optimizer_states",
                    True,
                    precision=MixedPrecision(
                        param="bfloat16", master="float32", moments="bfloat16"
                    ),
                ),
                {f"{name}.enabled": True},
            ),
            refused(f"{name}.bf16_optimizer_states", True, f"{name}.enabled is not"),
            *noted(f"{name}.immediate_grad_update", True, False),
        )
    ],
    done("bf16.check_grad_overflow", False),
    (
        *done(
            "data_types.grad_accum_dtype",
            "bf16",
            precision=MixedPrecision(param="bfloat16", master="float32", accumulate="bfloat16"),
        ),
        {"bf16.enabled": True},
    ),
    refused("data_types.grad_accum_dtype", "fp16", "small sums vanish"),
    (*done("data_types.param_dtype", "bf16", precision=BF16), {"bf16.enabled": True}),
    refused("data_types.param_dtype", "bf16", "fp16 and bf16 make it float32"),
    *noted("data_types.buffer_dtype", "fp32"),
    done("communication_data_type", "bf16", precision=MixedPrecision(reduce="bfloat16")),
    *noted("seq_parallel_communication_data_type", "fp32"),
    *noted("prescale_gradients", False),
    refused("prescale_gradients", True, "divided once"),
    *noted("gradient_predivide_factor", 1.0),
    refused("gradient_predivide_factor", 2.0, "divided once"),
    *noted("gradient_allreduce_op", "mean"),
    refused("gradient_allreduce_op", "sum", "averaged over ranks"),
    *noted("disable_allgather", True, False),
    # checkpoints
    done("checkpoint.tag_validation", "Fail", tag_validation="fail"),
    done("checkpoint.tag_validation", "IGNORE", tag_validation="ignore"),
    refused("checkpoint.tag_validation", "Perhaps", "one of Warn, Ignore, Fail"),
    *noted("checkpoint.load_universal", True, False),
    *noted("checkpoint.use_node_local_storage", True, False),
    *noted("checkpoint.parallel_write.pipeline_stage", True, False),
    *noted("checkpoint.checkpoint_serialization", True),
    *noted("checkpoint.writer", {"type": "FAST"}, None),
    *noted("activation_checkpointing.partition_activations", False),
    refused("activation_checkpointing.partition_activations", True, "stay whole"),
    *noted("activation_checkpointing.cpu_checkpointing", False),
    refused("activation_checkpointing.cpu_checkpointing", True, "another home"),
    *noted("activation_checkpointing.contiguous_memory_optimization", True),
    *noted("activation_checkpointing.number_checkpoints", 4, None),
    *noted("activation_checkpointing.synchronize_checkpoint_boundary", True),
    *noted("activation_checkpointing.profile", True),
    # what only is noted
    *noted("aio", {"block_size": 1 << 20}, {}),
    *noted("timers", {"throughput": {"enabled": False}}),
    *noted("log_level", "info"),
    *noted("dump_state", True, False),
    *noted("memory_breakdown", True, False),
    *noted("comms_logger", {"enabled": True, "verbose": False}),
    *noted("dataloader_drop_last", True),
    *noted("graph_harvesting", True),
    *noted("use_data_before_expert_parallelism", True),
    # what there is not
    *[
        case
        for name in (
            *("amp", "torch_autocast", "autotuning", "elasticity", "quantize_training"),
            *("eigenvalue", "data_efficiency", "curriculum_learning", "progressive_layer_drop"),
            *("hybrid_engine", "nebula", "tensorboard", "wandb", "comet", "csv_monitor"),
            *("flops_profiler", "tensor_parallel", "expert_parallel", "sequence_parallel"),
            "pipeline",
        )
        for case in (
            *noted(name, {"enabled": False}, {}),
            refused(name, {"enabled": True}, f"{name} is .*enabled.*: .*nearest"),
        )
    ],
    *noted("tensor_parallel", {"autotp_size": 1}),
    refused("tensor_parallel", {"autotp_size": 2}, "data-parallel ranks alone"),
    *noted("sequence_parallel_size", 1),
    refused("sequence_parallel_size", 2, "data-parallel ranks alone"),
    *[
        case
        for name in ("compression_training", "weight_quantization", "sparse_attention")
        for case in (*noted(name, {}), refused(name, {"mode": "fixed"}, "nearest"))
    ],
    *noted("datastates", {}),
    refused("datastates", {"enabled": True}, "background=True"),
    *noted("compile", {}, {"deepcompile": False}),
    refused("compile", {"deepcompile": True}, "torch.compile"),
    *noted("sparse_gradients", False),
    refused("sparse_gradients", True, "gradients are dense"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}={case[1]!r:.20}")
def test_key(case: Any) -> None:
    path, value, fate, expected, *more = case
    base: dict[str, Any] = more[0] if more else {}
    beside = {k.replace(".", "__"): v for k, v in base.items() if k != path}
    if fate == "refused":
        with pytest.raises(ConfigError, match=expected["text"]) as caught:
            config.deepspeed(nested(path, value, **beside), world_size=WORLD)
        section = path.rpartition(".")[0]
        assert path in str(caught.value) or section in str(caught.value)
        return
    read = config.deepspeed(nested(path, value, **beside), world_size=WORLD)
    assert row(read, path).fate == fate and row(read, path).text
    try:
        without = config.deepspeed(nested("aio", None, **beside), world_size=WORLD)
    except ConfigError:  # params without a type: the case is about the type itself
        without = config.deepspeed({}, world_size=WORLD)
    assert meaning(read) == {**meaning(without), **expected}


def test_every_key_has_a_case() -> None:
    known = set(paths(RULES))
    assert {case[0] for case in CASES} == known, {case[0] for case in CASES} ^ known
    for path in known:
        fates = {case[2] for case in CASES if case[0] == path}
        assert fates & {"done", "noted"} or path.endswith("_coeff"), path


BROKEN = ("yes please", None, [[]], {"a": 1}, float("nan"), -(1 << 80), True)
TAKES_ALL = {
    f"{Z}.leaf_module.classes",
    f"{Z}.leaf_module.names",
    f"{Z}.leaf_module.name_suffixes",
    "activation_checkpointing.number_checkpoints",
    "log_level",
}


@pytest.mark.parametrize("path", sorted(set(paths(RULES)) - TAKES_ALL))
def test_wrong_types_are_refused_by_name(path: str) -> None:
    refusals = 0
    for value in BROKEN:
        try:
            config.deepspeed(nested(path, value), world_size=WORLD)
        except ConfigError as error:
            if path in str(error):
                refusals += 1
    assert refusals >= 3, f"{path} takes almost anything"
