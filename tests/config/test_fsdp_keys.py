"""Each key of an fsdp_config, one by one: what it decides, that it moves nothing, or why not."""

from __future__ import annotations

from typing import Any

import pytest
from config_cases import done, meaning, noted, paths, refused, row

from flatshard import ConfigError, LossScale, MixedPrecision, Offload, Sharding, config
from flatshard.config import Units
from flatshard.config.fsdp import POLICY, RULES

pytestmark = pytest.mark.quick

PER_PARAMETER = Sharding(stage=3, partition="per_parameter")
KEPT = Sharding(stage=3, partition="per_parameter", reshard_after_forward=False)
ON_CPU = Offload(params="cpu", grads="cpu", state="cpu")
CPU = Sharding(stage=3, partition="per_parameter", offload=ON_CPU)
BF16 = MixedPrecision(param="bfloat16", master="float32")

CASES: list[tuple[str, Any, str, dict[str, Any]]] = [
    done("version", 2, sharding=PER_PARAMETER),
    done("version", 1, sharding=Sharding(stage=3, partition="flat")),
    done("version", "1", sharding=Sharding(stage=3, partition="flat")),
    refused("version", 3, "expected 1 or 2"),
    refused("version", True, "expected 1 or 2"),
    done("reshard_after_forward", True, sharding=PER_PARAMETER),
    done("reshard_after_forward", False, sharding=KEPT),
    done("reshard_after_forward", "false", sharding=KEPT),
    refused("reshard_after_forward", "FULL_SHARD", "version 2 takes true or false"),
    refused("reshard_after_forward", 7, "expected true or false, or, with version 1, one of"),
    done("sharding_strategy", "FULL_SHARD", sharding=PER_PARAMETER),
    done("sharding_strategy", "shard_grad_op", sharding=KEPT),
    done("sharding_strategy", 2, sharding=KEPT),
    done("sharding_strategy", "3", sharding=Sharding(stage=0, partition="per_parameter")),
    done("sharding_strategy", "HYBRID_SHARD", sharding=PER_PARAMETER),
    done("sharding_strategy", "HYBRID_SHARD_ZERO2", sharding=KEPT),
    refused("sharding_strategy", "ZERO3", "expected one of FULL_SHARD"),
    refused("sharding_strategy", 6, "or 1 to 5"),
    done("cpu_offload", True, sharding=CPU),
    done("cpu_offload", False, sharding=PER_PARAMETER),
    refused("cpu_offload", "auto", '"auto", which nothing fills'),
    done("offload_params", True, sharding=CPU),
    done("auto_wrap_policy", "TRANSFORMER_BASED_WRAP", units=Units("auto")),
    done("auto_wrap_policy", "no_wrap", units=Units("whole")),
    refused("auto_wrap_policy", "SIZE_BASED_WRAP", "min_num_params must be above 0"),
    refused("auto_wrap_policy", "WRAP_ALL", "expected one of TRANSFORMER_BASED_WRAP"),
    done("transformer_layer_cls_to_wrap", ["A", "B"], units=Units("classes", ("A", "B"))),
    done("transformer_layer_cls_to_wrap", [], units=Units("auto")),
    refused("transformer_layer_cls_to_wrap", [1], "a list of names"),
    refused("transformer_layer_cls_to_wrap", "A-B", "identifiers"),
    done("transformer_cls_names_to_wrap", "A", units=Units("classes", ("A",))),
    done("transformer_cls_to_wrap", "A,B", units=Units("classes", ("A", "B"))),
    *noted("min_num_params", 0, 100, 10**8),
    refused("min_num_params", -1, "a whole number from 0"),
    done("state_dict_type", "FULL_STATE_DICT", save="full"),
    done("state_dict_type", "sharded_state_dict", save="sharded"),
    refused("state_dict_type", "LOCAL_STATE_DICT", "nearest that is offered is SHARDED_STATE_DICT"),
    done("cpu_ram_efficient_loading", True, efficient_loading=True),
    done("cpu_ram_efficient_loading", "true", efficient_loading=True),
    done("activation_checkpointing", True, activation_checkpointing=True),
    refused("activation_checkpointing", "maybe", "expected true or false"),
    done("ignored_modules", "head.*", ignored_modules="head.*"),
    done("ignored_modules", ["a.b", "c"], ignored_modules=("a.b", "c")),
    refused("ignored_modules", "(", "a regular expression"),
    refused("ignored_modules", 3, "a regular expression"),
    done("mixed_precision_policy", "bf16", precision=BF16),
    done("mixed_precision_policy", "fp32", precision=MixedPrecision()),
    done(
        "mixed_precision_policy",
        "fp16",
        precision=MixedPrecision(param="float16", master="float32", loss_scale=LossScale()),
    ),
    refused("mixed_precision_policy", "fp8", "fp8 is not offered"),
    refused("mixed_precision_policy", 16, "expected one of fp32"),
    done("fsdp_size", 4, world_size=4),
    refused("fsdp_size", 0, "a whole number from 1"),
    *noted("backward_prefetch", "BACKWARD_PRE", "backward_post", "NO_PREFETCH"),
    refused("backward_prefetch", "SOMETIMES", "expected one of BACKWARD_PRE"),
    *noted("backward_prefetch_policy", "BACKWARD_PRE"),
    *noted("forward_prefetch", True, False, "true"),
    *noted("limit_all_gathers", True, False),
    *noted("use_orig_params", True, False),
    *noted("sync_module_states", True, False),
    *noted("activation_checkpointing_offload", False),
    refused("activation_checkpointing_offload", True, "nearest .* is activation_checkpointing"),
    *noted("xla", False),
    refused("xla", True, "no XLA backend"),
    *noted("xla_fsdp_v2", False),
    refused("xla_fsdp_v2", True, "no XLA backend"),
    *noted("xla_fsdp_settings", {}, None),
    refused("xla_fsdp_settings", {"compute_dtype": "bfloat16"}, "no XLA backend"),
    *noted("xla_fsdp_grad_ckpt", False),
    refused("xla_fsdp_grad_ckpt", True, "nearest .* is activation_checkpointing"),
    *[case for name in ("tp", "ep", "cp", "sp") for case in noted(f"{name}_size", 1)],
    *[refused(f"{name}_size", 2, f"{name}_size is 2: .*ranks alone") for name in ("tp", "ep")],
    *[refused(f"{name}_size", 2, f"{name}_size is 2: .*ranks alone") for name in ("cp", "sp")],
    *noted("enable_expert_parallel", False),
    refused("enable_expert_parallel", True, "ranks alone"),
    *noted("param_init_fn", None),
    refused("param_init_fn", "init", "a file holds no function"),
    *noted("state_dict_config", None),
    refused("state_dict_config", {}, "no object of torch"),
    *noted("optim_state_dict_config", None),
    refused("optim_state_dict_config", {}, "no object of torch"),
]

BROKEN = ("yes please", None, [[]], {"a": 1}, float("nan"), 1 << 80)


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize(("key", "value", "fate", "expected"), CASES)
def test_key(prefix: str, key: str, value: Any, fate: str, expected: dict[str, Any]) -> None:
    name = key if key == "fsdp_size" else prefix + key
    if fate == "refused":
        with pytest.raises(ConfigError, match=expected["text"]) as caught:
            config.fsdp({name: value})
        assert key in str(caught.value) or "min_num_params" in str(caught.value)
        return
    read = config.fsdp({name: value})
    assert row(read, key).fate == fate and row(read, key).text
    wanted = {**meaning(config.fsdp({})), **expected}
    assert meaning(read) == wanted


def test_every_key_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(RULES)
    fates = {case[0]: {c[2] for c in CASES if c[0] == case[0]} for case in CASES}
    for key, rule in RULES.items():
        if rule.fate == "refused":
            assert fates[key] == {"noted", "refused"}, key
        elif key != "min_num_params":
            assert rule.fate in fates[key], key


@pytest.mark.parametrize("key", sorted(RULES))
def test_wrong_types_are_refused_by_name(key: str) -> None:
    refusals = 0
    for value in BROKEN:
        try:
            config.fsdp({key: value})
        except ConfigError as error:
            assert key in str(error)
            refusals += 1
    assert refusals >= 3, f"{key} takes almost anything"


POLICIES = [
    done("param_dtype", "bf16", precision=BF16),
    done("param_dtype", "torch.float32", precision=MixedPrecision()),
    done("reduce_dtype", "bfloat16", precision=MixedPrecision(reduce="bfloat16")),
    done(
        "reduce_dtype",
        "fp16",
        precision=MixedPrecision(reduce="float16", loss_scale=LossScale()),
    ),
    refused("param_dtype", "int8", "expected fp32, bf16 or fp16"),
    *noted("output_dtype", "bf16"),
    *noted("buffer_dtype", "fp32"),
    *noted("cast_forward_inputs", True),
    refused("cast_forward_inputs", False, "inputs are cast to param_dtype"),
    *noted("cast_root_forward_inputs", True),
    refused("cast_root_forward_inputs", False, "inputs are cast to param_dtype"),
    *noted("keep_low_precision_grads", False),
    refused("keep_low_precision_grads", True, "summed gradients are float32"),
]


@pytest.mark.parametrize(("key", "value", "fate", "expected"), POLICIES)
def test_key_of_the_policy(key: str, value: Any, fate: str, expected: dict[str, Any]) -> None:
    policy = {"mixed_precision_policy": {key: value}}
    if fate == "refused":
        with pytest.raises(ConfigError, match=expected["text"]):
            config.fsdp(policy)
        return
    read = config.fsdp(policy)
    assert row(read, f"mixed_precision_policy.{key}").fate == fate
    assert meaning(read) == {**meaning(config.fsdp({})), **expected}


def test_every_key_of_the_policy_has_a_case() -> None:
    assert {case[0] for case in POLICIES} == set(paths(POLICY))


def test_version_one_goes_by_strategies() -> None:
    flat = {"version": 1}
    for name, number, wanted in (
        ("FULL_SHARD", 1, Sharding()),
        ("SHARD_GRAD_OP", 2, Sharding(reshard_after_forward=False)),
        ("NO_SHARD", 3, Sharding(stage=0)),
        ("HYBRID_SHARD", 4, Sharding()),
        ("HYBRID_SHARD_ZERO2", 5, Sharding(reshard_after_forward=False)),
    ):
        for value in (name, name.lower(), number, str(number)):
            assert config.fsdp({**flat, "reshard_after_forward": value}).sharding == wanted
            assert config.fsdp({**flat, "sharding_strategy": value}).sharding == wanted
    with pytest.raises(ConfigError, match="reshard_after_forward is true, and version 1 takes"):
        config.fsdp({**flat, "reshard_after_forward": True})


def test_contradictions() -> None:
    with pytest.raises(ConfigError, match="contradicts sharding_strategy SHARD_GRAD_OP"):
        config.fsdp({"reshard_after_forward": True, "sharding_strategy": "SHARD_GRAD_OP"})
    with pytest.raises(ConfigError, match=r"cpu_offload .*mean the same|offload_params .*the same"):
        config.fsdp({"cpu_offload": True, "offload_params": False})
    with pytest.raises(ConfigError, match="fsdp_size is 4, but the world has 2 ranks"):
        config.fsdp({"fsdp_size": 4}, world_size=2)
    with pytest.raises(ConfigError, match=r"is for 4 ranks, and this world has 2"):
        config.fsdp({"fsdp_size": 4}).check_world(2)
    with pytest.raises(ConfigError, match=r"keeps weights whole \(stage 0\): on cuda these stay"):
        config.fsdp({"sharding_strategy": "NO_SHARD", "cpu_offload": True}, device="cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_offload_on_every_device(device: str) -> None:
    everything = Offload(params="cpu", grads="cpu", state="cpu")
    for key in ("cpu_offload", "offload_params"):
        read = config.fsdp({key: True}, device=device)
        assert read.sharding.offload == everything
        assert "pinned host memory" in next(k.text for k in read.keys if k.path == key)


def test_size_based_wrap() -> None:
    sized = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}
    read = config.fsdp({**sized, "transformer_layer_cls_to_wrap": ["A"]})
    assert read.units == Units("size", min_num_params=1000)
    assert row(read, "min_num_params").fate == "done"
    assert row(read, "transformer_layer_cls_to_wrap").fate == "noted"
    with pytest.raises(ConfigError, match="arrays have none"):
        read.units.unit_of()


def test_both_kinds_of_checkpointing() -> None:
    on = {"activation_checkpointing": True}
    with pytest.raises(ConfigError, match="activation_checkpointing and gradient_checkpointing"):
        config.fsdp(on, gradient_checkpointing=True)
    assert config.fsdp(on).activation_checkpointing
    assert not config.fsdp({}, gradient_checkpointing=True).activation_checkpointing


def test_the_words_of_the_old_argument() -> None:
    read = config.fsdp({"version": 1}, options="shard_grad_op auto_wrap offload")
    assert read.sharding == Sharding(reshard_after_forward=False, offload=ON_CPU)
    read = config.fsdp({"reshard_after_forward": True}, options=["shard_grad_op"])
    assert read.sharding == PER_PARAMETER
    with pytest.raises(ConfigError, match="'full_shrad': expected full_shard"):
        config.fsdp({}, options="full_shrad")


def test_switched_off() -> None:
    read = config.fsdp({"version": 1, "anything": 1}, options=False)
    assert read.sharding == Sharding(stage=0)
    assert all(key.fate == "noted" and "ignored" in key.text for key in read.keys)


def test_what_the_trainer_puts_in() -> None:
    """transformers fills these into the dict it was given."""
    read = config.fsdp(
        {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
    )
    assert meaning(read) == meaning(config.fsdp({}))
