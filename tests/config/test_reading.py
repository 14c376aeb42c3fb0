"""Files, text, dicts; duplicates, unknown keys, "auto", prefixes: how configurations are read."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest
from config_cases import meaning, row

from flatshard import ConfigError, MixedPrecision, Offload, Sharding, config
from flatshard.config import LATER, Batch, Units

pytestmark = pytest.mark.quick

CALLER = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_grad_norm": 0.7,
}


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text, encoding="utf-8")
    return path


# ---- files --------------------------------------------------------------------------------------


def test_path_text_and_dict_are_one(tmp_path: pathlib.Path) -> None:
    values = {"fsdp_min_num_params": 100, "auto_wrap_policy": "SIZE_BASED_WRAP"}
    text = json.dumps(values)
    yaml = "fsdp_min_num_params: 100\nauto_wrap_policy: SIZE_BASED_WRAP\n"
    sources: list[Any] = [
        values,
        text,
        write(tmp_path / "a.json", text),
        str(tmp_path / "a.json"),
        write(tmp_path / "a.yaml", yaml),
        write(tmp_path / "plain", text),
        write(tmp_path / "bom.json", "\ufeff" + text),
    ]
    read = [config.fsdp(source) for source in sources]
    assert read[0].units == Units("size", min_num_params=100)
    for one in read[1:]:
        assert meaning(one) == meaning(read[0])
        assert one.keys == read[0].keys


def test_the_callers_dict_stays_as_it_was() -> None:
    values = {"fsdp_version": 1, "zero": 0}
    del values["zero"]
    nested = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    before = json.dumps([values, nested])
    config.fsdp(values, options="offload")
    config.deepspeed(nested, world_size=1)
    assert json.dumps([values, nested]) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 2, "version": 1}', "the key 'version' stands there twice"),
        ('{"version": 2,}', "not JSON"),
        ("[1, 2]", "expected an object at the top, not list"),
        ("", "not JSON"),
        ("{" * 100000, "not JSON|nested too deeply"),
        ('{"version": ' + "[" * 100000 + "]" * 100000 + "}", "nested too deeply|not JSON"),
        ('{"version": ' + "9" * 5000 + "}", "not JSON|expected"),
        ("\x00", "not JSON"),
    ],
)
def test_bad_json(tmp_path: pathlib.Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config.fsdp(write(tmp_path / "bad.json", text))
    assert "bad.json" in str(caught.value)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 2\nversion: 1\n", "'version' stands there twice, again in line 2"),
        ("a: [", "not YAML"),
        ("- a\n", "expected an object at the top"),
        ("!!python/object/apply:os.system ['true']\n", "not YAML"),
        ("? [a, b]\n: 1\n", "expected|not YAML|keys are strings"),
        ("2: 3\n", "keys are strings"),
        ("version: &a [*a]\n", "expected 1 or 2"),
    ],
)
def test_bad_yaml(tmp_path: pathlib.Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.fsdp(write(tmp_path / "bad.yaml", text))


def test_other_sources(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read: No such file"):
        config.fsdp(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        config.fsdp(tmp_path)
    with pytest.raises(ConfigError, match="a path, a dict or JSON text, not int"):
        config.fsdp(3)
    (tmp_path / "bytes.json").write_bytes(b'{"version": "\xff"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        config.fsdp(tmp_path / "bytes.json")


def test_yaml_without_pyyaml(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"pip install 'flatshard\[yaml\]'"):
        config.fsdp(write(tmp_path / "a.yaml", "version: 2\n"))
    config.fsdp(write(tmp_path / "a.json", '{"version": 2}'))


# ---- unknown keys -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation is not known; .*mean zero_optimization"),
        ({"gradient_cliping": 1.0}, "gradient_cliping is not known; did you mean gradient_clip"),
        ({"stage": 3}, "stage does not belong here: it is zero_optimization.stage"),
        (
            {"zero_optimization": {"stagee": 3}},
            r"zero_optimization\.stagee is not known; did you mean stage\?",
        ),
        (
            {"zero_optimization": {"offload_param": {"divice": "cpu"}}},
            r"zero_optimization\.offload_param\.divice is not known; did you mean device",
        ),
        ({"zero_optimization": {"gradient_clipping": 1}}, "it is gradient_clipping"),
        ({"optimizer": {"parms": {}}}, r"optimizer\.parms is not known; did you mean params"),
        ({"fp16": {"enable": True}}, r"fp16\.enable is not known; did you mean enabled"),
        ({"xyzzy": 1}, "xyzzy is not known; there are "),
        ({3: 1}, "3 is a key, and keys are strings"),
    ],
)
def test_unknown_keys_at_every_level(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.deepspeed(values, world_size=1)


def test_unknown_keys_of_fsdp() -> None:
    with pytest.raises(ConfigError, match=r"fsdp_reshard_after_foward|reshard_after_foward is not"):
        config.fsdp({"fsdp_reshard_after_foward": True})
    with pytest.raises(ConfigError, match="did you mean transformer_layer_cls_to_wrap"):
        config.fsdp({"transformer_layer_cls_to_warp": ["A"]})
    with pytest.raises(ConfigError, match=r"mixed_precision_policy\.param_dtyp is not known"):
        config.fsdp({"mixed_precision_policy": {"param_dtyp": "bf16"}})


def test_with_and_without_the_prefix() -> None:
    with pytest.raises(ConfigError, match="min_num_params is 100 and 200, with and without fsdp_"):
        config.fsdp({"fsdp_min_num_params": 100, "min_num_params": 200})
    config.fsdp({"fsdp_min_num_params": 100, "min_num_params": 100})


@pytest.mark.parametrize("value", ["A,B", "A, B", ["A", "B"], ["A,B"], ["A", " B"]])
def test_several_classes(value: Any) -> None:
    read = config.fsdp({"transformer_layer_cls_to_wrap": value})
    assert read.units == Units("classes", ("A", "B"))


@pytest.mark.parametrize("value", ["", [], None, " , "])
def test_no_classes_means_the_models_own(value: Any) -> None:
    read = config.fsdp({"transformer_layer_cls_to_wrap": value})
    assert read.units == Units("auto")
    assert "the layers the model names" in row(read, "transformer_layer_cls_to_wrap").text


def test_a_class_in_another_case() -> None:
    units = config.fsdp({"transformer_layer_cls_to_wrap": "decoderlayer"}).units
    with pytest.raises(ConfigError, match=r"mean DecoderLayer.? Its classes are DecoderLayer, Lin"):
        units.match(["Linear", "DecoderLayer"])
    with pytest.raises(ConfigError, match="Its classes are Linear"):
        units.match(["Linear"])
    assert Units("classes", ("A",)).match(["A", "B"]) == ("A",)


# ---- batch sizes --------------------------------------------------------------------------------

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((32, None, None), (32, 8, 1)),
        ((None, 2, None), (8, 2, 1)),
        ((None, 2, 4), (32, 2, 4)),
        ((32, 2, None), (32, 2, 4)),
        ((32, None, 4), (32, 2, 4)),
        ((32, 2, 4), (32, 2, 4)),
        ((None, None, 4), (None, None, 4)),
        ((None, None, None), (None, None, None)),
        ((30, 2, None), "30, and that is not a multiple of train_micro_batch_size_per_gpu 2"),
        ((32, 2, 3), "32, and that is not train_micro_batch_size_per_gpu 2 x .* 3 x 4 ranks = 24"),
        ((30, None, 4), "not a multiple of gradient_accumulation_steps 4 x 4 ranks"),
        ((30, None, None), "not a multiple of"),
        ((0, None, None), "train_batch_size is 0: expected a whole number from 1"),
        ((None, -1, None), "train_micro_batch_size_per_gpu is -1: expected"),
        ((None, 1, 0), "gradient_accumulation_steps is 0: expected"),
    ],
)
def test_the_batch_triangle(given: tuple[Any, ...], wanted: Any) -> None:
    values = {name: value for name, value in zip(NAMES, given, strict=True) if value is not None}
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted):
            config.deepspeed(values, world_size=4)
        return
    read = config.deepspeed(values, world_size=4)
    assert read.batch == Batch(*wanted)
    assert read.world_size == (None if wanted[0] is None else 4)


def test_batch_sizes_of_an_unknown_world() -> None:
    read = config.deepspeed({"train_batch_size": 24, NAMES[1]: 2}, world_size=None)
    assert read.batch == Batch(24, 2, None)
    with pytest.raises(ConfigError, match="no multiple"):
        config.deepspeed(dict(zip(NAMES, (25, 2, 3), strict=True)), world_size=None)


# ---- auto ---------------------------------------------------------------------------------------


def test_auto_is_resolved_and_shown() -> None:
    values = {
        **dict.fromkeys(NAMES, "auto"),
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3},
    }
    read = config.deepspeed(values, world_size=4, auto=CALLER)
    assert read.batch == Batch(24, 2, 3) and read.max_norm == 0.7
    assert row(read, "gradient_clipping").auto == " (auto, from max_grad_norm)"
    assert row(read, "train_batch_size").value == 24
    assert "24 (auto, from the other two)" in read.table()
    partly = {**values, NAMES[1]: 5}
    with pytest.raises(
        ConfigError, match=r"is 5, but per_device_train_batch_size given .* make it"
    ):
        config.deepspeed(partly, world_size=4, auto=CALLER)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"zero_optimization": {"sub_group_size": "auto"}}, "zero_optimization.sub_group_size"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        ({"steps_per_print": "auto"}, "steps_per_print"),
        ({"fp16": {"loss_scale": "auto"}}, "fp16.loss_scale"),
        ({"optimizer": {"type": "auto"}}, "optimizer.type"),
        ({"optimizer": {"params": {"betas": "auto"}}}, "optimizer.params.betas"),
        ({"gradient_clipping": "auto"}, "gradient_clipping"),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "reduce_bucket_size"),
        ({"scheduler": {"params": {"total_num_steps": "auto"}}}, "scheduler.params.total_num"),
    ],
)
def test_auto_that_nothing_fills_is_refused(values: Any, path: str) -> None:
    with pytest.raises(ConfigError, match=f'{path}.* "auto"'):
        config.deepspeed(values, world_size=1)


def test_what_auto_may_hold() -> None:
    with pytest.raises(ConfigError, match="auto= has 'lr': expected per_device_train_batch_size"):
        config.deepspeed({}, world_size=1, auto={"lr": 1e-3})
    with pytest.raises(ConfigError, match=r"gradient_clipping is .*expected a finite number"):
        config.deepspeed({"gradient_clipping": "auto"}, world_size=1, auto={"max_grad_norm": "x"})
    zero = {"zero_optimization": {"reduce_bucket_size": "auto"}}
    read = config.deepspeed(zero, world_size=1, auto={"hidden_size": 64})
    assert row(read, "zero_optimization.reduce_bucket_size").value == 4096
    with pytest.raises(ConfigError, match="cannot be filled from hidden_size"):
        config.deepspeed(zero, world_size=1, auto={"hidden_size": "wide"})


def test_both_precisions_auto() -> None:
    both = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    read = config.deepspeed(both, world_size=1, auto={"fp16": False, "bf16": True})
    assert read.precision == MixedPrecision(param="bfloat16", master="float32")
    with pytest.raises(ConfigError, match=r"fp16\.enabled and bf16\.enabled are both true"):
        config.deepspeed(both, world_size=1, auto={"fp16": True, "bf16": True})
    later = config.deepspeed(both, world_size=1, auto={"fp16": LATER, "bf16": LATER})
    assert "precision" not in later.given and later.precision == MixedPrecision()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_one_precision_never_switches_on_the_other(name: str) -> None:
    read = config.deepspeed({name: {"enabled": True}}, world_size=1)
    assert read.precision.param == {"fp16": "float16", "bf16": "bfloat16"}[name]
    other = {"fp16": "bf16", "bf16": "fp16"}[name]
    again = config.deepspeed({name: {"enabled": True}, other: {"enabled": False}}, world_size=1)
    assert again.precision == read.precision
    with pytest.raises(ConfigError, match="are both true"):
        config.deepspeed({name: {"enabled": True}, other: {"enabled": True}}, world_size=1)


def test_a_caller_and_a_file_that_differ() -> None:
    for values, auto in (
        ({NAMES[1]: 2}, {"per_device_train_batch_size": 8}),
        ({"gradient_clipping": 1.0}, {"max_grad_norm": 0.5}),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}}},
            {"adam_beta1": 0.9, "adam_beta2": 0.999},
        ),
    ):
        with pytest.raises(ConfigError, match="given beside the file make it"):
            config.deepspeed(values, world_size=1, auto=auto)


# ---- what is not there --------------------------------------------------------------------------

WHOLE: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "checkpoint": {"tag_validation": "Warn"},
    "data_types": {"grad_accum_dtype": "fp32"},
    "activation_checkpointing": {"profile": False},
}


def test_every_optional_key_may_be_missing() -> None:
    config.deepspeed({}, world_size=2)
    config.fsdp({})
    for key in WHOLE:
        config.deepspeed({k: v for k, v in WHOLE.items() if k != key}, world_size=2)
        if not isinstance(WHOLE[key], dict):
            continue
        for inner in WHOLE[key]:
            left = {k: v for k, v in WHOLE[key].items() if k != inner}
            if inner == "type":
                with pytest.raises(ConfigError, match=rf"{key}\.type is missing: expected one of"):
                    config.deepspeed({**WHOLE, key: left}, world_size=2)
            else:
                config.deepspeed({**WHOLE, key: left}, world_size=2)


def test_defaults_are_deepspeeds() -> None:
    read = config.deepspeed({}, world_size=2)
    assert read.sharding == Sharding(stage=0) and read.max_norm == 1.0
    assert "DeepSpeed's default" in row(read, "gradient_clipping").text
    assert read.precision == MixedPrecision() and read.batch == Batch()


def test_offload_said_twice() -> None:
    zero = {"stage": 3, "cpu_offload": True, "offload_optimizer": {"device": "none"}}
    with pytest.raises(ConfigError, match=r"cpu_offload is true, but .*device is none"):
        config.deepspeed({"zero_optimization": zero}, world_size=1)
    zero["offload_optimizer"] = {"device": "cpu"}
    for device in ("cpu", "cuda"):
        read = config.deepspeed({"zero_optimization": zero}, world_size=1, device=device)
        assert read.sharding.offload == Offload(grads="cpu", state="cpu")


def test_bf16_under_both_names() -> None:
    both = {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}
    with pytest.raises(ConfigError, match="bfloat16 is the old name of bf16"):
        config.deepspeed(both, world_size=1)
