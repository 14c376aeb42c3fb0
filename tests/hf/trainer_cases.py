"""Cases of the Trainer; see job.py. Each is judged in test_hf_trainer.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hf_small as small
import torch
import transformers

import flatshard.torch as ft
from flatshard import hf

#: What every run has in common; SGD with momentum, so that rounding noise stays noise.
COMMON: dict[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 1,
    "max_grad_norm": 0.5,
    "optim": "sgd",
    "optim_args": "momentum=0.9",
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "per_device_eval_batch_size": 4,
}


def arguments(folder: Path, kind: Any = None, **changes: Any) -> Any:
    kind = hf.TrainingArguments if kind is None else kind
    return kind(output_dir=str(folder / "out"), **{**COMMON, **changes})


def made(kind: Any, args: Any, rows: Any, **options: Any) -> Any:
    trainer = kind(
        args=args, train_dataset=rows, eval_dataset=small.sequences(6, seed=9), **options
    )
    trainer.callback_handler.pop_callback(transformers.PrinterCallback)
    return trainer


def trained(kind: Any, model: Any, args: Any, rows: Any, **options: Any) -> Any:
    trainer = made(kind, args, rows, model=model, **options)
    trainer.train()
    return trainer


def history(trainer: Any, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]


def stock(folder: Path, model: Any, rows: Any, **changes: Any) -> Any:
    """transformers' own, over DDP."""
    args = arguments(folder, transformers.TrainingArguments, use_cpu=True, **changes)
    return trained(transformers.Trainer, model, args, rows)


def ours(folder: Path, model: Any, rows: Any, **changes: Any) -> Any:
    return trained(hf.Trainer, model, arguments(folder, **changes), rows)


def compared(folder: Path, **changes: Any) -> dict[str, Any]:
    rows = small.sequences(40)
    mine = {k: v for k, v in changes.items() if k in ("fsdp", "fsdp_config", "deepspeed",
            "flatshard", "sharded_ddp")}  # fmt: skip
    theirs = {k: v for k, v in changes.items() if k not in mine}
    one = stock(folder, small.llama(), rows, **theirs)
    two = ours(folder, small.llama(), rows, **changes)
    names = dict(two.model.named_parameters())
    weights = {n: v for n, v in whole(two).items() if n in names}
    return {
        "apart": small.apart(weights, small.weights(one.model)),
        "moved": small.apart(weights, small.weights(small.llama())),
        "loss": [history(one, "loss"), history(two, "loss")],
        "grad_norm": [history(one, "grad_norm"), history(two, "grad_norm")],
        "rate": [history(one, "learning_rate"), history(two, "learning_rate")],
        "eval": [one.evaluate()["eval_loss"], two.evaluate()["eval_loss"]],
        "stage": ft.shards(two.model).policy.sharding.stage,
        "digest": small.digest(weights),
    }


def whole(trainer: Any) -> Any:
    """The weights, in copy mode too."""
    return {n: v.float() for n, v in ft.state_dict(trainer.model).items()}


CASES: dict[str, Any] = {}
ALONE: dict[str, Any] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


# ---- equality with DDP --------------------------------------------------------------------------

ZERO3 = {
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


@case
def default(folder: Path) -> Any:
    return compared(folder)


@case
def fsdp(folder: Path) -> Any:
    config = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    found = compared(folder, fsdp=True, fsdp_config=config)
    return {
        **found,
        "untouched": config == {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }


@case
def deepspeed(folder: Path) -> Any:
    path = folder / f"zero3-{os.getpid()}.json"
    path.write_text(json.dumps(ZERO3))
    return compared(folder, deepspeed=str(path))


COPY = {"stage": 3, "sharding": {"gather": "copy"}}


@case
def copy_mode(folder: Path) -> Any:
    """As on several hosts: a weight has memory only while its unit runs."""
    return compared(folder, flatshard=COPY)


@case
def recompute(folder: Path) -> Any:
    return compared(folder, fsdp=True, fsdp_config={"activation_checkpointing": True})


@case
def sharded_ddp(folder: Path) -> Any:
    return compared(folder, sharded_ddp=True)


@case
def no_clipping(folder: Path) -> Any:
    return compared(folder, max_grad_norm=0.0)


@case
def optimizers(folder: Path) -> Any:
    rows, found = small.sequences(40), {}
    for name, more in {
        "adamw_torch_fused": {"adam_epsilon": 1e-4},
        "adagrad": {"learning_rate": 0.01},
    }.items():
        changes = {"optim": name, "optim_args": None, "weight_decay": 0.1, **more}
        one = stock(folder, small.llama(), rows, **changes)
        two = ours(folder, small.llama(), rows, **changes)
        found[name] = small.apart(small.weights(two.model), small.weights(one.model))
    lion = ours(folder, small.llama(), rows, optim="lion_32bit", optim_args=None,
                learning_rate=1e-3)  # fmt: skip
    found["lion_32bit"] = type(lion.optimizer.optimizer).__name__
    try:
        ours(folder, small.llama(), rows, optim="adafactor", optim_args=None)
    except Exception as error:
        found["adafactor"] = f"{type(error).__name__}: {error}"
    return found


@case
def whole_batch(folder: Path) -> Any:
    """Against one process that sees the step's batch at once: token weights are right."""
    rows = small.sequences(8)
    changes = {"max_steps": 1, "train_sampling_strategy": "sequential", "max_grad_norm": 1e9,
               "warmup_steps": 0, "optim_args": None}  # fmt: skip
    trainer = ours(folder, small.llama(), rows, **changes)
    model = small.llama()
    batch = small.batch_of(rows)
    count = int((batch["labels"][:, 1:] != -100).sum())
    loss = model(**batch, num_items_in_batch=torch.tensor(count)).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {
        "apart": small.apart(small.weights(trainer.model), small.weights(model)),
        "loss": [history(trainer, "loss")[0], float(loss)],
        "norm": [history(trainer, "grad_norm")[0], float(norm)],
    }


@case
def frozen_base(folder: Path) -> Any:
    """As with adapters: most Parameters do not move."""

    def model() -> Any:
        made = small.llama()
        made.requires_grad_(False)
        for layer in made.model.layers:
            layer.mlp.requires_grad_(True)
        return made

    rows = small.sequences(40)
    one = stock(folder, model(), rows)
    two = ours(folder, model(), rows)
    before = small.weights(small.llama())
    after = small.weights(two.model)
    return {
        "apart": small.apart(after, small.weights(one.model)),
        "still": all(torch.equal(after[n], before[n]) for n in after if "mlp" not in n),
    }


# ---- the traps ----------------------------------------------------------------------------------


@case
def without_use_cpu(folder: Path) -> Any:
    found: dict[str, Any] = {"ours": arguments(folder).world_size}
    plain = arguments(folder, transformers.TrainingArguments)
    found["stock"] = plain.world_size
    try:
        hf.Trainer(model=small.llama(), args=plain, train_dataset=small.sequences(4))
    except Exception as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    return found


@case
def plain_arguments(folder: Path) -> Any:
    """transformers' own arguments are taken over, and stay as they were."""
    config = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    args = arguments(
        folder, transformers.TrainingArguments, use_cpu=True, fsdp=True, fsdp_config=config
    )
    trainer = trained(hf.Trainer, small.llama(), args, small.sequences(40))
    return {
        "sharded": ft.is_sharded(trainer.model),
        "kept": bool(args.fsdp),
        "digest": small.digest(small.weights(trainer.model)),
    }


@case
def misspelt(folder: Path) -> Any:
    found = {}
    for name, changes in {
        "fsdp": {"fsdp": True, "fsdp_config": {"reshard_after_forwrd": True}},
        "deepspeed": {"deepspeed": {"zero_optimisation": {"stage": 3}}},
        "nested": {"deepspeed": {"zero_optimization": {"stge": 3}}},
        "layer": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaLayer"]}},
        "both": {"fsdp": True, "deepspeed": ZERO3},
        "checkpointing": {
            "fsdp": True,
            "fsdp_config": {"activation_checkpointing": True},
            "activation_checkpointing": True,
        },
        "batch": {"deepspeed": {**ZERO3, "train_micro_batch_size_per_gpu": 7}},
    }.items():
        try:
            trained(hf.Trainer, small.llama(), arguments(folder, **changes), small.sequences(40))
            found[name] = "accepted"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@case
def evaluate_first(folder: Path) -> Any:
    rows = small.sequences(40)
    trainer = made(hf.Trainer, arguments(folder), rows, model=small.llama())
    trainer.evaluate()
    transformers.set_seed(42)
    trainer.train()
    again = ours(folder, small.llama(), rows)
    return {
        "same": small.digest(small.weights(trainer.model))
        == small.digest(small.weights(again.model)),
        "digest": small.digest(small.weights(trainer.model)),
    }


@case
def second_trainer(folder: Path) -> Any:
    """A model that was trained in fp32 trains on in bf16, as a fresh one would."""
    rows = small.sequences(40)
    used = ours(folder, small.llama(), rows, max_steps=1, warmup_steps=0).model
    fresh = small.llama()
    fresh.load_state_dict({k: v.clone() for k, v in used.state_dict().items()})
    before = small.weights(used)
    one = ours(folder, used, rows, bf16=True)
    digests = [small.digest(small.weights(used))]
    two = ours(folder, fresh, rows, bf16=True)
    digests.append(small.digest(small.weights(fresh)))
    plain = small.llama()
    plain.load_state_dict({n: before.get(n, v) for n, v in plain.state_dict().items()})
    plain.tie_weights()
    three = ours(folder, plain, rows)
    four = ours(folder, used, rows)
    return {
        "losses": [history(t, "loss") for t in (one, two, three, four)],
        "digests": digests,
        "autocast": ["_original_forward" in vars(used), "_original_forward" in vars(fresh)],
    }


@case
def classification(folder: Path) -> Any:
    """The loss is a mean, whatever forward() takes: neither ranks nor micro-batches multiply it."""
    rows = small.classified(8)
    changes = {"max_steps": 1, "train_sampling_strategy": "sequential", "max_grad_norm": 1e9,
               "warmup_steps": 0, "optim_args": None}  # fmt: skip
    trainer = ours(folder, small.bert(), rows, **changes)
    model = small.bert()
    loss = model(**small.batch_of(rows)).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    held = small.classified(8, seed=4)
    trainer.eval_dataset = held
    with torch.no_grad():
        eval_loss = float(model.eval()(**small.batch_of(held)).loss)
    wrong = stock(folder, small.bert(), rows, **changes)
    return {
        "apart": small.apart(small.weights(trainer.model), small.weights(model)),
        "loss": [history(trainer, "loss")[0], float(loss), history(wrong, "loss")[0]],
        "norm": [history(trainer, "grad_norm")[0], float(norm), history(wrong, "grad_norm")[0]],
        "eval": [trainer.evaluate()["eval_loss"], eval_loss],
    }
