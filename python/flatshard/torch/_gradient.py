"""What stands in ``parameter.grad`` of a sharded module: a handle on the gradient's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import _norms

if TYPE_CHECKING:
    from ._grads import Gradients

__all__ = ["ShardedGradient"]

_aten = torch.ops.aten


class ShardedGradient(torch.Tensor):
    """Shape and dtype of the whole gradient; the numbers are summed over ranks and each rank keeps
    its part. Adding to it, clipping by norm and zeroing work; whatever would need the numbers
    raises and says where they are.
    """

    _owner: Gradients
    _index: int

    @staticmethod
    def __new__(cls, owner: Gradients, index: int) -> ShardedGradient:
        like = owner.sharded.members[index].parameter
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made._owner = owner
        made._index = index
        return made

    def __repr__(self, **_: Any) -> str:
        name = self._owner.sharded.members[self._index].name
        return f"ShardedGradient({name}, shape {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a private copy of the Parameter has no gradient

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (type(None), ())

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise RuntimeError(_refusal(func, args))
        return handler(*args, **(kwargs or {}))


def _refusal(func: Any, args: Sequence[Any]) -> str:
    for arg in args:
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, ShardedGradient):
                name = item._owner.sharded.members[item._index].name
                return (
                    f"{func} on the gradient of {name}: it is sharded over the ranks. "
                    "flatshard.torch.full_grads(module) shows whole gradients, get(parameter, "
                    '"grad") this rank\'s part; clip with flatshard.torch.clip_grad_norm_ or '
                    "torch.nn.utils.clip_grad_norm_, step with an optimizer of flatshard.torch"
                )
    return f"{func} on a sharded gradient"


def _add_(self: ShardedGradient, other: torch.Tensor, *, alpha: float = 1) -> ShardedGradient:
    if alpha != 1 or isinstance(other, ShardedGradient):
        raise RuntimeError(_refusal("add_ of anything but a gradient of backward", [self]))
    self._owner.take(self._index, other)
    return self


def _zero_(self: ShardedGradient) -> ShardedGradient:
    self._owner.drop(self._index)
    return self


def _zero_all(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


def _same(self: ShardedGradient) -> ShardedGradient:
    return self


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **_norms.HANDLERS,
    _aten.add_.Tensor: _add_,
    _aten.zero_.default: _zero_,
    _aten._foreach_zero_.default: _zero_all,
    _aten.detach.default: _same,
    _aten.detach_.default: _same,
}
