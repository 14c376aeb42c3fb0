"""flatshard train with a configuration of another framework: two files, one result."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from flatshard import ConfigError, config
from flatshard._start import Place
from flatshard.cli.__main__ import main
from flatshard.cli.train import config_of, parse
from flatshard.config.native import train_options
from flatshard.models.options import TrainConfig

ALONE = Place(rank=0, size=1, local_rank=0, local_size=1, name="alone", launcher="nobody")
FSDP: dict[str, Any] = {
    "version": 1,
    "reshard_after_forward": "FULL_SHARD",
    "mixed_precision_policy": "bf16",
    "activation_checkpointing": True,
}
ZERO3: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
}


def file_of(folder: pathlib.Path, values: dict[str, Any]) -> str:
    file = folder / f"{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps(values))
    return str(file)


def asked(folder: pathlib.Path, values: dict[str, Any], *words: str) -> TrainConfig:
    return config_of(parse(["tiny", "--config", file_of(folder, values), *words], ALONE))


@pytest.mark.quick
def test_what_a_file_says_is_the_default(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = asked(tmp_path, FSDP)
    assert (read.stage, read.precision, read.activation_checkpointing) == (3, "bf16", True)
    assert "mixed_precision_policy" in capsys.readouterr().out
    read = asked(tmp_path, ZERO3, "--lr", "0.25")
    default = TrainConfig(model="tiny")
    assert (read.lr, read.weight_decay, read.max_norm) == (0.25, 0.1, 1.0)
    assert read.batch == default.batch  # "auto": as the command line says
    assert "not taken over: steps_per_print: every step is shown" in capsys.readouterr().out
    read = asked(tmp_path, ZERO3, "--stage", "1", "--precision", "fp32")
    assert (read.stage, read.precision) == (1, "fp32")
    sgd = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.8}}
    read = asked(tmp_path, {"optimizer": sgd, "gradient_clipping": 0})
    assert (read.optimizer, read.lr, read.betas[0], read.max_norm) == ("sgd", 0.5, 0.8, 0.0)
    read = asked(tmp_path, {"train_batch_size": 12, "gradient_accumulation_steps": 3}, "-n", "2")
    assert (read.batch, read.accumulate) == (2, 3)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "no option for the schedule WarmupLR"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "no option for amsgrad"),
        ({"communication_data_type": "bf16"}, "which is no preset"),
        ({"fp16": {"enabled": True}}, "which is no preset"),
        ({"zero_optimisation": {}}, "did you mean zero_optimization"),
        ({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}, "not a multiple of"),
    ],
)
def test_what_the_trainer_cannot_do_is_refused(
    tmp_path: pathlib.Path,
    values: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "tiny", "--config", file_of(tmp_path, values)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.quick
def test_a_module_that_is_left_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="no option for ignored_modules"):
        train_options(config.fsdp({"ignored_modules": "head"}))
    with pytest.raises(ConfigError, match="no option for replicate=2"):
        mesh = {"dp_replicate_size": 2}
        train_options(
            config.accelerate(
                {
                    "distributed_type": "FSDP",
                    "fsdp_config": {"version": 2},
                    "parallelism_config": mesh,
                }
            )
        )


def test_two_files_train_to_the_same_bits(tmp_path: pathlib.Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("The river runs past the old mill.\n" * 300)
    found = {}
    for name, values in (("fsdp", FSDP), ("zero3", ZERO3), ("zero1", ZERO3)):
        words = ["train", "tiny", "--data", str(corpus), "-n", "2", "--ranks-as", "threads"]
        words += ["--config", file_of(tmp_path, values), "--steps", "3", "--batch", "2"]
        words += ["--length", "16", "--sample-tokens", "0", "--eval-sequences", "2"]
        words += ["--out", str(tmp_path / name), "--json", str(tmp_path / f"{name}.result")]
        if name == "zero1":
            words += ["--stage", "1"]
        assert main(words) == 0
        found[name] = json.loads((tmp_path / f"{name}.result").read_text())
    assert found["fsdp"]["precision"] == "bf16" and found["zero1"]["stage"] == 1
    assert len({run["weights_sha256"] for run in found.values()}) == 1
