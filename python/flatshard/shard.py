"""The arrays way in: a mapping of arrays, sharded over the ranks of a world."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ._arrays import Array, as_array, raw
from ._device_arrays import is_device_array, to_host
from ._hash import state_sha256, weights_sha256
from ._kinds import WEIGHT
from ._layout import Group, Parameter, default_unit, take_groups
from ._shards import Shards
from ._unit import Unit
from .policy import Precision, Sharding, resolve

if TYPE_CHECKING:
    from .world import World

__all__ = [
    "Group",
    "Parameter",
    "Shards",
    "Unit",
    "shard",
    "state_sha256",
    "weights_sha256",
]

_log = logging.getLogger("flatshard")


def _agree_on_values(world: World, arrays: Mapping[str, Array]) -> bool:
    """Whether every rank passed the same bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays.values():
        digest.update(raw(np.ascontiguousarray(array)))
    mine = np.frombuffer(digest.digest(), np.int64)
    return bool(np.all(world.all_gather(mine) == mine))


def shard(
    params: Mapping[str, Array],
    world: World,
    *,
    sharding: Sharding = Sharding(),
    precision: Precision = "fp32",
    unit_of: Callable[[str], str] | None = None,
    frozen: Iterable[str] = (),
    groups: Mapping[str, Mapping[str, Any]] | None = None,
) -> Shards:
    """Shard a mapping of arrays over the ranks of a world. Collective.

    Parameters
    ----------
    params : mapping of str to ndarray
        Name to initial value: float arrays of any shape, of NumPy or of a library whose arrays it
        or DLPack can read on the CPU, or on the world's GPU. One array under two names is a tie.
        Copied.
    world : World
        The ranks.
    sharding : Sharding
        What each rank keeps.
    precision : str or MixedPrecision
        A preset ("fp32", "bf16", "bf16-split", "bf16-pure", "bf16-pure-sr", "fp16") or a mix.
    unit_of : callable, optional
        Parameter name to unit name; by default the name up to its first numbered component.
    frozen : iterable of str
        Names without gradient and optimizer state.
    groups : mapping, optional
        ``{name: {"match": [patterns], "lr": ..., ...}}`` for the optimizer.

    Returns
    -------
    Shards
        With the values of rank 0 where ranks passed different ones (a warning says so).

    Raises
    ------
    TypeError, ValueError
        A value that is no float array, an unknown name in ``frozen``.
    CollectiveMismatch
        Ranks passed different names, shapes, dtypes, orders, shardings, precisions or groups; the
        text says which rank differs in what. On all ranks; the world stays usable.

    Notes
    -----
    Gradients go on the wire in the arrays' own dtype unless ``MixedPrecision.reduce`` says
    otherwise. Memory: each rank keeps about 1/world of what the stage shards; ``flatshard.plan``
    lists the bytes.
    """
    arrays: dict[str, Array] = {}
    for name, value in params.items():
        on_device = is_device_array(value) and world.device != "cpu"
        arrays[name] = to_host(name, value, world) if on_device else as_array(name, value)
    unknown = set(frozen) - set(arrays)
    if unknown:
        raise ValueError(f"frozen: no parameter {', '.join(sorted(unknown))}")
    parameters, units, values = _define(params, arrays, unit_of or default_unit, frozenset(frozen))
    taken = take_groups(groups)
    dtypes = {a.dtype.name for a in arrays.values()}
    produced = "bfloat16" if dtypes == {"bfloat16"} else "float32"
    policy = resolve(
        world.size,
        sharding=sharding,
        precision=precision,
        produced=produced,
        device=world.device,
    )
    shards = Shards(
        world,
        parameters=parameters,
        units=units,
        policy=policy,
        groups=taken,
        dtypes=[values[p.name].dtype.name for p in parameters],
    )
    try:
        equal = _agree_on_values(world, values)
        if not equal and world.is_main:
            _log.warning("ranks passed different initial values; all take those of rank 0")
        with shards.storing() as store:
            for index, parameter in enumerate(parameters):
                value = np.ascontiguousarray(values[parameter.name])
                if not equal:
                    value = world.broadcast(value.copy(), root=0)
                store(index, WEIGHT, value)
    except BaseException:
        shards.close()
        raise
    return shards


def _define(
    params: Mapping[str, Array],
    arrays: Mapping[str, Array],
    unit_of: Callable[[str], str],
    frozen: frozenset[str],
) -> tuple[list[Parameter], list[tuple[str, int, int]], dict[str, Array]]:
    """Ties found by identity, parameters sorted by unit, units in order of first appearance.
    Gradients are expected from the last unit to the first; a tie across units
    belongs to its first name's."""
    first_name: dict[int, str] = {}
    second: dict[str, str] = {}
    for name in params:
        owner = first_name.setdefault(id(params[name]), name)
        if owner != name:
            if owner in second:
                raise ValueError(
                    f"{owner}, {second[owner]} and {name} are one array; two names are the most"
                )
            second[owner] = name
    order: dict[str, list[str]] = {}
    for name in arrays:
        if name not in second.values():
            order.setdefault(unit_of(name), []).append(name)
    last = len(order) - 1
    units = [(unit, last - u, last - u) for u, unit in enumerate(order)]
    parameters = [
        Parameter(
            name=name,
            tied_name=second.get(name),
            shape=arrays[name].shape,
            unit=u,
            trainable=name not in frozen and second.get(name) not in frozen,
        )
        for u, unit in enumerate(order)
        for name in order[unit]
    ]
    return parameters, units, {p.name: arrays[p.name] for p in parameters}
