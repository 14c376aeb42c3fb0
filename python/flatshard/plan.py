"""Memory, before and while it is used: the plan, the ledger, and what is kept in which
precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from . import _core
from ._charged import Charged, add, charged
from ._layout import Parameter, core_definition, default_unit
from ._shards import Shards
from .errors import MemoryBudgetError
from .policy import MixedPrecision, Policy, Precision, Sharding, resolve

__all__ = ["Plan", "describe", "memory", "plan"]

#: Moment arrays of each optimizer by name.
_MOMENTS = {
    "sgd": 0,
    "sgd-momentum": 1,
    "adam": 2,
    "adamw": 2,
    "adam-amsgrad": 3,
    "adamw-amsgrad": 3,
    "lion": 1,
    "adagrad": 1,
}


def _bytes(n: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:,.1f} {unit}"
        n /= 1024
    raise AssertionError


@dataclass(frozen=True)
class Plan:
    """Every class of memory, per rank and per host, to the byte.

    Parameters
    ----------
    ranks : tuple of dict
        For each rank: class to (private, world, device) bytes. World bytes are memory shared with
        the other ranks of the host, each byte charged to the rank that owns it; device bytes lie in
        the memory of the rank's GPU.
    what : str
        What was planned, in words.
    """

    ranks: tuple[Charged, ...]
    what: str

    def rank(self, rank: int = 0) -> dict[str, int]:
        """Class to bytes charged to a rank, on the host and on its device."""
        return {name: sum(row) for name, row in self.ranks[rank].items()}

    def device(self, rank: int = 0) -> dict[str, int]:
        """Class to bytes in the memory of a rank's device; all 0 on the CPU."""
        return {name: row[2] for name, row in self.ranks[rank].items()}

    @property
    def host(self) -> dict[str, int]:
        """Class to bytes of all ranks in the memory of a host that holds the whole world."""
        return {name: sum(sum(rank[name][:2]) for rank in self.ranks) for name in self.ranks[0]}

    @property
    def rank_nbytes(self) -> int:
        """Bytes of the rank that needs most, on the host and on its device."""
        return max(sum(map(sum, rank.values())) for rank in self.ranks)

    @property
    def host_nbytes(self) -> int:
        """Bytes of all ranks in the host's memory."""
        return sum(self.host.values())

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device of the rank that needs most there; 0 on the CPU."""
        return max(sum(self.device(rank).values()) for rank in range(len(self.ranks)))

    def table(self) -> str:
        """The plan as text, one class a line."""
        columns = {"rank 0": self.rank(0), "host": self.host}
        if self.device_nbytes:
            device = self.device(0)
            mine = {name: nbytes - device[name] for name, nbytes in self.rank(0).items()}
            columns = {"rank 0": mine, "its device": device, "host": self.host}
        lines = [self.what, f"{'':14}" + "".join(f"{head:>14}" for head in columns)]
        for name in self.ranks[0]:
            row = [column[name] for column in columns.values()]
            if any(row):
                lines.append(f"{name:14}" + "".join(f"{_bytes(n):>14}" for n in row))
        totals = [sum(column.values()) for column in columns.values()]
        lines.append(f"{'total':14}" + "".join(f"{_bytes(n):>14}" for n in totals))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def _shapes(source: Mapping[str, Any]) -> tuple[list[Parameter], list[tuple[str, int, int]]]:
    """Parameters and units of a mapping of names to shapes or arrays."""
    order: dict[str, list[str]] = {}
    for name in source:
        order.setdefault(default_unit(name), []).append(name)
    last = len(order) - 1
    parameters = [
        Parameter(name, None, tuple(getattr(source[name], "shape", source[name])), u)
        for u, names in enumerate(order.values())
        for name in names
    ]
    return parameters, [(unit, last - u, last - u) for u, unit in enumerate(order)]


def plan(
    source: Any,
    *,
    world_size: int,
    sharding: Sharding = Sharding(),
    precision: Precision = "fp32",
    optimizer: str = "adamw",
    batch: tuple[int, int] | None = None,
    checkpointing: bool = False,
    background: bool = False,
    budget: int | None = None,
    device: str = "cpu",
) -> Plan:
    """Count the memory of a training run without allocating any of it.

    Parameters
    ----------
    source : str, path, dict, or mapping of str to shape or array
        A native model (a size by name, a configuration, a Hugging Face folder), or parameters.
    world_size : int
        Ranks.
    sharding : Sharding
        What each rank keeps.
    precision : str or MixedPrecision
        A preset or a mix.
    optimizer : str
        Decides the moments: "sgd", "sgd-momentum", "adam", "adamw", "adam-amsgrad",
        "adamw-amsgrad", "lion" or "adagrad".
    batch : (int, int), optional
        Sequences and tokens of a micro-batch: adds what a native model's forward and backward hold.
    checkpointing : bool
        Activations are recomputed in backward (native models).
    background : bool
        Adds what ``checkpoint.save(background=True)`` holds until it is written: a copy of what
        each rank saves, and its buffer.
    budget : int, bytes, optional
        Room of the host.
    device : {"cpu", "cuda"}
        Where ranks compute: on a GPU, what ``Sharding(offload=)`` does not put on the CPU lies in
        its memory. None need be here.

    Returns
    -------
    Plan
        Computed by running the functions that place memory, without memory: what opening the same
        thing charges to the ledger, to the byte.

    Raises
    ------
    MemoryBudgetError
        The host's total is above ``budget``; the text has the table.
    ValueError
        An unknown optimizer, or ``batch`` for something that is no native model.
    """
    if optimizer not in _MOMENTS:
        raise ValueError(f"optimizer={optimizer!r}: expected one of {', '.join(_MOMENTS)}")
    policy = resolve(world_size, sharding=sharding, precision=precision, device=device)
    native = not isinstance(source, Mapping) or "model_type" in source or "hidden_size" in source
    config: Any = None
    if native:
        from .models.config import load_config
        from .models.definition import define, plan_rows

        config = load_config(source)
        parameters, units = define(config)
    else:
        if batch is not None:
            raise ValueError("batch= needs a native model: only its activations are known")
        parameters, units = _shapes(cast("Mapping[str, Any]", source))
    activations = None
    if batch is not None:
        activations = plan_rows(config, policy, world_size, batch, checkpointing=checkpointing)
    return plan_layout(
        parameters,
        units,
        policy,
        world_size,
        optimizer=optimizer,
        named=precision_name(precision),
        activations=activations,
        batch=batch,
        background=background,
        budget=budget,
    )


def plan_layout(
    parameters: Sequence[Parameter],
    units: Sequence[tuple[str, int, int]],
    policy: Policy,
    world_size: int,
    *,
    optimizer: str,
    named: str,
    activations: Charged | None = None,
    batch: tuple[int, int] | None = None,
    background: bool = False,
    budget: int | None = None,
) -> Plan:
    """The plan of a layout, as `plan` makes it.

    Parameters
    ----------
    parameters, units, policy, world_size
        What shards are opened with.
    optimizer : str
        Decides the moments.
    named : str
        The precision, in words.
    activations : mapping, optional
        What forward and backward hold for ``batch``.
    batch : (int, int), optional
        For the text.
    background : bool
        Checkpoints are saved in the background.
    budget : int, bytes, optional
        Room of the host.
    """
    if optimizer not in _MOMENTS:
        raise ValueError(f"optimizer={optimizer!r}: expected one of {', '.join(_MOMENTS)}")
    definition = core_definition(parameters, units)
    ranks = []
    for rank in range(world_size):
        rows = _core.shards_plan(
            *definition,
            policy.core(),
            world_size,
            rank,
            _MOMENTS[optimizer],
            policy.device != "cpu",
        )
        mine = charged(rows)
        if background:
            copy = _core.snapshot_plan(
                *definition, policy.core(), world_size, rank, _MOMENTS[optimizer]
            )
            mine = add(mine, charged(copy))
        ranks.append(mine if activations is None else add(mine, activations))
    numel = sum(p.numel for p in parameters)
    what = (
        f"{numel:,} parameters, {world_size} ranks, stage {policy.sharding.stage}, "
        f"gather {policy.sharding.gather}, {named}, {optimizer}"
    )
    if policy.device != "cpu":
        what += f", on {policy.device}"
    if batch is not None:
        what += f", batch {batch[0]} x {batch[1]}"
    if background:
        what += ", saves in the background"
    made = Plan(tuple(ranks), what)
    if budget is not None and made.host_nbytes > budget:
        raise MemoryBudgetError(
            f"needs {_bytes(made.host_nbytes)} of {_bytes(budget)} on the host\n{made.table()}"
        )
    return made


def precision_name(precision: Precision) -> str:
    return precision if isinstance(precision, str) else repr(precision)


def memory(target: Any) -> dict[str, tuple[int, int, int]]:
    """What this rank planned, holds, and has held at most, by class.

    Parameters
    ----------
    target : World, Shards, or anything with ``.shards``
        For a world, planned is what is held: only shards and models have a plan.

    Returns
    -------
    dict of str to (int, int, int)
        Class to (planned, held, peak) bytes charged to this rank: private memory, its share of
        memory shared with other ranks, and memory of its device. Held and peak are those of the
        whole world object.
    """
    world = target if hasattr(target, "memory") else target.shards.world
    rows = world.memory()
    if target is world:
        return {
            name: (row[0] + row[1] + row[3], row[0] + row[1] + row[3], row[2])
            for name, row in rows.items()
        }
    planned = target.planned() if hasattr(target, "planned") else target.shards.planned()
    return {
        name: (sum(planned.get(name, (0, 0, 0))), row[0] + row[1] + row[3], row[2])
        for name, row in rows.items()
    }


def _phases(policy: Policy, world_size: int) -> list[tuple[str, str, str]]:
    """(phase, buffer, dtype and home) for every buffer, from the policy's fields alone."""
    p: MixedPrecision = policy.precision
    part = "owned part" if policy.keep == 1 else f"{policy.keep} of {world_size} parts"
    if policy.keep == world_size:
        part = "whole on each rank"
    on_device = policy.device != "cpu"

    def home(on_host: bool) -> str:
        return (
            ("pinned host memory" if on_host else "device memory") if on_device else "world memory"
        )

    params, grads, state = map(home, policy.on_host)
    homes = {
        "shared": "world memory, one copy on the host",
        "whole": f"{params}, whole on each rank",
        "shard": f"{params}, owned part on each rank",
    }
    weights = homes[policy.weights]
    moved = "float32" if p.master else p.param
    masters = {
        None: f"none: the {p.param} weight is moved",
        "float32": f"float32, {state}, {part}",
        "split": f"float32, split: the compute copy and a 16-bit remainder, {state}, {part}",
    }
    rounding = "to nearest even"
    if p.master == "split":
        rounding = "to nearest, ties away from zero"
    if p.rounding == "stochastic":
        rounding = f"at random in proportion (seed {p.rounding_seed}), moments likewise"
        if p.moments != "bfloat16":
            rounding = f"at random in proportion (seed {p.rounding_seed})"
    scale = "none" if p.loss_scale is None else "a power of two, divided out in float32 by the step"
    added = "float32"
    if policy.sharding.reduce_order == "ring" and world_size > 1:
        added = f"{p.reduce}, by NCCL in an order of its own"
    gathered = "the weights themselves" if policy.weights != "shard" else "private pool"
    if on_device and policy.weights == "shard":
        gathered = "pool in device memory"
    if policy.weights == "shard" and policy.pool_units < 0:
        gathered = "memory of the front end, while it is used"
    return [
        ("load", "weights read", f"any float dtype -> {moved}"),
        ("flat", "compute copy", f"{p.param}, {weights}"),
        ("flat", "master", masters[p.master]),
        ("optimizer", "moments", f"{p.moments}, {state}, {part}"),
        ("forward", "gathered unit", f"{p.param}, {gathered}"),
        (
            "forward",
            "GEMM operands, activations",
            f"{p.param}, device memory" if on_device else "float32, private",
        ),
        ("forward", "norms, softmax, rotary tables, loss", "float32 or better, private"),
        ("backward", "gradients in slots", f"{p.reduce}, {home(False)}"),
        ("reduce", "sum over ranks", f"{added}, stored as {p.accumulate}, {grads}, {part}"),
        ("pre-step", "norm", "float64 sum of squares of what the reduce wrote"),
        ("pre-step", "loss scale", scale),
        (
            "step",
            "update",
            f"float32 arithmetic{', on the CPU' if policy.on_host[2] else ''}; "
            f"writes {moved} and {p.moments}",
        ),
        ("step", "published weights", f"{p.param}, rounded {rounding}"),
    ]


def describe(target: Any) -> str:
    """The dtype and home of every buffer in every phase.

    Parameters
    ----------
    target : Shards or anything with ``.shards``
        What to describe.

    Returns
    -------
    str
        A table, one buffer a line. Nothing is cast that is not in it. Where settings were attached,
        what became of each key of the configuration follows.
    """
    shards = cast(Shards, target.shards)
    policy = shards.policy
    s = policy.sharding
    numel = sum(p.numel for p in shards.parameters)
    frozen = sum(p.numel for p in shards.parameters if not p.trainable)
    lines = [
        f"{numel:,} parameters ({frozen:,} frozen) in {len(shards.units)} units, "
        f"rank {shards.world.rank} of {shards.world.size}, stage {s.stage}, "
        f"partition {s.partition}, gather {s.gather}, "
        f"{policy.keep} of {shards.world.size} cuts kept"
    ]
    rows = _phases(policy, shards.world.size)
    width = [max(len(row[i]) for row in rows) for i in range(2)]
    for phase, buffer, text in rows:
        lines.append(f"{phase:{width[0]}}  {buffer:{width[1]}}  {text}")
    if not math.isclose(frozen, 0):
        lines.append("frozen parameters have a compute copy alone")
    resting = sum(shards.parameters[p].numel for p in shards._frozen)
    if resting:
        lines.append(f"{resting:,} more are frozen for now, and keep their buffers")
    if s.offload is not None and policy.device == "cpu":
        lines.append('offload: every home above is on the CPU, where "device" and "cpu" are one')
    if shards.settings is not None:
        lines += ["", shards.settings.table()]
    return "\n".join(lines)
