"""Configurations: what will not do is refused by name, and a resume may not change the run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flatshard.cli import train as command
from flatshard.errors import ConfigError
from flatshard.models.folder import RunFolder
from flatshard.models.options import TrainConfig

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("batch", 0, "batch 0: expected at least 1"),
        ("length", 0, "length 0: expected at least 1"),
        ("steps", 0, "steps 0: expected at least 1"),
        ("accumulate", -1, "accumulate -1: expected at least 1"),
        ("threads", 0, "threads 0: expected at least 1"),
        ("keep", 0, "keep 0: expected at least 1"),
        ("save_every", -1, "save_every -1: expected at least 0"),
        ("warmup", 501, "warmup 501 is longer than the run of 500 steps"),
        ("warmup", -1, "warmup -1: expected at least 0"),
        ("lr", 0.0, "lr 0.0: expected a finite number, more than 0"),
        ("lr", float("nan"), "lr nan: expected a finite number"),
        ("max_norm", -1.0, "max_norm -1.0: expected a finite number, at least 0"),
        ("betas", (0.9, 1.0), r"betas \(0.9, 1.0\): expected two numbers in \[0, 1\)"),
        ("seed", -1, "seed -1: expected 0 to"),
        ("stage", 4, "stage 4: expected one of 0, 1, 2, 3"),
        (
            "precision",
            "fp8",
            "precision 'fp8' is not there yet; choose one of fp32, bf16, bf16-split, bf16-pure",
        ),
        ("precision", "fp64", "precision 'fp64': expected one of fp32, bf16, bf16-split"),
        ("gather", "auto?", "gather 'auto\\?': expected one of auto, view, copy"),
        ("optimizer", "lamb", "optimizer 'lamb' is not there yet"),
        ("schedule", "step", "schedule 'step': expected one of constant, linear, cosine"),
        ("save_on", ("SIGKILL",), "save_on 'SIGKILL': expected SIGTERM or SIGUSR1"),
        ("reschedule", True, "reschedule goes with resume"),
        ("out", "", "out is empty"),
    ],
)
def test_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TrainConfig(model="tiny"), **{field: value}).check()


def test_the_command_line_is_the_configuration() -> None:
    """Every field has its option, with the same default."""
    assert command.config_of(command.parser().parse_args(["tiny"])) == TrainConfig(model="tiny")
    words = [
        "tiny", "--data", "d", "--tokenizer", "t", "--glob", "*.a", "*.b", "--exclude", "c",
        "--encoding", "latin-1", "--token-dtype", "int32", "--cache", "k", "--holdout", "0.1",
        "--seed", "7", "--threads", "3", "--stage", "1", "--gather", "copy", "--partition",
        "per_parameter", "--precision", "bf16", "--activation-checkpointing", "--batch", "2",
        "--length", "9", "--accumulate", "4", "--steps", "11", "--optimizer", "sgd", "--lr", "0.5",
        "--warmup", "5", "--schedule", "linear", "--betas", "0.8", "0.95", "--eps", "1e-4",
        "--weight-decay", "0", "--max-norm", "0", "--out", "o", "--save-every", "6", "--keep", "1",
        "--eval-every", "8", "--eval-sequences", "12", "--resume", "--reschedule", "--save-on",
        "SIGTERM", "SIGUSR1", "--json", "j", "--prompt", "p", "--sample-tokens", "0",
        "--device", "cuda",
        "--temperature", "0.1", "--check-every", "9", "--trace", "t",
    ]  # fmt: skip
    config = command.config_of(command.parser().parse_args(words))
    default = TrainConfig(model="tiny")
    same = [
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) == getattr(default, field.name)
    ]
    assert same == ["model"]
    assert all(
        type(getattr(config, field.name)) is type(getattr(default, field.name))
        for field in dataclasses.fields(config)
        if getattr(default, field.name) is not None
    )


# Folders ---------------------------------------------------------------------------------------


def began(folder: Path, **changes: Any) -> TrainConfig:
    """A folder as a run leaves it after its first checkpoint."""
    config = TrainConfig(model="tiny", out=str(folder), **changes)
    RunFolder(folder).begin(config)
    checkpoint = folder / "step-000010"
    checkpoint.mkdir()
    (checkpoint / "index.json").write_text("{}")
    return config


def test_a_new_folder_is_free(tmp_path: Path) -> None:
    RunFolder(tmp_path / "new").check(TrainConfig(model="tiny"))
    RunFolder(tmp_path).check(TrainConfig(model="tiny"))
    assert not (tmp_path / "new").exists()


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    config = began(tmp_path)
    with pytest.raises(ConfigError, match=r"holds another run .*--resume goes on"):
        RunFolder(tmp_path).check(config)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        RunFolder(file).check(config)


def test_nothing_to_resume(tmp_path: Path) -> None:
    config = TrainConfig(model="tiny", resume=True)
    with pytest.raises(ConfigError, match=r"nothing to resume: .* holds no run"):
        RunFolder(tmp_path / "new").check(config)
    RunFolder(tmp_path).begin(config)
    with pytest.raises(ConfigError, match="ended before its first checkpoint"):
        RunFolder(tmp_path).check(config)
    (tmp_path / "run.json").write_text(json.dumps({"format": 2, "config": {}}))
    with pytest.raises(ConfigError, match="has format 2; this version reads 1"):
        RunFolder(tmp_path).check(config)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        RunFolder(tmp_path).check(config)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({}, None),
        ({"save_every": 3, "eval_every": 7, "json": "x", "threads": 2, "prompt": "a"}, None),
        ({"steps": 600}, "steps was 500 and is now 600: .* say --reschedule"),
        ({"lr": 0.5}, "lr was 0.001 and is now 0.5: .* say --reschedule"),
        ({"steps": 600, "lr": 0.5, "reschedule": True}, None),
        ({"batch": 4}, "batch was 8 and is now 4: .* say --reschedule"),
        ({"batch": 4, "accumulate": 2, "reschedule": True}, None),
        ({"stage": 1, "gather": "copy", "partition": "per_parameter"}, None),
        ({"precision": "bf16"}, "precision was 'fp32' when this run began and is now 'bf16'"),
        ({"seed": 1}, "seed was 0 when this run began and is now 1"),
        ({"model": "small"}, "model was 'tiny' when this run began and is now 'small'"),
        ({"betas": (0.9, 0.99)}, r"betas was \[0.9, 0.999\] when this run began"),
    ],
)
def test_a_resume_is_the_same_run(
    tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    config = dataclasses.replace(began(tmp_path), resume=True, **changes)
    config.check()
    if message is None:
        RunFolder(tmp_path).check(config)
        return
    with pytest.raises(ConfigError, match=message):
        RunFolder(tmp_path).check(config)
