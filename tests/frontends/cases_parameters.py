"""Parameters of a sharded module: what they are, who may write them, what is loaded. Each function
is a case that every rank runs; it raises when something is wrong."""

from __future__ import annotations

import io
import os

import numpy as np
import torch
from case_helpers import make, mine, one_step, raises
from models import mlp, mlp_loss
from torch import nn

import flatshard as fs
import flatshard.torch as ft

# ---- Parameters ---------------------------------------------------------------------------------


def identity(world: fs.World) -> None:
    """Same module, same Parameter objects, same ties, values of rank 0."""
    module = mlp(world.rank)
    module.extra = nn.Linear(5, 5)  # type: ignore[assignment]
    module.again = module.extra  # type: ignore[assignment]
    before = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    assert ft.fully_shard(module, world=world) is module
    after = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    assert before == after
    assert before["extra.weight"] == before["again.weight"]
    expected = dict(mlp(0).named_parameters())
    for name, parameter in module.named_parameters():
        if name in expected:
            assert torch.equal(parameter, expected[name]), name
    assert ft.is_sharded(module) and ft.is_sharded(module.again.weight)  # type: ignore[union-attr]
    assert not ft.is_sharded(nn.Linear(2, 2))


def storages(world: fs.World) -> None:
    """A storage of exactly its size for each Parameter: savers find ties by storage."""
    module, _ = make(world)
    seen = set()
    for name, parameter in module.named_parameters():
        storage = parameter.untyped_storage()
        assert storage.nbytes() == parameter.numel() * parameter.element_size(), name
        assert parameter.storage_offset() == 0
        if parameter.numel():
            assert storage.data_ptr() not in seen
            seen.add(storage.data_ptr())
    if world.is_main:
        buffer = io.BytesIO()
        torch.save(module.state_dict(), buffer)
        assert buffer.tell() < 60_000
        from safetensors.torch import load, save

        saved = load(save(dict(module.state_dict())))
        assert set(saved) == set(module.state_dict())


def shared(world: fs.World) -> None:
    """All ranks read one memory: the last of them to step is seen by the first."""
    module, optimizer = make(world)
    one_step(world, module, optimizer)
    digest = np.frombuffer(bytes.fromhex(fs.weights_sha256(ft.shards(module))), np.uint8).astype(
        np.int64
    )
    own = np.concatenate([p.detach().reshape(-1).numpy() for p in module.parameters()])
    sums = world.all_gather(np.array([own.astype(np.float64).sum(), float(digest.sum())]))
    assert (np.asarray(sums).reshape(-1, 2) == np.asarray(sums).reshape(-1, 2)[0]).all()


def aliases(world: fs.World) -> None:
    """Two Parameters over one memory are refused; one object twice is a tie."""
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(4))
    module.b = nn.Parameter(module.a.data)
    with raises(ValueError, "a and b share memory", "one Parameter"):
        ft.fully_shard(module, world=world)


# ---- writes -------------------------------------------------------------------------------------


def writes(world: fs.World) -> None:
    """Writing shared Parameters is noticed before forward, step, clip, save; each says the cure."""
    for edit in (
        lambda p: p.mul_(0.5),
        lambda p: nn.init.zeros_(p),
        lambda p: p.detach().add_(1.0),
        lambda p: p.copy_(torch.zeros_like(p)),
    ):
        module, optimizer = make(world)
        batch = mine(world, 0)
        mlp_loss(module, batch).backward()
        with torch.no_grad():
            edit(module.layers[0].weight)  # type: ignore[index, union-attr]
        cure = (r"layers\.0\.weight", "in place", r"full_params\(module, write=True\)")
        with raises(RuntimeError, "before forward", *cure):
            module(batch["x"])
        with raises(RuntimeError, r"before step\(\)", *cure):
            optimizer.step()
        with raises(RuntimeError, r"before clip_grad_norm_\(\)", *cure):
            ft.clip_grad_norm_(module, 1.0)
        with raises(RuntimeError, r"before save\(\)", *cure):
            ft.save("nowhere", module, step=1)
        world.barrier()


def unseen_writes(world: fs.World) -> None:
    """Writes that no version counter sees, found by checksums where that is asked for."""
    os.environ["FLATSHARD_WATCH_WRITES"] = "1"
    try:
        module, optimizer = make(world)
    finally:
        del os.environ["FLATSHARD_WATCH_WRITES"]
    assert one_step(world, module, optimizer).applied
    batch = mine(world, 1)
    loss = mlp_loss(module, batch)
    world.barrier()
    if world.is_main:
        module.layers[0].weight.data.mul_(0.5)  # type: ignore[index, union-attr]
    world.barrier()
    with raises(RuntimeError, r"layers\.0\.weight", r"parameter\.data", "full_params"):
        module(batch["x"])
    del loss


def threads(world: fs.World) -> None:
    """Ranks that are threads: the bits of ranks that are processes."""

    def train(ranks: fs.World) -> str:
        module, optimizer = make(ranks, seed=ranks.rank)
        for step in range(3):
            mlp_loss(module, mine(ranks, step)).backward()
            ft.clip_grad_norm_(module, 0.1)
            assert optimizer.step().applied
        return fs.weights_sha256(ft.shards(module))

    found = {train(world), *fs.local_world(world.size).run(train)}
    assert len(found) == 1


def crowded(world: fs.World) -> None:
    """More ranks than cores, and a world of one, are said once."""
    import logging

    from flatshard.torch import _guards

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    class Many:
        size, rank, _core = 4096, 0, world._core

    class One:
        size, rank, _core = 1, 0, world._core

    texts: list[str] = []
    handler = Said()
    logging.getLogger("flatshard").addHandler(handler)
    initialized = torch.distributed.is_initialized
    torch.distributed.is_initialized = lambda: False
    _guards._said.clear()
    try:
        for stand_in in (Many, Many, One, One):
            _guards.check_worlds(stand_in())  # type: ignore[arg-type]
    finally:
        torch.distributed.is_initialized = initialized
        logging.getLogger("flatshard").removeHandler(handler)
    if world.is_main:
        assert len(texts) == 2
        assert "4096 ranks on" in texts[0] and "cores" in texts[0]
        assert "one process" in texts[1] and "flatshard launch" in texts[1]


def moved(world: fs.World) -> None:
    """.to(dtype) and other replacements of the memory."""
    for change in (lambda m: m.to(torch.float64), lambda m: m.half(), lambda m: m.bfloat16()):
        module, _ = make(world)
        change(module)
        with raises(RuntimeError, "scale|layers", "no longer lies in the memory", "mp_policy"):
            module(mine(world, 0)["x"])
    module, _ = make(world)
    module.to("cpu", torch.float32)  # what changes nothing is fine
    module(mine(world, 0)["x"])
    module.layers[4] = nn.Linear(29, 5)  # type: ignore[index, operator]
    with raises(RuntimeError, "submodule 4 of a Sequential was replaced", "unshard"):
        module(mine(world, 0)["x"])


def legal_writes(world: fs.World) -> None:
    """full_params(write=True): private meanwhile, stored by every rank in part, masters along."""
    for precision in ("fp32", "bf16"):
        module, optimizer = make(world, mp_policy=precision)
        before = [p.detach().clone() for p in module.parameters()]
        with ft.full_params(module, write=True) as named, torch.no_grad():
            module.scale.mul_(2.0)  # type: ignore[operator, union-attr]
            named["layers.0.weight"].data.add_(1.0)  # .data: no version counter sees it
        assert torch.equal(module.scale, before[0] * 2)  # type: ignore[arg-type]
        master = ft.get(module.layers[0].weight, "master", full=True)  # type: ignore[index, arg-type, union-attr]
        assert torch.equal(master, module.layers[0].weight.float())  # type: ignore[index, union-attr]
        assert one_step(world, module, optimizer).applied
        try:
            with ft.full_params(module, write=True), torch.no_grad():
                module.scale.mul_(3.0)  # type: ignore[operator, union-attr]
                raise KeyError("changed my mind")
        except KeyError:
            pass
        assert module.scale.item() < 4.0  # type: ignore[operator]
        with ft.full_params(module) as named:
            assert named["scale"].data_ptr() == module.scale.data_ptr()  # type: ignore[operator, union-attr]


def thawed(world: fs.World) -> None:
    """A Parameter that was frozen has no room for a gradient; freezing for a while is fine."""
    module = mlp(0)
    module.layers[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    ft.fully_shard(module, world=world)
    optimizer = ft.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
    before = module.layers[2].weight.detach().clone()  # type: ignore[index, union-attr]
    frozen = module.layers[0].weight.detach().clone()  # type: ignore[index, union-attr]
    module.layers[2].requires_grad_(False)  # type: ignore[index, union-attr]
    one_step(world, module, optimizer)
    assert torch.equal(before, module.layers[2].weight)  # type: ignore[index, union-attr]
    module.layers[2].requires_grad_(True)  # type: ignore[index, union-attr]
    one_step(world, module, optimizer)
    assert not torch.equal(before, module.layers[2].weight)  # type: ignore[index, union-attr]
    assert torch.equal(frozen, module.layers[0].weight)  # type: ignore[index, union-attr]
    module.layers[0].weight.requires_grad_(True)  # type: ignore[index, union-attr]
    with raises(RuntimeError, r"layers\.0\.weight was frozen", "unshard"):
        module(mine(world, 0)["x"])


# ---- loading ------------------------------------------------------------------------------------


def loads(world: fs.World) -> None:
    """Masters follow load_state_dict, of the module, of a submodule, with bits that bf16 lacks."""
    for precision in ("fp32", "bf16"):
        module, optimizer = make(world, mp_policy=precision)
        one_step(world, module, optimizer)
        other = mlp(7)
        module.load_state_dict(other.state_dict())
        for (name, parameter), value in zip(
            module.named_parameters(), other.parameters(), strict=True
        ):
            assert torch.equal(ft.get(parameter, "master", full=True), value), name
            assert torch.equal(parameter, value.to(parameter.dtype)), name
        expected = mlp(8).layers[2].state_dict()  # type: ignore[index, union-attr]
        module.layers[2].load_state_dict(expected)  # type: ignore[index, union-attr]
        got = ft.get(module.layers[2].weight, "master", full=True)  # type: ignore[index, arg-type, union-attr]
        assert torch.equal(got, expected["weight"])
        assert torch.equal(ft.get(module.scale, "master", full=True), other.scale)  # type: ignore[arg-type]
        assert one_step(world, module, optimizer).applied
        whole = ft.state_dict(module, dtype="master")
        assert all(v.dtype is torch.float32 for v in whole.values())
        assert set(whole) == set(other.state_dict())
        result = ft.load_state_dict(module, {"scale": torch.tensor(3.0)}, strict=False)
        assert "layers.0.weight" in result.missing_keys and module.scale.item() == 3.0  # type: ignore[operator]


def bad_loads(world: fs.World) -> None:
    """assign=True, and ranks that load different values."""
    module, optimizer = make(world)
    ids = [id(p) for p in module.parameters()]
    with raises(RuntimeError, "assign=True", "sharded"):
        module.load_state_dict(mlp(7).state_dict(), assign=True)
    assert ids == [id(p) for p in module.parameters()]
    if world.size > 1:
        with raises(ValueError, "different values", r"layers\.0\.weight"):
            module.load_state_dict(mlp(world.rank).state_dict())
    with raises(RuntimeError, "size mismatch"):
        module.load_state_dict({"scale": torch.zeros(3)}, strict=False)
    module.load_state_dict(mlp(7).state_dict())
    assert one_step(world, module, optimizer).applied
