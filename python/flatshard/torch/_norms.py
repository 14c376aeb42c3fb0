"""Norms of single gradients, and scaling them, between the last backward and the step.

What ``torch.nn.utils.clip_grad_norm_`` and others do with ``parameter.grad`` ends here. Every rank
must do it alike: the first look is a collective, later ones are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import _core

if TYPE_CHECKING:
    from ._grads import Gradients

__all__ = ["HANDLERS", "Sums"]

_aten = torch.ops.aten


class Sums:
    """Each Parameter's gradient over all ranks and micro-batches, in two numbers. Collective.

    Parameters
    ----------
    gradients : Gradients
        Of the sharded module; no more may come before the step.
    """

    def __init__(self, gradients: Gradients) -> None:
        sharded = gradients.sharded
        n = len(sharded.members)
        mine = np.zeros((2, n), np.float64)
        _core.grad_sums(sharded.shards._core, mine)
        counts = [float(gradients.counted), float(gradients.count_given)]
        world = sharded.world
        total = np.asarray(world.all_reduce(np.concatenate([mine[0], counts]), op="sum"))
        #: Sums of squares, and largest magnitudes, of the undivided sums.
        self.squares = total[:n]
        self.largest = np.asarray(world.all_reduce(mine[1].copy(), op="max"))
        divisor = max(total[n], 1.0) if total[n + 1] > 0 else float(world.size)
        scale = 1.0 if sharded.optimizer is None else sharded.optimizer.engine.loss_scale
        #: What makes an average of a sum.
        self.divisor = divisor * scale
        self.had = np.frombuffer(sharded.shards._core.had(), np.uint8).astype(bool)  # a copy
        #: What gradients were multiplied by since.
        self.factors = np.ones(n)

    def norm(self, index: int, order: float) -> float:
        """Norm of one averaged gradient, 2 or inf."""
        if order == 2.0:
            size = math.sqrt(self.squares[index])
        else:
            size = float(self.largest[index])
        return size * abs(float(self.factors[index])) / self.divisor


def _order(order: Any) -> float:
    value = float(order)
    if value not in (2.0, math.inf):
        raise ValueError(
            f"norm of order {value:g} of a sharded gradient: this version has 2 and inf"
        )
    return value


def _norm(
    self: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    if dim is not None:
        raise RuntimeError("the norm of a sharded gradient along a dimension is not offered")
    value = self._owner.sums().norm(self._index, _order(order))
    made: torch.Tensor = torch.tensor(value, dtype=dtype or torch.float32)
    return made


def _norms(tensors: Sequence[Any], order: Any = 2, dtype: Any = None) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(t, _order(order), dtype=dtype) for t in tensors]


def _mul_(self: Any, other: Any) -> Any:
    if isinstance(other, torch.Tensor) and other.numel() != 1:
        raise RuntimeError("a sharded gradient can be multiplied by one number alone")
    factor = float(other)
    sums = self._owner.sums()
    if factor != 1.0:
        _core.grad_scale(self._owner.sharded.shards._core, self._index, factor)
        sums.factors[self._index] *= factor
    return self


def _mul_all(tensors: Sequence[Any], other: Any) -> None:
    for tensor in tensors:
        tensor.mul_(other)


#: What `ShardedGradient` does on its owner's sums.
HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norms,
    _aten.mul_.Tensor: _mul_,
    _aten.mul_.Scalar: _mul_,
    _aten._foreach_mul_.Tensor: _mul_all,
    _aten._foreach_mul_.Scalar: _mul_all,
}
