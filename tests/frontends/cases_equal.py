"""Training here, by DDP, and in one process with the whole batch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from models import MODELS, largest_difference, rows
from torch import nn

import flatshard as fs
import flatshard.torch as ft

#: Rows of a micro-batch on each rank.
ROWS = 2


def _freeze(module: nn.Module, freeze: str) -> None:
    for name, parameter in module.named_parameters():
        if freeze and freeze in name:
            parameter.requires_grad_(False)


def _optimizer(package: Any, rule: str, module: nn.Module) -> Any:
    parameters = [p for p in module.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if rule == "SGD":
        return package.SGD(groups, lr=0.01, momentum=0.9)
    # A tiny eps would turn a gradient that is rounding noise into a full-size update.
    return getattr(package, rule)(groups, lr=1e-3, eps=1e-4)


def train(
    world: fs.World, model: str, stage: int, steps: int = 20, rule: str = "AdamW",
    micro_batches: int = 1, max_norm: float = 0.0, freeze: str = "", recompute: str = "",
    norm_of: str = "ours", partition: str = "flat",
) -> dict[str, Any]:  # fmt: skip
    """Three trainings; how far apart their Parameters are at the end."""
    build, batch_of, loss_of = MODELS[model]
    size, rank = world.size, world.rank
    ours, ddp, alone = build(world.rank), build(0), build(0)
    for module in (ours, ddp, alone):
        _freeze(module, freeze)
        if recompute:
            module.gradient_checkpointing_enable(  # type: ignore[operator]
                gradient_checkpointing_kwargs={"use_reentrant": recompute == "reentrant"}
            )
    ids = [id(p) for p in ours.parameters()]
    ours_optimizer = _optimizer(ft, rule, ours)  # before: it binds at the first step
    sharding = fs.Sharding(stage=stage, partition=partition)  # type: ignore[arg-type]
    assert ft.fully_shard(ours, world=world, sharding=sharding) is ours
    assert [id(p) for p in ours.parameters()] == ids
    wrapped = nn.parallel.DistributedDataParallel(ddp)
    optimizers = {"ddp": _optimizer(torch.optim, rule, ddp),
                  "alone": _optimizer(torch.optim, rule, alone)}  # fmt: skip
    norms: dict[str, float] = {}
    whole = ROWS * size
    for step in range(steps):
        batches = [batch_of(1000 * step + m, whole) for m in range(micro_batches)]
        for m, batch in enumerate(batches):
            mine = rows(batch, ROWS * rank, ROWS * (rank + 1))
            last = m + 1 == micro_batches
            with contextlib.nullcontext() if last else ft.no_sync(ours):
                (loss_of(ours, mine) / micro_batches).backward()
            with contextlib.nullcontext() if last else wrapped.no_sync():
                (loss_of(wrapped, mine) / micro_batches).backward()
            (loss_of(alone, batch) / micro_batches).backward()
        if max_norm:
            clip = ft.clip_grad_norm_ if norm_of == "ours" else nn.utils.clip_grad_norm_
            norms["ours"] = float(clip(ours.parameters(), max_norm))
            for name, module in (("ddp", ddp), ("alone", alone)):
                norms[name] = float(nn.utils.clip_grad_norm_(module.parameters(), max_norm))
        assert ours_optimizer.step().applied
        for optimizer in optimizers.values():
            optimizer.step()
        for optimizer in (ours_optimizer, *optimizers.values()):
            optimizer.zero_grad()
    result = {
        "ddp": largest_difference(ours.parameters(), ddp.parameters()),
        "alone": largest_difference(ours.parameters(), alone.parameters()),
        "sha": fs.weights_sha256(ft.shards(ours)),
        "norms": norms,
        "moved": largest_difference(ours.parameters(), build(0).parameters()),
    }
    return result
