"""Settings at work: two files, one result; what is noted moves no bit, what is done does."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from config_cases import meaning, nested, paths
from test_deepspeed_keys import CASES as DEEPSPEED_CASES
from test_fsdp_keys import CASES as FSDP_CASES

import flatshard as fs
from flatshard import ConfigError, config
from flatshard.config import Settings
from flatshard.config.deepspeed_keys import RULES

RANKS, STEPS, LR = 2, 4, 3e-2
SHAPES = {
    "embed.weight": (13, 6),
    "layers.0.up": (6, 9),
    "layers.0.bias": (9,),
    "layers.1.down": (9, 6),
    "norm.weight": (6,),
}


def run(settings: Settings) -> dict[str, Any]:
    """A few steps on two ranks as settings say: hashes, norms, rates, and the bytes of the plan."""

    def rank(world: fs.World) -> dict[str, Any]:
        settings.check_world(world.size)
        random = np.random.default_rng(5)
        start = {n: random.standard_normal(s, np.float32) for n, s in SHAPES.items()}
        shards = fs.shard(
            start,
            world,
            sharding=settings.sharding,
            precision=settings.precision,
            unit_of=settings.units.unit_of(),
        )
        settings.attach(shards)
        if settings.optimizer is None:
            optimizer: fs.Optimizer = fs.AdamW(shards, lr=LR, eps=1e-4)
        else:
            optimizer = settings.optimizer.build(shards)
        rate = settings.schedule.rate(optimizer.lr) if settings.schedule else None
        norms, rates = [], []
        for step in range(STEPS):
            for part in range(settings.batch.accumulate or 1):
                for unit in reversed(shards.units):
                    scale = optimizer.loss_scale
                    grads = {}
                    with unit.gathered() as weights:
                        for name in unit.names:
                            gradient = random_gradient(SHAPES[name], step, part, world.rank, name)
                            gradient += np.float32(1e-2) * weights[name].astype(np.float32)
                            grads[name] = gradient * np.float32(scale)
                    unit.reduce(grads)
            if rate is not None:
                optimizer.lr = rate(step)
            result = optimizer.step(max_norm=settings.max_norm)
            assert result.applied
            norms.append(result.grad_norm)
            rates.append(optimizer.lr)
        made = {
            "weights": fs.weights_sha256(shards),
            "state": fs.state_sha256(shards),
            "norms": norms,
            "rates": rates,
            "units": [unit.name for unit in shards.units],
            "planned": sorted(shards.planned().items()),
            "described": fs.describe(shards),
        }
        shards.close()
        return made

    first: dict[str, Any] = fs.local_world(RANKS, timeout=60.0).run(rank)[0]
    return first


def random_gradient(
    shape: tuple[int, ...], step: int, part: int, rank: int, name: str
) -> np.ndarray[Any, np.dtype[np.float32]]:
    seed = [step, part, rank, *name.encode()]
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(3e-2)


def bits(made: dict[str, Any]) -> dict[str, Any]:
    return {key: made[key] for key in ("weights", "state", "norms", "rates")}


# ---- two files, one result ----------------------------------------------------------------------

ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_gather_16bit_weights_on_model_save": False,
    },
}
FSDP = {
    "version": 1,
    "reshard_after_forward": "full_shard",
    "state_dict_type": "SHARDED_STATE_DICT",
    "cpu_ram_efficient_loading": True,
    "mixed_precision_policy": "bf16",
    "backward_prefetch": "BACKWARD_PRE",
}


def of_files(folder: pathlib.Path, first: dict[str, Any], second: dict[str, Any]) -> list[Settings]:
    (folder / "fsdp.json").write_text(json.dumps(first))
    (folder / "zero3.json").write_text(json.dumps(second))
    return [
        config.fsdp(folder / "fsdp.json", world_size=RANKS),
        config.deepspeed(folder / "zero3.json", world_size=RANKS),
    ]


@pytest.mark.quick
def test_two_files_reach_the_same_settings_and_bits(tmp_path: pathlib.Path) -> None:
    sharded, zero = of_files(tmp_path, FSDP, ZERO3)
    assert {**meaning(sharded), "batch": None, "world_size": None} == {
        **meaning(zero),
        "batch": None,
        "world_size": None,
    }
    first, second = run(sharded), run(zero)
    assert bits(first) == bits(second)
    assert first["planned"] == second["planned"]


@pytest.mark.quick
def test_the_second_version_has_the_same_bits_without_clipping(tmp_path: pathlib.Path) -> None:
    newer = {**FSDP, "version": 2, "reshard_after_forward": True}
    sharded, zero = of_files(tmp_path, newer, ZERO3)
    assert sharded.sharding.partition == "per_parameter" and zero.sharding.partition == "flat"
    first, second = run(sharded), run(zero)
    assert first["weights"] == second["weights"] and first["state"] == second["state"]


PRECISIONS: list[dict[str, Any]] = [
    {"bf16": {"enabled": False}},
    {"communication_data_type": "bf16"},
    {"data_types": {"grad_accum_dtype": "bf16"}},
    {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
]


def test_each_field_of_the_precision_alone_moves_the_bits() -> None:
    base = config.deepspeed(ZERO3, world_size=RANKS)
    seen = {run(base)["weights"]}
    for change in PRECISIONS:
        other = config.deepspeed({**ZERO3, **change}, world_size=RANKS)
        assert other.precision != base.precision
        made = run(other)["weights"]
        assert made not in seen, change
        seen.add(made)


def test_fp16_runs_scaled() -> None:
    half = {"fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_clipping": 1.0}
    dynamic = run(config.deepspeed(half, world_size=RANKS))
    static = {"fp16": {"enabled": True, "loss_scale": 256}, "gradient_clipping": 1.0}
    assert bits(run(config.deepspeed(static, world_size=RANKS))) == bits(dynamic)


# ---- what is noted moves no bit -----------------------------------------------------------------


def values_of_noted(cases: list[Any], which: int) -> dict[str, Any]:
    """Every key that is noted, with its first or its last value; off values of refused keys too."""
    found: dict[str, list[Any]] = {}
    for path, value, fate, *_ in cases:
        if fate == "noted":
            found.setdefault(path, []).append(value)
    return {path: values[which] for path, values in found.items()}


def test_noted_keys_of_deepspeed_leave_the_bits() -> None:
    """All of them at once; that each alone leaves the settings is tested with the keys."""
    base = {
        "gradient_clipping": 0.3,
        "optimizer.type": "AdamW",
        "scheduler.type": "WarmupLR",
        "zero_optimization.stage": 2,
        "bf16.enabled": True,
    }
    plain = run(config.deepspeed(tree(base), world_size=RANKS))
    for which in (0, -1):
        noted = values_of_noted(DEEPSPEED_CASES, which)
        # bfloat16 is the old name of bf16, and one of them can be there.
        noted = {path: v for path, v in noted.items() if not path.startswith("bfloat16.")}
        assert len(noted) > 100
        read = config.deepspeed(tree({**base, **noted}), world_size=RANKS)
        assert bits(run(read)) == bits(plain)


def tree(values: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, value in values.items():
        merge(made, nested(path, value))
    return made


def merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def test_noted_keys_of_fsdp_leave_the_bits() -> None:
    plain = run(config.fsdp({"mixed_precision_policy": "bf16"}))
    for which in (0, -1):
        noted = values_of_noted(FSDP_CASES, which)
        assert len(noted) > 15
        read = config.fsdp({"mixed_precision_policy": "bf16", **noted})
        assert bits(run(read)) == bits(plain)


def test_every_noted_rule_is_among_them() -> None:
    flat: dict[str, Any] = {}

    def walk(rules: Any, path: str = "") -> None:
        for key, rule in rules.items():
            if rule.fate == "section":
                walk(rule.rules, f"{path}{key}.")
            else:
                flat[f"{path}{key}"] = rule

    walk(RULES)
    assert set(flat) == set(paths(RULES))
    noted = {path for path, rule in flat.items() if rule.fate == "noted"}
    assert noted <= set(values_of_noted(DEEPSPEED_CASES, 0))
    for path in noted:
        assert len(flat[path].text) > 15, f"{path} names no mechanism"


# ---- what is done, is ---------------------------------------------------------------------------

DONE: list[tuple[dict[str, Any], Callable[[dict[str, Any], dict[str, Any]], bool]]] = [
    ({"gradient_clipping": 1e-3}, lambda a, b: a["weights"] != b["weights"]),
    ({"gradient_accumulation_steps": 3}, lambda a, b: a["norms"] != b["norms"]),
    ({"zero_optimization": {"stage": 1}}, lambda a, b: a["planned"] != b["planned"]),
    ({"optimizer": {"type": "Lion"}}, lambda a, b: a["weights"] != b["weights"]),
    (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}},
        lambda a, b: a["weights"] != b["weights"],
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
        lambda a, b: a["weights"] != b["weights"],
    ),
    ({"optimizer": {"type": "Adagrad"}}, lambda a, b: a["weights"] != b["weights"]),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}},
        lambda a, b: len(set(a["rates"])) > 2 and a["weights"] != b["weights"],
    ),
]


@pytest.mark.parametrize(("change", "differs"), DONE, ids=lambda value: str(value)[:40])
def test_what_is_done_is_seen(
    change: dict[str, Any], differs: Callable[[dict[str, Any], dict[str, Any]], bool]
) -> None:
    base: dict[str, Any] = {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}},
    }
    plain = run(config.deepspeed(base, world_size=RANKS))
    assert differs(run(config.deepspeed({**base, **change}, world_size=RANKS)), plain)


def test_units_of_arrays() -> None:
    assert len(run(config.fsdp({}))["units"]) == 4
    whole = run(config.fsdp({"auto_wrap_policy": "NO_WRAP"}))
    assert whole["units"] == ["model"]


# ---- describe -----------------------------------------------------------------------------------


@pytest.mark.quick
def test_describe_shows_what_became_of_each_key() -> None:
    values = {**FSDP, "cpu_offload": True}
    made = run(config.fsdp(values))["described"]
    for key in values:
        assert key in made, key
    assert '"device" and "cpu" are one' in made
    assert "flatshard schedules gathers itself" in made
    assert "configuration:" in made and "7 keys" in made


def test_settings_are_attached_to_what_they_opened() -> None:
    settings = config.fsdp({"version": 1, "mixed_precision_policy": "bf16"})

    def rank(world: fs.World) -> None:
        for what, options in (
            ("sharding", {"sharding": fs.Sharding(stage=1), "precision": settings.precision}),
            ("precision", {"sharding": settings.sharding, "precision": "fp32"}),
        ):
            other = fs.shard({"w": np.zeros(4, np.float32)}, world, **options)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=f"pass {what}=settings.{what} when opening it"):
                settings.attach(other)
            assert "configuration" not in fs.describe(other)
            other.close()

    fs.local_world(1, timeout=60.0).run(rank)
