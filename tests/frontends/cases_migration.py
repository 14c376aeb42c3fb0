"""One file or one choice of words, trained by another system and here."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from models import MODELS, largest_difference, rows
from torch import nn

import flatshard as fs
import flatshard.torch as ft
from flatshard import config

ROWS = 2
LR, EPS = 1e-3, 1e-4


class Other:
    """A module under another system: forward, backward, step, and its whole Parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.optimizer: Any = torch.optim.AdamW(self._parameters(), lr=LR, eps=EPS)

    def _parameters(self) -> list[torch.Tensor]:
        return list(self.module.parameters())

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Within it a backward reduces nothing."""
        quiet: contextlib.AbstractContextManager[Any] = self.module.no_sync()
        return quiet

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def clip(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.module.parameters(), max_norm))

    def step(self, rate: float | None = None) -> None:
        if rate is not None:
            self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.module.state_dict()
        return {name.removeprefix("module."): value for name, value in state.items()}


class Ddp(Other):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(nn.parallel.DistributedDataParallel(module))


class Zero1(Ddp):
    """Optimizer state in shards: FairScale's OSS, as torch took it over."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.optimizer = ZeroRedundancyOptimizer(
            self._parameters(), optimizer_class=torch.optim.AdamW, lr=LR, eps=EPS
        )


class Fsdp1(Other):
    def __init__(self, module: nn.Module, settings: config.Settings, strategy: str) -> None:
        from torch.distributed import fsdp
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        by_name = {type(m).__name__: type(m) for m in module.modules()}
        wrap = ModuleWrapPolicy([by_name[n] for n in settings.units.match(by_name)])
        super().__init__(
            fsdp.FullyShardedDataParallel(
                module,
                device_id=torch.device("cpu"),
                use_orig_params=True,
                sharding_strategy=fsdp.ShardingStrategy[strategy],
                auto_wrap_policy=wrap,
            )
        )

    def clip(self, max_norm: float) -> float:
        return float(self.module.clip_grad_norm_(max_norm))

    def whole(self) -> dict[str, torch.Tensor]:
        from torch.distributed import fsdp

        with fsdp.FullyShardedDataParallel.summon_full_params(self.module, writeback=False):
            state = {k: v.detach().clone() for k, v in self.module.state_dict().items()}
        return {name.replace("_fsdp_wrapped_module.", ""): v for name, v in state.items()}

    def units(self) -> int:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return sum(isinstance(m, FullyShardedDataParallel) for m in self.module.modules())


class Fsdp2(Other):
    def __init__(self, module: nn.Module, settings: config.Settings, *, reshard: bool) -> None:
        from torch.distributed import fsdp
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        policy = {}
        if settings.precision.param != "float32":
            policy["mp_policy"] = fsdp.MixedPrecisionPolicy(
                param_dtype=getattr(torch, settings.precision.param),
                reduce_dtype=getattr(torch, settings.precision.reduce or "float32"),
            )
        options = {"mesh": mesh, "reshard_after_forward": reshard, **policy}
        for inner in list(module.modules()):
            if type(inner).__name__ in settings.units.classes:
                fsdp.fully_shard(inner, **options)
        fsdp.fully_shard(module, **options)
        super().__init__(module)

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        return self._unsynchronised()

    @contextlib.contextmanager
    def _unsynchronised(self) -> Any:
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)

    def clip(self, max_norm: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return float(norm.full_tensor())  # type: ignore[attr-defined]

    def whole(self) -> dict[str, torch.Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        made: dict[str, torch.Tensor] = get_model_state_dict(
            self.module, options=StateDictOptions(full_state_dict=True)
        )
        # The other ranks get nothing; the values are the same.
        shared = [made] if torch.distributed.get_rank() == 0 else [None]
        torch.distributed.broadcast_object_list(shared, src=0)
        return shared[0]  # type: ignore[return-value]


class DeepSpeed(Other):
    """Steps, clips and schedules by its own file."""

    def __init__(self, module: nn.Module, values: dict[str, Any]) -> None:
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config=values
        )
        self.module = engine

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.module.backward(loss)
        if not last:
            self.module.step()  # counts the micro-batch

    def clip(self, max_norm: float) -> float:
        return 0.0

    def step(self, rate: float | None = None) -> None:
        self.module.step()
        self.norm = float(self.module.get_global_grad_norm() or 0.0)

    def whole(self) -> dict[str, torch.Tensor]:
        import deepspeed

        inner = self.module.module
        with deepspeed.zero.GatheredParameters(list(inner.parameters())):
            return {k: v.detach().clone() for k, v in inner.state_dict().items()}


def _whole(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters as the optimizer moves them: masters where there are."""
    shards = ft.shards(module)
    what = "master" if shards.policy.precision.master else "weight"
    return {
        name: torch.from_numpy(shards.full(name, what).copy())
        for name, _ in module.named_parameters()
    }


def _recompute(module: nn.Module, classes: tuple[str, ...]) -> None:
    """As FSDP's users do it: each layer in a wrapper that computes it again."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    apply_activation_checkpointing(module, check_fn=lambda m: type(m).__name__ in classes)


def train(
    world: fs.World, system: str, values: dict[str, Any], model: str = "llama", steps: int = 8,
    micro_batches: int = 1, max_norm: float = 0.0, gather: str = "auto", stage: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The same training twice; how far apart whole Parameters, norms and losses are."""
    build, batch_of, loss_of = MODELS[model]
    size, rank = world.size, world.rank
    if system == "deepspeed":
        settings = config.deepspeed(values, world_size=size)
    else:
        settings = config.fsdp(values, world_size=size)
    sharding = dataclasses.replace(settings.sharding, gather=gather)  # type: ignore[arg-type]
    if stage is not None:
        sharding = dataclasses.replace(sharding, stage=stage)
    settings = dataclasses.replace(settings, sharding=sharding)
    ours, theirs = build(0), build(0)
    if settings.activation_checkpointing:
        for module in (ours, theirs):
            module.config.use_cache = False  # a forward that runs twice would fill it twice
        ft.activation_checkpointing(ours, list(settings.units.classes))
        _recompute(theirs, settings.units.classes)
    ft.fully_shard(ours, world=world, **settings.module_options(ours))
    settings.attach(ft.shards(ours))
    options: dict[str, Any] = {"lr": LR, "eps": EPS}
    rule = "AdamW"
    if settings.optimizer is not None:
        rule, options = settings.optimizer.name, dict(settings.optimizer.options)
    optimizer = getattr(ft, rule)(ours.parameters(), **options)
    rate = settings.schedule.rate(options["lr"]) if settings.schedule else None
    max_norm = max_norm if settings.max_norm is None else settings.max_norm
    other: Any
    if system == "deepspeed":
        other = DeepSpeed(theirs, values)
    elif system == "fsdp1":
        strategy = str(values.get("reshard_after_forward", "FULL_SHARD"))
        other = Fsdp1(theirs, settings, strategy)
    elif system == "fsdp2":
        other = Fsdp2(theirs, settings, reshard=bool(values.get("reshard_after_forward", True)))
    else:
        other = {"ddp": Ddp, "zero1": Zero1}[system](theirs)
    micro_batches = settings.batch.accumulate or micro_batches
    norms: list[list[float]] = []
    losses: list[list[float]] = []
    for step in range(steps):
        for m in range(micro_batches):
            batch = rows(batch_of(1000 * step + m, ROWS * size), ROWS * rank, ROWS * (rank + 1))
            last = m + 1 == micro_batches
            with contextlib.nullcontext() if last else ft.no_sync(ours):
                loss = loss_of(ours, batch)
                (loss / micro_batches).backward()
            with contextlib.nullcontext() if last else other.quiet():
                their_loss = loss_of(other.module, batch)
                scale = 1 if system == "deepspeed" else micro_batches  # its engine divides
                other.backward(their_loss / scale, last=last)
            losses.append([loss.item(), their_loss.item()])
        if max_norm:
            norms.append([float(ft.clip_grad_norm_(ours.parameters(), max_norm))])
            norms[-1].append(other.clip(max_norm))
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate(step)
        assert optimizer.step().applied
        optimizer.zero_grad()
        other.step()
        if system == "deepspeed" and max_norm:
            norms[-1][1] = other.norm
    whole = {k.replace("_checkpoint_wrapped_module.", ""): v for k, v in other.whole().items()}
    mine = _whole(ours)
    names = [name for name, _ in ours.named_parameters()]
    result = {
        "apart": largest_difference([mine[n] for n in names], [whole[n] for n in names]),
        "moved": largest_difference(
            [mine[n] for n in names], [dict(build(0).named_parameters())[n] for n in names]
        ),
        "norms": norms,
        "losses": losses,
        "units": [unit.name for unit in ft.shards(ours).units],
        "table": fs.describe(ft.shards(ours)),
        "state": fs.memory(ft.shards(ours)).get("state", (0, 0, 0))[1],
    }
    if system == "fsdp1":
        result["their_units"] = other.units()
    return result


def load_from_fsdp2(world: fs.World) -> dict[str, Any]:
    """A model trained under FSDP2 goes on here from its full state dict, and the other way."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    build, batch_of, loss_of = MODELS["llama"]
    settings = config.fsdp({"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]})
    theirs = Fsdp2(build(1), settings, reshard=True)
    ours = build(2)
    ft.fully_shard(ours, world=world, **settings.module_options(ours))

    def batch(seed: int) -> dict[str, torch.Tensor]:
        return rows(batch_of(seed, ROWS * world.size), ROWS * world.rank, ROWS * (world.rank + 1))

    def apart() -> float:
        mine, whole = ours.state_dict(), theirs.whole()
        names = [name for name, _ in ours.named_parameters()]
        return largest_difference([mine[n] for n in names], [whole[n] for n in names])

    loss_of(theirs.module, batch(1)).backward()
    theirs.step()
    ours.load_state_dict(theirs.whole())
    loaded = apart()
    optimizer = ft.AdamW(ours.parameters(), lr=LR, eps=EPS)
    loss_of(ours, batch(2)).backward()
    optimizer.step()
    moved = apart()
    full = {k: v.detach().clone() for k, v in ours.state_dict().items()}
    set_model_state_dict(
        theirs.module,
        full,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    return {"loaded": loaded, "moved": moved, "back": apart()}


def sized(world: fs.World, least: int, ignored: str = "") -> dict[str, Any]:
    """Names of the modules that FSDP's policy by size wraps, and of our units."""
    import functools

    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    ours, theirs = MODELS["t5"][0](0), MODELS["t5"][0](0)
    values: dict[str, Any] = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": least}
    left = [theirs.get_submodule(ignored)] if ignored else []
    if ignored:
        values["ignored_modules"] = [ignored]
    chosen = config.fsdp(values).module_options(ours)["units"]
    wrapped = fsdp.FullyShardedDataParallel(
        theirs,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        ignored_modules=left,
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=least),
    )
    theirs_named = {
        name.replace("_fsdp_wrapped_module.", "").removesuffix("._fsdp_wrapped_module")
        for name, m in wrapped.named_modules()
        if isinstance(m, fsdp.FullyShardedDataParallel) and m is not wrapped
    }
    return {
        "ours": sorted(name for name, m in ours.named_modules() if any(m is c for c in chosen)),
        "theirs": sorted(name.removeprefix("_fsdp_wrapped_module.") for name in theirs_named),
    }
