"""Gradients of a sharded module: what scripts see of them, and what backward may do. Each function
is a case that every rank runs; it raises when something is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from case_helpers import close, make, mine, one_step, raises
from models import mlp, mlp_batch, mlp_loss, rows
from torch import nn

import flatshard as fs
import flatshard.torch as ft


def handles(world: fs.World) -> None:
    """p.grad between backward and step: torch's own clipping is exact, other uses say where."""
    for stage in (0, 3):
        module, optimizer = make(world, sharding=stage)
        alone = mlp(0)
        mlp_loss(module, mine(world, 0)).backward()
        mlp_loss(alone, mlp_batch(0, 2 * world.size)).backward()
        weight = module.layers[0].weight  # type: ignore[index, union-attr]
        assert weight.grad is not None and weight.grad.shape == weight.shape
        for use in (
            lambda g: g + 1, lambda g: g.clone(), lambda g: g.sum(), lambda g: g[0],
            lambda g: g.mul_(torch.ones(33, 17)), lambda g: g.copy_(g), lambda g: g.abs(),
            lambda g: g.to(torch.float64), lambda g: g.clamp_(-1, 1),
        ):  # fmt: skip
            with raises(RuntimeError, "grad|sharded"), torch.no_grad():
                use(weight.grad)
        with raises(RuntimeError, r"layers\.0\.weight", r"full_grads\(module\)"), torch.no_grad():
            weight.grad.clone()
        with raises(RuntimeError, r"layers\.0\.weight", "outside of backward"), torch.no_grad():
            weight.grad.add_(torch.ones(33, 17))
        expected = alone.layers[0].weight.grad  # type: ignore[index, union-attr]
        assert abs(weight.grad.norm().item() / expected.norm().item() - 1) < 1e-6
        part = nn.utils.clip_grad_norm_(module.layers[0].parameters(), float("inf"))  # type: ignore[index, union-attr]
        expected = nn.utils.clip_grad_norm_(alone.layers[0].parameters(), float("inf"))  # type: ignore[index, union-attr]
        assert abs(part.item() / expected.item() - 1) < 1e-6
        with raises(ValueError, "layers.2.weight|scale", "torch.nn.utils"):
            ft.clip_grad_norm_(module.layers[0].parameters(), 1.0)  # type: ignore[index, union-attr]
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        reference = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        assert abs(norm.item() / reference.item() - 1) < 1e-6
        inner, outer = (  # torch's has none for an empty tensor
            nn.utils.get_total_norm([p.grad for p in m.parameters() if p.numel()], float("inf"))
            for m in (module, alone)
        )
        assert abs(inner.item() / outer.item() - 1) < 1e-5
        with ft.full_grads(module) as grads:
            assert set(grads) == {n for n, p in alone.named_parameters()}
            theirs = [p.grad for p in alone.parameters()]
            close(grads.values(), theirs, within=1e-6)
        result = optimizer.step()
        assert abs(result.grad_norm - 0.1) < 1e-6
        assert weight.grad is None
        torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-2).step()
        close(module.parameters(), alone.parameters(), within=1e-6)


def edited(world: fs.World) -> None:
    """Gradients written through full_grads and put are those the step takes."""
    module = ft.fully_shard(mlp(0), world=world)
    optimizer = ft.SGD(module.parameters(), lr=1.0)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    mlp_loss(module, mine(world, 0)).backward()
    with ft.full_grads(module, write=True) as grads:
        grads["scale"].fill_(0.5)
        kept = grads["layers.0.bias"].clone()
    bias = module.layers[2].bias  # type: ignore[index, union-attr]
    ft.put(bias, "grad", torch.full((29,), 0.25))  # type: ignore[arg-type]
    part = ft.get(bias, "grad")  # type: ignore[arg-type]
    assert bool((part == 0.25).all())
    with raises(RuntimeError, "summed up|looked at"):
        mlp_loss(module, mine(world, 1)).backward()
    norm = float(ft.clip_grad_norm_(module, float("inf")))
    assert optimizer.step().applied
    got = dict(module.named_parameters())
    assert abs(before["scale"] - got["scale"] - 0.5) < 1e-6
    assert (before["layers.2.bias"] - got["layers.2.bias"] - 0.25).abs().max() < 1e-6
    assert (before["layers.0.bias"] - got["layers.0.bias"] - kept).abs().max() < 1e-6
    moved_by = (
        sum((before[n] - got[n]).detach().double().square().sum().item() for n in before) ** 0.5
    )
    assert abs(moved_by / norm - 1) < 1e-4


def zeroed(world: fs.World) -> None:
    """zero_grad drops gradients, by module or optimizer, to None or to zero; half of it is told."""
    for drop in (
        lambda m, o: m.zero_grad(), lambda m, o: o.zero_grad(),
        lambda m, o: o.zero_grad(set_to_none=False), lambda m, o: m.zero_grad(set_to_none=False),
    ):  # fmt: skip
        module, optimizer = make(world)
        reference, other = make(world)
        mlp_loss(module, mine(world, 3)).backward()
        mlp_loss(module, mine(world, 4)).backward()
        drop(module, optimizer)
        one_step(world, module, optimizer)
        one_step(world, reference, other)
        close(module.parameters(), reference.parameters(), within=0.0)
        mlp_loss(module, mine(world, 4)).backward()
        drop(module, optimizer)
        with raises(RuntimeError, "without a gradient"):
            optimizer.step()
    module, optimizer = make(world)
    alone = mlp(0)
    other = torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-2)
    for step in range(3):  # some gradients alone, after the last backward
        mlp_loss(module, mine(world, step)).backward()
        mlp_loss(alone, mlp_batch(step, 2 * world.size)).backward()
        if step == 1:
            for m in (module, alone):
                m.scale.grad = None  # type: ignore[union-attr]
                m.layers[0].weight.grad = None  # type: ignore[index, union-attr]
        norm = ft.clip_grad_norm_(module, 0.1)
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        assert abs(norm.item() / expected.item() - 1) < 1e-5
        assert optimizer.step().applied
        other.step()
        other.zero_grad()
    close(module.parameters(), alone.parameters(), within=1e-6)
    mlp_loss(module, mine(world, 3)).backward()
    module.scale.grad = None  # type: ignore[union-attr]
    with raises(RuntimeError, "scale was dropped", "another backward", r"zero_grad\(\)"):
        mlp_loss(module, mine(world, 3)).backward()
    optimizer.zero_grad()
    mlp_loss(module, mine(world, 3)).backward()
    module.scale.grad = torch.tensor(1.0)  # type: ignore[union-attr]
    with raises(RuntimeError, "scale was set by hand", "put"):
        optimizer.step()


def nothing_published(world: fs.World) -> None:
    """torch.autograd.grad fires no hooks: a step after it is an error on every rank."""
    module, optimizer = make(world)
    torch.autograd.grad(mlp_loss(module, mine(world, 0)), list(module.parameters()))
    with raises(RuntimeError, "without a gradient"):
        optimizer.step()
    assert one_step(world, module, optimizer).step == 1


def unused(world: fs.World) -> None:
    """A part that one rank does not use counts as zero there; a part that no rank uses stands."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
            for i in which:
                x = torch.tanh(self.layers[i](x))
            return x.square().sum()

    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    for stage in (0, 1, 2, 3):
        module, alone = Experts(), Experts()
        ft.fully_shard(module, world=world, sharding=stage)
        optimizer = ft.AdamW(module.parameters(), lr=0.01, weight_decay=0.5, eps=1e-2)
        other = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.5, eps=1e-2)
        for step in range(4):
            # rank 0 goes another way than the others, and twice through one layer
            ways = [[0, 1, 1] if r == 0 else [2, 0] for r in range(world.size)]
            module(x + step, ways[world.rank]).backward()
            sum(alone(x + step, way) for way in ways).div(world.size).backward()
            assert optimizer.step().applied
            other.step()
            other.zero_grad()
        close(module.parameters(), alone.parameters(), within=2e-6)
        assert torch.equal(module.layers[3].weight, Experts().layers[3].weight)
        steps = optimizer.state_dict()["state"]
        assert 6 not in steps and steps[0]["step"] == 4.0


def counted(world: fs.World) -> None:
    """Losses that are sums, divided once by the count of all ranks and micro-batches."""
    module, optimizer = make(world)
    alone = mlp(0)
    batch = mlp_batch(0, 10 * world.size)
    size = [3 + world.rank, 2 * world.rank]  # another number of rows everywhere, none once
    starts = np.cumsum([0, *(3 + r + 2 * r for r in range(world.size))])
    at = int(starts[world.rank])
    for i, n in enumerate(size):
        part = rows(batch, at, at + n)
        at += n
        with ft.accumulate(module, last=i == 1, count=n):
            nn.functional.mse_loss(module(part["x"]), part["y"], reduction="sum").backward()
    whole = rows(batch, 0, int(starts[-1]))
    loss = nn.functional.mse_loss(alone(whole["x"]), whole["y"], reduction="sum")
    (loss / float(starts[-1])).backward()
    norm = nn.utils.get_total_norm([p.grad for p in alone.parameters()])
    result = optimizer.step()
    assert result.count == starts[-1] and abs(result.grad_norm / norm.item() - 1) < 1e-5
    torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-2).step()
    close(module.parameters(), alone.parameters(), within=1e-6)


def failed_backward(world: fs.World) -> None:
    """An exception in backward: its gradients are said to be partial, dropped, and on it goes."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
            ctx.fails = fails
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            if ctx.fails:
                raise KeyError("on purpose")
            return grad, None

    def loss_of(module: Any, fails: bool) -> torch.Tensor:
        x = mine(world, 0)["x"]
        for i, layer in enumerate(module.layers):
            x = layer(x)
            if i == 2:
                x = Fails.apply(x, fails)
        return x.square().sum() * module.scale

    for stage in (1, 3):
        module, optimizer = make(world, sharding=stage)
        reference, other = make(world, sharding=stage)
        loss_of(module, False).backward()  # a micro-batch before
        with raises(KeyError, "on purpose"):
            loss_of(module, True).backward()
        with raises(RuntimeError, "partial gradients", r"zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        module(mine(world, 0)["x"])
        for m, o in ((module, optimizer), (reference, other)):
            loss_of(m, False).backward()
            assert o.step().applied
        close(module.parameters(), reference.parameters(), within=0.0)


def stale_graph(world: fs.World) -> None:
    """Backward through a graph from before a step raises, as in torch."""
    module, optimizer = make(world)
    loss = mlp_loss(module, mine(world, 0))
    one_step(world, module, optimizer)
    with raises(RuntimeError, "modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    assert one_step(world, module, optimizer).applied


def sparse(world: fs.World) -> None:
    """A sparse gradient is refused by name."""
    module = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    ft.fully_shard(module, world=world)
    with raises(RuntimeError, r"0\.weight is sparse", "sparse=False"):
        module(torch.tensor([1, 2])).sum().backward()
    module.zero_grad()


def twice(world: fs.World) -> None:
    """Two forwards before a backward, and two backwards through one graph."""
    for stage in (1, 3):
        module, optimizer = make(world, sharding=stage)
        alone = mlp(0)
        (mlp_loss(module, mine(world, 0)) + mlp_loss(module, mine(world, 1))).backward()
        loss = mlp_loss(module, mine(world, 2))
        loss.backward(retain_graph=True)
        loss.backward()
        for step in (0, 1, 2, 2):
            mlp_loss(alone, mlp_batch(step, 2 * world.size)).backward()
        optimizer.step()
        torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-2).step()
        close(module.parameters(), alone.parameters(), within=1e-6)
