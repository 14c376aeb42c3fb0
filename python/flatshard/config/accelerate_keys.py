"""What becomes of each key of an Accelerate YAML, and of each variable its launcher sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import checks
from .reading import Auto, Rule, done, noted, refused
from .zero_keys import HOMES

__all__ = ["DEEPSPEED", "ENVIRONMENT", "PARALLEL", "TOP", "VARIABLES"]

_flag = checks.loose_flag
_size = checks.integer(1)
_LAUNCHED = "the launcher's: flatshard launch -n N, torchrun and accelerate launch start ranks"
_ONE_HOST = "a world is the ranks of one host"
_NO_XLA = "there is no XLA backend"
_FP8 = "fp8 is not offered"
_COMPILED = "the Accelerator compiles the module as asked, around what is sharded"
_RANKS_ALONE = "flatshard shards over data-parallel ranks alone"
_ALONE = "no effect: its size is 1"


def mixed_precision(value: object, from_text: bool) -> str:
    """no, fp16 or bf16; YAML reads an unquoted no as false."""
    if value is None or value is False:
        return "no"
    word = checks.choice("no", "fp16", "bf16", "fp8")(value, from_text)
    if word == "fp8":
        raise checks.Wrong("no, fp16 or bf16: fp8 is not offered")
    return str(word)


def _is_empty(value: object) -> bool:
    return value in (None, "", "no", "None", False) or value in ([], {}, ())


_mixed = done(
    mixed_precision,
    lambda v: {
        "no": "float32",
        "bf16": "bf16: with FSDP and DeepSpeed over fp32 masters, else the Accelerator's autocast",
        "fp16": "fp16: over fp32 masters, with loss scaling",
    }[v],
)

#: Keys at the top of a YAML; the three sections are read by rules of their own.
TOP: Mapping[str, Rule] = {
    "compute_environment": refused(
        checks.text, _ONE_HOST, near="LOCAL_MACHINE", off=lambda v: v == "LOCAL_MACHINE",
        off_text="this machine",
    ),
    "distributed_type": done(
        checks.choice(
            *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"),
            *("MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "FSDP", "DEEPSPEED"),
        ),
        lambda v: {
            "FSDP": "as fsdp_config says",
            "DEEPSPEED": "as deepspeed_config says",
            "NO": "one rank: Sharding(stage=0)",
        }.get(v, "DDP: Sharding(stage=0)"),
    ),
    "mixed_precision": _mixed,
    "fp16": done(_flag, "mixed_precision: fp16, in its old form", off=lambda v: not v),
    "num_processes": done(checks.integer(-1), "ranks of the world"),
    "num_machines": refused(_size, _ONE_HOST, near="num_processes", off=lambda v: v == 1),
    "machine_rank": refused(
        checks.integer(0), _ONE_HOST, near="num_processes", off=lambda v: v == 0
    ),
    "use_cpu": noted(_flag, "flatshard.init(device=) says where to compute; the CPU by itself"),
    "debug": noted(_flag, "always: ranks compare every collective at its fence"),
    "gpu_ids": noted(checks.anything, _LAUNCHED),
    "main_process_ip": noted(checks.optional_text, _LAUNCHED),
    "main_process_port": noted(checks.anything, _LAUNCHED),
    "rdzv_backend": noted(checks.optional_text, _LAUNCHED),
    "same_network": noted(_flag, _LAUNCHED),
    "main_training_function": noted(checks.text, _LAUNCHED),
    "enable_cpu_affinity": noted(_flag, _LAUNCHED),
    "mpirun_config": noted(checks.mapping, _LAUNCHED),
    "dynamo_config": noted(checks.mapping, _COMPILED),
    "dynamo_backend": noted(checks.text, _COMPILED),
    "fp8_config": refused(checks.mapping, _FP8, near="mixed_precision"),
    "megatron_lm_config": refused(checks.mapping, _RANKS_ALONE, near="fsdp_config"),
    "downcast_bf16": refused(
        checks.anything, _NO_XLA, near="mixed_precision", off=_is_empty
    ),
    **{
        name: refused(checks.anything, _NO_XLA, near="distributed_type", off=_is_empty)
        for name in (
            *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
            *("command_file", "commands"),
        )
    },
    "fsdp_config": done(checks.mapping, "FSDP"),
    "deepspeed_config": done(checks.mapping, "DeepSpeed"),
    "parallelism_config": done(checks.mapping, "sizes of the mesh"),
}  # fmt: skip

#: Keys of ``deepspeed_config``.
DEEPSPEED: Mapping[str, Rule] = {
    "deepspeed_config_file": done(checks.text, "this file is read, too"),
    "zero_stage": done(checks.integer(0, 3), lambda v: f"Sharding(stage={v})"),
    "offload_optimizer_device": done(
        checks.device,
        lambda v: (
            'Offload(grads="cpu", state="cpu"): pinned memory beside a GPU; one home on the CPU'
        ),
        off=lambda v: v == "none",
        off_text="nothing is offloaded",
        lacks=HOMES,
    ),
    "offload_param_device": done(
        checks.device,
        lambda v: 'Offload(params="cpu"): pinned memory beside a GPU; one home on the CPU',
        off=lambda v: v == "none",
        off_text="nothing is offloaded",
        lacks=HOMES,
    ),
    "offload_optimizer_nvme_path": noted(checks.optional_text, "homes on disk are refused"),
    "offload_param_nvme_path": noted(checks.optional_text, "homes on disk are refused"),
    "gradient_accumulation_steps": done(
        _size, "micro-batches of a step", auto=Auto((), lambda: None, must_match=False)
    ),
    "gradient_clipping": done(
        checks.number(),
        lambda v: f"step(max_norm={v:g})",
        auto=Auto((), lambda: 1.0, must_match=False),
        off=lambda v: v == 0,
        off_text="gradients are not clipped",
    ),
    "zero3_save_16bit_model": done(
        _flag,
        "the weights are also written whole, in the compute dtype",
        off=lambda v: not v,
        off_text="flatshard export writes them from a checkpoint",
    ),
    "zero3_init_flag": noted(_flag, "weights are read by the ranks that own them"),
    "deepspeed_moe_layer_cls_names": noted(
        checks.names, "gradients are keyed by unit and step: ranks may skip an expert"
    ),
    "deepspeed_hostfile": refused(checks.optional_text, _ONE_HOST, near="num_processes"),
    "deepspeed_multinode_launcher": noted(checks.optional_text, _LAUNCHED),
    "deepspeed_exclusion_filter": noted(checks.optional_text, _LAUNCHED),
    "deepspeed_inclusion_filter": noted(checks.optional_text, _LAUNCHED),
}


def _optional(check: checks.Check) -> checks.Check:
    return lambda value, from_text: None if value is None else check(value, from_text)


#: Keys of ``parallelism_config``.
PARALLEL: Mapping[str, Rule] = {
    "dp_replicate_size": done(_size, lambda v: f"Sharding(replicate={v})"),
    "dp_shard_size": done(_size, "ranks that share a replica"),
    **{
        f"{name}_size": refused(_size, _RANKS_ALONE, near="dp_shard_size", off=lambda v: v == 1)
        for name in ("tp", "cp", "sp", "ep")
    },
    "cp_backend": noted(checks.optional_text, _ALONE),
    "cp_comm_strategy": noted(checks.choice("allgather", "alltoall"), _ALONE),
    "sp_backend": noted(checks.optional_text, _ALONE),
    "sp_seq_length": noted(_optional(_size), _ALONE),
    "sp_seq_length_is_variable": noted(_flag, _ALONE),
    "sp_attn_implementation": noted(checks.optional_text, _ALONE),
}


def _env(prefix: str, section: str, *names: str, **renamed: str) -> dict[str, tuple[str, str]]:
    found = {f"{prefix}{name.upper()}": (section, name) for name in names}
    found.update({f"{prefix}{name.upper()}": (section, key) for name, key in renamed.items()})
    return found


#: Variable to the section and key that it means.
VARIABLES: Mapping[str, tuple[str, str]] = {
    **_env(
        *("FSDP_", "fsdp_config", "version", "sharding_strategy", "reshard_after_forward"),
        *("offload_params", "min_num_params", "auto_wrap_policy", "transformer_cls_to_wrap"),
        *("backward_prefetch", "state_dict_type", "forward_prefetch", "use_orig_params"),
        *("cpu_ram_efficient_loading", "sync_module_states", "activation_checkpointing"),
        *("activation_checkpointing_offload", "ignored_modules"),
    ),
    **_env(
        *("ACCELERATE_DEEPSPEED_", "deepspeed_config", "zero_stage", "offload_optimizer_device"),
        *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
        "zero3_save_16bit_model",
        zero3_init="zero3_init_flag",
        config_file="deepspeed_config_file",
        moe_layer_cls_names="deepspeed_moe_layer_cls_names",
    ),
    **_env(
        *("ACCELERATE_", "deepspeed_config", "gradient_accumulation_steps", "gradient_clipping"),
    ),
    **_env("PARALLELISM_CONFIG_", "parallelism_config", *PARALLEL),
}

#: The other variables that Accelerate's launcher sets, and its own switches.
ENVIRONMENT: Mapping[str, Rule] = {
    "ACCELERATE_USE_FSDP": done(_flag, lambda v: "as FSDP_* say", off=lambda v: not v),
    "ACCELERATE_USE_DEEPSPEED": done(
        _flag, lambda v: "as ACCELERATE_DEEPSPEED_* say", off=lambda v: not v
    ),
    "ACCELERATE_USE_PARALLELISM_CONFIG": done(
        _flag, lambda v: "as PARALLELISM_CONFIG_* say", off=lambda v: not v
    ),
    "ACCELERATE_MIXED_PRECISION": _mixed,
    "ACCELERATE_USE_MEGATRON_LM": refused(_flag, _RANKS_ALONE, near="ACCELERATE_USE_FSDP"),
    "ACCELERATE_USE_SAGEMAKER": refused(_flag, _ONE_HOST, near="ACCELERATE_USE_FSDP"),
    "ACCELERATE_USE_CPU": noted(
        _flag, "flatshard.init(device=) says where to compute; the CPU by itself"
    ),
    "ACCELERATE_DEBUG_MODE": noted(_flag, "always: ranks compare every collective at its fence"),
    "ACCELERATE_CPU_AFFINITY": noted(_flag, _LAUNCHED),
    "ACCELERATE_CONFIG_DS_FIELDS": noted(checks.text, "which fields the launcher was given"),
    **{
        f"ACCELERATE_DYNAMO_{name}": noted(checks.text, _COMPILED)
        for name in ("BACKEND", "MODE", "USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION")
    },
}


def is_ours(name: str) -> bool:
    """Is this a variable that decides how training is sharded, and so must be known?"""
    return name.startswith(("FSDP_", "ACCELERATE_DEEPSPEED_", "PARALLELISM_CONFIG_"))


def is_environment(values: Mapping[str, Any]) -> bool:
    """Are these variables of an environment, rather than keys of a file?"""
    starts = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return any(isinstance(key, str) and key.startswith(starts) for key in values)
