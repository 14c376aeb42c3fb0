"""fully_shard: an ordinary module becomes a sharded one, and stays the same object."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from .._kinds import WEIGHT
from ..errors import ConfigError
from ..job import init
from ..policy import Sharding, resolve
from ..shard import Shards, _agree_on_values
from ..world import World
from . import _registry
from ._arrays import as_array
from ._device import check_device, where_to_build
from ._grads import Gradients
from ._guards import check_worlds, install, refuse_torch_optimizers
from ._held import hold
from ._policies import read_precision, read_sharding, refuse_others
from ._state import install_loading
from ._units import Units, find_plan

__all__ = ["Sharded", "fully_shard", "is_sharded", "shards", "unshard"]

_log = logging.getLogger("flatshard")


class Sharded:
    """A sharded module: what the functions of this package find by module or Parameter.

    Anything that takes shards (`flatshard.checkpoint`, `flatshard.weights_sha256`) takes it too.
    """

    def __init__(
        self, module: torch.nn.Module, world: World, asked: tuple[Any, ...], units: Units,
        sharding: Sharding, mp_policy: Any, ignored: set[int],
    ) -> None:  # fmt: skip
        self.module = module
        self.world = world
        self.asked = asked
        plan = find_plan(module, units, ignored)
        if not plan.members:
            raise ValueError(f"this {type(module).__name__} has no Parameter to shard")
        #: False: built on the meta device, and `materialize` has not been called.
        self.has_values = check_members(plan.members)
        check_device(plan.members, world)
        for member in plan.members:
            if not self.has_values:
                _leave_meta(member.parameter, where_to_build(world))
        self.members = plan.members
        self.unit_modules = plan.modules
        self.links = plan.links
        dtypes = list(dict.fromkeys(m.parameter.dtype for m in plan.members))
        precision, self.casts, self.precision_from = read_precision(mp_policy, dtypes)
        check_batch_norms(module, getattr(torch, precision.param), where_to_build(world), ignored)
        # A unit is copied out of the pool at once: on a GPU one buffer is enough, and on a host
        # there is none, shards are read in place.
        policy = resolve(
            world.size, sharding=sharding, precision=precision, produced=precision.param,
            pool=1 if world.device != "cpu" else False, device=world.device,
        )  # fmt: skip
        self.shards = Shards(
            world, parameters=plan.parameters(), units=plan.places(), policy=policy
        )
        try:
            if self.has_values:
                self._store_values()
            self._share_buffers()
            #: Checksums of buffers by name: those that training changes are in no checkpoint.
            self.buffer_sums = buffer_sums(module)
            self.held = hold(self)
        except BaseException:
            self.shards.close()
            raise
        #: The optimizer of this package that moves these weights, once it is bound.
        self.optimizer: Any = None
        self.held.attach()
        self.grads = Gradients(self)
        self.loading: Any = None
        self._handles = [*install(self), *install_loading(self)]
        _registry.remember(self)

    def _store_values(self) -> None:
        """Everybody takes rank 0's values."""
        values = {m.name: as_array(m.parameter) for m in self.members}
        equal = _agree_on_values(self.world, values)
        if not equal and self.world.is_main:
            _log.info("ranks built the module with different values; all take those of rank 0")
        with self.shards.storing() as store:
            for index, member in enumerate(self.members):
                value = values[member.name]
                if not equal:
                    value = self.world.broadcast(np.array(value, order="C"), root=0)
                store(index, WEIGHT, value)

    def _share_buffers(self) -> None:
        """Buffers stay private; they begin as rank 0's."""
        buffers = {name: b for name, b in self.module.named_buffers() if b.device.type != "meta"}
        raw = {n: b.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
               for n, b in buffers.items() if b.numel()}  # fmt: skip
        if not raw or _agree_on_values(self.world, raw):
            return
        for name, array in raw.items():
            got = self.world.broadcast(np.array(array), root=0)
            buffer = buffers[name]
            with torch.no_grad():
                buffer.copy_(torch.from_numpy(got).view(buffer.dtype).reshape(buffer.shape))

    def find_optimizer(self) -> Any:
        """The `Binding` that moves these weights, bound now if it was made before. Collective then.

        Raises
        ------
        RuntimeError
            There is none yet.
        """
        if self.optimizer is None:
            ids = {id(m.parameter) for m in self.members}
            unbound = [o._flatshard for o in _registry.optimizers if o._flatshard.sharded is None]
            found = [b for b in unbound if ids & {id(p) for p in b.parameters()}]
            if len(found) > 1:
                rules = " and ".join(sorted(b.rule for b in found))
                raise RuntimeError(
                    f"{len(found)} optimizers ({rules}) hold Parameters of this "
                    f"{type(self.module).__name__}: keep one, with groups"
                )
            if found:
                found[0].bind("the first step")
        if self.optimizer is None:
            raise RuntimeError(
                f"no optimizer of flatshard.torch holds the Parameters of this "
                f"{type(self.module).__name__}: make one first, e.g. "
                "flatshard.torch.AdamW(module.parameters(), lr=...)"
            )
        return self.optimizer

    def check_values(self, where: str) -> None:
        """RuntimeError where there are none yet."""
        if not self.has_values:
            raise RuntimeError(
                f"{where}: this {type(self.module).__name__} was sharded on the meta device and "
                "has no values: call flatshard.torch.materialize(module, init=...), or load a "
                "checkpoint"
            )

    def before_step(self, where: str) -> None:
        """What a step, and a clip, must find in order."""
        self.check_values(f"{where}()")
        self.grads.settle_drops()
        self.held.check(f"before {where}()")

    def after_step(self) -> None:
        """The weights have moved and the gradients are used."""
        self.grads.taken()
        self.held.refresh()

    def close(self) -> None:
        """Ends the sharding; Parameters become private tensors. Local."""
        _registry.forget(self)
        for handle in self._handles:
            handle.remove()
        self.grads.close()
        self.held.detach()
        if self.optimizer is not None:
            self.optimizer.sharded = self.optimizer.engine = None
            self.optimizer = None
        self.shards.close()


def _leave_meta(parameter: torch.nn.Parameter, device: torch.device) -> None:
    """The same object on a device, still without memory to speak of: one element, repeated."""
    bare = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    torch.utils.swap_tensors(
        parameter, torch.nn.Parameter(bare, requires_grad=parameter.requires_grad)
    )


def check_members(members: Sequence[Any]) -> bool:
    """Refuses what cannot be sharded, before anything is allocated. Have they values, or are they
    all on the meta device?"""
    seen: dict[int, str] = {}
    bare = [m.name for m in members if m.parameter.device.type == "meta"]
    if 0 < len(bare) < len(members):
        raise ValueError(
            f"Parameter {bare[0]} is on the meta device, without values, and others are not: give "
            "it values (torch.nn.Module.to_empty and its initialisation), or build the whole "
            "module inside flatshard.torch.empty_weights()"
        )
    for member in members:
        p = member.parameter
        entry = _registry.entry_of(p)
        if entry is not None:
            raise ValueError(
                f"Parameter {member.name} is sharded already, by fully_shard() on a "
                f"{type(entry.sharded.module).__name__}: call it once, on the whole module, and "
                "name the submodules that are gathered together with units=[...]"
            )
        if not p.is_floating_point():
            raise TypeError(
                f"Parameter {member.name} is of {p.dtype}: pass what is not float32, bfloat16 or "
                "float16 in ignored_params="
            )
        if p.layout is not torch.strided:
            raise TypeError(f"Parameter {member.name} is {p.layout}: expected a dense one")
        if p.numel() and not bare:
            owner = seen.setdefault(p.untyped_storage().data_ptr(), member.name)
            if owner != member.name:
                raise ValueError(
                    f"Parameters {owner} and {member.name} share memory but are two objects: "
                    "sharding would part them. Tie them by assigning one Parameter to both"
                )
    return not bare


def check_batch_norms(
    module: torch.nn.Module, dtype: torch.dtype, device: torch.device, ignored: set[int]
) -> None:
    """Refuses a BatchNorm that torch cannot compute with weights of this dtype and the statistics
    that it keeps: they are buffers, which sharding leaves as they are."""
    asked: dict[torch.dtype, str | None] = {}
    for path, part in module.named_modules():
        if not isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            continue
        statistics, weight = part.running_mean, part.weight
        if statistics is None or weight is None or id(weight) in ignored:
            continue
        kept = statistics.dtype
        if kept == dtype:
            continue
        if kept not in asked:
            asked[kept] = _batch_norm_fails(dtype, kept, device)
        if asked[kept] is not None:
            weights, buffers = (str(d).removeprefix("torch.") for d in (dtype, kept))
            raise ConfigError(
                f"{path or 'the module'} is a {type(part).__name__} whose statistics are {buffers} "
                f"and whose weights would be {weights}, which torch does not compute on {device} "
                f"({asked[kept]}). Convert them before fully_shard() "
                f"(bn.running_mean = bn.running_mean.to(torch.{weights}), running_var likewise), "
                'train in fp32 (mp_policy="fp32"), or use GroupNorm or LayerNorm'
            )


def _batch_norm_fails(dtype: torch.dtype, kept: torch.dtype, device: torch.device) -> str | None:
    """What torch says against one element of these dtypes."""
    ones = torch.ones(1, dtype=dtype, device=device)
    mean, var = (torch.ones(1, dtype=kept, device=device) for _ in range(2))
    try:
        torch.nn.functional.batch_norm(ones.expand(2, 1), mean, var, ones, ones, training=True)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def fully_shard(
    module: torch.nn.Module,
    *,
    world: World | None = None,
    units: Units = "auto",
    sharding: Sharding | int | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[torch.nn.Parameter] | None = None,
    **others: Any,
) -> torch.nn.Module:
    """Shard a module's Parameters, gradients and optimizer state over the ranks. Collective.

    The module and its Parameters stay the same objects, ties included, so an optimizer may be
    built before or after. Call it once, on the whole module.

    Parameters
    ----------
    module : Module
        With values, on the CPU or on this rank's GPU (then the world must be, too): every rank
        takes rank 0's. Or on the meta device, as a whole: `materialize` gives it values.
    world : World, optional
        The ranks; by default those of the launcher (``flatshard.init()``).
    units : "auto", class name, class, callable, or a list of names, classes and submodules
        What is gathered and reduced together. "auto": the blocks that a Hugging Face model says
        must not be split, else the children of its lists and sequences. A callable is asked for
        each submodule. What lies in no such submodule forms units of its own.
    sharding : Sharding or int, optional
        What each rank keeps; a number is a stage. By default stage 3.
    reshard_after_forward : bool, optional
        As in ``Sharding``; with "view" nothing is gathered, and it changes nothing.
    mp_policy : str, MixedPrecision, or torch's MixedPrecisionPolicy, optional
        Element types. By default the module's own dtype; a bfloat16 or float16 module gets fp32
        masters.
    offload_policy : Offload, or torch's CPUOffloadPolicy, optional
        On the CPU "device" and "cpu" are one home.
    ignored_params : iterable of Parameter, optional
        Left as they are, private to each rank and not kept in step.
    **others
        Nothing: other arguments of torch's fully_shard are refused with what takes their place.

    Returns
    -------
    Module
        The module itself.

    Raises
    ------
    TypeError
        No Module, a Parameter of another dtype than float32, bfloat16 and float16, or an argument
        that there is not.
    ValueError
        It is sharded already, with other arguments; or has Parameters that share memory without
        being one object.
    ConfigError
        A name in ``units`` that is not there, an unknown policy, or processes that do not know of
        each other.
    CollectiveMismatch
        Ranks built different modules.

    Notes
    -----
    On the CPU Parameters lie in memory that all ranks of the host share: reading them is free at
    any time, on any rank. On a GPU they have memory while their unit runs, and what reads them
    whole (``state_dict``, `full_params`, an evaluation) is a collective at stage 3. Write them
    through ``full_params(module, write=True)`` alone. After ``step()`` a Parameter's ``grad`` is
    None. Memory: ``flatshard.torch.plan``.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"fully_shard: expected a torch.nn.Module, got {type(module).__name__}")
    refuse_others(others)
    asked = (_key(units), sharding, reshard_after_forward, mp_policy, offload_policy)
    present = _registry.find_module(module)
    if present is not None:
        if present.asked == asked and (world is None or world is present.world):
            return module
        raise ValueError(
            f"this {type(module).__name__} is sharded already, with other arguments: call "
            "fully_shard() once, or flatshard.torch.unshard(module) in between"
        )
    chosen = read_sharding(sharding, reshard_after_forward, offload_policy)
    ignored = {id(p) for p in ignored_params or ()}
    world = world if world is not None else init()
    check_worlds(world)
    refuse_torch_optimizers()
    Sharded(module, world, asked, units, chosen, mp_policy, ignored)
    return module


def buffer_sums(module: torch.nn.Module) -> dict[str, int]:
    """CRC-32 of each buffer of the module's state dict, by name: one read of them.

    Parameters
    ----------
    module : Module
    """
    kept = {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }
    return {
        name: zlib.crc32(b.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, b in kept.items()
        if b.device.type != "meta"
    }


def _key(units: Units) -> Any:
    if isinstance(units, (str, type)) or callable(units):
        return units
    return tuple(id(u) if isinstance(u, torch.nn.Module) else u for u in units)


def unshard(module: torch.nn.Module) -> torch.nn.Module:
    """End the sharding: an ordinary module, with private tensors, on every rank. Collective.

    Parameters
    ----------
    module : Module
        A sharded one.

    Returns
    -------
    Module
        The module itself; its Parameters stay the same objects, in the dtype they were computed
        with. Optimizer state and fp32 masters are gone: take them before with ``state_dict`` and
        `flatshard.torch.state_dict`.

    Raises
    ------
    RuntimeError
        A Parameter was written in place.
    """
    sharded = _registry.sharded_of(module, "unshard")
    sharded.held.check("before unshard()")
    sharded.world.barrier()  # nobody reads the shared memory any more once it is left
    sharded.close()
    return module


def is_sharded(target: torch.nn.Module | torch.Tensor) -> bool:
    """Whether a module, or a Parameter, is sharded.

    Parameters
    ----------
    target : Module or Parameter
        A module is, if `fully_shard` was called on it or one of its Parameters is sharded.
    """
    if isinstance(target, torch.nn.Module):
        if _registry.find_module(target) is not None:
            return True
        return any(_registry.entry_of(p) is not None for p in target.parameters())
    return _registry.entry_of(target) is not None


def shards(module: torch.nn.Module) -> Shards:
    """The shards behind a sharded module: what `flatshard.weights_sha256`, `flatshard.describe` and
    the checkpoints of `flatshard` take.

    Parameters
    ----------
    module : Module
        A sharded one.

    Raises
    ------
    ValueError
        It is not sharded.
    """
    return _registry.sharded_of(module, "shards").shards
