"""The Trainer over flatshard, against transformers' own over DDP and against plain torch.

The cases run in one job of two ranks (trainer_cases.py, trainer_run_cases.py) and are judged here.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch

#: Single precision: sums over ranks and micro-batches in another order.
CLOSE = 1e-6


def equal_runs(found: dict[str, Any], close: float = CLOSE) -> None:
    assert found["apart"] < close
    assert found["moved"] > 0.1, "or nothing was tested"
    for key in ("loss", "grad_norm", "rate"):
        stock, ours = found[key]
        assert len(stock) == len(ours) == 4
        assert ours == pytest.approx(stock, rel=1e-5, abs=1e-9)
    assert found["eval"][1] == pytest.approx(found["eval"][0], rel=1e-5)


def test_default(found: Any) -> None:
    equal_runs(found)
    assert found["stage"] == 3


def test_fsdp(found: Any) -> None:
    equal_runs(found)
    assert found["stage"] == 3 and found["untouched"]


def test_deepspeed(found: Any) -> None:
    equal_runs(found)
    assert found["stage"] == 3


def test_copy_mode(found: Any) -> None:
    equal_runs(found)
    assert found["stage"] == 3


def test_recompute(found: Any) -> None:
    equal_runs(found)


def test_sharded_ddp(found: Any) -> None:
    equal_runs(found)
    assert found["stage"] == 2


def test_no_clipping(found: Any) -> None:
    """max_grad_norm=0: the norm is still logged."""
    equal_runs(found)


def test_the_same_bits_from_every_configuration(job: Any) -> None:
    names = ("default", "fsdp", "deepspeed", "sharded_ddp", "evaluate_first", "plain_arguments",
             "accelerate_launch", "accelerate_launch_of_fsdp1", "copy_mode",
             "recompute")  # fmt: skip
    assert len({one["found"]["digest"] for name in names for one in job[name]}) == 1


def test_optimizers(found: Any) -> None:
    assert found["adamw_torch_fused"] < 1e-5
    assert found["adagrad"] < 1e-5
    assert found["lion_32bit"] == "Lion"
    assert "ConfigError" in found["adafactor"] and "adamw_torch" in found["adafactor"]


def test_whole_batch(found: Any) -> None:
    """Ranks and micro-batches with unequal numbers of labels weigh by them."""
    assert found["apart"] < CLOSE
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-6)
    assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-6)


def test_frozen_base(found: Any) -> None:
    assert found["apart"] < CLOSE and found["still"]


# ---- what goes wrong silently in the stock Trainer ----------------------------------------------


def test_without_use_cpu(found: Any) -> None:
    """Two processes without use_cpu=True: stock trains two models apart."""
    assert found["ours"] == 2 and found["stock"] == 1
    assert "2 processes were launched" in found["refused"] and "use_cpu=True" in found["refused"]


def test_misspelt(found: Any) -> None:
    """Stock takes any key at the top of either file."""
    assert "did you mean reshard_after_forward" in found["fsdp"]
    assert "did you mean zero_optimization" in found["deepspeed"]
    assert "zero_optimization.stge" in found["nested"] and "stage" in found["nested"]
    assert "did you mean LlamaDecoderLayer" in found["layer"]
    assert "fsdp and deepspeed" in found["both"]
    assert "checkpointing" in found["checkpointing"]
    assert "per_device_train_batch_size" in found["batch"]
    assert all(text.startswith("ConfigError") for text in found.values())


def test_evaluate_first(found: Any) -> None:
    """Stock never wraps a model that was evaluated before it trained."""
    assert found["same"]


def test_second_trainer(found: Any) -> None:
    """Stock leaves out the autocast of a second Trainer on the same model."""
    bf16, fresh, fp32, again = found["losses"]
    assert bf16 == fresh != fp32
    assert found["digests"][0] == found["digests"][1]
    assert found["autocast"] == [False, True], "and a third one takes it off"
    assert again[0] < bf16[0], "it goes on where the second ended"


def test_classification(found: Any) -> None:
    """Stock multiplies loss and norm by ranks and micro-batches, and eval_loss by ranks."""
    ours, right, stock = found["loss"]
    assert ours == pytest.approx(right, rel=1e-6) and stock == pytest.approx(4 * right, rel=1e-4)
    ours, right, stock = found["norm"]
    assert ours == pytest.approx(right, rel=1e-5) and stock == pytest.approx(4 * right, rel=1e-4)
    assert found["eval"][0] == pytest.approx(found["eval"][1], rel=1e-6)
    assert found["apart"] < CLOSE


def test_classification_is_noticed(job: Any) -> None:
    log = job["classification"][0]["log"]
    assert any("does not use num_items_in_batch" in line for line in log)
    assert not any("num_items" in line for line in job["default"][0]["log"])


def test_plain_arguments(found: Any) -> None:
    assert found["sharded"] and found["kept"]


# ---- a run --------------------------------------------------------------------------------------


BEST = ("best_model", "best_model_in_copy_mode", "best_model_in_pieces")


@pytest.mark.parametrize("name", BEST)
def test_best(job: Any, name: str) -> None:
    found = job[name][0]["found"]
    assert "raised" not in found, found["where"]
    losses = {int(step): loss for step, loss in found["losses"].items()}
    best = min(losses, key=lambda step: losses[step])
    assert best != max(losses), "or the last one would do"
    assert found["best"] == f"checkpoint-{best}"
    assert found["again"] == pytest.approx(losses[best], rel=1e-6)
    assert "flatshard-complete.json" in found["files"]
    assert ("model.safetensors" in found["files"]) == (name != "best_model_in_pieces")


def test_best_is_the_same_however_saved(job: Any) -> None:
    assert len({one["found"]["digest"] for name in BEST for one in job[name]}) == 1


def test_early_stopping(found: Any) -> None:
    assert found["steps"] == 4 and found["losses"][1] > found["losses"][0]


def test_resume(found: Any, job: Any) -> None:
    """The newest folder has no marker: the run goes on from the one before, to the same bits."""
    assert found["same"]
    whole, again = found["history"]
    assert again == whole and found["rate"][0] == found["rate"][1]
    assert found["folders"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert any("checkpoint-6 is passed over" in line for line in job["resume"][0]["log"])


def test_resume_in_pieces(found: Any) -> None:
    assert found["same"] and found["rate"][0] == found["rate"][1]
    assert "flatshard" in found["files"] and "model.safetensors" not in found["files"]


def test_damaged(found: Any) -> None:
    assert found["named"].startswith("CheckpointError") and "optimizer.pt" in found["named"]
    assert found["newest"] == 2


def test_resume_alone(found_alone: Any, job: Any) -> None:
    """One rank goes on where two stopped, with the same samples in each step."""
    found = found_alone
    two = job["for_another_world"][0]["found"]["loss"]
    assert found["loss"] == pytest.approx(two, rel=1e-5)
    assert found["apart"] < 1e-5


def test_fsdp_alone(found_alone: Any) -> None:
    assert found_alone["apart"] < CLOSE


def test_threads(found_alone: Any) -> None:
    assert len(found_alone) == 2
    for text in found_alone.values():
        assert text.startswith("RuntimeError") and "flatshard launch" in text


def test_auto_batch(found_alone: Any) -> None:
    assert found_alone == {"steps": 4, "batch": 2}


def test_auto_batch_of_two(job: Any) -> None:
    for one in job["auto_batch_of_two"]:
        assert one["found"]["raised"] == "ConfigError"
        assert "per_device_train_batch_size" in one["found"]["text"]


def test_predict(found: Any) -> None:
    assert found["shape"] == [9, 2] and found["labels"]
    assert found["apart"] < 1e-6
    assert found["right"][0] == pytest.approx(found["right"][1])


def test_replaced(found: Any) -> None:
    assert found["one"] == found["two"] == {"fsdp": {"reshard_after_forward": False}}
    assert found["fsdp"] == [None, None] and found["json"]


def test_forms(found: Any, job: Any) -> None:
    assert found == {
        "words": [3, True],
        "list": [3, False],
        "true": [3, True],
        "json": [2, True],
        "off": [3, True],
        "sharded_ddp": [2, True],
        "command line": {"stage": 2},
    }
    assert any("fsdp_config is ignored" in line for line in job["forms"][0]["log"])


def test_model_init(found: Any) -> None:
    assert found["same"] and found["unsharded"]


def test_translation(found: Any) -> None:
    """Beam search on two ranks gives what one model alone gives."""
    for predicted, alone in found.values():
        assert len(predicted) == 7
        for mine, right in zip(predicted, alone, strict=True):
            assert [t for t in mine if t > 0] == [t for t in right if t > 0]


def test_subclass(found: Any) -> None:
    assert found["apart"] < CLOSE and found["sharded"]


# ---- precision, launchers -----------------------------------------------------------------------


def test_bf16_autocast(found: Any) -> None:
    """Forward and backward are the same operations; only the sum over ranks is in another order."""
    equal_runs(found, close=1e-5)


def test_bf16_aligned(found: Any) -> None:
    one, two = found["fsdp"], found["deepspeed"]
    assert one["dtypes"] == ["torch.bfloat16"] and one["saved"] == ["torch.float32"]
    assert one == two


def test_bf16_resume(found: Any) -> None:
    assert found["same"]


def test_fp16(found: Any) -> None:
    assert found["dtypes"] == ["torch.float16"] and found["scale"] > 1
    assert found["loss"][-1] < found["loss"][0]


def test_fp16_resume(found: Any) -> None:
    assert found["same"]
    assert found["scale"] == [32768.0, 32768.0]
    whole, again = found["rate"]
    assert whole == again
    assert whole[2] == whole[3], "the schedule waited for the skipped step"


def test_fp8(job: Any) -> None:
    for one in job["fp8"]:
        assert one["found"]["raised"] == "NotImplementedError" and "fp8" in one["found"]["text"]


def test_accelerate_launch(found: Any) -> None:
    assert found["reshard"] is False
    assert "model.layers.0" in found["units"]
    assert found["kept"] == "true", "the environment is as it was"


def test_deepspeed_optimizer_and_schedule(found: Any) -> None:
    """WarmupDecayLR with the optimizer's rate at its top; DeepSpeed begins twice at the minimum."""
    assert found["optimizer"] == "AdamW"
    assert found["rate"] == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.0075, 0.005])
