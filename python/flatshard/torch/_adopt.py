"""An optimizer of torch's, kept as the object it is, moves sharded Parameters."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from . import _registry
from ._binding import Binding

__all__ = ["adopt"]


def _rule_of(optimizer: Any) -> str:
    kind = type(optimizer)
    known = {
        torch.optim.SGD: "SGD",
        torch.optim.Adam: "Adam",
        torch.optim.AdamW: "AdamW",
        torch.optim.Adagrad: "Adagrad",
    }
    if kind not in known:
        raise TypeError(
            f"adopt: {kind.__module__}.{kind.__name__} is not offered; of torch.optim SGD, Adam, "
            "AdamW and Adagrad are (themselves: a subclass has a step() of its own), and "
            "flatshard.torch has Lion. Another rule can be written with full_grads(module) and "
            "full_params(module, write=True), without sharded state"
        )
    decoupled = [bool(g.get("decoupled_weight_decay")) for g in optimizer.param_groups]
    if kind is torch.optim.Adam and any(decoupled):
        if not all(decoupled):
            raise ValueError("adopt: decoupled_weight_decay differs between groups")
        return "AdamW"
    return known[kind]


_MUST = {"maximize": False, "differentiable": False, "dampening": 0}


def adopt(optimizer: Any) -> Any:
    """Let an optimizer of ``torch.optim`` move a sharded module.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        SGD, Adam, AdamW or Adagrad; before or after `fully_shard`. State that it has is taken over.

    Returns
    -------
    Optimizer
        The same object: schedulers that hold it go on working. Its ``step`` (which returns a
        ``StepResult``), ``state_dict`` and ``load_state_dict`` are those of this package.

    Raises
    ------
    TypeError
        Another class; the text says which there are.
    ValueError
        An option that is not offered, such as maximize.
    """
    if getattr(optimizer, "_flatshard", None) is not None:
        return optimizer
    rule = _rule_of(optimizer)
    for group in optimizer.param_groups:
        for name, value in _MUST.items():
            if group.get(name, value) != value:
                raise ValueError(
                    f"adopt: {type(optimizer).__name__}({name}={group[name]!r}): this version "
                    f"offers {name}={value!r} alone"
                )
    kind = type(optimizer)
    original_state, original_load = kind.state_dict, kind.load_state_dict
    saved = original_state(optimizer)
    binding = Binding(rule, optimizer.param_groups)
    if saved["state"]:
        binding.load(saved)
        optimizer.state.clear()

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True  # what schedulers of torch look for
        if closure is not None:
            with torch.enable_grad():
                closure()
        return self._flatshard.step()

    def state_dict(self: Any) -> dict[str, Any]:
        groups = original_state(self)["param_groups"]
        return {"state": self._flatshard.state(), "param_groups": groups}

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        original_load(self, {"state": {}, "param_groups": state["param_groups"]})
        self._flatshard.param_groups = self.param_groups
        self._flatshard.load(state)

    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    hooked = torch.optim.Optimizer.profile_hook_step(step)
    if hasattr(step, "_wrapped_by_lr_sched"):
        hooked._wrapped_by_lr_sched = True
    optimizer._flatshard = binding
    optimizer.step = types.MethodType(hooked, optimizer)
    optimizer.state_dict = types.MethodType(state_dict, optimizer)
    optimizer.load_state_dict = types.MethodType(load_state_dict, optimizer)
    _registry.optimizers.add(optimizer)
    return optimizer


def binding_of(optimizer: Any, what: str) -> Binding:
    """The binding of an optimizer of this package, or of an adopted one."""
    found = getattr(optimizer, "_flatshard", None)
    if isinstance(found, Binding):
        return found
    raise TypeError(
        f"{what}: expected an optimizer of flatshard.torch, or an adopted one, got "
        f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    )
