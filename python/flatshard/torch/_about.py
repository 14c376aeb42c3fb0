"""What a sharded module is made of, and what one would need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..plan import Plan, plan_layout, precision_name
from ..plan import describe as describe_shards
from ..policy import Sharding, resolve
from . import _registry
from ._policies import read_precision, read_sharding
from ._units import Units, find_plan

__all__ = ["describe", "plan"]


def describe(module: torch.nn.Module) -> str:
    """Units, precision, and the home of every buffer, as text.

    Parameters
    ----------
    module : Module
        A sharded one.
    """
    sharded = _registry.sharded_of(module, "describe")
    lines = [
        f"{type(sharded.module).__name__}, precision from {sharded.precision_from}",
        describe_shards(sharded.shards),
        "units, in the order of the layout:",
    ]
    for unit in sharded.shards.units:
        numel = sum(sharded.shards.parameters[p].numel for p in unit._params)
        lines.append(f"  {unit.name}  {len(unit._params)} Parameters, {numel:,} elements")
    ties = [m for m in sharded.members if len(m.names) > 1]
    lines += [f"tied: {', '.join(m.names)}" for m in ties]
    if sharded.casts.inputs is not None:
        lines.append(f"floating-point inputs are cast to {sharded.casts.inputs}")
    if sharded.casts.outputs is not None:
        lines.append(f"floating-point outputs are cast to {sharded.casts.outputs}")
    offload = sharded.shards.policy.sharding.offload
    if offload is not None:
        lines.append("offload to the CPU: the device is the CPU, so everything is there already")
    return "\n".join(lines)


def plan(
    module: torch.nn.Module,
    *,
    world_size: int,
    units: Units = "auto",
    sharding: Sharding | int | None = None,
    mp_policy: Any = None,
    optimizer: str = "adamw",
    ignored_params: Iterable[torch.nn.Parameter] | None = None,
    budget: int | None = None,
) -> Plan:
    """Count what sharding a module would take, without allocating it.

    Parameters
    ----------
    module : Module
        Any, on the meta device too.
    world_size : int
        Ranks.
    units, sharding, mp_policy, ignored_params
        As for `fully_shard`.
    optimizer : str
        Decides the moments, as for ``flatshard.plan``.
    budget : int, bytes, optional
        Room of the host.

    Returns
    -------
    Plan
        To the byte what `fully_shard` and the optimizer will charge to the ledger. Activations, and
        the private module that each rank builds before it is sharded, are not in it.

    Raises
    ------
    MemoryBudgetError
        The host's total is above ``budget``.
    """
    cut = find_plan(module, units, {id(p) for p in ignored_params or ()})
    dtypes = list(dict.fromkeys(m.parameter.dtype for m in cut.members))
    precision, _, _ = read_precision(mp_policy, dtypes)
    policy = resolve(
        world_size,
        sharding=read_sharding(sharding, None, None),
        precision=precision,
        produced=precision.param,
    )
    return plan_layout(
        cut.parameters(),
        cut.places(),
        policy,
        world_size,
        optimizer=optimizer,
        named=precision_name(policy.precision),
        budget=budget,
    )
