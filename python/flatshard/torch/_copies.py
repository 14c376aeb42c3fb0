"""Copy mode at stage 3, or on a GPU: a Parameter has memory only while its unit runs.

Each Parameter has one storage for ever, which is resized: to nothing between uses, to its size when
its unit is gathered. What autograd saved of it (a transposed view, say) lies over the same storage,
and is right again when backward gathers the unit once more. Touching a Parameter without memory
raises, by a class that it has meanwhile.

A unit is gathered before its module's forward and before the first gradient of its outputs; it is
released after forward, and in backward when its gradients, or that of an input, are there. What
lies in no unit's module, and what is tied across units, is gathered for the whole of a forward and
backward. On a host whole weights are read from their owners' shards, which lie in memory that the
ranks map: nothing waits. On a GPU a unit is gathered by a collective (at stages 0 to 2 from the
rank's own whole copy) and copied into the tensors in the order of torch's stream.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .._kinds import WEIGHT
from ._absent import come_back, leave
from ._arrays import borrow_array, torch_dtype
from ._compat import increment_versions
from ._copy_hooks import (
    AfterRoot,
    AfterUnit,
    BeforeHolder,
    BeforeRoot,
    BeforeUnit,
    OutOfStateDict,
    Use,
    refuse_deepcopy,
)
from ._device import place
from ._held import Held

__all__ = ["Copies"]

_task_id = torch._C._current_graph_task_id
#: Outside of backward.
_NONE = -1


class Copies(Held):
    """Every Parameter with memory while its unit is gathered."""

    def attach(self) -> None:
        members = self.sharded.members
        modules = self.sharded.unit_modules
        dtype = torch_dtype(self.sharded.shards.policy.precision.param)
        reshard = self.sharded.shards.policy.sharding.reshard_after_forward
        self._in_unit: list[list[int]] = [[] for _ in modules]
        #: Parameters lie over these; they are never exchanged.
        self._full: list[torch.Tensor] = []
        for index, member in enumerate(members):
            self._in_unit[member.unit].append(index)
            p = member.parameter
            self._full.append(torch.empty(p.shape, dtype=dtype, device=p.device))
        self._on_device = self.sharded.world.device != "cpu"
        inside = [{id(s) for s in m.modules()} if m is not None else set() for m in modules]
        #: Gathered as long as the sharded module runs.
        self._resident = [
            module is None
            or module is self.sharded.module
            or any(id(h) not in inside[u] for i in self._in_unit[u] for h, _ in members[i].places)
            for u, module in enumerate(modules)
        ]
        self.keeps_after_forward = not reshard
        self._gathered = [False] * len(modules)
        #: Calls of each unit's module whose backward runs, with its graph task.
        self._running: list[list[tuple[Use, int]]] = [[] for _ in modules]
        self._callbacks: set[int] = set()
        #: Gradients that have not come in this backward.
        self._missing = [len(members) for members in self._in_unit]
        self._all_trainable = [
            all(members[i].parameter.requires_grad for i in indices) for indices in self._in_unit
        ]
        self._trainable = [m.parameter.requires_grad for m in members]
        self._versions: list[int] = []
        for index, member in enumerate(members):
            self._full[index].untyped_storage().resize_(0)
            member.parameter.data = self._full[index]
            leave(member.parameter)
        self._storages = [f.untyped_storage()._cdata for f in self._full]
        self._handles = list(self._install())
        # copy.deepcopy would stumble over a Parameter before it comes to a hook.
        self.sharded.module.__dict__["__deepcopy__"] = refuse_deepcopy
        self._wholes: dict[int, weakref.ref[torch.Tensor]] = {}
        self.refresh()

    def _install(self) -> Iterator[Any]:
        root = self.sharded.module
        yield root.register_forward_pre_hook(BeforeRoot(self.sharded), prepend=True)
        yield root.register_forward_hook(AfterRoot(self.sharded), always_call=True)
        for unit, module in enumerate(self.sharded.unit_modules):
            if module is not None and not self._resident[unit]:
                calls: list[Use] = []
                before = BeforeUnit(self.sharded, unit, calls)
                after = AfterUnit(self.sharded, unit, calls)
                yield module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                yield module.register_forward_hook(after, always_call=True)
        # A submodule may be called without the module of its unit around it.
        units = {id(m) for m in self.sharded.unit_modules}
        holders: dict[int, tuple[torch.nn.Module, list[tuple[str, int]]]] = {}
        for index, member in enumerate(self.sharded.members):
            for holder, attribute in member.places:
                holders.setdefault(id(holder), (holder, []))[1].append((attribute, index))
        weak = weakref.ref(self)
        for member in self.sharded.members:
            if member.parameter.requires_grad:
                hook = functools.partial(_on_gradient, weak, member.unit)
                yield member.parameter.register_post_accumulate_grad_hook(hook)
        for holder, places in holders.values():
            yield holder._register_state_dict_hook(OutOfStateDict(self.sharded, places))
            if id(holder) not in units:
                needed = sorted({self.sharded.members[i].unit for _, i in places})
                yield holder.register_forward_pre_hook(BeforeHolder(self.sharded, needed))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        del self.sharded.module.__dict__["__deepcopy__"]
        for index, member in enumerate(self.sharded.members):
            come_back(member.parameter)
            member.parameter.data = self.whole(index)
        self._full.clear()

    # -- gathering --------------------------------------------------------------------------------

    def gather(self, unit: int) -> None:
        """Gives the unit's Parameters their memory and values, if they lack them. Local on a host;
        on a GPU a collective at stage 3."""
        if self._gathered[unit]:
            return
        for index in self._in_unit[unit]:
            full = self._full[index]
            full.untyped_storage().resize_(full.numel() * full.element_size())
            if not self._on_device:
                self._read(index, full)
        if self._on_device:
            self._copy_unit(unit)
        for index in self._in_unit[unit]:
            come_back(self.sharded.members[index].parameter)
        self._gathered[unit] = True

    def _copy_unit(self, unit: int) -> None:
        core = self.sharded.shards._core
        arrays = core.gather(unit)
        try:
            for index, array in zip(self._in_unit[unit], arrays, strict=True):
                place(self.sharded.world, array, self._full[index])
        finally:
            core.release(unit, True)

    def release(self, unit: int) -> None:
        """Takes the memory back."""
        if self._gathered[unit]:
            for index in self._in_unit[unit]:
                self._full[index].untyped_storage().resize_(0)
                leave(self.sharded.members[index].parameter)
            self._gathered[unit] = False

    def release_all(self) -> None:
        """Takes all memory back."""
        for unit in range(len(self._gathered)):
            self.release(unit)

    def _read(self, index: int, into: torch.Tensor) -> None:
        # Written behind autograd's back, on purpose: the values are what they were in forward.
        self.sharded.shards._core.load(index, WEIGHT, 0, borrow_array(into))

    def gather_residents(self) -> None:
        """What is gathered as long as the module runs."""
        for unit, resident in enumerate(self._resident):
            if resident:
                self.gather(unit)

    # -- backward ---------------------------------------------------------------------------------

    def in_backward(self) -> int:
        """A gradient has come to something the module gave out. Gives the graph task's number."""
        # In a backward autograd records just where its caller asked for create_graph=True.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"rank {self.sharded.world.rank}: backward with create_graph=True through a module "
                "whose Parameters have memory only while their unit runs: a second backward would "
                'need them again. Shard it with Sharding(gather="view") (on the CPU), which keeps '
                "them whole, or at stage 0 to 2 on the CPU"
            )
        task = int(_task_id())
        if task not in self._callbacks:
            self._callbacks.add(task)
            self.gather_residents()
            weak = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _on_end(weak, task))
        return task

    def begin_use(self, use: Use) -> None:
        """Backward of one call of a unit's module begins."""
        task = self.in_backward()
        self.gather(use.unit)
        if not use.running:
            use.running = True
            self._running[use.unit].append((use, task))

    def end_use(self, use: Use) -> None:
        """The gradient of one of its inputs is there. Autograd runs what was made last first, so
        nothing of that call's backward is left."""
        running = self._running[use.unit]
        running[:] = [row for row in running if row[0] is not use]
        use.running = False
        if not running:
            self.release(use.unit)

    def gradient_came(self, unit: int) -> None:
        """One more of a unit's Parameters has its gradient. A unit that has them all, and none that
        is frozen, is through, although an input's gradient may wait for others that use it."""
        self._missing[unit] -= 1
        if self._missing[unit] == 0 and self._all_trainable[unit] and not self._resident[unit]:
            self._running[unit].clear()
            self._missing[unit] = len(self._in_unit[unit])
            self.release(unit)

    def on_end(self, task: int) -> None:
        """A graph task of autograd ended, and with it the calls whose inputs need no gradient."""
        self._callbacks.discard(task)
        self._missing = [len(members) for members in self._in_unit]
        for unit, running in enumerate(self._running):
            before = len(running)
            running[:] = [row for row in running if row[1] != task]
            if before and not running and not self._resident[unit]:
                self.release(unit)
        if not self._callbacks:
            self.release_all()

    # -- what the rest of the package asks ---------------------------------------------------------

    def check(self, where: str) -> None:
        rows = zip(
            self.sharded.members, self._storages, self._versions, self._trainable, strict=True
        )
        for member, storage, version, trainable in rows:
            parameter = member.parameter
            if parameter.untyped_storage()._cdata != storage:
                what = (
                    "no longer lies in the memory it was given: something like module.to(dtype) or "
                    "parameter.data = ... moved it. Convert the module before fully_shard()"
                )
            elif parameter._version != version:
                what = (
                    "was written in place. Only a copy of it was: change weights inside "
                    "flatshard.torch.full_params(module, write=True), or with put()"
                )
            elif parameter.requires_grad is not trainable:
                what = "was frozen or thawed: set requires_grad before fully_shard()"
            else:
                continue
            raise RuntimeError(
                f"rank {self.sharded.world.rank}, {where}: Parameter {member.name} {what}"
            )

    def refresh(self) -> None:
        self.release_all()
        self._wholes.clear()
        parameters = [m.parameter for m in self.sharded.members]
        if self._versions:  # tells autograd that graphs of before are out of date
            increment_versions(parameters)
        self._versions = [p._version for p in parameters]

    def changed(self, index: int) -> bool:
        return bool(self.sharded.members[index].parameter._version != self._versions[index])

    def lend(self, values: list[torch.Tensor] | None) -> None:
        for unit in range(len(self._gathered)):
            if values is None:
                self.gather(unit)
            else:
                self.release(unit)
        if values is not None:
            for member, value in zip(self.sharded.members, values, strict=True):
                come_back(member.parameter)
                member.parameter.data = value

    def restore(self) -> None:
        for member, full in zip(self.sharded.members, self._full, strict=True):
            member.parameter.data = full
            leave(member.parameter)
        self.refresh()

    def whole(self, index: int) -> torch.Tensor:
        like = self._full[index]
        found = torch.empty(like.shape, dtype=like.dtype)
        self._read(index, found)
        return found.to(like.device)

    def whole_once(self, index: int) -> torch.Tensor:
        """The same tensor again as long as somebody keeps it: names of a tie stay tied."""
        last = self._wholes.get(index)
        found = last() if last is not None else None
        if found is None:
            found = self.whole(index)
            self._wholes[index] = weakref.ref(found)
        return found


def _on_end(weak: weakref.ref[Copies], task: int) -> None:
    held = weak()
    if held is not None:
        held.on_end(task)


def _on_gradient(weak: weakref.ref[Copies], unit: int, _: Any) -> None:
    held = weak()
    if held is not None:
        held.gradient_came(unit)
