"""The configuration tables of docs/migration.md, row by row, in both directions."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
from config_cases import nested, paths

from flatshard import config
from flatshard.config import Settings
from flatshard.config.deepspeed_keys import RULES as DEEPSPEED
from flatshard.config.fsdp import POLICY
from flatshard.config.fsdp import RULES as FSDP

pytestmark = pytest.mark.quick

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "migration.md"
Cell = dict[str, Any]


def cell(text: str) -> Cell:
    """`a.b: value` ... -> {"a.b": value}; a dash is nothing."""
    found = re.findall(r"`([\w.]+): ([^`]+)`", text)
    assert found or text.strip() == "-", text
    return {path: json.loads(value) for path, value in found}


def tables() -> list[list[tuple[str, Cell, Cell, Cell]]]:
    """Rows of the two tables: name, FSDP, DeepSpeed, Settings."""
    text = GUIDE.read_text(encoding="utf-8")
    head = "| what | FSDP | DeepSpeed | `Settings` |\n|---|---|---|---|\n"
    made = []
    for part in text.split(head)[1:]:
        rows = []
        for line in part.splitlines():
            if not line.startswith("|"):
                break
            name, *cells = [piece.strip() for piece in line.strip("|").split("|")]
            rows.append((name, *(cell(piece) for piece in cells)))
        made.append(rows)
    return made  # type: ignore[return-value]


BOTH, ONE = tables()


def tree(values: Cell) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, value in values.items():
        new, into = nested(path, value), made
        while True:
            key, inner = next(iter(new.items()))
            if key in into:
                into, new = into[key], inner
                continue
            into[key] = inner
            break
    return made


def look(settings: Settings, path: str) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def of_fsdp(values: Cell) -> Settings:
    return config.fsdp(tree(values))


def of_deepspeed(values: Cell) -> Settings:
    return config.deepspeed(tree(values), world_size=2)


def test_the_tables_are_there() -> None:
    assert len(BOTH) >= 6 and len(ONE) >= 12
    known = {*FSDP, *(f"mixed_precision_policy.{key}" for key in POLICY)}
    for _, sharded, zero, _ in [*BOTH, *ONE]:
        assert set(sharded) <= known
        assert set(zero) <= set(paths(DEEPSPEED))


@pytest.mark.parametrize("row", BOTH, ids=[row[0] for row in BOTH])
def test_both_directions(row: tuple[str, Cell, Cell, Cell]) -> None:
    _, sharded, zero, wanted = row
    first, second = of_fsdp(sharded), of_deepspeed(zero)
    for path, value in wanted.items():
        assert look(first, path) == value
        assert look(second, path) == value
    assert first.sharding == second.sharding and first.precision == second.precision
    for settings, form, words in ((first, "deepspeed", zero), (second, "fsdp", sharded)):
        written: Any = config.write(settings, form).values
        for path, value in words.items():
            there = written
            for name in path.split("."):
                there = there[name]
            assert there == value, path


@pytest.mark.parametrize("row", ONE, ids=[row[0] for row in ONE])
def test_one_direction(row: tuple[str, Cell, Cell, Cell]) -> None:
    _, sharded, zero, wanted = row
    assert bool(sharded) != bool(zero)
    settings = of_fsdp(sharded) if sharded else of_deepspeed(zero)
    for path, value in wanted.items():
        assert look(settings, path) == value
    other = "deepspeed" if sharded else "fsdp"
    assert config.write(settings, other).left_out, "the other form should have no word for it"


DOCUMENTED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
TRAINER = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 3e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.01,
    "warmup_steps": 100,
    "max_steps": 1000,
    "fp16": False,
    "bf16": True,
    "hidden_size": 768,
}
YAML = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
  fsdp_version: 1
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def leaves(values: Any, path: str = "") -> set[str]:
    found = set()
    for key, value in values.items():
        where = f"{path}{key}"
        found |= leaves(value, f"{where}.") if isinstance(value, dict) else {where}
    return found


def test_a_json_as_the_guides_show_it_is_accounted_for(tmp_path: pathlib.Path) -> None:
    """The keys that transformers' guide to ZeRO-3 lists, with its "auto"."""
    file = tmp_path / "ds_config_zero3.json"
    file.write_text(json.dumps(DOCUMENTED))
    read = config.deepspeed(file, world_size=4, auto=TRAINER)
    assert {key.path for key in read.keys} == leaves(DOCUMENTED)
    assert read.batch.train == 32 and read.sharding.stage == 3
    assert "filled when" not in read.table() and read.table().count("(auto") == 17
    again = config.deepspeed(config.write(read, "deepspeed").values, world_size=4)
    for name in ("sharding", "precision", "batch", "optimizer", "schedule", "max_norm"):
        assert getattr(again, name) == getattr(read, name)


def test_a_yaml_as_accelerate_config_writes_it_is_accounted_for(tmp_path: pathlib.Path) -> None:
    yaml = pytest.importorskip("yaml")
    file = tmp_path / "default_config.yaml"
    file.write_text(YAML)
    read = config.accelerate(file)
    wanted = {
        path.replace("fsdp_config.fsdp_", "fsdp_config.") for path in leaves(yaml.safe_load(YAML))
    }
    assert {key.path for key in read.keys} == wanted
    assert read.units.classes == ("BertLayer",) and read.precision.param == "bfloat16"
    again = config.accelerate(config.write(read, "accelerate").values)
    for name in ("sharding", "precision", "units", "save", "efficient_loading"):
        assert getattr(again, name) == getattr(read, name)
