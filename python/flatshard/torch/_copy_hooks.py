"""Hooks of a module whose Parameters have memory only now and then; see ``_copies``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils import _pytree as pytree

from ._guards import Hook

if TYPE_CHECKING:
    from ._copies import Copies

__all__ = [
    "AfterRoot",
    "AfterUnit",
    "BeforeHolder",
    "BeforeRoot",
    "BeforeUnit",
    "OutOfStateDict",
    "Use",
    "refuse_deepcopy",
]

_task_id = torch._C._current_graph_task_id
#: Outside of backward.
_NONE = -1


def _tensors_needing_gradients(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]


class Use:
    """One call of a unit's module, for its backward."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.running = False


class CopyHook(Hook):
    """A hook of a module whose Parameters have memory only now and then."""

    @property
    def held(self) -> Copies:
        """How the weights are held."""
        return cast("Copies", self.sharded.held)

    def __deepcopy__(self, memo: Any) -> Any:
        refuse_deepcopy(memo)


def refuse_deepcopy(memo: Any) -> Any:
    raise RuntimeError(
        'deepcopy of a module sharded with gather="copy": its Parameters have no memory outside of '
        "forward and backward. Call flatshard.torch.unshard(module) first, or build a second "
        "module and load flatshard.torch.state_dict(module) into it"
    )


class BeforeRoot(CopyHook):
    """Before a forward of the sharded module."""

    def __call__(self, module: Any, args: Any) -> None:
        held = self.held
        if _task_id() == _NONE:
            held.release_all()  # an exception may have left units gathered
        held.gather_residents()


class AfterRoot(CopyHook):
    """After it: residents stay for a backward that may follow."""

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        held = self.held
        if torch.is_grad_enabled():
            weak = weakref.ref(held)
            for tensor in _tensors_needing_gradients(output):
                tensor.register_hook(lambda _: _begin(weak, None))
        elif _task_id() == _NONE:
            held.release_all()


class UnitHook(CopyHook):
    """A hook of a unit's module."""

    def __init__(self, sharded: Any, unit: int, calls: list[Use]) -> None:
        super().__init__(sharded)
        self.unit = unit
        #: Calls that have begun; a module may call itself.
        self.calls = calls


class BeforeUnit(UnitHook):
    """Before a forward of a unit's module: gathers; sees to the end of its backward."""

    def __call__(self, module: Any, args: Any, kwargs: Any) -> Any:
        held = self.held
        use = Use(self.unit)
        self.calls.append(use)
        held.gather(self.unit)
        if not torch.is_grad_enabled():
            return None
        weak = weakref.ref(held)
        for tensor in _tensors_needing_gradients((args, kwargs)):
            tensor.register_hook(lambda _: _end(weak, use))
        return None


class AfterUnit(UnitHook):
    """After it: releases; asks for the unit again when a gradient of the outputs comes."""

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        held = self.held
        use = self.calls.pop()
        outputs = _tensors_needing_gradients(output) if torch.is_grad_enabled() else []
        weak = weakref.ref(held)
        for tensor in outputs:
            tensor.register_hook(lambda _: _begin(weak, use))
        # Recomputed inside backward, the unit is needed next.
        if _task_id() == _NONE and not (held.keeps_after_forward and outputs):
            held.release(self.unit)


def _begin(weak: weakref.ref[Copies], use: Use | None) -> None:
    held = weak()
    if held is not None and use is None:
        held.in_backward()
    elif held is not None and use is not None:
        held.begin_use(use)


def _end(weak: weakref.ref[Copies], use: Use) -> None:
    held = weak()
    if held is not None:
        held.end_use(use)


class BeforeHolder(CopyHook):
    """Before a forward of a module that holds Parameters and is no unit: it may be called alone."""

    def __init__(self, sharded: Any, units: list[int]) -> None:
        super().__init__(sharded)
        self.units = units

    def __call__(self, module: Any, args: Any) -> None:
        for unit in self.units:
            self.held.gather(unit)


class OutOfStateDict(CopyHook):
    """State dicts of a module that holds Parameters get whole weights."""

    def __init__(self, sharded: Any, places: list[tuple[str, int]]) -> None:
        super().__init__(sharded)
        self.places = places

    def __call__(self, module: Any, state: Any, prefix: str, metadata: Any) -> None:
        held = self.held
        for attribute, index in self.places:
            key = prefix + attribute
            # With keep_vars the Parameter itself was asked for.
            if key in state and not isinstance(state[key], torch.nn.Parameter):
                state[key] = held.whole_once(index)
