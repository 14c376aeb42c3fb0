"""What a Parameter is while it has no memory: whatever would read or write it raises."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["come_back", "leave"]

#: Functions that look at a tensor without its elements.
_HARMLESS = {
    "__get__", "__set__", "__delete__", "size", "dim", "ndimension", "numel", "nelement", "stride",
    "element_size", "storage_offset", "is_floating_point", "is_complex", "is_contiguous", "__len__",
    "get_device", "is_same_size", "has_names", "requires_grad_", "untyped_storage", "__hash__",
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "grad",
}  # fmt: skip
#: Properties that are views of the elements.
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}


class Absent(torch.Tensor):
    """A tensor over memory that is not there now."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__repr__":
                return _describe(args[0])
            if name == "detach" or (name == "__get__" and owner == "data"):
                return func(*args, **(kwargs or {})).as_subclass(Absent)
            if name in _HARMLESS and owner not in _VIEWS:
                return func(*args, **(kwargs or {}))
        raise RuntimeError(_refusal(owner if name == "__get__" else name, args))


class AbsentParameter(Absent, torch.nn.Parameter):
    """A Parameter without memory."""


def _describe(tensor: torch.Tensor) -> str:
    return f"<sharded, not gathered: shape {tuple(tensor.shape)}, {tensor.dtype}>"


def _refusal(name: str, args: Any) -> str:
    from . import _registry

    which = "a Parameter"
    for arg in args:
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            entry = _registry.entry_of(item) if isinstance(item, AbsentParameter) else None
            if entry is not None:
                which = f"Parameter {entry.sharded.members[entry.place].name}"
    return (
        f"{name} on {which}, which is sharded and not gathered now: with gather='copy' a "
        "Parameter has memory only while its unit runs forward or backward. Read it, or write it, "
        "inside flatshard.torch.full_params(module, write=...); convert or move the module before "
        "fully_shard()"
    )


def leave(parameter: torch.nn.Parameter) -> None:
    """From now on touching it raises. It stays the same object."""
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = AbsentParameter


def come_back(parameter: torch.nn.Parameter) -> None:
    """An ordinary Parameter again."""
    if type(parameter) is AbsentParameter:
        parameter.__class__ = torch.nn.Parameter
