"""Cases of whole runs of the Trainer: saving, resuming, precision, launchers; see job.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_small as small
import torch
import transformers
from trainer_cases import COPY, ZERO3, arguments, compared, history, made, ours, trained, whole

import flatshard as fs
import flatshard.torch as ft
from flatshard import hf

CASES: dict[str, Any] = {}
ALONE: dict[str, Any] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


def alone(function: Any) -> Any:
    ALONE[function.__name__] = function
    return function


# ---- the run ------------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
          "max_steps": 6, "save_total_limit": 3}  # fmt: skip


@case
def best_model(folder: Path) -> Any:
    return best_of(folder / "best")


@case
def best_model_in_copy_mode(folder: Path) -> Any:
    return best_of(folder / "best-copy", flatshard=COPY)


@case
def best_model_in_pieces(folder: Path) -> Any:
    config = {"state_dict_type": "SHARDED_STATE_DICT"}
    return best_of(folder / "best-pieces", fsdp=True, fsdp_config=config)


def best_of(where: Path, **more: Any) -> Any:
    """The rate is high at the end, so the best checkpoint is not the last."""
    changes = {**more, **SAVING, "load_best_model_at_end": True, "learning_rate": 4.0,
               "lr_scheduler_type": "constant", "max_grad_norm": 1.0}  # fmt: skip
    trainer = ours(where, small.llama(), small.sequences(40), **changes)
    losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history
              if "eval_loss" in row}  # fmt: skip
    best = trainer.state.best_model_checkpoint
    return {
        "losses": losses,
        "best": os.path.basename(best),
        "again": trainer.evaluate()["eval_loss"],
        "digest": small.digest(whole(trainer)),
        "files": sorted(os.listdir(best)),
    }


@case
def early_stopping(folder: Path) -> Any:
    args = arguments(folder / "early", **{**SAVING, "max_steps": 20, "learning_rate": 4.0,
                     "lr_scheduler_type": "constant", "max_grad_norm": 1.0},
                     load_best_model_at_end=True)  # fmt: skip
    trainer = trained(
        hf.Trainer, small.llama(), args, small.sequences(40),
        callbacks=[transformers.EarlyStoppingCallback(1)],
    )  # fmt: skip
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return {"steps": trainer.state.global_step, "losses": losses}


def resumable(where: Path, **changes: Any) -> Any:
    return arguments(where, **{**SAVING, "optim": "adamw_torch", "optim_args": None, **changes})


@case
def resume(folder: Path) -> Any:
    where = folder / "resume"
    rows = small.sequences(40)
    whole = trained(hf.Trainer, small.llama(), resumable(where), rows)
    final = small.digest(small.weights(whole.model))
    newest = where / "out" / "checkpoint-6"
    whole.accelerator.wait_for_everyone()
    if whole.args.should_save:  # as a kill would have left it
        (newest / "flatshard-complete.json").unlink()
    whole.accelerator.wait_for_everyone()
    again = made(hf.Trainer, resumable(where), rows, model=small.llama(seed=7))
    again.train(resume_from_checkpoint=True)
    return {
        "same": small.digest(small.weights(again.model)) == final,
        "history": [history(whole, "loss"), history(again, "loss")],
        "rate": [history(whole, "learning_rate"), history(again, "learning_rate")],
        "folders": sorted(os.listdir(where / "out")),
    }


@case
def resume_in_pieces(folder: Path) -> Any:
    """SHARDED_STATE_DICT with bf16 weights: masters and moments come back."""
    where = folder / "pieces"
    rows = small.sequences(40)
    changes = {"bf16": True, "fsdp": True, "learning_rate": 1e-3,
               "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}  # fmt: skip
    one = trained(hf.Trainer, small.llama(), resumable(where, **changes), rows)
    again = made(hf.Trainer, resumable(where, **changes), rows, model=small.llama(seed=7))
    again.train(resume_from_checkpoint=str(where / "out" / "checkpoint-4"))
    masters = [ft.state_dict(t.model, dtype="master") for t in (one, again)]
    return {
        "same": small.digest(masters[0]) == small.digest(masters[1]),
        "rate": [history(one, "learning_rate"), history(again, "learning_rate")],
        "files": sorted(os.listdir(where / "out" / "checkpoint-4")),
    }


@case
def damaged(folder: Path) -> Any:
    where = folder / "damaged"
    rows = small.sequences(40)
    trainer = trained(hf.Trainer, small.llama(), resumable(where, max_steps=4), rows)
    trainer.accelerator.wait_for_everyone()
    path = where / "out" / "checkpoint-4" / "optimizer.pt"
    if trainer.args.should_save:
        path.write_bytes(path.read_bytes()[:-9])
    trainer.accelerator.wait_for_everyone()
    found = {}
    for name, value in {"named": str(path.parent), "newest": True}.items():
        args = resumable(where, max_steps=4, save_strategy="no")
        again = made(hf.Trainer, args, rows, model=small.llama(seed=7))
        try:
            again.train(resume_from_checkpoint=value)
            found[name] = again._initial_global_step
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@case
def for_another_world(folder: Path) -> Any:
    """Saved here by two ranks, resumed by one in `resume_alone`: the steps have equal batches."""
    where = folder / "other"
    changes = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4,
               "train_sampling_strategy": "sequential", "adam_epsilon": 1e-4}  # fmt: skip
    trainer = trained(hf.Trainer, small.llama(), resumable(where, **changes), small.sequences(48))
    torch.save(small.weights(trainer.model), folder / f"other-{trainer.args.process_index}.pt")
    return {"loss": history(trainer, "loss")}


@alone
def resume_alone(folder: Path) -> Any:
    where = folder / "other"
    changes = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8,
               "train_sampling_strategy": "sequential", "adam_epsilon": 1e-4,
               "save_strategy": "no"}  # fmt: skip
    args = resumable(where, **changes)
    trainer = made(hf.Trainer, args, small.sequences(48), model=small.llama(seed=7))
    trainer.train(resume_from_checkpoint=str(where / "out" / "checkpoint-4"))
    return {
        "apart": small.apart(small.weights(trainer.model), torch.load(folder / "other-0.pt")),
        "loss": history(trainer, "loss"),
    }


@alone
def fsdp_alone(folder: Path) -> Any:
    """Stock refuses FSDP in one process; here it is a world of one."""
    rows = small.sequences(40)
    trainer = ours(folder / "one", small.llama(), rows, fsdp=True, fsdp_config={})
    plain = arguments(folder / "one", transformers.TrainingArguments, use_cpu=True)
    one = trained(transformers.Trainer, small.llama(), plain, rows)
    return {"apart": small.apart(small.weights(trainer.model), small.weights(one.model))}


@alone
def threads(folder: Path) -> Any:
    """Ranks that are threads: Accelerate's state is the process's."""
    found = {}
    for name, call in {
        "Accelerator": lambda _: hf.Accelerator(),
        "TrainingArguments": lambda _: arguments(folder),
    }.items():
        try:
            fs.local_world(2).run(call)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@alone
def auto_batch(folder: Path) -> Any:
    """Memory runs out at the first size; the second trains."""

    class Greedy(hf.Trainer):
        def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: planted")
            return super().training_step(model, inputs, *more)

    args = arguments(folder / "auto", auto_find_batch_size=True, per_device_train_batch_size=4,
                     gradient_accumulation_steps=1)  # fmt: skip
    trainer = trained(Greedy, small.llama(), args, small.sequences(40))
    return {"steps": trainer.state.global_step, "batch": trainer._train_batch_size}


@case
def auto_batch_of_two(folder: Path) -> Any:
    return ours(folder, small.llama(), small.sequences(8), auto_find_batch_size=True)


@case
def predict(folder: Path) -> Any:
    """Nine rows on two ranks: none is missing and none comes twice."""
    rows = small.classified(9)
    args = arguments(folder, max_steps=1)
    trainer = trained(hf.Trainer, small.bert(), args, small.classified(8),
                      compute_metrics=lambda p: {"right": float((p.predictions.argmax(-1) ==
                                                                p.label_ids).mean())})  # fmt: skip
    found = trainer.predict(rows)
    with torch.no_grad():
        logits = trainer.model.eval()(**small.batch_of(rows)).logits
    return {
        "shape": list(found.predictions.shape),
        "apart": float((torch.tensor(found.predictions) - logits).abs().max()),
        "labels": found.label_ids.tolist() == [r["labels"] for r in rows],
        "right": [found.metrics["test_right"],
                  float((logits.argmax(-1) == small.batch_of(rows)["labels"]).float().mean())],
    }  # fmt: skip


@case
def replaced(folder: Path) -> Any:
    """A copy of the arguments keeps what was asked."""
    args = arguments(folder, fsdp=True, fsdp_config={"reshard_after_forward": False})
    copy = dataclasses.replace(args, learning_rate=0.5)
    return {"one": args.flatshard, "two": copy.flatshard, "fsdp": [args.fsdp, copy.fsdp],
            "json": "reshard_after_forward" in args.to_json_string()}  # fmt: skip


@case
def forms(folder: Path) -> Any:
    """The ways in which a command line and older scripts say it."""
    found: dict[str, Any] = {}
    for name, changes in {
        "words": {"fsdp": "full_shard auto_wrap"},
        "list": {"fsdp": ["shard_grad_op"]},
        "true": {"fsdp": "true"},
        "json": {"flatshard": '{"stage": 2}'},
        "off": {"fsdp_config": {"reshard_after_forward": False}},
        "sharded_ddp": {"sharded_ddp": True},
    }.items():
        args = arguments(folder, **changes)
        trainer = made(hf.Trainer, args, small.sequences(4), model=small.llama())
        sharding = trainer.accelerator.flatshard.sharding
        found[name] = [sharding.stage, sharding.reshard_after_forward]
    parser = transformers.HfArgumentParser(hf.Seq2SeqTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(
        ["--output_dir", str(folder), "--sharded_ddp", "--report_to", "none"]
    )
    found["command line"] = args.flatshard
    return found


@case
def model_init(folder: Path) -> Any:
    """A new model at each train(); the memory of the one before goes back."""
    args = arguments(folder, max_steps=2)
    trainer = made(hf.Trainer, args, small.sequences(40), model_init=lambda: small.llama())
    digests = []
    for _ in range(2):
        before = trainer.model
        trainer.train()
        digests.append(small.digest(small.weights(trainer.model)))
    return {"same": len(set(digests)) == 1, "unsharded": not ft.is_sharded(before)}


@case
def subclass(folder: Path) -> Any:
    """A Trainer of somebody else's that computes its own loss, with the mixin before it."""

    class Theirs(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False,
                         num_items_in_batch: Any = None) -> Any:  # fmt: skip
            outputs = model(input_ids=inputs["input_ids"])
            logits = outputs.logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten())
            return (loss, outputs) if return_outputs else loss

        loss_is_scaled_for_ga = False

    class Mine(hf.TrainerMixin, Theirs):
        pass

    rows = small.sequences(40)
    plain = arguments(folder, transformers.TrainingArguments, use_cpu=True)
    one = trained(Theirs, small.llama(), plain, rows)
    two = trained(Mine, small.llama(), arguments(folder), rows)
    return {
        "apart": small.apart(small.weights(two.model), small.weights(one.model)),
        "sharded": ft.is_sharded(two.model),
    }


@case
def translation(folder: Path) -> Any:
    """Beams of ranks end at different lengths; in copy mode every forward is everybody's."""
    found: dict[str, Any] = {}
    rows = small.sequences(7, seed=6)
    for row in rows:
        row["labels"] = row["input_ids"][:4]
    for name, flatshard in {"view": None, "copy": COPY}.items():
        args = arguments(
            folder / name, hf.Seq2SeqTrainingArguments, predict_with_generate=True, max_steps=2,
            generation_num_beams=3, generation_max_length=9, flatshard=flatshard,
        )  # fmt: skip
        trainer = trained(hf.Seq2SeqTrainer, small.t5(), args, rows)
        predicted = trainer.predict(rows).predictions
        alone = small.t5()
        alone.load_state_dict(whole(trainer))
        with torch.no_grad():
            ids = small.batch_of(rows)["input_ids"]
            wanted = alone.eval().generate(ids, num_beams=3, max_length=9)
        found[name] = [predicted.tolist(), wanted.tolist()]
    return found


# ---- precision ----------------------------------------------------------------------------------


@case
def bf16_autocast(folder: Path) -> Any:
    """bf16 without a configuration: autocast around fp32 weights, as DDP has it."""
    return {**compared(folder, bf16=True), "dtype": "float32"}


@case
def bf16_aligned(folder: Path) -> Any:
    """FSDP's file and DeepSpeed's: bf16 weights, fp32 masters, the same bits."""
    rows = small.sequences(40)
    found: dict[str, Any] = {}
    for name, changes in {
        "fsdp": {"fsdp": True, "fsdp_config": {}},
        "deepspeed": {"deepspeed": {**ZERO3, "bf16": {"enabled": "auto"}}},
    }.items():
        trainer = ours(folder / name, small.llama(), rows, bf16=True, **changes)
        trainer.save_model()
        from safetensors.torch import load_file

        trainer.accelerator.wait_for_everyone()
        saved = load_file(folder / name / "out" / "model.safetensors")
        found[name] = {
            "digest": small.digest(small.weights(trainer.model)),
            "dtypes": sorted({str(p.dtype) for p in trainer.model.parameters()}),
            "saved": sorted({str(v.dtype) for v in saved.values()}),
            "loss": history(trainer, "loss"),
        }
    return found


@case
def bf16_resume(folder: Path) -> Any:
    """Masters come back: the run goes on with the same bits."""
    where = folder / "bf16"
    rows = small.sequences(40)
    changes = {"bf16": True, "fsdp": True, "fsdp_config": {}, "learning_rate": 1e-3}
    whole = trained(hf.Trainer, small.llama(), resumable(where, **changes), rows)
    again = made(hf.Trainer, resumable(where, **changes), rows, model=small.llama(seed=7))
    again.train(resume_from_checkpoint=str(where / "out" / "checkpoint-4"))
    masters = [ft.state_dict(t.model, dtype="master") for t in (whole, again)]
    return {"same": small.digest(masters[0]) == small.digest(masters[1])}


@case
def fp16(folder: Path) -> Any:
    """The scale begins too high: steps are skipped, and the schedule waits for them."""
    trainer = ours(folder, small.llama(), small.sequences(80), fp16=True, max_steps=8,
                   learning_rate=0.01)  # fmt: skip
    return {
        "loss": history(trainer, "loss"),
        "rate": history(trainer, "learning_rate"),
        "scale": ft._adopt.binding_of(trainer.optimizer.optimizer, "test").engine.loss_scale,
        "dtypes": sorted({str(p.dtype) for p in trainer.model.parameters()}),
    }


@case
def fp16_resume(folder: Path) -> Any:
    """Masters and the loss scale come back."""
    where = folder / "fp16"
    rows = small.sequences(40)
    changes = {"fp16": True, "learning_rate": 1e-3}

    class Planted(hf.Trainer):
        """The third step overflows, so the scale is not the first one."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * 1e9 if self.model.training and self.state.global_step == 2 else loss

    one = trained(Planted, small.llama(), resumable(where, **changes), rows)
    again = made(Planted, resumable(where, **changes), rows, model=small.llama(seed=7))
    again.train(resume_from_checkpoint=str(where / "out" / "checkpoint-4"))
    masters = [ft.state_dict(t.model, dtype="master") for t in (one, again)]
    return {
        "same": small.digest(masters[0]) == small.digest(masters[1]),
        "scale": [t.optimizer.optimizer._flatshard.engine.loss_scale for t in (one, again)],
        "rate": [history(one, "learning_rate"), history(again, "learning_rate")],
    }


@case
def fp8(folder: Path) -> Any:
    with environment(ACCELERATE_MIXED_PRECISION="fp8"):
        return arguments(folder)


# ---- what launchers say -------------------------------------------------------------------------


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@case
def accelerate_launch(folder: Path) -> Any:
    """As under accelerate launch with FSDP: the Trainer's environment."""
    with environment(
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_RESHARD_AFTER_FORWARD="false",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer",
    ):
        trainer = ours(folder, small.llama(), small.sequences(40))
        return {
            "reshard": ft.shards(trainer.model).policy.sharding.reshard_after_forward,
            "units": [unit.name for unit in ft.shards(trainer.model).units],
            "kept": os.environ["ACCELERATE_USE_FSDP"],
            "digest": small.digest(small.weights(trainer.model)),
        }


@case
def accelerate_launch_of_fsdp1(folder: Path) -> Any:
    """Version 1 of FSDP on CPUs: stock ends in the plugin with "no available devices"."""
    with environment(
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="1",
        FSDP_SHARDING_STRATEGY="FULL_SHARD",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer",
        FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
        FSDP_SYNC_MODULE_STATES="true",
        FSDP_USE_ORIG_PARAMS="true",
    ):
        trainer = ours(folder, small.llama(), small.sequences(40))
    stage = ft.shards(trainer.model).policy.sharding.stage
    return {"stage": stage, "digest": small.digest(small.weights(trainer.model))}


@case
def deepspeed_optimizer_and_schedule(folder: Path) -> Any:
    config = {
        **ZERO3,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                  "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 2,
            "total_num_steps": "auto", "warmup_type": "linear"}},
    }  # fmt: skip
    trainer = ours(folder, small.llama(), small.sequences(80), deepspeed=config, max_steps=6,
                   learning_rate=0.01, warmup_steps=2)  # fmt: skip
    return {
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "rate": history(trainer, "learning_rate"),
    }
