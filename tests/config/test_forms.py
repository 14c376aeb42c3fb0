"""From one form to another and back, flatshard's own form, and the commands."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
from config_cases import meaning, row

from flatshard import ConfigError, LossScale, MixedPrecision, Offload, Sharding, config
from flatshard.cli.__main__ import main
from flatshard.config import Batch, Settings, Units, Written
from flatshard.config.own import KINDS, RULES, kind_of
from flatshard.policy import PRESETS

pytestmark = pytest.mark.quick

ZERO3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "steps_per_print": 50,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999]}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 100, "warmup_num_steps": 10},
    },
    "checkpoint": {"tag_validation": "Fail"},
}
FSDP: dict[str, Any] = {
    "version": 2,
    "reshard_after_forward": False,
    "cpu_offload": True,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": "SHARDED_STATE_DICT",
    "cpu_ram_efficient_loading": True,
    "activation_checkpointing": True,
    "ignored_modules": "head",
    "mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
}


def settings_of() -> list[Settings]:
    """Many different settings, from every form."""
    read = [
        config.fsdp({}),
        config.fsdp(FSDP),
        config.fsdp({"version": 1, "reshard_after_forward": "SHARD_GRAD_OP"}),
        config.fsdp({"version": 1, "reshard_after_forward": "NO_SHARD"}),
        config.fsdp({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10}),
        config.fsdp({"auto_wrap_policy": "NO_WRAP", "mixed_precision_policy": "fp16"}),
        config.deepspeed({}, world_size=2),
        config.deepspeed(ZERO3, world_size=2),
    ]
    for stage in range(4):
        read.append(config.deepspeed({"zero_optimization": {"stage": stage}}, world_size=2))
    for name in ("SGD", "Adam", "Lion", "Adagrad"):
        read.append(config.deepspeed({"optimizer": {"type": name}}, world_size=2))
    adam = {"type": "Adam", "params": {"adam_w_mode": False, "amsgrad": True}}
    read.append(config.deepspeed({"optimizer": adam}, world_size=2))
    for name, params in (
        ("WarmupLR", {}),
        ("WarmupCosineLR", {"total_num_steps": 9}),
        ("LRRangeTest", {"lr_range_test_staircase": True}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_stair_count": 3}),
    ):
        made = {"scheduler": {"type": name, "params": params}}
        read.append(config.deepspeed(made, world_size=2))
    for half in (
        {"fp16": {"enabled": True, "initial_scale_power": 9, "loss_scale_window": 5}},
        {"fp16": {"enabled": True, "loss_scale": 1024}},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    ):
        read.append(config.deepspeed(half, world_size=2))
    return read


ALL = settings_of()


@pytest.mark.parametrize("settings", ALL, ids=range(len(ALL)))
def test_own_form_there_and_back(settings: Settings) -> None:
    text = json.dumps(config.to_dict(settings))
    again = config.flatshard(text)
    assert meaning(again) == meaning(settings) or _only_defaults_differ(settings, again)
    assert again.given == settings.given
    if settings.given - {"units"}:
        assert kind_of(json.loads(text)) == "flatshard"


def _only_defaults_differ(settings: Settings, again: Settings) -> bool:
    """What was not given keeps the default of flatshard's form, not of the other."""
    return all(getattr(settings, name) == getattr(again, name) for name in settings.given)


@pytest.mark.parametrize("settings", ALL, ids=range(len(ALL)))
def test_deepspeed_there_and_back(settings: Settings) -> None:
    written = config.write(settings, "deepspeed")
    again = config.deepspeed(json.dumps(written.values), world_size=2)
    differing = _differing(settings, again)
    said = " ".join(written.left_out)
    words = {"sharding": ("partition", "reshard", "params"), "precision": ("master",)}
    for name in differing - {"world_size", "batch"}:
        assert any(word in said for word in words.get(name, (name,))), (name, said)
    if settings.kind == "deepspeed":
        assert not differing and not said


@pytest.mark.parametrize("settings", ALL, ids=range(len(ALL)))
def test_fsdp_there_and_back(settings: Settings) -> None:
    written = config.write(settings, "fsdp")
    again = config.fsdp(json.dumps(written.values))
    said = " ".join(written.left_out)
    words = {
        "sharding": ("stage", "Offload"),
        "precision": ("accumulate", "moments", "master", "LossScale"),
    }
    differing = _differing(settings, again)
    for name in differing - {"world_size", "batch"}:
        assert any(word in said for word in words.get(name, (name,))), (name, said)
    if settings.kind == "fsdp":
        assert not differing and not said


def _differing(one: Settings, other: Settings) -> set[str]:
    first, second = meaning(one), meaning(other)
    return {name for name in first if first[name] != second[name]}


@pytest.mark.parametrize("settings", ALL, ids=range(len(ALL)))
def test_accelerate_reads_what_is_written(settings: Settings) -> None:
    written = config.write(settings, "accelerate")
    again = config.accelerate(written.values)
    assert again.sharding.stage in (settings.sharding.stage, 3)
    if settings.kind == "fsdp" and settings.sharding.stage:
        assert not _differing(settings, again) - {"world_size"}


def test_the_table_of_both_directions() -> None:
    """FSDP's words and ZeRO's for one thing, from each to the other."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"reshard_after_forward": "FULL_SHARD"}, {"zero_optimization": {"stage": 3}}),
        ({"reshard_after_forward": "NO_SHARD"}, {"zero_optimization": {"stage": 0}}),
        (
            {"cpu_offload": True},
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "cpu"},
                }
            },
        ),
        (
            {"mixed_precision_policy": {"param_dtype": "bf16"}},
            {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        ),
        (
            {"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
            {
                "zero_optimization": {"stage": 3},
                "bf16": {"enabled": True},
                "communication_data_type": "fp32",
            },
        ),
    ]
    for sharded, zero in pairs:
        first = config.fsdp({"version": 1, "state_dict_type": "SHARDED_STATE_DICT", **sharded})
        second = config.deepspeed({"gradient_clipping": 0, **zero}, world_size=2)
        same = ("sharding", "precision", "max_norm", "save", "optimizer", "schedule")
        for name in same:
            assert getattr(first, name) == getattr(second, name), (sharded, name)
        there = config.deepspeed(config.write(first, "deepspeed").values, world_size=2)
        back = config.fsdp(config.write(second, "fsdp").values)
        for name in same:
            assert getattr(there, name) == getattr(second, name), (sharded, name)
            assert getattr(back, name) == getattr(first, name), (sharded, name)


def test_what_is_left_out_is_said() -> None:
    said = config.write(config.deepspeed(ZERO3, world_size=2), "fsdp").left_out
    for word in ("optimizer: ", "schedule: ", "max_norm: ", "batch.micro: ", "save_16bit: "):
        assert any(text.startswith(word) for text in said), word
    said = config.write(config.fsdp(FSDP), "deepspeed").left_out
    for word in ("partition", "reshard", "units", "ignored_modules", "activation_checkpointing"):
        assert any(text.startswith(word) for text in said), word
    left = config.deepspeed(
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        world_size=1,
        auto={"learning_rate": config.LATER},
    )
    with pytest.raises(ConfigError, match="lr was left open"):
        config.write(left, "deepspeed")
    with pytest.raises(ConfigError, match="form='yaml': expected one of flatshard, fsdp"):
        config.write(left, "yaml")
    assert config.write(config.fsdp({}), "flatshard") == Written(
        config.to_dict(config.fsdp({})), ()
    )


# ---- flatshard's own form -----------------------------------------------------------------------


def test_own_form_by_hand() -> None:
    read = config.flatshard(
        {
            "stage": 2,
            "precision": "bf16",
            "units": ["A", "B"],
            "batch": {"micro": 4},
            "max_norm": 1,
            "optimizer": {"name": "AdamW", "options": {"lr": 1e-3}},
        }
    )
    assert read.sharding == Sharding(stage=2) and read.precision == PRESETS["bf16"]
    assert read.units == Units("classes", ("A", "B")) and read.batch == Batch(micro=4)
    assert read.max_norm == 1.0 and read.optimizer is not None
    assert read.given >= {"sharding", "precision", "units", "batch", "max_norm", "optimizer"}
    read = config.flatshard(
        {
            "sharding": {"stage": 1, "offload": {"state": "cpu"}},
            "precision": {"param": "float16", "master": "float32", "loss_scale": {"window": 9}},
            "units": {"by": "size", "min_num_params": 5},
        }
    )
    assert read.sharding == Sharding(stage=1, offload=Offload(state="cpu"))
    assert read.precision == MixedPrecision(
        param="float16", master="float32", loss_scale=LossScale(window=9)
    )
    assert row(read, "precision.loss_scale.window").fate == "done"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stages": 3}, "stages is not known; did you mean stage"),
        ({"stage": 4}, "stage is 4: expected a whole number from 0 to 3"),
        ({"stage": 1, "sharding": {"stage": 2}}, "stage is 1, and sharding.stage is 2"),
        ({"sharding": {"stages": 2}}, r"sharding\.stages is not known; did you mean stage"),
        ({"sharding": {"offload": "cpu"}}, r"sharding\.offload is a string: expected an object"),
        ({"sharding": {"offload": {"state": "disk"}}}, r"sharding\.offload cannot be: .*disk"),
        ({"precision": "int8"}, 'precision is "int8": expected one of fp32'),
        ({"precision": {"param": "int8"}}, "precision cannot be: .*int8"),
        ({"precision": {"loss_scale": {"window": 0}}}, r"loss_scale\.window is 0: expected"),
        ({"precision": {"loss_scale": {"initial": 3}}}, r"loss_scale cannot be: .*power of two"),
        ({"units": []}, "units is empty"),
        ({"units": 3}, "units is wrong"),
        ({"units": {"by": "size"}}, r"units\.min_num_params above 0"),
        ({"units": {"classes": ["A"]}}, r"units\.classes and"),
        ({"batch": {"micros": 1}}, r"batch\.micros is not known"),
        ({"optimizer": {"name": "Adamm"}}, r'optimizer\.name is "Adamm": expected one of Adam'),
        (
            {"optimizer": {"name": "SGD", "options": {"betas": [0.9, 0.9]}}},
            r"optimizer\.options\.betas is no option of SGD",
        ),
        ({"schedule": {"name": "Cosine"}}, r'schedule\.name is "Cosine"'),
        ({"schedule": {"name": "WarmupDecayLR"}}, r"total_num_steps is missing"),
        ({"world_size": True}, "world_size is true: expected a whole number"),
    ],
)
def test_own_form_is_strict(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.flatshard(values)


def test_own_form_has_every_field() -> None:
    fields = {field.name for field in dataclasses.fields(Settings)}
    assert set(RULES) - {"stage"} == fields - {"source", "kind", "given", "keys"}


def test_the_form_is_told_by_the_keys() -> None:
    for values, kind in (
        (FSDP, "fsdp"),
        ({"fsdp_version": 1}, "fsdp"),
        ({"activation_checkpointing": True}, "fsdp"),
        (ZERO3, "deepspeed"),
        ({"optimizer": {"type": "SGD"}}, "deepspeed"),
        ({"optimizer": {"name": "SGD"}}, "flatshard"),
        ({"stage": 3}, "flatshard"),
        ({"distributed_type": "NO"}, "accelerate"),
        ({"ACCELERATE_USE_FSDP": "true"}, "accelerate"),
    ):
        assert kind_of(values) == kind
        assert config.read(values, world_size=1).kind == kind
    assert config.read({}, kind="deepspeed", world_size=1).kind == "deepspeed"
    with pytest.raises(ConfigError, match="kind='yaml': expected one of"):
        config.read({}, kind="yaml")


# ---- commands -----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    (tmp_path / "fsdp.json").write_text(json.dumps(FSDP))
    (tmp_path / "auto.json").write_text(
        '{"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}'
    )
    (tmp_path / "bad.json").write_text('{"gradient_cliping": 1}')
    (tmp_path / "run.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    return tmp_path


def test_check(files: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(files / "zero3.json"), "--world-size", "2"]) == 0
    out = capsys.readouterr().out
    for key in ("zero_optimization.stage", "scheduler.params.warmup_num_steps", "pin_memory"):
        assert key in out
    assert out.endswith("15 done, 2 noted, none refused\n")
    assert main(["config", "check", str(files / "run.yaml")]) == 0
    assert "fsdp_config.version" in capsys.readouterr().out
    assert main(["config", "check", str(files / "fsdp.json"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert {entry["key"] for entry in made["keys"]} >= set(FSDP) - {"mixed_precision_policy"}
    assert config.flatshard(made["settings"]).sharding == config.fsdp(FSDP).sharding


def test_check_says_what_is_wrong(files: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (
            [str(files / "bad.json")],
            "gradient_cliping is not known; did you mean gradient_clipping",
        ),
        ([str(files / "nowhere.json")], "cannot be read: No such file"),
        ([str(files / "auto.json")], "auto={'max_grad_norm': ...}"),
        ([str(files / "auto.json"), "--auto", "lr=1"], "--auto lr=1: expected NAME=VALUE"),
        ([str(files / "auto.json"), "--auto", "bf16=maybe"], "'maybe' is no number"),
        ([str(files / "zero3.json"), "--world-size", "0"], "--world-size 0: expected"),
        ([str(files / "run.yaml"), "--kind", "deepspeed"], "distributed_type is not known"),
    ):
        assert main(["config", "check", *words]) == 2
        assert message in capsys.readouterr().err


def test_check_calls_no_refused_key_done(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme"}}
    path = "zero_optimization.offload_param"
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "nothing": 1}))
    assert main(["config", "check", str(tmp_path / "ds.json"), "--json"]) == 2
    fates = {k["key"]: k["fate"] for k in json.loads(capsys.readouterr().out)["keys"]}
    assert fates[f"{path}.device"] == fates["nothing"] == "refused"
    # Keys that contradict each other, each right by itself.
    zero = {"stage": 2, "offload_param": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    assert main(["config", "check", str(tmp_path / "ds.json"), "--json"]) == 2
    fates = {k["key"]: k["fate"] for k in json.loads(capsys.readouterr().out)["keys"]}
    assert fates[path] == "refused"


def test_comments_of_json_are_noted() -> None:
    comments = {"_comment": "ours", "//": "x", "comment": ["y"]}
    values = {**comments, "zero_optimization": {"stage": 1, "_why": "small"}}
    read = config.deepspeed(values, world_size=None)
    noted = {key.path for key in read.keys if key.fate == "noted" and key.text == "a comment"}
    assert noted == {*comments, "zero_optimization._why"}
    assert read.sharding.stage == 1


def test_check_shows_every_refused_key(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "zero_optimization": {"stage": 3, "overlap_com": True, "reduce_bucket_size": "auto"},
        "prescale_gradients": True,
        "optimizer": {"type": "LAMB", "params": {"max_coeff": 3}},
        "gradient_clipping": -1,
    }
    wrong = {
        "optimizer.type": "is not offered",
        "zero_optimization.overlap_com": "did you mean overlap_comm?",
        "zero_optimization.reduce_bucket_size": "nothing was given to fill it",
        "prescale_gradients": "communication_data_type",
        "gradient_clipping": "expected a finite number from 0",
    }
    with pytest.raises(ConfigError) as caught:
        config.deepspeed(values, world_size=2)
    lines = str(caught.value).splitlines()
    assert [line.split()[1] for line in lines] == list(wrong)
    assert {key.path: key.fate for key in caught.value.keys} == {
        **dict.fromkeys(wrong, "refused"),
        "zero_optimization.stage": "done",
    }
    file = tmp_path / "many.json"
    file.write_text(json.dumps(values))
    assert main(["config", "check", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out.endswith("1 done, 0 noted, 5 refused\n")
    assert "--auto NAME=VALUE, or by --trainer" in printed.err
    for path, text in wrong.items():
        row = next(line for line in printed.out.splitlines() if line.startswith(path))
        assert " refused " in row and text.split("?")[0] in " ".join(row.split())
        assert f"{path} " in printed.err
    assert main(["config", "check", str(file), "--json"]) == 2
    made = json.loads(capsys.readouterr().out)
    assert made["settings"] is None
    assert {key["key"] for key in made["keys"] if key["fate"] == "refused"} == set(wrong)


def test_check_with_auto(files: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(files / "auto.json")
    assert (
        main(["config", "check", name, "--auto", "max_grad_norm=0.5", "--auto", "bf16=true"]) == 0
    )
    assert "0.5 (auto, from max_grad_norm)" in capsys.readouterr().out
    assert main(["config", "check", name, "--trainer"]) == 0
    assert "filled when training starts" in capsys.readouterr().out
    assert main(["config", "check", name, "--trainer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"]


def test_check_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert main(["config", "check", "environment"]) == 0
    assert "FSDP_OFFLOAD_PARAMS" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["fsdp", "deepspeed", "accelerate"])
def test_keys(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "keys", form]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 40 and len(set(lines)) == len(lines)
    fates = {line.split()[1] for line in lines}
    assert fates == {"done", "noted", "refused"}
    refused = [line for line in lines if line.split()[1] == "refused"]
    assert all("nearest: " in line for line in refused)


def test_write(files: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for to in KINDS:
        source, out = str(files / "fsdp.json"), files / f"made-{to}.json"
        words = ["config", "write", str(out), "--from", source, "--to", to]
        assert main(words) == 0
        assert config.read(out, world_size=2).kind == to
        assert main(words) == 2
        assert "is there already; name another, or say --force" in capsys.readouterr().err
        assert main([*words, "--force"]) == 0
    out = files / "accelerate.yaml"
    assert main(["config", "write", str(out), "--from", source, "--to", "accelerate"]) == 0
    assert config.accelerate(out).activation_checkpointing
    capsys.readouterr()
    assert main(["config", "write", "-", "--from", str(files / "zero3.json"), "--to", "fsdp"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["version"] == 1
    assert "left out: optimizer: TrainingArguments(optim= and learning_rate=)" in shown.err
