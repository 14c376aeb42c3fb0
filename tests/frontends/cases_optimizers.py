"""Optimizers over a sharded module, steps that are skipped, precision. Each function
is a case that every rank runs; it raises when something is wrong."""

from __future__ import annotations

import io

import torch
from case_helpers import close, make, mine, one_step, raises
from models import mlp, mlp_batch, mlp_loss
from torch import nn

import flatshard as fs
import flatshard.torch as ft

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
