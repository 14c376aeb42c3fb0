"""What a script may do with a sharded module, and what it is told when it may not. Each function
is a case that every rank runs; it raises when something is wrong."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from models import MODELS, largest_difference, mlp, mlp_batch, mlp_loss, rows
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


# ---- gradients ----------------------------------------------------------------------------------


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


# ---- optimizers ---------------------------------------------------------------------------------


def wrong_optimizer(world: fs.World) -> None:
    """torch's own optimizers are refused when they step; those of other modules are left alone."""
    module, optimizer = make(world)
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        wrong = kind(module.parameters(), lr=0.1)
        mlp_loss(module, mine(world, 0)).backward()
        with raises(RuntimeError, "scale", "sharded", f"flatshard.torch.{kind.__name__}", "adopt"):
            wrong.step()
        optimizer.zero_grad()
    private = mlp(0)
    mlp_loss(private, mine(world, 0)).backward()
    torch.optim.SGD(private.parameters(), lr=0.1).step()
    with raises(ValueError, "not sharded", "fully_shard"):
        ft.AdamW(private.parameters(), lr=0.1).step()
    one_step(world, module, optimizer)
    second = ft.SGD(module.parameters(), lr=0.1)
    third, _first = make(world)
    _again = ft.SGD(third.parameters(), lr=0.1)
    with raises(RuntimeError, r"2 optimizers \(AdamW and SGD\)", "keep one"):
        ft.clip_grad_norm_(third, 1.0)
    mlp_loss(module, mine(world, 0)).backward()
    with raises(ValueError, "another optimizer"):
        second.step()
    with raises(AttributeError, "LAMB", "AdamW"):
        _ = ft.LAMB
    with raises(ValueError, "maximize"):
        ft.AdamW(module.parameters(), maximize=True)
    with raises(TypeError, "no argument 'learning_rate'"):
        ft.AdamW(module.parameters(), learning_rate=0.1)
    with raises(ValueError, "dampening"):
        ft.SGD(module.parameters(), dampening=0.5)


def adopted(world: fs.World) -> None:
    """The user's own torch optimizer, its state and its scheduler go on, as the same objects."""
    for before in (False, True):
        module, alone = mlp(0), mlp(0)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, eps=1e-2)
        other = torch.optim.AdamW(alone.parameters(), lr=0.05, eps=1e-2)
        if before:  # it has stepped on the private module already
            for m, o in ((module, optimizer), (alone, other)):
                mlp_loss(m, mlp_batch(9, 4)).backward()
                o.step()
                o.zero_grad()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        theirs = torch.optim.lr_scheduler.LambdaLR(other, lambda n: 0.5**n)
        ft.fully_shard(module, world=world)
        assert ft.adopt(optimizer) is optimizer and ft.adopt(optimizer) is optimizer
        for step in range(4):
            mlp_loss(module, mine(world, step)).backward()
            mlp_loss(alone, mlp_batch(step, 2 * world.size)).backward()
            result = optimizer.step()
            assert isinstance(result, fs.StepResult) and result.applied
            other.step()
            schedule.step()
            theirs.step()
            other.zero_grad()
            assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
        close(module.parameters(), alone.parameters(), within=1e-6)
        saved, expected = optimizer.state_dict(), other.state_dict()
        for key in ("exp_avg", "exp_avg_sq"):
            ours = [saved["state"][i][key] for i in sorted(saved["state"])]
            refs = [expected["state"][i][key] for i in sorted(expected["state"])]
            close(ours, refs, within=2e-6)
        assert saved["state"][0]["step"] == expected["state"][0]["step"]
    with raises(TypeError, "RMSprop", "SGD, Adam, AdamW"):
        ft.adopt(torch.optim.RMSprop(mlp(0).parameters()))
    with raises(ValueError, "maximize"):
        ft.adopt(torch.optim.SGD(mlp(0).parameters(), lr=0.1, maximize=True))


def states(world: fs.World) -> None:
    """Optimizer state in torch's form, out and in, here and from torch; before binding, too."""
    module, optimizer = make(world)
    alone = mlp(0)
    other = torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-2)
    for step in range(3):
        one_step(world, module, optimizer, step)
        mlp_loss(alone, mlp_batch(step, 2 * world.size)).backward()
        other.step()
        other.zero_grad()
    saved, weights = optimizer.state_dict(), ft.state_dict(module)
    local = ft.optimizer_state_dict(optimizer, full=False)
    tensor, (begin, end) = local["layers.0.weight"]["exp_avg"]
    whole = ft.get(module.layers[0].weight, "exp_avg", full=True)  # type: ignore[index, arg-type, union-attr]
    assert torch.equal(whole.reshape(-1)[begin:end], tensor)
    again = mlp(5)
    resumed = ft.AdamW(again.parameters(), lr=0.5)
    resumed.load_state_dict(other.state_dict())  # waits for the binding
    again.load_state_dict(weights)
    ft.fully_shard(again, world=world)
    third, direct = make(world)
    third.load_state_dict(weights)
    ft.load_optimizer_state_dict(direct, saved)
    for step in range(3, 5):
        for m, o in ((module, optimizer), (again, resumed), (third, direct)):
            assert one_step(world, m, o, step).step == step + 1
    close(third.parameters(), module.parameters(), within=0.0)
    close(again.parameters(), module.parameters(), within=1e-6)


def groups(world: fs.World) -> None:
    """Groups, schedulers, a group added later, Parameters in no group."""
    module, alone = mlp(0), mlp(0)
    pairs = []
    for m, package in ((module, ft), (alone, torch.optim)):
        layers = m.layers  # type: ignore[union-attr]
        optimizer = package.SGD(  # type: ignore[attr-defined]
            [{"params": list(layers[0].parameters()), "lr": 0.1},  # type: ignore[index]
             {"params": list(layers[2].parameters()), "momentum": 0.9}], lr=0.02)  # type: ignore[index] # fmt: skip
        pairs.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
    ft.fully_shard(module, world=world)
    for step in range(4):
        mlp_loss(module, mine(world, step)).backward()
        mlp_loss(alone, mlp_batch(step, 2 * world.size)).backward()
        if step == 2:
            for (o, _), m in zip(pairs, (module, alone), strict=True):
                o.add_param_group({"params": [m.scale], "lr": 0.3, "weight_decay": 0.1})
        for optimizer, schedule in pairs:
            optimizer.step()
            schedule.step()
        alone.zero_grad()
    close(module.parameters(), alone.parameters(), within=1e-6)
    last = mlp(0).layers[4].weight  # type: ignore[index, union-attr]
    assert torch.equal(module.layers[4].weight, last)  # type: ignore[index, union-attr]


def skipped(world: fs.World) -> None:
    """A gradient that is not finite on one rank: nothing moves anywhere, and all know why."""
    module, optimizer = make(world)
    before = [p.detach().clone() for p in module.parameters()]
    batch = mine(world, 0)
    if world.rank == world.size - 1:
        batch["x"][0, 0] = float("nan")
    mlp_loss(module, batch).backward()
    result = optimizer.step()
    assert not result and result.reason == "nonfinite"
    assert result.nonfinite is not None and result.nonfinite[1] == world.size - 1
    close(module.parameters(), before, within=0.0)
    mlp_loss(module, mine(world, 0)).backward()
    if world.is_main:
        optimizer.skip("a bad batch here")
    assert optimizer.step().reason == "rank_skipped"
    assert one_step(world, module, optimizer).step == 1


# ---- precision ----------------------------------------------------------------------------------


def bf16(world: fs.World) -> None:
    """bf16 weights over fp32 masters, inputs cast; a bf16 module without saying; autocast."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    for asked in ("bf16", policy, None):
        module = mlp(0) if asked is not None else mlp(0).bfloat16()
        ft.fully_shard(module, world=world, mp_policy=asked)
        optimizer = ft.AdamW(module.parameters(), lr=1e-3)
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        alone = mlp(0) if asked is not None else mlp(0).bfloat16().float()
        other = torch.optim.AdamW(alone.parameters(), lr=1e-3)
        for step in range(5):
            batch = mine(world, step)
            x = batch["x"] if asked is not None else batch["x"].bfloat16()
            out = module(x)
            assert out.dtype is (torch.float32 if asked is policy else torch.bfloat16)
            nn.functional.mse_loss(out.float(), batch["y"]).backward()
            mlp_loss(alone, mlp_batch(step, 2 * world.size)).backward()
            assert optimizer.step().applied
            other.step()
            other.zero_grad()
        masters = [ft.get(p, "master", full=True) for p in module.parameters()]
        # Adam moves by lr whatever the size of a gradient; bf16 may turn the sign of small ones.
        close(masters, alone.parameters(), within=0.05)
        for master, parameter in zip(masters, module.parameters(), strict=True):
            assert torch.equal(master.bfloat16(), parameter)
    module, optimizer = make(world)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mlp_loss(module, mine(world, 0))
    loss.backward()
    assert optimizer.step().applied
    mixed = mlp(0)
    mixed.layers[0].bfloat16()  # type: ignore[index, union-attr]
    with raises(fs.ConfigError, "several dtypes", "bfloat16, float32", "mp_policy"):
        ft.fully_shard(mixed, world=world)


def fp16(world: fs.World) -> None:
    """float16 needs its loss scaled, and says how."""
    module, optimizer = make(world, lr=1e-3, mp_policy="fp16")
    batch = mine(world, 0)
    with raises(RuntimeError, "float16", r"flatshard\.torch\.backward\(loss"):
        nn.functional.mse_loss(module(batch["x"]).float(), batch["y"]).backward()
    optimizer.zero_grad()
    results = []
    for _ in range(8):
        loss = nn.functional.mse_loss(module(batch["x"]).float(), batch["y"])
        ft.backward(loss, optimizer=optimizer)
        results.append(optimizer.step())
    assert results[0].loss_scale == 65536.0
    assert results[-1].applied and results[-1].loss_scale <= 65536.0
    assert results[-1].grad_norm < 100.0  # unscaled


def buffers(world: fs.World) -> None:
    """Buffers are no weights: no policy casts them, and they are saved as they are."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("count", torch.tensor(16777217))  # no float32 is equal to it
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("far", torch.tensor(70000.0))  # an infinity as float16

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            assert self.far.dtype is torch.float32
            return self.layer(x) * self.mask

    for policy in ("fp16", "bf16"):
        module = ft.fully_shard(Kept(), world=world, mp_policy=policy)
        for _ in range(2):
            module(torch.ones(1, 4))
        file = io.BytesIO()
        torch.save(ft.state_dict(module), file)
        file.seek(0)
        saved = torch.load(file)
        assert saved["count"].dtype is torch.int64 and int(saved["count"]) == 16777219
        assert saved["mask"].dtype is torch.bool and saved["mask"].tolist() == [True, False]
        assert saved["far"].dtype is torch.float32 and float(saved["far"]) == 70000.0


# ---- the module itself --------------------------------------------------------------------------


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


def one_step_bf16(world: fs.World, module: nn.Module, optimizer: Any) -> None:
    batch = mine(world, 0)
    nn.functional.mse_loss(module(batch["x"]).float(), batch["y"]).backward()
    assert optimizer.step().applied


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
