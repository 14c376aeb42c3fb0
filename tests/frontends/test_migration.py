"""What the migration guide says is one thing, trains to the same Parameters in both systems.

One configuration is read here and by the other system. fp32 and AdamW with a large eps: Parameters
agree to 1e-6 of the largest element of each. DeepSpeed is compared where it is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from gang import Gang

pytest.importorskip("torch")
pytest.importorskip("transformers")

CLOSE = 1e-6
LLAMA = ["LlamaDecoderLayer"]
WRAP = {"transformer_layer_cls_to_wrap": LLAMA}

PAIRS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("DDP", "ddp", {"version": 1, "sharding_strategy": "NO_SHARD"}, {"max_norm": 0.5}),
    ("DDP, accumulation", "ddp", {"sharding_strategy": "NO_SHARD"}, {"micro_batches": 3}),
    (
        "FSDP1",
        "fsdp1",
        {"version": 1, "reshard_after_forward": "FULL_SHARD", **WRAP},
        {"max_norm": 0.5},
    ),
    (
        "FSDP1, gradients and state",
        "fsdp1",
        {"version": 1, "reshard_after_forward": "SHARD_GRAD_OP", **WRAP},
        {"micro_batches": 2},
    ),
    (
        "FSDP1, nothing sharded",
        "fsdp1",
        {"version": 1, "reshard_after_forward": "NO_SHARD", **WRAP},
        {},
    ),
    ("FSDP2", "fsdp2", {"reshard_after_forward": True, **WRAP}, {"max_norm": 0.5}),
    (
        "FSDP2, kept gathered",
        "fsdp2",
        {"reshard_after_forward": False, **WRAP},
        {"micro_batches": 2},
    ),
    (
        "FSDP2, copies",
        "fsdp2",
        {"reshard_after_forward": True, **WRAP},
        {"gather": "copy", "max_norm": 0.5},
    ),
    (
        "FSDP2, copies kept gathered",
        "fsdp2",
        {"reshard_after_forward": False, **WRAP},
        {"gather": "copy", "micro_batches": 2},
    ),
    (
        "FSDP2, recomputation",
        "fsdp2",
        {"activation_checkpointing": True, **WRAP},
        {"max_norm": 0.5},
    ),
    # OSS shards the state, ShardedDataParallel the gradients too; both leave results as they are.
    ("FairScale's OSS", "zero1", {}, {"stage": 1, "max_norm": 0.5}),
    ("FairScale's ShardedDataParallel", "zero1", {}, {"stage": 2, "micro_batches": 2}),
]


@pytest.mark.parametrize(
    ("system", "values", "options"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS]
)
def test_pair(
    gang: Callable[[int], Gang], system: str, values: dict[str, Any], options: dict[str, Any]
) -> None:
    results = gang(2).run("cases_migration:train", system=system, values=values, **options)
    for result in results:
        assert result["apart"] <= CLOSE
        assert result["moved"] > 1e-3
        for mine, theirs in result["norms"]:
            assert mine == pytest.approx(theirs, rel=1e-5)
        for mine, theirs in result["losses"]:
            assert mine == pytest.approx(theirs, rel=1e-5)


def test_units_are_what_fsdp_wraps(gang: Callable[[int], Gang]) -> None:
    values = {"version": 1, "reshard_after_forward": "FULL_SHARD", **WRAP}
    results = gang(2).run("cases_migration:train", system="fsdp1", values=values, steps=1)
    layers = [name for name in results[0]["units"] if "layers." in name]
    # FSDP wraps each layer, and the rest of the model once.
    assert len(layers) == 2 and results[0]["their_units"] == len(layers) + 1
    assert "transformer_layer_cls_to_wrap" in results[0]["table"]


@pytest.mark.parametrize("options", [{"least": n} for n in (1500, 2000, 6000, 20000)])
def test_units_by_size_are_fsdps(gang: Callable[[int], Gang], options: dict[str, Any]) -> None:
    """A tie counts once here; FSDP counts what is left of it on the rank, here 1,024."""
    for result in gang(2).run("cases_migration:sized", **options):
        assert result["ours"] == result["theirs"]


def test_units_by_size_do_not_count_what_is_ignored(gang: Callable[[int], Gang]) -> None:
    options = {"least": 2000, "ignored": "encoder.block.0"}
    for result in gang(2).run("cases_migration:sized", **options):
        assert result["ours"] == result["theirs"] and result["ours"]


HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}}
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": ADAMW,
    "zero_allow_untested_optimizer": True,
}
#: torch's own AdamW and SGD: DeepSpeed's fused ones are for GPUs.
TORCH_ADAM = {**ADAMW, "params": {**ADAMW["params"], "torch_adam": True}}  # type: ignore[dict-item]
ZERO: list[tuple[str, dict[str, Any]]] = [
    *[
        (f"stage {n}", {"zero_optimization": {"stage": n}, "optimizer": TORCH_ADAM})
        for n in range(4)
    ],
    (
        "accumulation",
        {
            "zero_optimization": {"stage": 2},
            "optimizer": TORCH_ADAM,
            "gradient_accumulation_steps": 2,
        },
    ),
    (
        "schedule",
        {
            "zero_optimization": {"stage": 3},
            "optimizer": TORCH_ADAM,
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_max_lr": 5e-3},
            },
        },
    ),
    (
        "SGD",
        {
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        },
    ),
]


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("name", "values"), ZERO, ids=[name for name, _ in ZERO])
def test_zero(gang: Callable[[int], Gang], name: str, values: dict[str, Any]) -> None:
    """One JSON, given to DeepSpeed as it is and to flatshard.config."""
    results = gang(2).run(
        "cases_migration:train", system="deepspeed", values={**BASE, **values}, steps=8
    )
    for result in results:
        assert result["apart"] <= CLOSE
        assert result["moved"] > 1e-3
        for mine, theirs in result["losses"]:
            assert mine == pytest.approx(theirs, rel=1e-5)
        for mine, theirs in result["norms"]:
            # At stage 0 its engine keeps no norm.
            assert theirs == 0.0 or mine == pytest.approx(theirs, rel=1e-5)


def test_a_full_state_dict_goes_from_fsdp2_here_and_back(gang: Callable[[int], Gang]) -> None:
    for result in gang(2).run("cases_migration:load_from_fsdp2"):
        assert result["loaded"] == 0.0 and result["back"] == 0.0
        assert result["moved"] > 1e-4


@pytest.mark.parametrize(("reduce", "close"), [("fp32", CLOSE), ("bf16", 5e-3)])
def test_mixed_precision_follows_fsdp2(
    gang: Callable[[int], Gang], reduce: str, close: float
) -> None:
    """bf16 compute over fp32 weights. With bf16 on the wire FSDP2 sums in bf16 and we in fp32."""
    policy = {"param_dtype": "bf16", "reduce_dtype": reduce}
    values = {"mixed_precision_policy": policy, **WRAP}
    for result in gang(2).run("cases_migration:train", system="fsdp2", values=values, steps=8):
        assert result["apart"] <= close
        assert result["moved"] > 2 * close
        for mine, theirs in result["losses"]:
            assert mine == pytest.approx(theirs, rel=close)
