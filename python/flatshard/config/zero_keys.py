"""What becomes of each key of DeepSpeed's ``zero_optimization``."""

from __future__ import annotations

from collections.abc import Mapping

from . import checks
from .reading import Auto, Rule, done, noted, refused, section

__all__ = ["FILES", "HOMES", "REDUCED", "SCHEDULED", "ZERO"]

flag = checks.flag
_size = checks.integer(1)
_size_or_off = checks.integer(0)


def _offload_text(what: str) -> str:
    return f'Offload({what}="cpu"): pinned memory beside a GPU; on the CPU there is one home'


#: Homes that DeepSpeed has and flatshard has not.
HOMES = {"nvme": "homes on disk are not there yet; the nearest that is offered is cpu"}


def _is_none(value: object) -> bool:
    return value == "none"


SCHEDULED = "flatshard sizes its buffers by unit and schedules them itself: Sharding(prefetch=)"
REDUCED = "each unit's gradient is reduced from its own slot, as soon as every rank has filled it"
_ONE_SHARD = "there are no second shards or quantized collectives"
_OFFLOADED = "flatshard sizes its own buffers, and what is offloaded from a GPU is always pinned"
FILES = "checkpoints are sharded files that any world size reads"

_hidden_squared = Auto(("hidden_size",), lambda h: int(h) * int(h), False)
_hidden_prefetch = Auto(("hidden_size",), lambda h: int(0.9 * int(h) * int(h)), False)
_hidden_tens = Auto(("hidden_size",), lambda h: 10 * int(h), False)


def _offload_section(what: str) -> dict[str, Rule]:
    rules = {
        "device": done(
            checks.device,
            _offload_text(what),
            off=_is_none,
            off_text="nothing is offloaded",
            lacks=HOMES,
        ),
        "nvme_path": noted(checks.optional_text, "folder of homes on disk, which are refused"),
        "buffer_count": noted(_size, _OFFLOADED),
        "buffer_size": noted(_size, _OFFLOADED),
        "pin_memory": noted(flag, _OFFLOADED),
    }
    if what == "params":
        return {**rules, "max_in_cpu": noted(_size_or_off, _OFFLOADED)}
    return {
        **rules,
        "pipeline": noted(flag, _OFFLOADED),
        "pipeline_read": noted(flag, _OFFLOADED),
        "pipeline_write": noted(flag, _OFFLOADED),
        "fast_init": noted(flag, _OFFLOADED),
        "cpuadam_cores_perc": noted(checks.number(most=1.0), "threads: flatshard.init(threads=)"),
        "ratio": refused(
            checks.number(most=1.0),
            "a part of the state cannot be offloaded",
            near="zero_optimization.offload_optimizer.device",
            off=lambda v: v == 1.0,
            off_text="all of it",
        ),
        "super_offload": refused(
            flag, "there is no such mode", near="zero_optimization.offload_optimizer.device"
        ),
    }


ZERO: Mapping[str, Rule] = {
    "stage": done(checks.integer(0, 3), lambda v: f"Sharding(stage={v})"),
    "offload_optimizer": section(_offload_section("state")),
    "offload_param": section(_offload_section("params")),
    "cpu_offload": done(
        flag, _offload_text("state"), off=lambda v: not v, off_text="nothing is offloaded"
    ),
    "cpu_offload_param": done(
        flag, _offload_text("params"), off=lambda v: not v, off_text="nothing is offloaded"
    ),
    "cpu_offload_params": done(
        flag,
        _offload_text("params"),
        alias="cpu_offload_param",
        off=lambda v: not v,
        off_text="nothing is offloaded",
    ),
    "cpu_offload_use_pin_memory": noted(flag, _OFFLOADED),
    "ignore_unused_parameters": done(
        flag,
        lambda v: f"a parameter without gradient on any rank is {'legal' if v else 'an error'}",
    ),
    "load_from_fp32_weights": done(
        flag, "a checkpoint's masters are loaded; exports in a 16-bit dtype are cast up"
    ),
    "stage3_gather_16bit_weights_on_model_save": done(
        flag,
        "the weights are also written whole, in the compute dtype",
        off=lambda v: not v,
        off_text="flatshard export writes them from a checkpoint",
    ),
    "gather_16bit_weights_on_model_save": done(
        flag,
        "the weights are also written whole, in the compute dtype",
        alias="stage3_gather_16bit_weights_on_model_save",
        off=lambda v: not v,
        off_text="flatshard export writes them from a checkpoint",
    ),
    "stage3_gather_fp16_weights_on_model_save": done(
        flag,
        "the weights are also written whole, in the compute dtype",
        alias="stage3_gather_16bit_weights_on_model_save",
        off=lambda v: not v,
        off_text="flatshard export writes them from a checkpoint",
    ),
    "reduce_bucket_size": noted(_size, REDUCED, auto=_hidden_squared),
    "allgather_bucket_size": noted(_size, SCHEDULED),
    "sub_group_size": noted(_size, "a step walks over tiles that fit the first-level cache"),
    **{
        f"{prefix}prefetch_bucket_size": noted(_size_or_off, SCHEDULED, auto=_hidden_prefetch)
        for prefix in ("stage3_", "")
    },
    **{
        f"{prefix}param_persistence_threshold": noted(
            _size_or_off, "small parameters are gathered with their unit", auto=_hidden_tens
        )
        for prefix in ("stage3_", "")
    },
    **{
        f"{prefix}model_persistence_threshold": noted(
            _size_or_off, "small parameters are gathered with their unit"
        )
        for prefix in ("stage3_", "")
    },
    **{
        f"{prefix}max_live_parameters": noted(
            _size_or_off, "Sharding(reshard_after_forward=) bounds what is gathered at once"
        )
        for prefix in ("stage3_", "")
    },
    **{
        f"{prefix}max_reuse_distance": noted(
            _size_or_off, "Sharding(reshard_after_forward=) bounds what is gathered at once"
        )
        for prefix in ("stage3_", "")
    },
    **{
        f"{prefix}module_granularity_threshold": noted(
            _size_or_off, "units are layers: fully_shard(units=)"
        )
        for prefix in ("stage3_", "")
    },
    **{
        f"{prefix}use_all_reduce_for_fetch_params": noted(flag, SCHEDULED)
        for prefix in ("stage3_", "")
    },
    **{f"{prefix}allgather_sequential": noted(flag, SCHEDULED) for prefix in ("stage3_", "")},
    "overlap_comm": noted(flag, REDUCED),
    "contiguous_gradients": noted(flag, "always: slots are flat memory"),
    "reduce_scatter": noted(flag, "always from stage 2 on: each rank sums what it owns"),
    "use_multi_rank_bucket_allreduce": noted(flag, REDUCED),
    "allgather_partitions": noted(flag, SCHEDULED),
    "round_robin_gradients": noted(flag, REDUCED),
    "elastic_checkpoint": noted(flag, FILES),
    "legacy_stage1": noted(flag, "there is one implementation of stage 1"),
    "memory_efficient_linear": noted(flag, "no weight is kept for backward: it is gathered again"),
    "pipeline_loading_checkpoint": noted(flag, "each rank reads only what it owns"),
    "override_module_apply": noted(flag, "initialisation sees ordinary parameters"),
    "log_trace_cache_warnings": noted(flag, "there is no trace to fall out of step with"),
    "enable_sanity_checks": noted(flag, "always: ranks compare every collective at its fence"),
    "save_muon_momentum_buffer_in_memory": noted(flag, "of the Muon optimizer, which is refused"),
    "leaf_module": section(
        {
            name: noted(checks.anything, "gradients are keyed by unit and step: ranks may skip")
            for name in ("classes", "names", "name_suffixes")
        }
    ),
    "zero_hpz_partition_size": refused(
        _size_or_off, _ONE_SHARD, near="zero_optimization.stage", off=lambda v: v <= 1
    ),
    "zero_quantized_weights": refused(flag, _ONE_SHARD, near="bf16.enabled"),
    "zero_quantized_nontrainable_weights": refused(flag, _ONE_SHARD, near="bf16.enabled"),
    "zero_quantized_gradients": refused(flag, _ONE_SHARD, near="communication_data_type"),
    "zeropp_loco_param": refused(checks.mapping, _ONE_SHARD, near="communication_data_type"),
    "mics_shard_size": refused(
        checks.integer(-1), _ONE_SHARD, near="zero_optimization.stage", off=lambda v: v <= 0
    ),
    "mics_hierarchical_params_gather": refused(flag, _ONE_SHARD, near="zero_optimization.stage"),
    "zenflow": refused(
        checks.mapping, "there is no such mode", near="zero_optimization.offload_optimizer"
    ),
}
