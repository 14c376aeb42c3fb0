"""Whole models in the ways people train them. Each function is a case that every rank runs."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np
import torch
from case_helpers import close, mine, one_step, raises
from models import MODELS, mlp, mlp_batch, mlp_loss, rows
from torch import nn

import flatshard as fs
import flatshard.torch as ft


def batch_of_rank(world: fs.World, model: str, step: int) -> Any:
    whole = MODELS[model][1](step, 2 * world.size)
    return rows(whole, 2 * world.rank, 2 * world.rank + 2)


def recomputed(world: fs.World) -> None:
    """transformers' own switch, both kinds: the bits of none. With T5, whose position biases all
    layers use, torch itself adds up in another order."""
    for model in ("llama", "bert", "t5"):
        build, _, loss_of = MODELS[model]
        found, weights = set(), []
        for kind in (None, False, True):
            module = build(0)
            module.config.use_cache = False
            if kind is not None:
                module.gradient_checkpointing_enable({"use_reentrant": kind})  # type: ignore[operator]
                if kind:
                    module.enable_input_require_grads()  # type: ignore[operator]
            ft.fully_shard(module, world=world)
            optimizer = ft.AdamW(module.parameters(), lr=1e-3, eps=1e-2)
            for step in range(2):
                for half in (0, 1):
                    loss_of(module, batch_of_rank(world, model, 2 * step + half)).backward()
                assert optimizer.step().applied
            found.add(fs.weights_sha256(ft.shards(module)))
            weights.append(list(ft.state_dict(module).values()))
        assert len(found) == 1 or model == "t5", model
        for other in weights[1:]:
            close(other, weights[0], within=1e-6)


def adapters(world: fs.World) -> None:
    """A frozen base with small trainable matrices beside it: the base has no state and stays."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
            self.up = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
            return out

    def build() -> Any:
        module: Any = MODELS["llama"][0](0)
        torch.manual_seed(1)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        for layer in module.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        return module

    loss_of = MODELS["llama"][2]
    for kind in (None, "not"):
        module, alone = build(), build()
        if kind:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
        ft.fully_shard(module, world=world)
        trainable = [p for p in module.parameters() if p.requires_grad]
        optimizer = ft.AdamW(trainable, lr=0.01, eps=1e-2)
        other = torch.optim.AdamW(
            [p for p in alone.parameters() if p.requires_grad], lr=0.01, eps=1e-2
        )
        for step in range(3):
            loss_of(module, batch_of_rank(world, "llama", step)).backward()
            loss_of(alone, MODELS["llama"][1](step, 2 * world.size)).backward()
            norm = ft.clip_grad_norm_(trainable, 0.1)
            expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            assert abs(norm.item() / expected.item() - 1) < 1e-5
            assert optimizer.step().applied
            other.step()
            other.zero_grad()
        close(module.parameters(), alone.parameters(), within=1e-6)
        for name, parameter in module.named_parameters():
            assert torch.equal(before[name], parameter) is not parameter.requires_grad, name
        state = ft.shards(module).planned()
        numel = sum(p.numel() for p in trainable)
        assert sum(state["moments"]) < 2 * 4 * numel + 4096


def odd_uses(world: fs.World) -> None:
    """Outputs outside of the loss, a call without gradients in between, a submodule called alone,
    parts of a model used from outside: what a script does between forward and step."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(17, 5), nn.Linear(17, 5)
            self.norm = nn.BatchNorm1d(5)
            self.last = nn.Parameter(torch.empty(0))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.norm(self.first(x)), self.second(x)

    for stage in (1, 3):
        module, alone = Two(), Two()
        ft.fully_shard(module, world=world, sharding=stage, mp_policy="fp32")
        optimizer = ft.SGD(module.parameters(), lr=0.1)
        other = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(3):
            batch = mine(world, step)
            with torch.no_grad():
                module(batch["x"])
            out, _ = module(batch["x"])
            penalty = nn.functional.linear(batch["x"], module.second.weight).square().mean()
            (out.square().mean() * 0 + module.first(batch["x"]).mean() + penalty).backward()
            assert optimizer.step().applied
            whole = mlp_batch(step, 2 * world.size)
            alone(whole["x"])
            penalty = nn.functional.linear(whole["x"], alone.second.weight).square().mean()
            (alone.first(whole["x"]).mean() + penalty).backward()
            other.step()
            other.zero_grad()
        for name in ("first", "second"):
            close(
                getattr(module, name).parameters(), getattr(alone, name).parameters(), within=1e-6
            )
        assert module.norm.running_mean.dtype is torch.float32


def shapes(world: fs.World) -> None:
    """Strided Parameters and gradients, a convolution in another memory format, one element, an
    empty Parameter last, a unit with fewer elements than ranks, one with nothing to train."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.across = nn.Parameter(torch.randn(5, 4).T)
            self.one = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(5, 1)])
            self.fixed = nn.Linear(4, 4).requires_grad_(False)
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fixed(self.conv(x).mean((2, 3))) @ self.across
            out: torch.Tensor = self.one[0](self.one[1](y)) + self.empty.sum()
            return out

    pictures = torch.randn(2 * world.size, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    pictures = pictures.to(memory_format=torch.channels_last)
    for partition in ("flat", "per_parameter"):
        module, alone = Odd(), Odd()
        sharding = fs.Sharding(partition=partition)  # type: ignore[arg-type]
        ft.fully_shard(module, world=world, sharding=sharding)
        optimizer = ft.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        other = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            module(pictures[2 * world.rank : 2 * world.rank + 2]).square().mean().backward()
            alone(pictures).square().mean().backward()
            assert optimizer.step().applied
            other.step()
            other.zero_grad()
        close(module.parameters(), alone.parameters(), within=1e-6)


def inductor(world: fs.World) -> None:
    """Compiled to machine code: close to what runs uncompiled."""
    import torch._dynamo

    module = ft.fully_shard(mlp(0), world=world)
    optimizer = ft.SGD(module.parameters(), lr=0.1)
    reference = ft.fully_shard(mlp(0), world=world)
    other = ft.SGD(reference.parameters(), lr=0.1)
    torch._dynamo.reset()
    fast = torch.compile(module, fullgraph=True)
    for step in range(3):
        batch = mine(world, step)
        nn.functional.mse_loss(fast(batch["x"]), batch["y"]).backward()
        mlp_loss(reference, batch).backward()
        assert optimizer.step().applied and other.step().applied
    close(module.parameters(), reference.parameters(), within=1e-5)


def bf16_outputs(world: fs.World) -> None:
    """Outputs of transformers keep their class when they are cast; buffers stay as they are."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    module = MODELS["llama"][0](0)
    rotary = {n: b.dtype for n, b in module.named_buffers()}
    ft.fully_shard(module, world=world, mp_policy=policy)
    out = module(**batch_of_rank(world, "llama", 0))
    assert type(out).__name__ == "CausalLMOutputWithPast"
    assert out.logits.dtype is torch.float32
    assert rotary == {n: b.dtype for n, b in module.named_buffers()}


def native(world: fs.World, folder: str) -> None:
    """A Llama trained here and by the native model, from one folder: the same losses, and each
    reads the checkpoint of the other."""
    from transformers import LlamaForCausalLM

    path = pathlib.Path(folder)
    build, _, loss_of = MODELS["llama"]
    if world.is_main:
        build(0).save_pretrained(path / "hf")
    world.barrier()
    module: Any = LlamaForCausalLM.from_pretrained(path / "hf")
    ft.fully_shard(module, world=world)
    model = fs.models.Llama.from_pretrained(path / "hf", world=world)
    optimizer = ft.AdamW(module.parameters(), lr=1e-3, eps=1e-4)
    engine = fs.AdamW(model, lr=1e-3, eps=1e-4, weight_decay=0.01)

    def both(step: int, torch_module: Any, torch_optimizer: Any, other: Any, its: Any) -> None:
        batch = batch_of_rank(world, "llama", step)
        loss = loss_of(torch_module, batch)
        loss.backward()
        assert torch_optimizer.step().applied
        tokens = batch["input_ids"].numpy().astype(np.int32)
        targets = np.full_like(tokens, -100)
        targets[:, :-1] = tokens[:, 1:]
        theirs = other.forward_backward(tokens, targets)
        assert its.step().applied
        mean = float(world.all_reduce(loss.item(), op="sum")) / world.size
        expected = float(world.all_reduce(float(theirs.mean), op="sum")) / world.size
        assert abs(mean / expected - 1) < 1e-5

    for step in range(5):
        both(step, module, optimizer, model, engine)
    ft.save(path / "torch", module, optimizer, step=5)
    fs.checkpoint.save(path / "native", model, engine, step=5).wait()
    world.barrier()
    crossed: Any = build(3)
    ft.fully_shard(crossed, world=world)
    crossed_optimizer = ft.AdamW(crossed.parameters(), lr=1e-3, eps=1e-4)
    ft.load(path / "native", crossed, crossed_optimizer, weights_only=True)
    again = fs.models.Llama.from_pretrained(path / "hf", world=world)
    fs.checkpoint.load(path / "torch", again, weights_only=True)
    for name in again.shards.names:
        assert np.array_equal(again.shards.full(name), ft.shards(module).full(name)), name
        assert np.array_equal(model.shards.full(name), ft.shards(crossed).full(name)), name


def local_steps(world: fs.World) -> None:
    """no_sync at stages 0 and 1: nothing leaves the rank before the last micro-batch; a step that
    comes without one takes it all the same."""
    for stage in (0, 1):
        module = ft.fully_shard(mlp(0), world=world, sharding=stage)
        optimizer = ft.SGD(module.parameters(), lr=0.1)
        alone = mlp(0)
        other = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(3):
            with ft.no_sync(module):
                mlp_loss(module, mine(world, 2 * step)).backward()
                mlp_loss(module, mine(world, 2 * step + 1)).backward()
            assert optimizer.step().applied
            for part in (0, 1):
                mlp_loss(alone, mlp_batch(2 * step + part, 2 * world.size)).backward()
            other.step()
            other.zero_grad()
        close(module.parameters(), alone.parameters(), within=1e-6)


def launched_wrong(world: fs.World) -> None:
    """torch.distributed knows more ranks than we do: trainings would run apart."""
    alone = fs.local_world(1)

    def rank(one: fs.World) -> None:
        ft.fully_shard(mlp(0), world=one)

    alone.run(rank)  # ranks that are threads are no processes to compare with
    from flatshard.torch import _guards

    class Fewer:
        size, rank, _core = 1, 0, world._core

    if world.size > 1:
        with raises(fs.ConfigError, r"2 ranks and flatshard's world 1", "torchrun", "launch"):
            _guards.check_worlds(Fewer())  # type: ignore[arg-type]


def killed(world: fs.World) -> None:
    """A rank that dies in backward: the others are told who, from inside torch's engine."""
    module = ft.fully_shard(mlp(0), world=world)
    optimizer = ft.AdamW(module.parameters(), lr=0.01)
    one_step(world, module, optimizer)
    if world.rank == 1:
        module.layers[2].weight.register_hook(lambda _: os._exit(9))  # type: ignore[index, union-attr]
    with raises(fs.PeerLost, "rank 1"):
        for step in range(50):
            one_step(world, module, optimizer, step)
