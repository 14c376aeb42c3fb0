"""Cases of the Accelerator; see job.py. Each is judged in test_hf_accelerate.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import accelerate
import hf_small as small
import torch
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

import flatshard.torch as ft
from flatshard import hf

CASES: dict[str, Any] = {}
ALONE: dict[str, Any] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


def stock_accelerator(**options: Any) -> Any:
    return accelerate.Accelerator(cpu=True, **options)


def loop(
    accelerator: Any,
    *,
    order: str = "model optimizer train held schedule",
    steps: int = 6,
    clip: float | None = 0.5,
    rule: Any = torch.optim.AdamW,
    seed: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """The sequence-pair script of Accelerate's examples, small: accumulation, warm-up, metrics."""
    torch.manual_seed(5)
    model = small.bert(seed)
    rows = small.classified(40)
    things = {
        "model": model,
        "optimizer": rule(model.parameters(), lr=1e-2, **(options or {"eps": 1e-4})),
        "train": DataLoader(rows, batch_size=2, shuffle=True, drop_last=True),
        "held": DataLoader(small.classified(9, seed=4), batch_size=4),
    }
    things["schedule"] = get_linear_schedule_with_warmup(things["optimizer"], 2, 20)
    names = order.split()
    done = dict(zip(names, accelerator.prepare(*[things[n] for n in names]), strict=True))
    model, optimizer, schedule = done["model"], done["optimizer"], done["schedule"]
    losses, norms, rates, applied = [], [], [], 0
    for batch in done["train"]:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if clip is not None:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                applied += 1
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates.append(schedule.get_last_lr()[0])
        losses.append(float(accelerator.gather(loss.detach()).mean()))
        if applied == steps:
            break
    model.eval()
    seen, right = 0, 0
    for batch in done["held"]:
        with torch.no_grad():
            got = model(**batch).logits.argmax(-1)
        got, want = accelerator.gather_for_metrics((got, batch["labels"]))
        seen, right = seen + len(want), right + int((got == want).sum())
    return {
        "losses": losses, "norms": norms, "rates": rates, "seen": seen, "right": right,
        "weights": small.weights(accelerator.unwrap_model(model)), "done": done,
    }  # fmt: skip


def result(found: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    kept = ("losses", "norms", "rates", "seen", "right")
    return {
        **{key: [one[key] for one in (found, *others)] for key in kept},
        "apart": [small.apart(one["weights"], found["weights"]) for one in others],
        "digests": [small.digest(one["weights"]) for one in (found, *others)],
    }


def fresh(kind: Any, **options: Any) -> Any:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return kind(**options)


@case
def script(folder: Path) -> Any:
    """Stock, ours, and ours with the arguments of prepare in another order."""
    one = loop(fresh(stock_accelerator, gradient_accumulation_steps=2))
    two = loop(fresh(hf.Accelerator, gradient_accumulation_steps=2))
    three = loop(
        fresh(hf.Accelerator, gradient_accumulation_steps=2),
        order="schedule held optimizer train model",
    )
    return {**result(one, two, three), "sharded": ft.is_sharded(three["done"]["model"])}


@case
def rules(folder: Path) -> Any:
    """The script's own optimizer stays the object it is, whichever of torch's it is."""
    found = {}
    for rule, options in {
        torch.optim.SGD: {"momentum": 0.9},
        torch.optim.Adam: {"eps": 1e-4},
        torch.optim.Adagrad: {"eps": 1e-4},
        torch.optim.RMSprop: {"eps": 1e-4},
    }.items():
        try:
            one = loop(fresh(stock_accelerator), rule=rule, clip=None, **options)
            two = loop(fresh(hf.Accelerator, flatshard=1), rule=rule, clip=None, **options)
            same = type(two["done"]["optimizer"].optimizer) is rule
            found[rule.__name__] = [small.apart(two["weights"], one["weights"]), same]
        except Exception as error:
            found[rule.__name__] = f"{type(error).__name__}: {error}"
    return found


@case
def without_cpu(folder: Path) -> Any:
    one = fresh(accelerate.Accelerator).num_processes
    two = fresh(hf.Accelerator)
    return {
        "stock": one,
        "ours": two.num_processes,
        "type": str(two.distributed_type.value),
        "world": two.world.size,
    }


@case
def state_is_saved_and_loaded(folder: Path) -> Any:
    return saved_and_loaded(folder / "state")


@case
def state_in_pieces(folder: Path) -> Any:
    config = {"fsdp": {"state_dict_type": "SHARDED_STATE_DICT"}}
    return saved_and_loaded(folder / "state-pieces", mixed_precision="bf16", flatshard=config)


def saved_and_loaded(where: Path, **options: Any) -> Any:

    def run(accelerator: Any, resume: bool) -> Any:
        torch.manual_seed(5)
        model = small.bert(1 if not resume else 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, 20)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        rank = accelerator.process_index
        batches = [small.batch_of(small.classified(4, seed=10 * i + rank)) for i in range(6)]
        if resume:
            accelerator.load_state(str(where))
        for number, batch in enumerate(batches):
            if resume and number < 3:
                continue
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if not resume and number == 2:
                accelerator.save_state(str(where))
        return small.digest(small.weights(model)), schedule.get_last_lr()[0]

    one = run(fresh(hf.Accelerator, **options), False)
    two = run(fresh(hf.Accelerator, **options), True)
    return {"same": one == two, "files": sorted(os.listdir(where))}


@case
def clipped_by_the_file(folder: Path) -> Any:
    """gradient_clipping of a DeepSpeed file, where the script does not clip."""
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2,
              "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}  # fmt: skip
    one = loop(fresh(stock_accelerator, gradient_accumulation_steps=2))
    two = loop(fresh(hf.Accelerator, flatshard=config), clip=None)
    return {
        "apart": small.apart(two["weights"], one["weights"]),
        "stage": ft.shards(two["done"]["model"]).policy.sharding.stage,
        "described": ft.describe(two["done"]["model"]),
    }


@case
def filled(folder: Path) -> Any:
    """What a DeepSpeed file leaves to "auto", and what stands in it and in the script."""
    config = {
        "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, options in {"bf16": {"mixed_precision": "bf16"}, "none": {}}.items():
        accelerator = fresh(
            hf.Accelerator, flatshard=config, gradient_accumulation_steps=2, **options
        )
        model = accelerator.prepare(small.bert())
        found[name] = [
            str(next(model.parameters()).dtype),
            accelerator.gradient_accumulation_steps,
            accelerator.flatshard.max_norm,
        ]
    for name, section in {
        "optimizer": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
        "scheduler": {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3,
                                                                   "warmup_num_steps": 4}}},
    }.items():  # fmt: skip
        accelerator = fresh(hf.Accelerator, flatshard={**config, **section})
        try:
            loop(accelerator, steps=1)
            found[name] = "accepted"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@case
def fp16_overflow(folder: Path) -> Any:
    """Overflows at first: the step is skipped on every rank, and the schedule waits."""
    accelerator = fresh(hf.Accelerator, mixed_precision="fp16")
    model = small.bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rows = []
    for number in range(12):
        batch = small.batch_of(small.classified(4, seed=10 * number + accelerator.process_index))
        loss = model(**batch).loss
        dtype = str(loss.dtype)
        # One rank alone overflows.
        accelerator.backward(loss * (1e6 if number == 3 and accelerator.process_index else 1.0))
        outcome = optimizer.step()
        rows.append([bool(outcome), accelerator.optimizer_step_was_skipped, outcome.loss_scale])
        schedule.step()
        optimizer.zero_grad()
    return {"rows": rows, "rate": schedule.get_last_lr()[0], "dtype": dtype,
            "weights": sorted({str(p.dtype) for p in model.parameters()})}  # fmt: skip


@case
def refused(folder: Path) -> Any:
    found = {}
    accelerator = fresh(hf.Accelerator)
    model = accelerator.prepare(small.bert())
    model(**small.batch_of(small.classified(4))).loss.backward()

    def uneven() -> None:
        with accelerator.join_uneven_inputs([model]):
            pass

    for name, call in {
        "fp8": lambda: hf.Accelerator(mixed_precision="fp8"),
        "plugin": lambda: hf.Accelerator(fsdp_plugin=object()),
        "key": lambda: hf.Accelerator(flatshard={"stge": 2}),
        "stage": lambda: hf.Accelerator(flatshard=4),
        "clip_grad_value_": lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        "join_uneven_inputs": uneven,
        "precision": lambda: hf.Accelerator(
            mixed_precision="fp16",
            flatshard={"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2},
        ),
    }.items():
        try:
            call()
            found[name] = "accepted"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    accelerator.sync_gradients = False
    try:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    except Exception as error:
        found["between"] = f"{type(error).__name__}: {error}"
    model.zero_grad()
    return found


@case
def ranks(folder: Path) -> Any:
    """main_process_first, print, gather, reduce and pad_across_processes."""
    accelerator = fresh(hf.Accelerator)
    rank = accelerator.process_index
    order = folder / "order.txt"
    with accelerator.main_process_first(), open(order, "a") as stream:
        stream.write(f"{rank}\n")
    accelerator.wait_for_everyone()
    accelerator.print("")
    mine = torch.arange(rank + 1)
    padded = accelerator.pad_across_processes(mine, pad_index=-1)
    return {
        "order": order.read_text().split(),
        "gathered": accelerator.gather(torch.tensor([rank])).tolist(),
        "reduced": accelerator.reduce(torch.tensor([1.0 + rank]), "mean").tolist(),
        "padded": accelerator.gather(padded).tolist(),
    }


@case
def no_sync_by_hand(folder: Path) -> Any:
    """no_sync and trigger_sync_in_backward, at a stage that keeps gradients local and one that
    does not, against DDP."""

    def run(accelerator: Any) -> Any:
        model = accelerator.prepare(small.bert())
        optimizer = torch.optim.SGD(accelerator.unwrap_model(model).parameters(), lr=0.1)
        optimizer = accelerator.prepare(optimizer)
        one, two = (small.batch_of(small.classified(4, seed=s + accelerator.process_index))
                    for s in (10, 20))  # fmt: skip
        with accelerator.no_sync(model):
            first = model(**one).loss
            second = model(**two).loss
            accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        optimizer.step()
        return small.weights(accelerator.unwrap_model(model))

    stock = run(fresh(stock_accelerator))
    return [small.apart(run(fresh(hf.Accelerator, flatshard=stage)), stock) for stage in (1, 3)]


@case
def two_models(folder: Path) -> Any:
    """A generator and a critic, each with an optimizer."""

    def run(accelerator: Any) -> Any:
        torch.manual_seed(4)
        models = [torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)]
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in models]
        one, two, first, second = accelerator.prepare(*models, *optimizers)
        g = torch.Generator().manual_seed(accelerator.process_index)
        for _ in range(3):
            noise, real = torch.randn(4, 6, generator=g), torch.randn(4, 6, generator=g)
            critic = two(one(noise).detach()).mean() - two(real).mean()
            accelerator.backward(critic)
            second.step()
            second.zero_grad()
            accelerator.backward(-two(one(noise)).mean())
            first.step()
            first.zero_grad()
            second.zero_grad()
        return [small.weights(accelerator.unwrap_model(m)) for m in (one, two)]

    stock = run(fresh(stock_accelerator))
    ours = run(fresh(hf.Accelerator))
    return [small.apart(mine, theirs) for mine, theirs in zip(ours, stock, strict=True)]


@case
def whole_model_is_saved(folder: Path) -> Any:
    """accelerator.save_model: every tensor, in a file that stock opens."""
    found = {}
    for gather in ("view", "copy"):
        accelerator = fresh(hf.Accelerator, flatshard={"sharding": {"gather": gather}})
        model = accelerator.prepare(small.bert())
        where = folder / f"saved-{gather}"
        accelerator.save_model(model, where)
        accelerator.wait_for_everyone()
        from safetensors.torch import load_file

        saved = load_file(where / "model.safetensors")
        wanted = small.bert().state_dict()
        found[gather] = saved.keys() == wanted.keys() and all(
            torch.equal(saved[n], wanted[n]) for n in saved
        )
    return found


@case
def late_rank(folder: Path) -> Any:
    """What gloo would wait for in silence is reported, with the line the late rank is at."""
    accelerator = fresh(hf.Accelerator)
    if accelerator.process_index == 1:
        time.sleep(2.5)  # the late line
    return accelerator.gather(torch.tensor([1])).tolist()


@case
def evaluated_on_one_rank(folder: Path) -> Any:
    """In view mode nobody else is needed."""
    accelerator = fresh(hf.Accelerator)
    model = accelerator.prepare(small.bert())
    loss = 0.0
    if accelerator.is_main_process:
        with torch.no_grad():
            loss = float(model.eval()(**small.batch_of(small.classified(4))).loss)
    accelerator.wait_for_everyone()
    return {"loss": loss}
