"""Whole weights, gradients and moments: to read, and to write without breaking masters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from .._kinds import GRAD, WEIGHT
from . import _registry
from ._arrays import as_array, as_tensor

if TYPE_CHECKING:
    from ._module import Sharded

__all__ = ["FullGrads", "full_grads", "full_params", "get", "put"]


# ---- weights ------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_params(
    module: torch.nn.Module, *, write: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Whole Parameters for the length of a ``with`` block.

    Parameters
    ----------
    module : Module
        A sharded one.
    write : bool
        Parameters become private tensors that may be written in any way; when the block ends
        without an exception every rank stores its own part of what changed, fp32 masters included.
        Collective.

    Yields
    ------
    dict of str to Tensor
        Every name (all of a tie) to the Parameter's values: read-only in meaning without ``write``.

    Raises
    ------
    RuntimeError
        A Parameter was written in place before.

    Notes
    -----
    With ``write`` each rank holds a private copy of the module meanwhile. Compute new values alike
    on every rank: a rank's own part of them is what stays.
    """
    sharded = _registry.sharded_of(module, "full_params")
    sharded.held.check("before full_params()")
    if not write:
        named = {}
        for index, member in enumerate(sharded.members):
            whole = sharded.held.whole(index).detach()
            named.update(dict.fromkeys(member.names, whole))
        yield named
        return
    before = [sharded.held.whole(i).detach() for i in range(len(sharded.members))]
    sharded.held.lend([whole.clone() for whole in before])
    try:
        yield {name: m.parameter.data for m in sharded.members for name in m.names}
        values = [m.parameter.data for m in sharded.members]
        for member, value, whole in zip(sharded.members, values, before, strict=True):
            if value.shape != whole.shape or value.dtype != whole.dtype:
                raise ValueError(
                    f"full_params: Parameter {member.name} became {value.dtype} of shape "
                    f"{tuple(value.shape)}; it was {whole.dtype} of {tuple(whole.shape)}"
                )
        changed = [not _same_bits(v, w) for v, w in zip(values, before, strict=True)]
    except BaseException:
        sharded.held.restore()
        raise
    sharded.held.restore()
    anywhere = _any_rank(sharded, changed)
    with sharded.shards.storing() as store:
        for index, value in enumerate(values):
            if anywhere[index]:
                store(index, WEIGHT, as_array(value))
    sharded.held.refresh()


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int32 if a.dtype is torch.float32 else torch.int16
    return bool(torch.equal(a.contiguous().view(kind), b.contiguous().view(kind)))


def _any_rank(sharded: Sharded, flags: list[bool]) -> list[bool]:
    """Which flags are set on some rank: what is stored must be stored by all."""
    both = sharded.world.all_reduce(np.array(flags, np.int32), op="max")
    return [bool(flag) for flag in np.asarray(both)]


# ---- gradients ----------------------------------------------------------------------------------


class FullGrads(Mapping[str, torch.Tensor]):
    """Names to whole averaged gradients, float32, read when asked for."""

    def __init__(self, sharded: Sharded, keep: bool) -> None:
        self._sharded = sharded
        self._keep = keep
        self._sums = sharded.grads.sums()
        self._index = {
            name: i
            for i, member in enumerate(sharded.members)
            if self._sums.had[i]
            for name in member.names
        }
        #: Those that were read, by index, with ``write``.
        self.kept: dict[int, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        index = self._index[name]
        if index in self.kept:
            return self.kept[index]
        made = read_grad(self._sharded, index)
        if self._keep:
            self.kept[index] = made
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def read_grad(sharded: Sharded, index: int) -> torch.Tensor:
    """A whole averaged gradient, after the sums were taken."""
    sums = sharded.grads.sums()
    array = sharded.shards.full(sharded.members[index].name, "grad").astype(np.float32)
    array *= np.float32(sums.factors[index] / sums.divisor)
    return as_tensor(array)


@contextlib.contextmanager
def full_grads(module: torch.nn.Module, *, write: bool = False) -> Iterator[FullGrads]:
    """Whole gradients for the length of a ``with`` block. Collective, after the last backward of a
    step and before clipping.

    Parameters
    ----------
    module : Module
        A sharded one.
    write : bool
        What was read may be written; every rank's own part of it is taken when the block ends
        without an exception. Alike on every rank.

    Yields
    ------
    mapping of str to Tensor
        Every name (all of a tie) of a Parameter that has a gradient on some rank, to the average
        over ranks: whole, float32, a private copy made when it is read.

    Raises
    ------
    RuntimeError
        A backward follows before the step (raised there).
    """
    sharded = _registry.sharded_of(module, "full_grads")
    sharded.grads.settle_drops()
    grads = FullGrads(sharded, write)
    yield grads
    if not write:
        return
    touched = [index in grads.kept for index in range(len(sharded.members))]
    anywhere = _any_rank(sharded, touched)
    values = {i: grads.kept.get(i) for i, flag in enumerate(anywhere) if flag}
    for index in values:
        if values[index] is None:  # another rank read it
            values[index] = read_grad(sharded, index)
    with sharded.shards.storing() as store:
        for index, value in values.items():
            assert value is not None
            _store_grad(sharded, store, index, value)
    sharded.grads.replaced(list(values))


def _store_grad(sharded: Sharded, store: object, index: int, value: torch.Tensor) -> None:
    divisor = np.float32(sharded.grads.sums().divisor)
    assert callable(store)
    store(index, GRAD, as_array(value.float()) * divisor)


# ---- one Parameter ------------------------------------------------------------------------------


def get(parameter: torch.Tensor, what: str = "weight", *, full: bool = False) -> torch.Tensor:
    """A private copy of what belongs to a Parameter.

    Parameters
    ----------
    parameter : Parameter
        A sharded one.
    what : {"weight", "master", "grad"} or a moment such as "exp_avg"
        What to read. "master" is the fp32 weight behind a low-precision one. "grad" is the average
        over ranks, and collective as `full_grads` is.
    full : bool
        Whole, in the Parameter's shape; else the part this rank keeps, flat.

    Raises
    ------
    ValueError
        Not sharded, or nothing of this name is kept.
    """
    entry = _registry.entry_of(parameter)
    if entry is None:
        raise ValueError("get: this Parameter is not sharded")
    shards = entry.sharded.shards
    name = entry.sharded.members[entry.place].name
    if what == "grad":
        entry.sharded.grads.settle_drops()
        entry.sharded.grads.sums()
        whole = read_grad(entry.sharded, entry.place)
        if full:
            return whole
        begin, end = shards._core.range(entry.place, entry.sharded.world.rank)
        return whole.reshape(-1)[begin:end].clone()
    if full:
        return as_tensor(shards.full(name, what))
    return as_tensor(shards.local(name, what)[0])


def put(parameter: torch.Tensor, what: str, tensor: torch.Tensor) -> None:
    """Replace what belongs to a Parameter. Collective.

    Parameters
    ----------
    parameter : Parameter
        A sharded one.
    what : str
        As for `get`; "weight" and "master" set both.
    tensor : Tensor
        Whole, any float dtype, equal on every rank.

    Raises
    ------
    ValueError
        Not sharded, another shape, or nothing of this name is kept.
    """
    entry = _registry.entry_of(parameter)
    if entry is None:
        raise ValueError("put: this Parameter is not sharded")
    sharded, index = entry.sharded, entry.place
    name = sharded.members[index].name
    if tuple(tensor.shape) != tuple(parameter.shape):
        raise ValueError(
            f"put: {name} has shape {tuple(parameter.shape)}, the value {tuple(tensor.shape)}"
        )
    sharded.held.check("before put()")
    if what == "grad":
        sharded.grads.settle_drops()
        sharded.grads.sums()
        with sharded.shards.storing() as store:
            _store_grad(sharded, store, index, tensor)
        sharded.grads.replaced([index])
        return
    sharded.shards.set_full(name, as_array(tensor), what)
    sharded.held.refresh()
