"""Guards: what would go wrong silently is refused, with the cure."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from .. import _core
from ..errors import ConfigError
from ..world import World
from . import _registry

if TYPE_CHECKING:
    from ._module import Sharded

__all__ = ["Hook", "check_worlds", "install", "refuse_torch_optimizers"]

_log = logging.getLogger("flatshard")
_said: set[str] = set()


def say_once(key: str, text: str) -> None:
    """A warning in the log, once per process."""
    if key not in _said:
        _said.add(key)
        _log.warning("%s", text)


# ---- launching ----------------------------------------------------------------------------------


def check_worlds(world: World) -> None:
    """Does our world agree with what else says how many processes there are?

    Raises
    ------
    ConfigError
        torch.distributed has more ranks than we know of: trainings would run apart.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        size, rank = distributed.get_world_size(), distributed.get_rank()
        if size != world.size and not world._core.is_threads:
            raise ConfigError(
                f"torch.distributed has {size} ranks and flatshard's world {world.size}: each "
                "process would train on its own. Start the script with torchrun or 'flatshard "
                "launch -n N script.py', or set RANK, WORLD_SIZE and LOCAL_RANK in each process"
            )
        if rank != world.rank and not world._core.is_threads:
            raise ConfigError(
                f"this process is rank {rank} of torch.distributed and rank {world.rank} of "
                "flatshard's world: one launcher must set both"
            )
    if world.size == 1:
        say_once(
            "alone",
            "fully_shard() in a world of one process: nothing is sharded. For N ranks start the "
            "script with 'flatshard launch -n N script.py' or torchrun --nproc-per-node N",
        )
    cores = _core.cpu_count()
    if world.size > cores:
        say_once(
            "cores",
            f"{world.size} ranks on {cores} cores: they take turns, and each step waits for the "
            f"slowest; {cores} ranks would be faster",
        )
    if world._core.is_threads and world.size > 1:
        say_once(
            "threads",
            "ranks are threads of one process, and torch has one default random generator for "
            "all of them: seeded dropout differs from run to run; use processes where that matters",
        )


# ---- optimizers ---------------------------------------------------------------------------------

_hooked = False


def refuse_torch_optimizers() -> None:
    """From now on a step of a torch optimizer that holds a sharded Parameter raises."""
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "_flatshard", None) is not None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = _registry.entry_of(parameter)
            if entry is not None:
                name = entry.sharded.members[entry.place].name
                kind = type(optimizer)
                remedy = "SGD, Adam, AdamW, Lion or Adagrad of flatshard.torch"
                if kind.__name__ in ("SGD", "Adam", "AdamW", "Adagrad"):
                    own = f"flatshard.torch.{kind.__name__}"
                    remedy = f"{own}, or flatshard.torch.adopt(optimizer)"
                raise RuntimeError(
                    f"{kind.__module__}.{kind.__name__} holds Parameter {name}, which is sharded: "
                    "each rank would move the weights that all of them share. Use " + remedy
                )


# ---- forward ------------------------------------------------------------------------------------


def _inert(*_: Any, **__: Any) -> None:
    """What stands for a hook in a copy of the module."""


def _the_inert() -> Any:
    return _inert


class Hook:
    """A hook of a sharded module that its copies and pickles do not take along.

    Parameters
    ----------
    sharded : Sharded
        Kept alive by the hook, and so by the module.
    """

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded

    def __deepcopy__(self, memo: Any) -> Any:
        return _inert

    def __reduce__(self) -> Any:
        return (_the_inert, ())


class BeforeForward(Hook):
    """Before a forward of the sharded module: checks, and casts inputs."""

    def __call__(self, module: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        self.sharded.grads.notice_failure()
        self.sharded.check_values("forward")
        self.sharded.held.check("before forward")
        dtype = self.sharded.casts.inputs
        if dtype is None:
            return None
        return _cast(args, dtype), _cast(kwargs, dtype)


class AfterForward(Hook):
    """After it: casts outputs."""

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return _cast(output, self.sharded.casts.outputs)


def install(sharded: Sharded) -> list[Any]:
    """Registers the hooks of forward; returns their handles."""
    module = sharded.module
    before = BeforeForward(sharded)
    handles = [module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)]
    if sharded.casts.outputs is not None:
        handles.append(module.register_forward_hook(AfterForward(sharded)))
    return handles


def _cast(value: Any, dtype: Any) -> Any:
    """Floating-point tensors anywhere in it (lists, dictionaries, outputs of transformers)."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(dtype)
        return leaf

    return tree_map(one, value)
