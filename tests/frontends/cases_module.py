"""The sharded module itself: copied, forked, compiled, planned, saved. Each function
is a case that every rank runs; it raises when something is wrong."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle

import numpy as np
import torch
from case_helpers import close, make, mine, one_step, one_step_bf16, raises
from models import MODELS, mlp, mlp_batch, mlp_loss, rows
from torch import nn

import flatshard as fs
import flatshard.torch as ft
from flatshard.torch import _guards


def copies(world: fs.World) -> None:
    """deepcopy gives an ordinary private module; pickle takes the state alone."""
    module, optimizer = make(world)
    mlp_loss(module, mine(world, 0)).backward()
    copied = copy.deepcopy(module)
    assert optimizer.step().applied
    assert not ft.is_sharded(copied)
    with torch.no_grad():
        copied.scale.mul_(2)  # type: ignore[operator, union-attr]
    mlp_loss(copied, mine(world, 0)).backward()
    torch.optim.SGD(copied.parameters(), lr=0.1).step()
    assert copied.scale.grad is not None and type(copied.scale.grad) is torch.Tensor  # type: ignore[union-attr]
    copied.load_state_dict(module.state_dict())
    small = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ft.fully_shard(small, world=world)
    loaded = pickle.loads(pickle.dumps(small))
    assert not ft.is_sharded(loaded)
    assert torch.equal(loaded[0].weight, small[0].weight)
    loaded(torch.ones(3))


def forked(world: fs.World) -> None:
    """A child inherits the mapping, reads it, and its end touches nothing."""
    module, optimizer = make(world)
    value = module.scale.item()  # type: ignore[operator]
    child = os.fork()
    if child == 0:
        os._exit(0 if module.scale.item() == value else 1)  # type: ignore[operator]
    assert os.waitpid(child, 0)[1] == 0
    dataset = torch.utils.data.TensorDataset(torch.arange(8.0))
    assert len(list(torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1))) == 2
    assert one_step(world, module, optimizer).applied


def one_rank_reads(world: fs.World) -> None:
    """Evaluation, saving and generation on one rank alone; the others' step waits for it."""
    module, optimizer = make(world)
    for step in range(3):
        mlp_loss(module, mine(world, step)).backward()
        if world.rank == step % world.size:
            before = [p.detach().clone() for p in module.parameters()]
            module.eval()
            with torch.no_grad():
                first = module(mlp_batch(0, 4)["x"])
                for _ in range(20):
                    assert torch.equal(first, module(mlp_batch(0, 4)["x"]))
            torch.save(module.state_dict(), io.BytesIO())
            module.train()
            close(module.parameters(), before, within=0.0)
        assert optimizer.step().applied


def calls(world: fs.World) -> None:
    """fully_shard twice: the same is fine, another is told, inner ones are named."""
    module, _ = make(world)
    assert ft.fully_shard(module, world=world) is module
    with raises(ValueError, "sharded already", "once", "unshard"):
        ft.fully_shard(module, world=world, sharding=1)
    outer = nn.Sequential(module)
    with raises(ValueError, "scale is sharded already", r"units=\[\.\.\.\]"):
        ft.fully_shard(outer, world=world)
    assert ft.unshard(module) is module and not ft.is_sharded(module)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with torch.no_grad():
        module.scale.mul_(2)  # type: ignore[operator, union-attr]
    ft.fully_shard(outer, world=world)
    optimizer = ft.SGD(outer.parameters(), lr=0.1)
    mlp_loss(outer, mine(world, 0)).backward()
    assert optimizer.step().applied
    with raises(ValueError, "no Parameter"):
        ft.fully_shard(nn.Tanh(), world=world)
    with raises(ValueError, "not sharded"):
        ft.clip_grad_norm_(mlp(0), 1.0)


def unit_choices(world: fs.World) -> None:
    """Units by class name, class, list, callable, and automatically; each covers everything."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    build = MODELS["llama"][0]
    layers = ["model.layers.0", "model.layers.1"]
    expected = ["model.embed_tokens", *layers, "model.norm"]
    for units in (
        "auto", "LlamaDecoderLayer", LlamaDecoderLayer, ["LlamaDecoderLayer"],
        lambda m: isinstance(m, LlamaDecoderLayer),
    ):  # fmt: skip
        module = build(0)
        ft.fully_shard(module, world=world, units=units)
        shards = ft.shards(module)
        assert [u.name for u in shards.units] == expected
        assert shards.parameters[0].tied_name == "lm_head.weight"
        assert all(f"  {name}  " in ft.describe(module) for name in expected)
    module = build(0)
    ft.fully_shard(module, world=world, units=[module.model.layers[1]])
    names = [u.name for u in ft.shards(module).units]
    assert names == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    module = build(0)
    ft.fully_shard(module, world=world, units=[module.model.layers])
    names = [u.name for u in ft.shards(module).units]
    assert names == ["model.embed_tokens", "model.layers", "model.norm"]
    with raises(fs.ConfigError, "LlamaLayer", "LlamaDecoderLayer"):
        ft.fully_shard(build(0), world=world, units="LlamaLayer")
    with raises(fs.ConfigError, "no submodule"):
        ft.fully_shard(build(0), world=world, units=[nn.Linear(2, 2)])


def fsdp_policies(world: fs.World) -> None:
    """FSDP2's policies by duck type, and what is no policy."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    module = mlp(0)
    ft.fully_shard(
        module, world=world, mp_policy=MixedPrecisionPolicy(), offload_policy=CPUOffloadPolicy(),
        reshard_after_forward=False,
    )  # fmt: skip
    policy = ft.shards(module).policy
    assert policy.precision.param == "float32" and not policy.sharding.reshard_after_forward
    assert "offload" in ft.describe(module)
    with raises(fs.ConfigError, "bf17", "bf16"):
        ft.fully_shard(mlp(0), world=world, mp_policy="bf17")
    with raises(fs.ConfigError, "offload_policy"):
        ft.fully_shard(mlp(0), world=world, offload_policy="cpu")
    with raises(TypeError, "mesh=", "world="):
        ft.fully_shard(mlp(0), mesh=object())
    with raises(TypeError, "wrld=", "units"):
        ft.fully_shard(mlp(0), wrld=world)
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with raises(fs.ConfigError, "1 is a BatchNorm1d", "float32", "bfloat16", "running_mean"):
        ft.fully_shard(normed, world=world, mp_policy="bf16")
    for name in ("running_mean", "running_var"):  # as the error says
        setattr(normed[1], name, getattr(normed[1], name).bfloat16())
    ft.fully_shard(normed, world=world, mp_policy="bf16")
    assert normed(torch.randn(3, 4)).dtype is torch.bfloat16
    ignored = mlp(0)
    ft.fully_shard(ignored, world=world, ignored_params=[ignored.scale])  # type: ignore[list-item]
    assert not ft.is_sharded(ignored.scale)  # type: ignore[arg-type]
    assert "scale" not in ft.shards(ignored).names


def plans(world: fs.World) -> None:
    """What plan says is what is charged, on the meta device too."""
    with torch.device("meta"):
        meta = mlp(0)
    for stage in (0, 3):
        module, optimizer = make(world, sharding=stage, mp_policy="bf16")
        one_step_bf16(world, module, optimizer)
        planned = ft.plan(meta, world_size=world.size, sharding=stage, mp_policy="bf16")
        held = {k: sum(v) for k, v in ft.shards(module).planned().items()}
        assert held == planned.rank(world.rank)
    with raises(fs.MemoryBudgetError, "needs"):
        ft.plan(meta, world_size=2, budget=10)


def several(world: fs.World) -> None:
    """Two models that take turns, and an optimizer that is given both."""
    first, one = make(world, seed=0)
    second, two = make(world, seed=1)
    for step in range(3):
        batch = mine(world, step)
        (mlp_loss(first, batch) + mlp_loss(second, batch)).backward()
        one.step()
        two.step()
    for seed, module in ((0, first), (1, second)):
        alone = mlp(seed)
        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-2)
        for step in range(3):
            mlp_loss(alone, mlp_batch(step, 2 * world.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        close(module.parameters(), alone.parameters(), within=1e-6)
    both = ft.AdamW([*mlp(0).parameters(), *first.parameters()], lr=0.1)
    mlp_loss(first, mine(world, 0)).backward()
    with raises(ValueError, "not part of the sharded module|another optimizer"):
        both.step()


def freed(world: fs.World) -> None:
    """A module nobody uses any more takes its world memory along."""
    import gc
    import weakref

    module, optimizer = make(world)
    one_step(world, module, optimizer)
    weak = weakref.ref(ft.shards(module))
    del module, optimizer
    gc.collect()
    assert weak() is None


def compiled(world: fs.World) -> None:
    """torch.compile with aot_eager: one graph, and the same numbers."""
    import torch._dynamo

    module, optimizer = make(world)
    reference, other = make(world)
    torch._dynamo.reset()
    fast = torch.compile(module, backend="aot_eager", fullgraph=True)
    for step in range(4):
        batch = mine(world, step)
        nn.functional.mse_loss(fast(batch["x"]), batch["y"]).backward()
        mlp_loss(reference, batch).backward()
        assert optimizer.step().applied and other.step().applied
    close(module.parameters(), reference.parameters(), within=1e-6)


def recomputed(world: fs.World) -> None:
    """Both kinds of checkpointing give the bits of none."""
    build, batch_of, loss_of = MODELS["llama"]
    found = []
    for kind in ("none", "not", "reentrant"):
        for stage in (1, 3):
            module = build(0)
            module.config.use_cache = False
            ft.fully_shard(module, world=world, sharding=stage)
            if kind != "none":
                ft.activation_checkpointing(module, use_reentrant=kind == "reentrant")
                with raises(ValueError, "already"):
                    ft.activation_checkpointing(module)
            if kind == "reentrant":
                module.enable_input_require_grads()  # type: ignore[operator]
            optimizer = ft.AdamW(module.parameters(), lr=1e-3)
            for step in range(3):
                batch = rows(batch_of(step, 2 * world.size), 2 * world.rank, 2 * world.rank + 2)
                loss_of(module, batch).backward()
                assert optimizer.step().applied
            found.append(fs.weights_sha256(ft.shards(module)))
    assert len(set(found[:4])) == 1  # none and not reentrant
    assert len(set(found)) == 1


def saves(world: fs.World, folder: str) -> None:
    """Checkpoints: resumed exactly, and read by the engine without torch."""
    module, optimizer = make(world, mp_policy="bf16")
    one_step_bf16(world, module, optimizer)
    optimizer.param_groups[0]["lr"] = 0.02
    ft.save(folder, module, optimizer, step=1)
    again, resumed = make(world, seed=3, lr=0.5, mp_policy="bf16")
    assert ft.load(folder, again, resumed).step == 1
    assert resumed.param_groups[0]["lr"] == 0.02
    for m, o in ((module, optimizer), (again, resumed)):
        one_step_bf16(world, m, o)
    assert fs.weights_sha256(ft.shards(module)) == fs.weights_sha256(ft.shards(again))


def told(world: fs.World) -> None:
    """What cannot be is named, and what would do."""
    with raises(TypeError, "expected a torch.nn.Module, got Tensor"):
        ft.fully_shard(torch.ones(3), world=world)
    module = ft.fully_shard(mlp(0), world=world)
    mlp_loss(module, mlp_batch(0, 4)).backward()
    with raises(RuntimeError, "RMSprop holds Parameter", "Lion or Adagrad of flatshard.torch$"):
        torch.optim.RMSprop(module.parameters()).step()
    with raises(RuntimeError, "flatshard.torch.Adam, or flatshard.torch.adopt"):
        torch.optim.Adam(module.parameters()).step()
    with raises(TypeError, "full_grads", r"full_params\(module, write=True\)"):
        ft.adopt(torch.optim.RMSprop(module.parameters()))
    for operand in (torch.ones(2), [1.0, 2.0]):
        with raises(TypeError, r"numpy.asarray\(\) makes one"):
            world.all_reduce(operand)
        assert (world.all_reduce(np.asarray(operand)) == world.size * np.asarray(operand)).all()
    ft.unshard(module)


def broken_off(world: fs.World) -> None:
    """A backward that ends between autograd's gradient and ours is said to have ended, no more."""
    module = mlp(0)
    ends = [False]

    def end(parameter: torch.Tensor) -> None:
        if ends[0]:
            raise KeyboardInterrupt

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(end)  # runs before fully_shard()'s
    ft.fully_shard(module, world=world)
    optimizer = ft.SGD(module.parameters(), lr=0.1)
    mlp_loss(module, mlp_batch(0, 4)).backward()
    assert optimizer.step().applied
    ends[0] = True
    with raises(KeyboardInterrupt):
        mlp_loss(module, mlp_batch(0, 4)).backward()
    ends[0] = False
    with raises(RuntimeError, "backward ended with an exception", r"zero_grad\(\) on every rank"):
        optimizer.step()
    optimizer.zero_grad()
    mlp_loss(module, mlp_batch(0, 4)).backward()
    assert optimizer.step().applied
    ft.unshard(module)


def changed_buffers(world: fs.World, folder: str) -> None:
    """A save names the buffers that training changed, once, on rank 0; others are not worth it."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, handler = logging.getLogger("flatshard"), Keep(logging.WARNING)
    log.addHandler(handler)
    _guards._said.discard("save")
    try:
        for norm, at in ((nn.LayerNorm(4), 1), (nn.BatchNorm1d(4), 2), (nn.BatchNorm1d(4), 3)):
            module = nn.Sequential(nn.Linear(4, 4), norm)
            module.register_buffer("table", torch.arange(4.0))
            ft.fully_shard(module, world=world)
            optimizer = ft.SGD(module.parameters(), lr=0.1)
            module(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            ft.save(folder, module, optimizer, step=at)
            said = [text for text in said if text.startswith("save()")]
            assert len(said) == (at > 1 and world.is_main), said
            ft.unshard(module)
    finally:
        log.removeHandler(handler)
    if world.is_main:
        for word in ("buffers changed", "1.running_mean, 1.running_var, 1.num_batches_tracked."):
            assert word in said[0], said
        assert "table" not in said[0]
