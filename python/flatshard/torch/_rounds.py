"""Micro-batches: several backwards before one step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import _registry
from ._guards import say_once

__all__ = ["accumulate", "no_sync"]


@contextlib.contextmanager
def no_sync(module: torch.nn.Module) -> Iterator[None]:
    """Backwards inside need not talk to other ranks, as in DDP.

    Parameters
    ----------
    module : Module
        A sharded one.

    Notes
    -----
    At stages 0 and 1 in fp32 gradients stay in the rank until a backward outside of the block. Else
    a micro-batch is reduced as it comes, which on one host is one pass over memory, needs no room
    for whole gradients, and adds micro-batches up in fp32. The sum is the same.
    """
    sharded = _registry.sharded_of(module, "no_sync")
    policy = sharded.shards.policy
    local = policy.slot_per_unit and policy.precision.reduce == "float32"
    if not local:
        say_once(
            "no_sync",
            "micro-batches are reduced as they come (stages 2 and 3, and 16-bit gradients): inside "
            "no_sync() and accumulate() too; the sum is the same and no rank keeps whole gradients",
        )
    before = sharded.grads.keep_local
    sharded.grads.keep_local = local
    try:
        yield
    finally:
        sharded.grads.keep_local = before


@contextlib.contextmanager
def accumulate(module: torch.nn.Module, *, last: bool, count: int | None = None) -> Iterator[None]:
    """One micro-batch of several.

    Parameters
    ----------
    module : Module
        A sharded one.
    last : bool
        Whether a step follows; the others are as in `no_sync`.
    count : int, optional
        Tokens or samples of this rank's micro-batch, where its loss is a sum over them: the step
        divides by the sum of counts of all ranks and micro-batches. Give it always or never.

    Raises
    ------
    ValueError
        A negative count.

    Examples
    --------
    >>> for i, batch in enumerate(batches):                              # doctest: +SKIP
    ...     with accumulate(model, last=i + 1 == len(batches), count=batch.tokens):
    ...         loss_sum(model(batch.x), batch.y).backward()
    """
    if count is not None and count < 0:
        raise ValueError(f"count={count!r}: expected 0 or more")
    sharded = _registry.sharded_of(module, "accumulate")
    sharded.grads.count = count
    try:
        with contextlib.nullcontext() if last else no_sync(module):
            yield
    finally:
        sharded.grads.count = None
