"""State dicts of the module: out, and in with the fp32 masters following."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from .._kinds import MASTER
from . import _registry
from ._arrays import as_array, as_tensor
from ._compat import register_before_load
from ._guards import Hook

if TYPE_CHECKING:
    from ._module import Sharded

__all__ = [
    "install_loading",
    "load_optimizer_state_dict",
    "load_state_dict",
    "optimizer_state_dict",
    "state_dict",
]


# ---- out ----------------------------------------------------------------------------------------


def state_dict(
    module: torch.nn.Module, *, dtype: Literal["compute", "master"] = "compute"
) -> dict[str, torch.Tensor]:
    """A private copy of a sharded module's state, whole tensors, on any rank.

    Parameters
    ----------
    module : Module
        A sharded one.
    dtype : {"compute", "master"}
        Weights as they are computed with, or the fp32 masters behind them.

    Returns
    -------
    dict of str to Tensor
        As ``module.state_dict()``, buffers included; names of a tie share one tensor. On one host
        no other rank takes part.

    Notes
    -----
    ``module.state_dict()`` itself works too and copies nothing: its tensors lie over the shared
    memory, and show later steps.
    """
    if dtype not in ("compute", "master"):
        raise ValueError(f'dtype={dtype!r}: expected "compute" or "master"')
    sharded = _registry.sharded_of(module, "state_dict")
    sharded.held.check("before state_dict()")
    what = "master" if dtype == "master" else "weight"
    by_pointer: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, value in sharded.module.state_dict(keep_vars=True).items():
        entry = _registry.entry_of(value)
        if entry is None:
            found[name] = value.detach().clone()
            continue
        if entry.place not in by_pointer:
            member = sharded.members[entry.place]
            by_pointer[entry.place] = as_tensor(sharded.shards.full(member.name, what))
        found[name] = by_pointer[entry.place]
    return found


def load_state_dict(
    module: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> Any:
    """Load weights and buffers; fp32 masters follow. Collective; ``module.load_state_dict`` is the
    same.

    Parameters
    ----------
    module : Module
        A sharded one.
    state : mapping of str to Tensor
        Equal on every rank.
    strict : bool
        As in torch.

    Returns
    -------
    NamedTuple
        ``missing_keys`` and ``unexpected_keys``.
    """
    _registry.sharded_of(module, "load_state_dict")
    return module.load_state_dict(state, strict=strict)


def optimizer_state_dict(optimizer: Any, *, full: bool = True) -> dict[str, Any]:
    """The state of an optimizer over a sharded module.

    Parameters
    ----------
    optimizer : Optimizer
        Of this package, or adopted.
    full : bool
        Whole tensors in torch's form, on any rank; else this rank's own parts: Parameter name to
        moment name to (flat tensor, (begin, end)).

    Returns
    -------
    dict
        See above.
    """
    binding = _binding(optimizer, "optimizer_state_dict")
    if full:
        found: dict[str, Any] = optimizer.state_dict()
        return found
    sharded = binding.bind("optimizer_state_dict")
    shards = sharded.shards
    local: dict[str, Any] = {}
    for parameter in shards.parameters:
        if parameter.trainable:
            rows = {}
            for moment in shards._moments:
                array, extent = shards.local(parameter.name, moment)
                rows[moment] = (as_tensor(array), extent)
            local[parameter.name] = rows
    return local


def load_optimizer_state_dict(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Take over a full `optimizer_state_dict`, or a state dict of the same class of
    ``torch.optim``. Collective.

    Parameters
    ----------
    optimizer : Optimizer
        Of this package, or adopted.
    state : mapping
        Equal on every rank.
    """
    _binding(optimizer, "load_optimizer_state_dict")
    optimizer.load_state_dict(state)


def _binding(optimizer: Any, what: str) -> Any:
    found = getattr(optimizer, "_flatshard", None)
    if found is None:
        raise TypeError(
            f"{what}: expected an optimizer of flatshard.torch, or an adopted one, got "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    return found


# ---- in -----------------------------------------------------------------------------------------


class _Loading:
    """A load_state_dict in progress: module by module, and then the masters.

    torch copies values into the shared memory; afterwards each rank stores its own part of what
    changed, from the tensors that were loaded, so that a master keeps bits that the compute copy
    has not.
    """

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded
        self.depth = 0
        self.sources: dict[int, torch.Tensor] = {}

    def begin(self, module: torch.nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        if module is self.sharded.module:
            self.depth = 0  # one that an exception ended is over
        if self.depth == 0:
            self.sources.clear()
            self.sharded.held.check("before load_state_dict()")
            self.sharded.held.lend(None)
            self.sharded.shards._core.store_begin()
        self.depth += 1
        for attribute, parameter in module._parameters.items():
            entry = None if parameter is None else _registry.entry_of(parameter)
            source = state.get(prefix + attribute)
            if entry is not None and isinstance(source, torch.Tensor):
                self.sources[entry.place] = source

    def end(self, module: torch.nn.Module) -> None:
        self.depth -= 1
        if self.depth > 0:
            return
        sharded = self.sharded
        replaced = self._put_back()
        changed = [i for i in range(len(sharded.members)) if sharded.held.changed(i)]
        sums = np.zeros(len(sharded.members), np.int64)
        for index in changed:
            value = self._value(index)
            sums[index] = _checksum(value)
            sharded.shards._core.store(index, MASTER, 0, value)
        self.sources.clear()
        sharded.shards._core.store_end()
        sharded.has_values = True
        sharded.held.refresh()
        everyone = np.asarray(sharded.world.all_gather(sums)).reshape(-1, len(sums))
        if replaced:
            raise RuntimeError(
                f"load_state_dict(assign=True) would replace Parameter {replaced}, which is "
                "sharded; load with assign=False, or before fully_shard()"
            )
        for index, member in enumerate(sharded.members):
            if (everyone[:, index] != sums[index]).any():
                raise ValueError(
                    f"load_state_dict: ranks loaded different values for Parameter {member.name}; "
                    "every rank must load the same state"
                )

    def _value(self, index: int) -> Any:
        parameter = self.sharded.members[index].parameter
        source = self.sources.get(index)
        if (
            source is None
            or source.shape != parameter.shape
            or source.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        ):
            source = parameter
        return as_array(source.to("cpu"))

    def _put_back(self) -> str:
        """Parameters that assign=True replaced come back; the first one's name."""
        first = ""
        for member in self.sharded.members:
            for holder, attribute in member.places:
                if holder._parameters.get(attribute) is not member.parameter:
                    holder._parameters[attribute] = member.parameter
                    first = first or member.name
        return first


def _checksum(array: Any) -> int:
    """A sum over the words of an array: tells values apart, at the speed of memory."""
    raw = array.reshape(-1).view(np.uint8)
    whole = raw[: raw.size // 4 * 4].view(np.uint32)
    rest = raw[whole.size * 4 :]
    return int((int(np.add.reduce(whole, dtype=np.uint64)) + int(rest.sum())) & (2**62 - 1))


class _BeforeLoad(Hook):
    def __call__(self, module: Any, state: Any, prefix: str, *_: Any) -> None:
        self.sharded.loading.begin(module, state, prefix)


class _AfterLoad(Hook):
    def __call__(self, module: Any, incompatible: Any) -> None:
        self.sharded.loading.end(module)


def install_loading(sharded: Sharded) -> list[Any]:
    """Hooks on every module that holds a Parameter, or has one below; their handles."""
    sharded.loading = _Loading(sharded)
    before, after = _BeforeLoad(sharded), _AfterLoad(sharded)
    handles = []
    for module in sharded.module.modules():
        handles.append(register_before_load(module, before))
        handles.append(module.register_load_state_dict_post_hook(after))
    return handles
