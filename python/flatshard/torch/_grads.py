"""Gradients: from autograd's hooks into the slots that ranks sum from.

Nothing here counts on a Parameter's hook firing once per backward, or on backward having one end:
recomputation inside backward (reentrant checkpointing) breaks both. A gradient is put into its
unit's slot when it comes; a unit whose gradients have all come is published at once; what comes
after that is part of the next round, which the step sums as well, because sums are linear.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from ._device import put_gradient
from ._gradient import ShardedGradient
from ._norms import Sums

if TYPE_CHECKING:
    from ._module import Sharded

__all__ = ["Gradients"]

_log = logging.getLogger("flatshard")

_NO_COUNT = -1
_task_id = torch._C._current_graph_task_id
#: Outside of backward.
_NONE = -1


class Gradients:
    """The gradients of one sharded module on this rank.

    Parameters
    ----------
    sharded : Sharded
        The module; its weights are attached.
    """

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded
        self._core = sharded.shards._core
        members = sharded.members
        self._unit_of = [m.unit for m in members]
        self._wanted = [0] * len(sharded.shards.units)
        for member in members:
            self._wanted[member.unit] += bool(member.parameter.requires_grad)
        self._handles: list[ShardedGradient | None] = [
            ShardedGradient(self, i) if m.parameter.requires_grad else None
            for i, m in enumerate(members)
        ]
        self._hooks: list[Any] = []
        self._needs_scale = sharded.shards.policy.precision.loss_scale is not None
        #: Graph tasks of autograd that are running (several when backward runs inside backward).
        self._tasks: set[int] = set()
        #: Of the present micro-batch.
        self._came = [False] * len(members)
        self._missing = list(self._wanted)
        self._published = [False] * len(self._wanted)
        #: Of the present step: gradients that came and were not dropped.
        self._has = [False] * len(members)
        self._dropped: set[int] = set()
        self._failed = False
        self.count: int | None = None
        self.keep_local = False
        #: Inside of `flatshard.torch.backward`.
        self.scaled = False
        self._forget_counts()
        weak = weakref.ref(self)
        for index, member in enumerate(members):
            if member.parameter.requires_grad:
                hook = functools.partial(_on_gradient, weak, index)
                self._hooks.append(member.parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Removes the hooks, and gradients from the Parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for member in self.sharded.members:
            if isinstance(member.parameter.grad, ShardedGradient):
                member.parameter.grad = None

    # -- in backward ------------------------------------------------------------------------------

    def on_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Autograd has accumulated into ``parameter.grad``."""
        grad = parameter.grad
        if type(grad) is ShardedGradient:
            return  # it was added to, and so taken, already
        parameter.grad = None
        self.take(index, grad)
        parameter.grad = self._handles[index]

    def take(self, index: int, grad: torch.Tensor) -> None:
        """Puts a gradient into its slot; publishes its unit when that is complete."""
        task = _task_id()
        if task not in self._tasks:
            self._enter(task, index)
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {self.sharded.members[index].name} is sparse; flatshard sums "
                "dense ones: use Embedding(sparse=False)"
            )
        put_gradient(self.sharded, index, grad)
        if self._came[index]:
            return
        self._came[index] = self._has[index] = True
        self._dropped.discard(index)
        unit = self._unit_of[index]
        self._missing[unit] -= 1
        if self._missing[unit] == 0 and not self._published[unit]:
            self._published[unit] = True
            self._core.grad_publish(unit, self.keep_local)

    def _enter(self, task: int, index: int) -> None:
        if task == _NONE:
            raise RuntimeError(
                f"the gradient of {self.sharded.members[index].name} is sharded: nothing can be "
                "added to it outside of backward"
            )
        if self._needs_scale and not self.scaled:
            raise RuntimeError(
                "float16 gradients vanish without loss scaling, and this backward scales nothing: "
                "call flatshard.torch.backward(loss, optimizer=optimizer)"
            )
        if not self._tasks:
            self.settle_drops(more=True)
        if self._sums is not None:
            raise RuntimeError(
                "a backward after the gradients of this step were looked at (full_grads, get, "
                "torch.nn.utils.clip_grad_norm_): step(), or zero_grad(), comes first"
            )
        self._tasks.add(task)
        # Not a flag: after an exception in backward no callback runs, and a flag would stay set.
        torch.autograd.Variable._execution_engine.queue_callback(
            functools.partial(_on_end, weakref.ref(self), task)
        )

    def on_end(self, task: int) -> None:
        """A graph task of autograd ended. The last one ends the micro-batch."""
        self._tasks.discard(task)
        if not self._tasks:
            self._end_round()

    def _end_round(self) -> None:
        count = _NO_COUNT if self.count is None else self.count
        self._core.round_end(count, self.keep_local)
        if self.count is not None:
            self.counted += self.count
            self.count_given = True
        self._came = [False] * len(self._came)
        self._missing = list(self._wanted)
        self._published = [False] * len(self._wanted)

    # -- outside of backward ----------------------------------------------------------------------

    def notice_failure(self) -> None:
        """Outside of backward: was one left by an exception? Local."""
        if self._tasks and _task_id() == _NONE:
            self._tasks.clear()
            self._failed = True
            self._came = [False] * len(self._came)
            self._missing = list(self._wanted)
            self._published = [False] * len(self._wanted)
            _log.warning("a backward ended with an exception: its gradients are partial")

    def drop(self, index: int) -> None:
        """The gradient was zeroed in place."""
        self._has[index] = False
        self._dropped.add(index)

    def settle_drops(self, *, more: bool = False) -> None:
        """Gradients that somebody set to None, or to zero, since they came are forgotten.
        Collective if there are any: every rank drops alike.

        Parameters
        ----------
        more : bool
            A backward is about to add to what is there.

        Raises
        ------
        RuntimeError
            A gradient was set by hand; a partial backward was not dropped; or some were dropped,
            others not, and ``more`` are to come.
        """
        self.notice_failure()
        kept: list[int] = []
        gone = sorted(self._dropped)
        for index, member in enumerate(self.sharded.members):
            grad = member.parameter.grad
            if type(grad) is ShardedGradient:
                if self._has[index]:
                    kept.append(index)
            elif grad is not None and self._handles[index] is not None:
                raise RuntimeError(
                    f"the gradient of {member.name} was set by hand; say it to all ranks with "
                    'flatshard.torch.put(parameter, "grad", value). Or a backward ended with an '
                    "exception and left it: then call zero_grad() on every rank"
                )
            elif self._has[index]:
                gone.append(index)
        if self._failed and kept:
            raise RuntimeError(
                f"rank {self.sharded.world.rank}: a backward ended with an exception and left "
                "partial gradients; call zero_grad() on every rank and repeat the micro-batches of "
                "this step"
            )
        if gone and kept:
            self._forget_some(gone, kept, more)
        elif gone or self._failed:
            self._core.grad_drop()
            self.forget()

    def _forget_some(self, gone: list[int], kept: list[int], more: bool) -> None:
        if more:
            members = self.sharded.members
            raise RuntimeError(
                f"the gradient of {members[gone[0]].name} was dropped and that of "
                f"{members[kept[0]].name} was not, and another backward follows: drop single "
                "gradients after the last backward of a step, or all of them (zero_grad())"
            )
        sums = self.sums()
        for index in gone:
            _core.grad_forget(self._core, index)
            self._has[index] = False
            sums.squares[index] = sums.largest[index] = 0.0
            sums.had[index] = False
        self._dropped.clear()

    def taken(self) -> None:
        """The step took the gradients."""
        self.forget()
        for member in self.sharded.members:
            if isinstance(member.parameter.grad, ShardedGradient):
                member.parameter.grad = None

    def forget(self) -> None:
        """No gradient has come. Handles stay: backward may be adding to one just now."""
        self._has = [False] * len(self._has)
        self._dropped.clear()
        self._failed = False
        self._forget_counts()

    def _forget_counts(self) -> None:
        #: Of this step's micro-batches on this rank.
        self.counted = 0
        self.count_given = False
        self._sums: Sums | None = None

    def sums(self) -> Sums:
        """Every gradient in two numbers. Collective the first time in a step."""
        if self._sums is None:
            self._sums = Sums(self)
        return self._sums

    def replaced(self, indices: list[int]) -> None:
        """Gradients were stored, alike on every rank: their norms anew. Collective."""
        for index in indices:
            _core.grad_replaced(self._core, index)
        factors = self.sums().factors
        factors[indices] = 1.0
        self._sums = Sums(self)
        # The core's sums know the factors already.
        scale = factors != 0
        self._sums.squares[scale] /= factors[scale] ** 2
        self._sums.largest[scale] /= abs(factors[scale])
        self._sums.factors = factors


def _on_gradient(weak: weakref.ref[Gradients], index: int, parameter: torch.nn.Parameter) -> None:
    gradients = weak()
    if gradients is not None:
        gradients.on_gradient(index, parameter)


def _on_end(weak: weakref.ref[Gradients], task: int) -> None:
    gradients = weak()
    if gradients is not None:
        gradients.on_end(task)
