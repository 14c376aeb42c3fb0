"""Accelerate's YAML and the environment of its launcher, key by key and one against the other."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
from config_cases import done, meaning, noted, paths, refused, row

from flatshard import ConfigError, MixedPrecision, Offload, Sharding, config
from flatshard.config import Batch, Units
from flatshard.config.accelerate_keys import DEEPSPEED, ENVIRONMENT, PARALLEL, TOP, VARIABLES
from flatshard.policy import PRESETS

pytestmark = pytest.mark.quick

V2 = Sharding(stage=3, partition="per_parameter")
FSDP = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
ZERO = {"distributed_type": "DEEPSPEED"}


def on_cpu(**homes: Any) -> Sharding:
    return Sharding(stage=2, offload=Offload(**homes))


# ---- the top of a YAML --------------------------------------------------------------------------

_TOP: list[Any] = [
    *noted("compute_environment", "LOCAL_MACHINE"),
    refused("compute_environment", "AMAZON_SAGEMAKER", "a world is the ranks of one host"),
    done("distributed_type", "FSDP", sharding=V2),
    refused("distributed_type", "XLA", "expected one of NO, MULTI_CPU"),
    refused("distributed_type", "MEGATRON_LM", "expected one of NO, MULTI_CPU"),
    done("mixed_precision", "no"),
    done("mixed_precision", False),
    done("mixed_precision", "bf16", precision=PRESETS["bf16"]),
    done("mixed_precision", "fp16", precision=PRESETS["fp16"]),
    refused("mixed_precision", "fp8", "fp8 is not offered"),
    done("fp16", True, precision=PRESETS["fp16"]),
    done("fp16", False),
    done("num_processes", -1),
    refused("num_processes", 0, "expected at least 1"),
    *noted("num_machines", 1),
    refused("num_machines", 2, "a world is the ranks of one host"),
    *noted("machine_rank", 0),
    refused("machine_rank", 1, "a world is the ranks of one host"),
    *noted("use_cpu", True, False),
    *noted("debug", True, False),
    *noted("gpu_ids", "all", None),
    *noted("main_process_ip", None, "10.0.0.1"),
    *noted("main_process_port", None, 29500),
    *noted("rdzv_backend", "static"),
    *noted("same_network", True),
    *noted("main_training_function", "main"),
    *noted("enable_cpu_affinity", False),
    *noted("mpirun_config", {}, {"mpirun_ccl": "1"}),
    *noted("dynamo_config", {}, {"dynamo_backend": "INDUCTOR"}),
    *noted("dynamo_backend", "NO"),
    *noted("fp8_config", {}, None),
    refused("fp8_config", {"backend": "TE"}, "fp8 is not offered"),
    *noted("megatron_lm_config", {}),
    refused("megatron_lm_config", {"megatron_lm_tp_degree": 2}, "nearest .* is fsdp_config"),
    *noted("downcast_bf16", "no", False),
    refused("downcast_bf16", "yes", "no XLA backend"),
    *[
        case
        for name, off, on in (
            *(("tpu_name", None, "v4"), ("tpu_zone", None, "europe"), ("tpu_vm", [], ["a"])),
            *(("tpu_use_cluster", False, True), ("tpu_use_sudo", False, True)),
            *(("tpu_env", [], ["A=1"]), ("command_file", None, "run"), ("commands", None, ["x"])),
        )
        for case in (*noted(name, off), refused(name, on, "no XLA backend"))
    ],
]
_LEAVES_OPEN = {"fsdp_config", "deepspeed_config", "parallelism_config"}


@pytest.mark.parametrize(("key", "value", "fate", "expected"), _TOP)
def test_key_at_the_top(key: str, value: Any, fate: str, expected: dict[str, Any]) -> None:
    values = {**FSDP, key: value}
    if fate == "refused":
        with pytest.raises(ConfigError, match=expected["text"]) as caught:
            config.accelerate(values)
        assert key in str(caught.value)
        return
    read = config.accelerate(values)
    assert row(read, key).fate == fate
    assert meaning(read) == {**meaning(config.accelerate(FSDP)), **expected}


def test_every_key_at_the_top_has_a_case() -> None:
    assert {case[0] for case in _TOP} | _LEAVES_OPEN == set(TOP)


def test_kinds_of_distribution() -> None:
    for kind in ("NO", "MULTI_CPU", "MULTI_GPU"):
        read = config.accelerate({"distributed_type": kind, "mixed_precision": "bf16"})
        assert read.sharding == Sharding(stage=0)
        assert "precision" not in read.given, "the Accelerator's autocast"
    with pytest.raises(ConfigError, match="distributed_type is missing"):
        config.accelerate({"num_processes": 2})
    with pytest.raises(ConfigError, match="fsdp_config is there, but distributed_type is MULTI_C"):
        config.accelerate({**FSDP, "distributed_type": "MULTI_CPU"})
    with pytest.raises(ConfigError, match="distributed_typ is not known; did you mean"):
        config.accelerate({"distributed_type": "NO", "distributed_typ": "FSDP"})
    with pytest.raises(ConfigError, match="fp16 is true, and mixed_precision is bf16"):
        config.accelerate({**FSDP, "fp16": True, "mixed_precision": "bf16"})
    empty = {"fsdp_config": {}, "deepspeed_config": {}, "parallelism_config": {}}
    assert config.accelerate({"distributed_type": "MULTI_CPU", **empty}).sharding.stage == 0


def test_the_number_of_processes() -> None:
    zero = {**ZERO, "deepspeed_config": {"gradient_accumulation_steps": 2}, "num_processes": 4}
    assert config.accelerate(zero).batch == Batch(None, None, 2)
    read = config.accelerate(zero, world_size=2)
    assert "this world has 2 ranks" in row(read, "num_processes").text
    sized = {**FSDP, "num_processes": 4, "fsdp_config": {"fsdp_size": 2}}
    with pytest.raises(ConfigError, match=r"fsdp_size is 2, but the world has 4 ranks"):
        config.accelerate(sized)


# ---- fsdp_config --------------------------------------------------------------------------------


def test_fsdp_has_accelerates_defaults() -> None:
    first = config.accelerate({"distributed_type": "FSDP"})
    assert first.sharding == Sharding() and first.save == "full"
    assert first.units == Units("whole")
    assert "saves no gathered memory" in row(first, "fsdp_config.auto_wrap_policy").text
    second = config.accelerate(FSDP)
    assert second.sharding == V2 and second.save == "sharded"


def test_fsdp_keys_stand_in_their_section() -> None:
    values = {"fsdp_reshard_after_forward": "SHARD_GRAD_OP", "auto_wrap_policy": "NO_WRAP"}
    read = config.accelerate({"distributed_type": "FSDP", "fsdp_config": values})
    assert read.sharding == Sharding(reshard_after_forward=False)
    assert row(read, "fsdp_config.reshard_after_forward").fate == "done"
    with pytest.raises(ConfigError, match=r"fsdp_config\.offload_parms is not known; did you mean"):
        config.accelerate({"distributed_type": "FSDP", "fsdp_config": {"offload_parms": True}})
    both = {"fsdp_config": {"activation_checkpointing": True}, "distributed_type": "FSDP"}
    with pytest.raises(ConfigError, match="gradient_checkpointing are both on"):
        config.accelerate(both, gradient_checkpointing=True)


def test_a_policy_of_its_own_comes_before_mixed_precision() -> None:
    policy = {"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
    read = config.accelerate(
        {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": policy}
    )
    assert read.precision == MixedPrecision(param="bfloat16", reduce="float32", master="float32")


# ---- deepspeed_config ---------------------------------------------------------------------------

_DEEPSPEED: list[Any] = [
    *[
        done("zero_stage", n, sharding=Sharding(stage=n), efficient_loading=n == 3)
        for n in range(4)
    ],
    refused("zero_stage", 5, "a whole number from 0 to 3"),
    done("offload_optimizer_device", "cpu", sharding=on_cpu(grads="cpu", state="cpu")),
    done("offload_optimizer_device", "none"),
    refused("offload_optimizer_device", "nvme", "homes on disk are not there yet"),
    done("offload_param_device", "none"),
    refused("offload_param_device", "nvme", "homes on disk are not there yet"),
    refused("offload_param_device", "cpu", "needs stage 3"),
    *noted("offload_optimizer_nvme_path", None, "/nvme"),
    *noted("offload_param_nvme_path", None, "/nvme"),
    done("gradient_accumulation_steps", 3, batch=Batch(None, None, 3)),
    done("gradient_accumulation_steps", "auto"),
    refused("gradient_accumulation_steps", 0, "a whole number from 1"),
    done("gradient_clipping", 0.5, max_norm=0.5),
    done("gradient_clipping", 0, max_norm=None),
    done("gradient_clipping", "auto", max_norm=1.0),
    done("zero3_save_16bit_model", True, save_16bit=True),
    *noted("zero3_init_flag", True, False),
    *noted("deepspeed_moe_layer_cls_names", "MixtralSparseMoeBlock", ""),
    *noted("deepspeed_hostfile", None, ""),
    refused("deepspeed_hostfile", "hosts", "a world is the ranks of one host"),
    *noted("deepspeed_multinode_launcher", "pdsh"),
    *noted("deepspeed_exclusion_filter", None),
    *noted("deepspeed_inclusion_filter", None),
]


@pytest.mark.parametrize(("key", "value", "fate", "expected"), _DEEPSPEED)
def test_key_of_deepspeed(key: str, value: Any, fate: str, expected: dict[str, Any]) -> None:
    values = {**ZERO, "deepspeed_config": {key: value}}
    if fate == "refused":
        with pytest.raises(ConfigError, match=expected["text"]):
            config.accelerate(values)
        return
    read = config.accelerate(values)
    assert row(read, f"deepspeed_config.{key}").fate == fate
    without = {**meaning(config.accelerate(ZERO)), **expected}
    assert meaning(read) == without


def test_every_key_of_deepspeed_has_a_case() -> None:
    assert {case[0] for case in _DEEPSPEED} | {"deepspeed_config_file"} == set(paths(DEEPSPEED))


def test_deepspeed_has_accelerates_defaults() -> None:
    read = config.accelerate(ZERO)
    assert read.sharding == Sharding(stage=2) and read.max_norm == 1.0
    assert "Accelerate's default" in row(read, "deepspeed_config.zero_stage").text


def test_a_deepspeed_file_says_it_all(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "zero3.json"
    file.write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, '
        '"gradient_clipping": "auto"}'
    )
    values = {
        **ZERO,
        "mixed_precision": "bf16",
        "deepspeed_config": {"deepspeed_config_file": str(file), "zero3_init_flag": True},
    }
    read = config.accelerate(values, auto={"max_grad_norm": 0.3})
    assert read.sharding == Sharding(stage=3) and read.max_norm == 0.3
    assert read.precision == PRESETS["bf16"]
    assert row(read, "zero_optimization.stage").fate == "done"
    twice = {**values, "deepspeed_config": {**values["deepspeed_config"], "zero_stage": 2}}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="zero_stage and deepspeed_config_file are both there"):
        config.accelerate(twice, auto={"max_grad_norm": 0.3})
    file.write_text('{"zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}')
    with pytest.raises(ConfigError, match=r"fp16\.enabled is True, but fp16 given beside the file"):
        config.accelerate(values)
    file.write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(ConfigError, match=r"mixed_precision is bf16, and .* has float32"):
        config.accelerate(values)


# ---- parallelism_config -------------------------------------------------------------------------

_MESH: list[Any] = [
    done("dp_replicate_size", 2, sharding=Sharding(partition="per_parameter", replicate=2)),
    done("dp_shard_size", 4, world_size=4),
    *[
        case
        for name in ("tp", "cp", "sp", "ep")
        for case in (
            *noted(f"{name}_size", 1),
            refused(f"{name}_size", 2, f"{name}_size is 2: .*ranks alone"),
        )
    ],
    *noted("cp_backend", "torch"),
    *noted("cp_comm_strategy", "allgather", "alltoall"),
    refused("cp_comm_strategy", "ring", "one of allgather, alltoall"),
    *noted("sp_backend", "deepspeed"),
    *noted("sp_seq_length", 128, None),
    *noted("sp_seq_length_is_variable", True),
    *noted("sp_attn_implementation", "sdpa"),
]


@pytest.mark.parametrize("prefix", ["", "parallelism_config_"])
@pytest.mark.parametrize(("key", "value", "fate", "expected"), _MESH)
def test_key_of_the_mesh(
    prefix: str, key: str, value: Any, fate: str, expected: dict[str, Any]
) -> None:
    values = {**FSDP, "parallelism_config": {prefix + key: value}}
    if fate == "refused":
        with pytest.raises(ConfigError, match=expected["text"]):
            config.accelerate(values)
        return
    read = config.accelerate(values)
    assert row(read, f"parallelism_config.{key}").fate == fate
    size = value if key in ("dp_replicate_size", "dp_shard_size") else 1
    assert meaning(read) == {
        **meaning(config.accelerate(FSDP)),
        "world_size": size,
        **expected,
    }


def test_every_key_of_the_mesh_has_a_case() -> None:
    assert {case[0] for case in _MESH} == set(paths(PARALLEL))


def test_the_mesh_fills_the_world() -> None:
    mesh = {**FSDP, "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}}
    assert config.accelerate(mesh, world_size=4).sharding.replicate == 2
    with pytest.raises(ConfigError, match="together 4, and the world has 2 ranks"):
        config.accelerate(mesh, world_size=2)
    with pytest.raises(ConfigError, match="goes with version 2 of FSDP"):
        config.accelerate({**mesh, "fsdp_config": {"version": 1}})
    with pytest.raises(ConfigError, match="only FSDP shards over a mesh"):
        config.accelerate(
            {"distributed_type": "MULTI_CPU", "parallelism_config": {"dp_shard_size": 2}}
        )


# ---- the environment ----------------------------------------------------------------------------

ENV = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def test_an_environment_without_accelerate() -> None:
    read = config.accelerate(os.environ)
    assert read.kind == "accelerate"
    read = config.accelerate({"ACCELERATE_MIXED_PRECISION": "no", "PATH": "/bin", "HOME": "/"})
    assert read.sharding == Sharding(stage=0)
    assert [key.path for key in read.keys] == ["ACCELERATE_MIXED_PRECISION"]


VALUES = {
    "version": "2",
    "sharding_strategy": "FULL_SHARD",
    "auto_wrap_policy": "NO_WRAP",
    "transformer_cls_to_wrap": "A",
    "backward_prefetch": "BACKWARD_PRE",
    "state_dict_type": "FULL_STATE_DICT",
    "activation_checkpointing_offload": "false",
    "ignored_modules": "head",
    "zero_stage": "2",
    "offload_optimizer_device": "cpu",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": "none",
    "offload_param_nvme_path": "none",
    "deepspeed_moe_layer_cls_names": "A",
    "cp_backend": "torch",
    "cp_comm_strategy": "alltoall",
    "sp_backend": "deepspeed",
    "sp_attn_implementation": "sdpa",
}


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_every_variable_is_read_under_its_name(name: str, tmp_path: pathlib.Path) -> None:
    section, key = VARIABLES[name]
    base = {**ENV, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    if section == "deepspeed_config":
        base = {"ACCELERATE_USE_DEEPSPEED": "true"}
    value = VALUES.get(key, "1" if "size" in key or "num" in key or "length" in key else "true")
    if key in ("gradient_clipping", "gradient_accumulation_steps"):
        value = "2"
    if key == "deepspeed_config_file":
        (tmp_path / "empty.json").write_text("{}")
        value = str(tmp_path / "empty.json")
    read = config.accelerate({**base, name: value})
    assert row(read, name).text
    if key not in ("cp_backend", "sp_backend", "sp_attn_implementation") and "path" not in key:
        with pytest.raises(ConfigError, match=rf"environment: {name} is |\(: cannot be read"):
            config.accelerate({**base, name: "("})


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, {"reshard_after_forward": False}),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, {"cpu_offload": True}),
        (
            {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "100"},
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100},
        ),
        (
            {
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
            },
            {
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": ["A", "B"],
            },
        ),
        ({"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, {"state_dict_type": "FULL_STATE_DICT"}),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "True"}, {"activation_checkpointing": True}),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, {"cpu_ram_efficient_loading": True}),
        ({"FSDP_IGNORED_MODULES": "head.*"}, {"ignored_modules": "head.*"}),
        ({"FSDP_FORWARD_PREFETCH": "false", "FSDP_USE_ORIG_PARAMS": "None"}, {}),
    ],
)
def test_variables_mean_what_keys_mean(variables: dict[str, str], expected: dict[str, Any]) -> None:
    of_file = config.accelerate(
        {"distributed_type": "FSDP", "fsdp_config": {"version": 2, **expected}}
    )
    assert meaning(config.accelerate({**ENV, **variables})) == meaning(of_file)


def test_variables_of_deepspeed() -> None:
    env = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage",
    }
    read = config.accelerate(env)
    assert read.sharding == Sharding(stage=3, offload=Offload(grads="cpu", state="cpu"))
    assert read.precision == PRESETS["bf16"] and read.max_norm == 0.5 and read.save_16bit
    assert read.batch.accumulate == 2
    assert {key.path for key in read.keys} == set(env)


def test_the_launcher_exports_two_strategies() -> None:
    exported = {"FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    read = config.accelerate({**ENV, **exported})
    assert not read.sharding.reshard_after_forward
    assert row(read, "FSDP_SHARDING_STRATEGY").fate == "noted"
    first = {**ENV, "FSDP_VERSION": "1", **exported}
    assert config.accelerate({**first, "FSDP_RESHARD_AFTER_FORWARD": "true"}).sharding == Sharding()
    kept = {**first, "FSDP_RESHARD_AFTER_FORWARD": "shard_grad_op"}
    assert config.accelerate(kept).sharding == Sharding(reshard_after_forward=False)
    with pytest.raises(
        ConfigError, match=r"FSDP_RESHARD_AFTER_FORWARD .* contradicts FSDP_SHARDING"
    ):
        config.accelerate({**kept, "FSDP_SHARDING_STRATEGY": "NO_SHARD"})


def test_unknown_variables() -> None:
    for wrong, right in (
        ("FSDP_RESHARD_AFTER_FOWARD", "FSDP_RESHARD_AFTER_FORWARD"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGES", "ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        ("PARALLELISM_CONFIG_CP_SIZES", "PARALLELISM_CONFIG_CP_SIZE"),
        ("ACCELERATE_USE_FSPD", "ACCELERATE_USE_FSDP"),
    ):
        with pytest.raises(ConfigError, match=rf"{wrong} is no variable .* did you mean {right}\?"):
            config.accelerate({**ENV, wrong: "1"})
    read = config.accelerate({**ENV, "ACCELERATE_LOG_LEVEL": "info"})
    assert row(read, "ACCELERATE_LOG_LEVEL").fate == "noted"
    with pytest.raises(ConfigError, match="expected strings"):
        config.accelerate({**ENV, "FSDP_OFFLOAD_PARAMS": True})


def test_switches() -> None:
    for name in ENVIRONMENT:
        assert row(config.accelerate({name: "no"}), name).text
        if "DYNAMO" not in name and "FIELDS" not in name:
            with pytest.raises(ConfigError, match=f"{name} is .perhaps.: expected"):
                config.accelerate({name: "perhaps"})
    with pytest.raises(ConfigError, match="and ACCELERATE_USE_DEEPSPEED are both true"):
        config.accelerate({**ENV, "ACCELERATE_USE_DEEPSPEED": "true"})
    for name in ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_SAGEMAKER"):
        with pytest.raises(ConfigError, match=f"{name} is true"):
            config.accelerate({name: "true"})
    off = config.accelerate({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})
    assert off.sharding.stage == 0 and "ignored" in row(off, "FSDP_CPU_RAM_EFFICIENT_LOADING").text


def test_context_parallelism_alone_is_ignored_with_a_warning() -> None:
    """Four cases: both flags, each alone, the field of a YAML."""
    size, use = {"PARALLELISM_CONFIG_CP_SIZE": "2"}, {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    with pytest.warns(UserWarning, match="PARALLELISM_CONFIG_CP_SIZE=2 is ignored without"):
        alone = config.accelerate({**ENV, **size})
    assert meaning(alone) == meaning(config.accelerate(ENV))
    assert "cp_size is 1" in row(alone, "PARALLELISM_CONFIG_CP_SIZE").text
    with pytest.raises(ConfigError, match=r"PARALLELISM_CONFIG_CP_SIZE is 2: .*ranks alone"):
        config.accelerate({**ENV, **size, **use})
    with pytest.raises(ConfigError, match=r"parallelism_config\.cp_size is 2: .*ranks alone"):
        config.accelerate({**FSDP, "parallelism_config": {"cp_size": 2}})
    assert config.accelerate({**ENV, **use}).sharding.replicate == 1
    for other in ("TP", "SP", "DP_SHARD"):
        with pytest.raises(ConfigError, match=f"PARALLELISM_CONFIG_{other}_SIZE is 2, but ACCEL"):
            config.accelerate({**ENV, f"PARALLELISM_CONFIG_{other}_SIZE": "2"})


# ---- the installed Accelerate -------------------------------------------------------------------

YAMLS = {
    "fsdp1": """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer,BertEmbeddings
  fsdp_use_orig_params: true
""",
    "fsdp2": """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: NO_WRAP
  fsdp_reshard_after_forward: false
  fsdp_activation_checkpointing: true
  fsdp_cpu_ram_efficient_loading: false
  fsdp_state_dict_type: FULL_STATE_DICT
""",
    "deepspeed": """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: fp16
num_machines: 1
num_processes: 2
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
""",
}


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(YAMLS))
def test_a_file_and_what_the_launcher_makes_of_it(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed Accelerate turns a YAML into variables; both mean the same here."""
    launch = pytest.importorskip("accelerate.commands.launch")
    tools = pytest.importorskip("accelerate.utils.launch")
    file = tmp_path / "accelerate.yaml"
    file.write_text(YAMLS[name])
    for key in [k for k in os.environ if k.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(key)
    before = dict(os.environ)
    parsed = launch.launch_command_parser().parse_args(["--config_file", str(file), "x.py"])
    arguments, _, _ = launch._validate_launch_command(parsed)
    if name == "deepspeed":
        arguments.deepspeed_fields_from_accelerate_config = "zero_stage"
        _, made = tools.prepare_deepspeed_cmd_env(arguments)
    else:
        made = tools.prepare_multi_gpu_env(arguments)
    exported = {k: v for k, v in made.items() if before.get(k) != v}
    of_file, of_env = config.accelerate(file), config.accelerate(exported)
    assert of_file.kind == of_env.kind == "accelerate"
    # What only one of the two can say: the launcher's own defaults, and the number of ranks.
    loading = {"efficient_loading": None}
    assert {**meaning(of_file), **loading} == {**meaning(of_env), **loading}
    assert {key.path for key in of_env.keys} >= {
        k for k in exported if k.startswith(("FSDP_", "ACCELERATE_DEEPSPEED_"))
    }


@pytest.mark.torch
def test_no_key_of_the_installed_accelerate_is_unknown() -> None:
    arguments = pytest.importorskip("accelerate.commands.config.config_args")
    known = set(arguments.ClusterConfig.__dataclass_fields__)
    assert known <= set(TOP), known - set(TOP)
    plugins = pytest.importorskip("accelerate.utils.dataclasses")
    from flatshard.config.fsdp import RULES

    fields = set(plugins.FullyShardedDataParallelPlugin.__dataclass_fields__)
    assert {name.removeprefix("fsdp_") for name in fields} <= set(RULES)


@pytest.mark.torch
def test_no_key_of_the_installed_transformers_is_unknown() -> None:
    """The keys that its own code reads from an fsdp_config."""
    import inspect
    import re

    training = pytest.importorskip("transformers.training_args")
    from flatshard.config.fsdp import RULES

    source = inspect.getsource(training.TrainingArguments._process_fsdp_args)
    read = set(re.findall(r'self\.fsdp_config(?:\.get|\.setdefault)?[\[(]"(\w+)"', source))
    assert len(read) > 12
    assert read <= set(RULES), read - set(RULES)


@pytest.mark.torch
def test_what_the_trainer_fills_may_be_auto() -> None:
    """The paths that the installed transformers replaces, each from what it replaces them with."""
    import inspect
    import re

    filling = pytest.importorskip("transformers.integrations.deepspeed").HfTrainerDeepSpeedConfig
    source = inspect.getsource(filling.trainer_config_process)
    source += inspect.getsource(filling.trainer_config_finalize)
    filled = set(re.findall(r'self\.fill_(?:match|only)\(\s*"([\w.]+)"', source))
    assert len(filled) > 12
    from config_cases import nested

    from flatshard.config.deepspeed import AUTO_NAMES

    for path in sorted(filled):
        beside = {
            "optimizer__type": "AdamW",
            "scheduler__type": "WarmupDecayLR",
            "scheduler__params__total_num_steps": 9,
            "train_micro_batch_size_per_gpu": 1,
        }
        values = nested(
            path, "auto", **{k: v for k, v in beside.items() if k.replace("__", ".") != path}
        )
        read = config.deepspeed(values, world_size=1, auto=dict.fromkeys(AUTO_NAMES, config.LATER))
        assert "auto" in row(read, path).auto, path
