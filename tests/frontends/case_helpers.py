"""What the cases of this folder share: a small sharded module, its steps, and what errors say."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from models import largest_difference, mlp, mlp_batch, mlp_loss, rows
from torch import nn

import flatshard as fs
import flatshard.torch as ft


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """The block raises it, and the text has every word (each a pattern)."""
    try:
        yield
    except kind as error:
        for word in words:
            assert re.search(word, str(error)), f"{word!r} not in {error}"
        return
    raise AssertionError(f"no {kind.__name__}")


def close(ours: Any, theirs: Any, *, within: float) -> None:
    """Tensors differ by at most this, in parts of the largest element of each."""
    found = largest_difference(ours, theirs)
    assert found <= within, f"they differ by {found}"


def make(
    world: fs.World, seed: int = 0, lr: float = 0.01, **options: Any
) -> tuple[nn.Module, ft.AdamW]:
    module = mlp(seed)
    ft.fully_shard(module, world=world, **options)
    return module, ft.AdamW(module.parameters(), lr=lr, eps=1e-2)


def mine(world: fs.World, step: int) -> dict[str, torch.Tensor]:
    batch = mlp_batch(step, 2 * world.size)
    return rows(batch, 2 * world.rank, 2 * world.rank + 2)


def one_step(world: fs.World, module: nn.Module, optimizer: Any, step: int = 0) -> fs.StepResult:
    mlp_loss(module, mine(world, step)).backward()
    result: fs.StepResult = optimizer.step()
    return result


def one_step_bf16(world: fs.World, module: nn.Module, optimizer: Any) -> None:
    """The same with bf16 weights: the loss is taken in fp32."""
    batch = mine(world, 0)
    nn.functional.mse_loss(module(batch["x"]).float(), batch["y"]).backward()
    assert optimizer.step().applied


def message_of(function: Any) -> str:
    """Type and text of what it raises; empty when it raises nothing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
