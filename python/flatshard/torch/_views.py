"""Parameters that are whole at any time, over memory of the engine.

With ``gather="view"`` every rank of the host maps it; with "copy" at stages 0 to 2 it is the rank's
own. Whatever a script does with Parameters in reading just works. Each has a storage object of its
own: tensors cut from one storage would be taken for ties by savers.
"""

from __future__ import annotations

import os
import zlib

import numpy as np
import torch

from ._arrays import as_tensor
from ._compat import increment_versions
from ._held import Held

__all__ = ["Views"]

_CURE = (
    "change weights inside flatshard.torch.full_params(module, write=True), or with put(), or "
    "before fully_shard()"
)


class Views(Held):
    """Every Parameter over shared memory."""

    def attach(self) -> None:
        self._views: list[torch.Tensor] = []
        shards = self.sharded.shards
        for unit in range(len(shards.units)):
            for array in shards._core.gather(unit, True):
                self._views.append(as_tensor(array))
        for member, view in zip(self.sharded.members, self._views, strict=True):
            member.parameter.data = view
        self._pointers = [view.data_ptr() for view in self._views]
        self._trainable = [m.parameter.requires_grad for m in self.sharded.members]
        self._versions: list[int] = []
        self._watches = os.environ.get("FLATSHARD_WATCH_WRITES", "") == "1"
        self._sums: list[int] = []
        self.refresh()

    def detach(self) -> None:
        for member in self.sharded.members:
            member.parameter.data = member.parameter.data.clone()
        self._views.clear()

    def check(self, where: str) -> None:
        rows = zip(
            self.sharded.members, self._pointers, self._versions, self._trainable, strict=True
        )
        for member, pointer, version, trainable in rows:
            parameter = member.parameter
            if (
                parameter.data_ptr() != pointer
                or parameter._version != version
                or (parameter.requires_grad and not trainable)
            ):
                raise RuntimeError(
                    self._complaint(where, member.name, parameter, pointer, trainable)
                )
            for holder, attribute in member.places:
                if holder._parameters.get(attribute) is not parameter:
                    raise RuntimeError(self._replaced(where, f"Parameter {member.name}"))
        if self._watches:
            self._check_sums(where)
        for holder, attribute, child in self.sharded.links:
            if holder._modules.get(attribute) is not child:
                what = f"the submodule {attribute} of a {type(holder).__name__}"
                raise RuntimeError(self._replaced(where, what))

    def _replaced(self, where: str, what: str) -> str:
        return (
            f"{self._head(where)}: {what} was replaced by another object (a resized embedding, a "
            "new head); call flatshard.torch.unshard(module) before such a change and "
            "fully_shard() after it"
        )

    def _head(self, where: str) -> str:
        return f"rank {self.sharded.world.rank}, {where}"

    def _complaint(
        self,
        where: str,
        name: str,
        parameter: torch.nn.Parameter,
        pointer: int,
        trainable: bool,
    ) -> str:
        if parameter.data_ptr() != pointer:
            return (
                f"{self._head(where)}: Parameter {name} no longer lies in the memory that the "
                "ranks share: something like module.to(dtype), .half() or parameter.data = ... "
                "moved it. Convert the module before fully_shard(), or say mp_policy= there"
            )
        if parameter.requires_grad and not trainable:
            return (
                f"{self._head(where)}: Parameter {name} was frozen when the module was sharded, "
                "and has no room for a gradient; set requires_grad before fully_shard() (or "
                "unshard(), set it, and shard again). Freezing for a while needs nothing"
            )
        return (
            f"{self._head(where)}: Parameter {name} was written in place since the last step. All "
            "ranks share its memory, so every rank's write lands on the same values and the fp32 "
            f"master does not see it; {_CURE}"
        )

    def refresh(self) -> None:
        parameters = [m.parameter for m in self.sharded.members]
        if self._versions:  # tells autograd that graphs of before are out of date
            increment_versions(parameters)
        self._versions = [p._version for p in parameters]
        if self._watches:
            self._sums = self._own_sums()

    def _own_sums(self) -> list[int]:
        """Checksums of what this rank speaks for, a pass over it."""
        shards = self.sharded.shards
        return [zlib.crc32(shards.local(p.name)[0].view(np.uint8).data) for p in shards.parameters]

    def _check_sums(self, where: str) -> None:
        for member, before, now in zip(
            self.sharded.members, self._sums, self._own_sums(), strict=True
        ):
            if before != now:
                raise RuntimeError(
                    f"{self._head(where)}: Parameter {member.name} was written by this rank or "
                    "another since the last step, past every counter of torch (parameter.data, a "
                    f"NumPy view); {_CURE}"
                )

    def changed(self, index: int) -> bool:
        return bool(self.sharded.members[index].parameter._version != self._versions[index])

    def lend(self, values: list[torch.Tensor] | None) -> None:
        if values is not None:
            for member, value in zip(self.sharded.members, values, strict=True):
                member.parameter.data = value

    def restore(self) -> None:
        for member, view in zip(self.sharded.members, self._views, strict=True):
            member.parameter.data = view
        self.refresh()

    def whole(self, index: int) -> torch.Tensor:
        return self._views[index]
