"""Modules sharded with gather="copy": the same bits as with "view", and memory only when needed."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import cases_gradients
import cases_module
import cases_optimizers
import cases_parameters
import torch
from case_helpers import message_of
from models import MODELS, rows
from torch import nn

import flatshard as fs
import flatshard.torch as ft
from flatshard.torch import _module

ROWS = 2


def _allocated(module: nn.Module) -> int:
    """Bytes that Parameters have now, ties once."""
    return sum(p.untyped_storage().nbytes() for p in module.parameters())


def bits(
    world: fs.World, model: str, stage: int, gather: str, reshard: bool = True, freeze: str = "",
    recompute: str = "", steps: int = 4, micro_batches: int = 1, precision: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A short training: the weights' hash, and what memory Parameters had on the way."""
    build, batch_of, loss_of = MODELS[model]
    module = build(0)
    for name, parameter in module.named_parameters():
        if freeze and freeze in name:
            parameter.requires_grad_(False)
    if recompute:
        module.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": recompute == "reentrant"}
        )
    ids = [id(p) for p in module.parameters()]
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    kinds: Any = {"stage": stage, "gather": gather}
    sharding = fs.Sharding(**kinds, reshard_after_forward=reshard)
    ft.fully_shard(module, world=world, sharding=sharding, mp_policy=precision)
    assert [id(p) for p in module.parameters()] == ids
    optimizer = ft.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)
    peaks = [0, 0]  # in forward, in backward

    def look(place: int) -> Any:
        def hook(*_: Any) -> None:
            peaks[place] = max(peaks[place], _allocated(module))

        return hook

    for submodule in module.modules():
        submodule.register_forward_hook(look(0))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(look(1))
    between = []
    for step in range(steps):
        for m in range(micro_batches):
            batch = rows(batch_of(10 * step + m, ROWS * world.size), ROWS * world.rank,
                         ROWS * (world.rank + 1))  # fmt: skip
            loss = loss_of(module, batch)
            loss.backward()
            between.append(_allocated(module))
        assert ft.clip_grad_norm_(module, 1.0) > 0
        assert optimizer.step().applied
        optimizer.zero_grad()
    with torch.no_grad():
        last = float(loss_of(module, rows(batch_of(77, ROWS), 0, ROWS)))
    return {
        "sha": fs.weights_sha256(ft.shards(module)),
        "loss": last,
        "total": total,
        "peaks": peaks,
        "between": max(between),
        "after": _allocated(module),
    }


def touched_outside(world: fs.World) -> list[str]:
    """What a script hears that touches Parameters outside of forward."""
    build, batch_of, loss_of = MODELS["mlp"]
    module = build(0)
    ft.fully_shard(module, world=world, sharding=fs.Sharding(gather="copy"))
    weight = module.layers[0].weight  # type: ignore[union-attr]
    said = [
        message_of(lambda: weight.sum()),
        message_of(lambda: weight.data.mul_(2)),
        message_of(lambda: weight.detach().numpy()),
        message_of(lambda: torch.zeros(1, 17) @ weight.T),
        message_of(lambda: nn.functional.linear(torch.zeros(1, 17), weight)),
        message_of(lambda: copy.deepcopy(module)),
    ]
    assert "(33, 17)" in repr(weight)
    assert weight.shape == (33, 17)
    state = module.state_dict()
    assert torch.equal(state["layers.0.weight"], build(0).state_dict()["layers.0.weight"])
    loss_of(module, batch_of(1, 2)).backward()  # all is well after the errors
    return said


def gradients_of_gradients(world: fs.World, gather: str) -> str:
    """The gradient of a gradient's square against plain torch, or what is said instead."""
    build, batch_of, loss_of = MODELS["mlp"]
    module, alone = build(0), build(0)
    kinds: Any = {"gather": gather}
    ft.fully_shard(module, world=world, sharding=fs.Sharding(**kinds))
    found = []
    for one in (module, alone):
        x = batch_of(1, 2)["x"].clone().requires_grad_()
        loss = one(x).square().sum()
        try:
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
        except NotImplementedError as error:
            loss_of(module, batch_of(1, 2)).backward()  # all is well after the error
            return str(error)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*found)
    return ""


def calls(world: fs.World) -> dict[str, float]:
    """Modules called twice, not at all, alone, in two forwards before one backward, and after an
    exception: gradients equal those of an ordinary module."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.unused = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x: torch.Tensor, fail: bool = False) -> dict[str, Any]:
            x = torch.tanh(self.blocks[0](x))
            y = self.blocks[1](x)
            if fail:
                raise ValueError("on purpose")
            x = torch.tanh(self.blocks[0](y)) + x
            return {"out": self.blocks[2](x), "middle": (y, None)}

    def build() -> nn.Module:
        torch.manual_seed(3)
        return Twice()

    module, plain = build(), build()
    ft.fully_shard(module, world=world, sharding=fs.Sharding(gather="copy"))
    optimizer = ft.SGD(module.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, z = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.ones(2, 6)
    for _ in range(3):
        assert "on purpose" in message_of(lambda: module(x, fail=True))
        with torch.no_grad():
            module(z)
        for net, opt in ((module, optimizer), (plain, reference)):
            first, second = net(x), net(z)
            loss = (first["out"] * second["out"].mean()).sum() + second["middle"][0].pow(2).sum()
            loss = loss + net.blocks[1](z).sum()  # type: ignore[operator, index]
            if net is module:
                with torch.no_grad():
                    module(z)  # between a forward and its backward
            loss.backward()
            opt.step()
            opt.zero_grad()
    whole = {m: ft.shards(module).full(m) for m in dict(plain.named_parameters())}
    return {
        name: float((torch.from_numpy(whole[name]) - p).abs().max())
        for name, p in plain.named_parameters()
    }


def left_out(world: fs.World, gather: str) -> None:
    """Outputs that are in no loss: one in one step, the other in the next, then both; and forwards
    without gradients in between. Nothing stays gathered, and what is written meanwhile is seen."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.tanh(self.layers[0](x))
            return self.layers[1](x), self.layers[2](x)

    def build() -> nn.Module:
        torch.manual_seed(3)
        return Two()

    kinds: Any = {"gather": gather}
    module, plain = build(), build()
    ft.fully_shard(module, world=world, sharding=fs.Sharding(**kinds))
    optimizer = ft.AdamW(module.parameters(), lr=0.1, eps=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1, eps=1e-2)
    x, other = torch.ones(2, 6), torch.full((1, 6), -3.0)
    resting = _allocated(module)
    assert gather == "view" or resting == 0
    for turn in range(20):
        for net, opt in ((module, optimizer), (plain, reference)):
            outputs = net(x + turn)
            with torch.no_grad():
                net(other)
            chosen = outputs if turn % 4 == 2 else outputs[turn % 2 : turn % 2 + 1]
            if turn % 4 != 3:
                sum(y.square().sum() for y in chosen).backward()
            elif net is module:
                assert "without a gradient" in message_of(opt.step)
                opt.zero_grad()
                continue
            opt.step()
            opt.zero_grad()
        assert _allocated(module) == resting
        weights = ft.state_dict(module)
        for name, p in plain.named_parameters():
            assert (weights[name] - p).abs().max() < 1e-5, (turn, name)
    module(x)  # gathered, and in no loss
    ft.put(module.layers[2].weight, "weight", torch.zeros(6, 6))  # type: ignore[union-attr, index, arg-type]
    bias = ft.state_dict(module)["layers.2.bias"]
    assert torch.equal(module(x)[1], bias.expand(2, 6))


def whole(world: fs.World, folder: str) -> None:
    """Whole weights in and out: read, written, loaded, saved, unsharded; fp32 masters follow."""
    build, batch_of, loss_of = MODELS["mlp"]
    module, twin = build(0), build(0)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    optimizers = {}
    for one, gather in ((module, "copy"), (twin, "view")):
        kinds: Any = {"gather": gather}
        ft.fully_shard(one, world=world, sharding=fs.Sharding(**kinds), mp_policy="bf16")
        optimizers[gather] = ft.AdamW(one.parameters(), lr=1e-2)

    def step(one: nn.Module, optimizer: Any, seed: int) -> None:
        loss_of(one, rows(batch_of(seed, 2 * world.size), 2 * world.rank, 2 * world.rank + 2)
                ).backward()  # fmt: skip
        assert optimizer.step().applied
        optimizer.zero_grad()

    def same() -> None:
        assert _allocated(module) == 0
        assert fs.weights_sha256(ft.shards(module)) == fs.weights_sha256(ft.shards(twin))

    with ft.full_params(module) as named:
        assert torch.equal(named["layers.2.weight"], before["layers.2.weight"].bfloat16())
    for one in (module, twin):
        with ft.full_params(one, write=True) as named:
            named["layers.0.weight"].mul_(2)
            one.scale.data.fill_(0.5)  # type: ignore[union-attr]
    same()
    for one in (module, twin):
        ft.put(one.layers[2].bias, "weight", torch.full((29,), 0.3))  # type: ignore[union-attr, index, arg-type]
    same()
    assert "in between" in message_of(lambda: _write_and_fail(module))
    same()
    for seed in (1, 2):
        step(module, optimizers["copy"], seed)
        step(twin, optimizers["view"], seed)
    same()
    state = ft.state_dict(module, dtype="master")
    assert state["layers.0.weight"].dtype is torch.float32
    ft.save(folder, module, optimizers["copy"], step=2)
    for one in (module, twin):
        one.load_state_dict({n: (p.detach() * 3).float() for n, p in before.items()})
    same()
    step(module, optimizers["copy"], 3)
    step(twin, optimizers["view"], 3)
    same()
    for one, gather in ((module, "copy"), (twin, "view")):
        ft.load(folder, one, optimizers[gather])
    same()
    again = ft.state_dict(module, dtype="master")
    assert all(torch.equal(again[name], value) for name, value in state.items())
    step(module, optimizers["copy"], 4)
    step(twin, optimizers["view"], 4)
    same()
    kept = ft.state_dict(module)
    ft.unshard(module)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert all(torch.equal(p, kept[n]) for n, p in module.named_parameters())
    copy.deepcopy(module)
    module.float()


RULES = (cases_parameters, cases_gradients, cases_optimizers, cases_module)


def _write_and_fail(module: nn.Module) -> None:
    with ft.full_params(module, write=True) as named:
        named["layers.0.weight"].zero_()
        raise ValueError("in between")


def rule(world: fs.World, which: str) -> None:
    """A case that test_rules runs, with modules sharded with gather="copy" unless it says."""
    inner = _module.read_sharding

    def copying(*arguments: Any) -> fs.Sharding:
        return dataclasses.replace(inner(*arguments), gather="copy")

    _module.read_sharding = copying
    try:
        next(getattr(cases, which) for cases in RULES if hasattr(cases, which))(world)
    finally:
        _module.read_sharding = inner
