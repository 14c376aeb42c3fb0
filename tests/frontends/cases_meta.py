"""Modules that are built without memory and get their values when they are sharded."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import torch
from case_helpers import message_of
from models import MODELS, rows
from torch import nn

import flatshard as fs
import flatshard.torch as ft


def _bytes_read() -> int:
    for line in pathlib.Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar"):
            return int(line.split()[1])
    raise AssertionError("no rchar")


def _all_equal(module: nn.Module, reference: nn.Module) -> None:
    state, right = ft.state_dict(module), reference.state_dict()
    assert state.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(state[name], value), name


def pretrained(world: fs.World, folder: str, model: str, gather: str) -> None:
    """As cls.from_pretrained gives it, buffers included; it trains like that one."""
    build, batch_of, loss_of = MODELS[model]
    like = build(0)
    cls = type(like)
    if world.is_main:
        like.save_pretrained(folder, max_shard_size="40KB")  # type: ignore[operator]
    world.barrier()
    kinds: Any = {"gather": gather}
    sharding = fs.Sharding(**kinds)
    ours = ft.from_pretrained(cls, folder, world=world, sharding=sharding, strict=True)
    theirs = cls.from_pretrained(folder)  # type: ignore[attr-defined]
    assert type(ours) is cls
    assert not ours.training
    _all_equal(ours, theirs)
    non_persistent = dict(theirs.named_buffers()).items() - theirs.state_dict().items()
    for name, buffer in theirs.named_buffers():
        assert torch.equal(dict(ours.named_buffers())[name], buffer), name
    assert non_persistent or model != "llama"  # the rotary table is there, and in no file
    ft.fully_shard(theirs, world=world, sharding=sharding)
    losses = []
    for module in (ours, theirs):
        optimizer = ft.SGD(module.parameters(), lr=0.1)
        for step in range(2):
            batch = rows(batch_of(step, 2 * world.size), 2 * world.rank, 2 * world.rank + 2)
            loss = loss_of(module, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] == losses[1], losses


def owned_ranges(world: fs.World, folder: str) -> list[int]:
    """Bytes that this rank read, and that the file has."""
    from safetensors.torch import save_file

    torch.manual_seed(1)
    big = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(4)))
    path = pathlib.Path(folder) / "model.safetensors"
    if world.is_main:
        save_file(big.state_dict(), path)
    world.barrier()
    with ft.empty_weights():
        module = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(4)))
    ft.fully_shard(module, world=world, sharding=fs.Sharding(partition="flat"))
    before = _bytes_read()
    ft.materialize(module, folder)
    read = _bytes_read() - before
    _all_equal(module, big)
    return [read, path.stat().st_size]


def initialised(world: fs.World) -> None:
    """By a callable, by reset_parameters, by transformers; the same on every rank."""

    def ones(holder: nn.Module) -> None:
        for parameter in holder.parameters(recurse=False):
            parameter.fill_(float(parameter.dim()))

    def build() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))

    module = build()
    ids = [id(p) for p in module.parameters()]
    optimizer = ft.SGD(module.parameters(), lr=0.1)  # binds to what they become
    ft.fully_shard(module, world=world)
    assert [id(p) for p in module.parameters()] == ids
    assert "materialize" in message_of(lambda: module(torch.zeros(1, 3)))
    assert "materialize" in message_of(lambda: ft.save("never", module, step=1))
    assert "materialize" in message_of(optimizer.step)
    assert ft.materialize(module, ones) is module
    assert torch.equal(ft.state_dict(module)["0.weight"], torch.full((5, 3), 2.0))
    module(torch.zeros(1, 3)).sum().backward()
    assert optimizer.step().applied

    for stage in (0, 1, 2):  # sizes are those of the module, not of what lies there yet
        module = build()
        ft.fully_shard(module, world=world, sharding=stage)
        assert "materialize" in message_of(lambda whole=module: whole(torch.zeros(1, 3)))
        ft.materialize(module, ones)
        assert torch.equal(ft.state_dict(module)["0.weight"], torch.full((5, 3), 2.0))

    torch.manual_seed(5 + world.rank)
    drawn = ft.materialize(ft.fully_shard(build(), world=world))
    values = ft.state_dict(drawn)
    assert float(values["0.weight"].abs().max()) <= 3**-0.5
    assert float(values["0.weight"].std()) > 0.1
    assert torch.equal(values["1.weight"], torch.ones(5))
    hashes = world.all_gather(np.array([int(fs.weights_sha256(ft.shards(drawn))[:12], 16)]))
    assert len(set(hashes.tolist())) == 1

    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    with ft.empty_weights():
        llama = LlamaForCausalLM(config)
    llama.tie_weights()
    ft.materialize(ft.fully_shard(llama, world=world))
    weight = ft.state_dict(llama)["model.layers.0.mlp.up_proj.weight"]
    assert 0.01 < float(weight.std()) < 0.03  # initializer_range is 0.02
    assert torch.isfinite(llama(torch.zeros(1, 4, dtype=torch.long)).logits).all()


def refused(world: fs.World, folder: str) -> None:
    """What cannot be, with the cure; nothing is left half done."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(4))
            self.register_buffer("table", torch.arange(4.0), persistent=False)

        def reset_parameters(self) -> None:
            nn.init.ones_(self.w)

    with torch.device("meta"):
        bare = Table()
    ft.fully_shard(bare, world=world)
    assert "empty_weights" in message_of(lambda: ft.materialize(bare))
    half = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert "1.weight is on the meta device" in message_of(lambda: ft.fully_shard(half, world=world))
    with ft.empty_weights():
        good, strange = Table(), nn.Sequential(nn.Linear(2, 2))
    ft.materialize(ft.fully_shard(good, world=world))
    assert torch.equal(good.table, torch.arange(4.0))  # type: ignore[arg-type]
    ft.fully_shard(strange, world=world)
    assert "no such folder" in message_of(lambda: ft.materialize(strange, folder + "/none"))
    if world.is_main:
        from safetensors.torch import save_file

        save_file({"0.weight": torch.ones(2, 2)}, folder + "/model.safetensors")
    world.barrier()
    assert "lacks 0.bias" in message_of(lambda: ft.materialize(strange, folder))
    assert "materialize" in message_of(lambda: strange(torch.zeros(1, 2)))
    ft.materialize(strange, folder, strict=False)  # the bias is initialised
    assert torch.isfinite(strange(torch.ones(1, 2))).all()


def headless(world: fs.World, folder: str) -> None:
    """A model with a new head reads the folder of one without."""
    from safetensors.torch import load_file
    from transformers import BertForSequenceClassification

    bert = MODELS["bert"][0](0)
    if world.is_main:
        bert.bert.save_pretrained(folder)  # type: ignore[union-attr, operator]
    world.barrier()
    model = ft.from_pretrained(BertForSequenceClassification, folder, world=world, num_labels=3)
    state = ft.state_dict(model)
    for name, value in load_file(folder + "/model.safetensors").items():
        assert torch.equal(state["bert." + name], value), name
    assert state["classifier.weight"].shape == (3, bert.config.hidden_size)  # type: ignore[union-attr]
    assert 0.005 < float(state["classifier.weight"].std()) < 0.5
