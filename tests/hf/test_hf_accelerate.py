"""The Accelerator over flatshard, against accelerate's own over DDP (accelerate_cases.py)."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch


def test_script(found: Any) -> None:
    """The sequence-pair script, and prepare() with its arguments in another order."""
    stock, ours, shuffled = found["losses"]
    assert len(stock) == 10
    assert ours == pytest.approx(stock, rel=1e-5) and shuffled == ours
    assert found["norms"][1] == pytest.approx(found["norms"][0], rel=1e-5)
    assert found["rates"][0] == found["rates"][1] == found["rates"][2]
    assert found["seen"] == [9, 9, 9], "nine rows on two ranks: none missing, none twice"
    assert found["right"][0] == found["right"][1]
    assert max(found["apart"]) < 1e-5
    assert found["digests"][1] == found["digests"][2]
    assert found["sharded"]


@pytest.mark.parametrize("rule", ["SGD", "Adam", "Adagrad"])
def test_rules(job: Any, rule: str) -> None:
    apart, same = job["rules"][0]["found"][rule]
    assert apart < 1e-5
    assert same, "the wrapped optimizer is the script's own object"


def test_unknown_rule(job: Any) -> None:
    text = job["rules"][0]["found"]["RMSprop"]
    assert text.startswith("TypeError") and "AdamW" in text


def test_without_cpu(found: Any) -> None:
    """Stock is two jobs of one process each."""
    assert found == {"stock": 1, "ours": 2, "type": "MULTI_CPU", "world": 2}


def test_state_is_saved_and_loaded(found: Any) -> None:
    assert found["same"]
    assert "flatshard-complete.json" in found["files"]


def test_state_in_pieces(found: Any) -> None:
    assert found["same"]
    assert "flatshard" in found["files"] and "optimizer.bin" not in found["files"]


def test_clipped_by_the_file(found: Any) -> None:
    assert found["apart"] < 1e-5 and found["stage"] == 2
    for key in ("zero_optimization.stage", "gradient_accumulation_steps", "gradient_clipping"):
        assert key in found["described"]


def test_filled(found: Any) -> None:
    assert found["bf16"] == ["torch.bfloat16", 2, 1.0]
    assert found["none"] == ["torch.float32", 2, 1.0]
    assert "AdamW" in found["optimizer"] and "take one of them out" in found["optimizer"]
    assert "WarmupLR" in found["scheduler"] and "take one of them out" in found["scheduler"]


def test_fp16_skips_alike(job: Any) -> None:
    """The first step overflows everywhere, the fourth on rank 1 alone: all skip, none advances."""
    one, two = (rank["found"] for rank in job["fp16_overflow"])
    assert one == two
    applied = [row[0] for row in one["rows"]]
    skipped = [row[1] for row in one["rows"]]
    assert applied == [not s for s in skipped]
    assert skipped[3] and sum(skipped) < 4
    scales = [row[2] for row in one["rows"]]
    assert scales[4] == scales[3] / 2
    # With two ranks Accelerate moves the schedule by two for each applied step.
    assert one["rate"] == pytest.approx(1e-2 / (1 + 2 * sum(applied)))
    assert one["dtype"] == "torch.float32" and one["weights"] == ["torch.float16"]


def test_refused(found: Any) -> None:
    assert "fp8" in found["fp8"]
    assert "fsdp_plugin" in found["plugin"]
    assert "did you mean stage" in found["key"]
    assert "0 to 3" in found["stage"]
    assert "clip_grad_norm_" in found["clip_grad_value_"]
    assert "even_batches" in found["join_uneven_inputs"]
    assert "bfloat16" in found["precision"] and "fp16" in found["precision"]
    assert "sync_gradients" in found["between"]


def test_ranks(job: Any) -> None:
    for one in job["ranks"]:
        assert one["found"] == {
            "order": ["0", "1"],
            "gathered": [0, 1],
            "reduced": [1.5],
            "padded": [0, -1, 0, 1],
        }


def test_no_sync_by_hand(found: Any) -> None:
    assert max(found) < 1e-6


def test_two_models(found: Any) -> None:
    assert max(found) < 1e-6


def test_whole_model_is_saved(found: Any) -> None:
    assert found == {"view": True, "copy": True}


def test_late_rank(found: Any, job: Any) -> None:
    assert found == [1, 1]
    log = "\n".join(job["late_rank"][0]["log"])
    assert "rank 1" in log and "accelerate_cases.py" in log


def test_evaluated_on_one_rank(found: Any) -> None:
    assert found["loss"] > 0
