"""What is sharded, where it lives, and in which precision: the frozen words of a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "LossScale",
    "MixedPrecision",
    "Offload",
    "PRESETS",
    "Policy",
    "Precision",
    "Sharding",
    "resolve",
]

Gather = Literal["auto", "view", "copy"]
Partition = Literal["flat", "per_parameter"]
Home = Literal["device", "cpu", "disk"]
ReduceOrder = Literal["rank", "ring"]


@dataclass(frozen=True)
class Offload:
    """Where each class of memory lives when it is idle. The bits of a run do not depend on it.

    Parameters
    ----------
    params, grads, state : {"device", "cpu", "disk"}
        Home of the compute copies, of the summed gradients, of masters and moments. On the CPU
        "device" and "cpu" are one home; on a GPU "cpu" is pinned host memory. ``params="cpu"``
        (stage 3): each gather copies from there. ``grads="cpu"``: sums are written and read there.
        ``state="cpu"``: the CPU takes the step, over gradients that come down and weights that go
        back up in pieces while it computes.
    path : str, optional
        Folder of the files of homes on disk.

    Raises
    ------
    ValueError
        A home is unknown.
    NotImplementedError
        A home is "disk", which is not offered yet.
    """

    params: Home = "device"
    grads: Home = "device"
    state: Home = "device"
    path: str | None = None

    def __post_init__(self) -> None:
        for name in ("params", "grads", "state"):
            home = getattr(self, name)
            if home not in ("device", "cpu", "disk"):
                raise ValueError(f'Offload({name}={home!r}): expected "device", "cpu" or "disk"')
            if home == "disk":
                raise NotImplementedError(f'Offload({name}="disk") is not offered yet')


@dataclass(frozen=True)
class Sharding:
    """What each rank keeps of the model.

    Parameters
    ----------
    stage : {0, 1, 2, 3}
        0: everything whole on every rank (DDP). 1: optimizer state sharded (ZeRO-1). 2: gradients
        too (ZeRO-2). 3: parameters too (ZeRO-3, FSDP).
    partition : {"flat", "per_parameter"}
        "flat" cuts each unit into equal slices (FSDP1, ZeRO); "per_parameter" cuts the rows of each
        parameter (FSDP2).
    gather : {"auto", "view", "copy"}
        How a unit is gathered. "view": the ranks of a host map one copy of the weights, so a gather
        moves nothing at any stage. "copy": each rank holds its own. "auto": "view" where all ranks
        share a host and compute on the CPU.
    reshard_after_forward : bool
        With stage 3 and "copy": False keeps every unit gathered until the weights change.
    replicate : int
        Ranks that keep the same shard (hybrid sharding). Must divide the world size.
    prefetch : int
        Units gathered ahead on a device. Without effect on the CPU, where all cores compute.
    offload : Offload, optional
        Homes of the memory classes.
    reduce_order : {"rank", "ring"}
        Who sums gradients over ranks, in which order. "rank": each rank, in float32 and in the
        order of ranks, whatever dtype they travelled in; the bits are those of any other device.
        "ring", between GPUs: NCCL's own reduce-scatter, which adds in the dtype of the wire
        (``MixedPrecision(reduce=)``), in an order and so with bits that depend on NCCL and on the
        links; faster on some. With bfloat16 gradients each of its additions rounds. No bytes are
        saved.

    Raises
    ------
    ValueError
        A field has a value outside those above.
    """

    stage: int = 3
    partition: Partition = "flat"
    gather: Gather = "auto"
    reshard_after_forward: bool = True
    replicate: int = 1
    prefetch: int = 1
    offload: Offload | None = None
    reduce_order: ReduceOrder = "rank"

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3) or isinstance(self.stage, bool):
            raise ValueError(f"Sharding(stage={self.stage!r}): expected 0, 1, 2 or 3")
        if self.partition not in ("flat", "per_parameter"):
            raise ValueError(
                f'Sharding(partition={self.partition!r}): expected "flat" or "per_parameter"'
            )
        if self.gather not in ("auto", "view", "copy"):
            raise ValueError(f'Sharding(gather={self.gather!r}): expected "auto", "view" or "copy"')
        if self.replicate < 1:
            raise ValueError(f"Sharding(replicate={self.replicate!r}): expected at least 1")
        if self.prefetch < 0:
            raise ValueError(f"Sharding(prefetch={self.prefetch!r}): expected 0 or more")
        if self.reduce_order not in ("rank", "ring"):
            raise ValueError(
                f'Sharding(reduce_order={self.reduce_order!r}): expected "rank" or "ring"'
            )


@dataclass(frozen=True)
class LossScale:
    """How losses are scaled so that 16-bit gradients neither vanish nor overflow.

    Parameters
    ----------
    initial : float
        First scale; a power of two.
    dynamic : bool
        Lower the scale when gradients overflow, raise it after ``window`` clean steps. False:
        static.
    window : int, steps
        Applied steps in a row after which the scale grows.
    factor : float
        By which it grows and shrinks; a power of two above 1.
    hysteresis : int
        Overflows before the scale shrinks: 1 shrinks at the first one.
    restore : {"shrink", "growth", "applied"}
        When the count of hysteresis starts anew: whenever the scale moves; when it grows alone, so
        that after a first shrinking every overflow shrinks (DeepSpeed, Megatron); or then and with
        every applied step (DeepSpeed's ``consecutive_hysteresis``).
    minimum : float
        Floor; a power of two. An overflow there raises NonFiniteError.

    Raises
    ------
    ValueError
        A value outside those above.

    References
    ----------
    Micikevicius et al. 2018, "Mixed precision training", section 3.2.
    """

    initial: float = 65536.0
    dynamic: bool = True
    window: int = 1000
    factor: float = 2.0
    hysteresis: int = 1
    minimum: float = 1.0
    restore: Literal["shrink", "growth", "applied"] = "shrink"

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "minimum"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5):
                raise ValueError(f"LossScale({name}={value!r}): expected a power of two")
        if self.factor <= 1.0:
            raise ValueError(f"LossScale(factor={self.factor!r}): expected more than 1")
        if self.initial < self.minimum:
            raise ValueError(
                f"LossScale(initial={self.initial!r}) is below minimum={self.minimum!r}"
            )
        for name in ("window", "hysteresis"):
            if getattr(self, name) < 1:
                raise ValueError(f"LossScale({name}={getattr(self, name)!r}): expected at least 1")
        if self.restore not in ("shrink", "growth", "applied"):
            raise ValueError(
                f'LossScale(restore={self.restore!r}): expected "shrink", "growth" or "applied"'
            )


@dataclass(frozen=True)
class MixedPrecision:
    """Element types of each class of memory, by name.

    Parameters
    ----------
    param : {"float32", "bfloat16", "float16"}
        Compute copy of the weights.
    reduce : {"float32", "bfloat16", "float16"}, optional
        Gradients on the wire; None: as produced. They are summed in fp32 in any case.
    accumulate : {"float32", "bfloat16"}
        Summed gradients of the owned shard.
    master : {"float32", "split"}, optional
        Weights behind the compute copy, which the optimizer moves; None: it moves the compute copy.
        "split" keeps a float32 master as the bfloat16 compute copy and a 16-bit remainder, 2 bytes
        a parameter less; weights are then published rounded to nearest with ties away from zero,
        since a remainder cannot express ties to even. Whatever reads or saves masters sees float32.
    moments : {"float32", "bfloat16"}
        Optimizer state.
    loss_scale : LossScale or float, optional
        Required where ``param`` or ``reduce`` is float16, whose gradients vanish below 6e-8. A
        number is a static scale.
    rounding : {"nearest", "stochastic"}
        How the step rounds bfloat16 weights and moments: to nearest even, or up or down at random
        in proportion, so that steps far below a weight's last place move it in the mean. For
        bfloat16 weights without a master. Loading and setting weights round to nearest in any case.
    rounding_seed : int
        With "stochastic": the random numbers are a function of it, of the parameter, of its step
        count and of the element, so that bits depend on no shape of the job.

    Raises
    ------
    ValueError
        A name is no dtype, or two fields contradict each other (the pair is named).

    Notes
    -----
    Bytes per owned parameter with Adam, summed gradient included: fp32 16, bf16 and fp16 18 (16
    with a split master), bf16-pure 10.
    """

    param: str = "float32"
    reduce: str | None = None
    accumulate: str = "float32"
    master: str | None = None
    moments: str = "float32"
    loss_scale: LossScale | float | None = None
    rounding: str = "nearest"
    rounding_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "accumulate", "master", "moments"):
            value = getattr(self, name)
            if value is None and name in ("reduce", "master"):
                continue
            if value == "split" and name == "master":
                continue
            if value == "float16" and name in ("param", "reduce"):
                continue
            if value == "float16":
                raise ValueError(
                    f"MixedPrecision({name}='float16'): squares and small sums vanish in "
                    "float16; use bfloat16 or float32"
                )
            if value not in ("float32", "bfloat16"):
                raise ValueError(
                    f'MixedPrecision({name}={value!r}): expected "float32" or "bfloat16"'
                )
        if self.master == "bfloat16":
            raise ValueError(
                'MixedPrecision(master="bfloat16"): a master is "float32" or "split", or None'
            )
        half = [n for n in ("param", "reduce") if getattr(self, n) == "float16"]
        if half and self.loss_scale is None:
            raise ValueError(
                f"MixedPrecision({half[0]}='float16', loss_scale=None): float16 gradients vanish "
                "without loss scaling; give loss_scale=LossScale()"
            )
        if isinstance(self.loss_scale, (int, float)):
            LossScale(initial=self.loss_scale, minimum=self.loss_scale)
        if self.master is not None and self.param == "float32":
            raise ValueError(
                f"MixedPrecision(param='float32', master={self.master!r}): a float32 weight is its "
                "own master; leave master out"
            )
        if self.master == "split" and self.param != "bfloat16":
            raise ValueError(
                f"MixedPrecision(param={self.param!r}, master='split'): the halves of a split "
                "master are a bfloat16 weight and its remainder; use master='float32'"
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f'MixedPrecision(rounding={self.rounding!r}): expected "nearest" or "stochastic"'
            )
        if not 0 <= self.rounding_seed < 1 << 64:
            raise ValueError(
                f"MixedPrecision(rounding_seed={self.rounding_seed!r}): expected 0 to 2**64 - 1"
            )
        if self.rounding == "stochastic" and self.param != "bfloat16":
            raise ValueError(
                f"MixedPrecision(param={self.param!r}, rounding='stochastic'): it is for bfloat16 "
                "weights that the step itself moves"
            )
        if self.rounding == "stochastic" and self.master is not None:
            raise ValueError(
                f"MixedPrecision(master={self.master!r}, rounding='stochastic'): a master keeps "
                "what rounding would lose; leave one of them out"
            )
        if self.rounding == "nearest" and self.rounding_seed:
            raise ValueError(
                f"MixedPrecision(rounding='nearest', rounding_seed={self.rounding_seed}): nothing "
                "is random in it"
            )


#: The presets by name.
PRESETS: dict[str, MixedPrecision] = {
    "fp32": MixedPrecision(),
    "bf16": MixedPrecision(param="bfloat16", master="float32"),
    "bf16-split": MixedPrecision(param="bfloat16", master="split"),
    "bf16-pure": MixedPrecision(param="bfloat16", moments="bfloat16"),
    "bf16-pure-sr": MixedPrecision(param="bfloat16", moments="bfloat16", rounding="stochastic"),
    "fp16": MixedPrecision(param="float16", master="float32", loss_scale=LossScale()),
}

Precision = str | MixedPrecision


@dataclass(frozen=True)
class Policy:
    """A sharding and a precision, resolved for one world: what the core is opened with.

    Parameters
    ----------
    sharding : Sharding
        As it was asked for.
    precision : MixedPrecision
        As it was asked for.
    weights : {"shared", "whole", "shard"}
        How compute copies are held: once for the host, whole in each rank, or an owned shard with a
        pool of gathered units.
    keep : int
        Cuts whose state a rank keeps: 1, or all.
    slot_per_unit : bool
        One gradient slot for each unit, else two that take turns.
    pool_units : int
        Units that may be gathered at once, with "shard"; 0: all; -1: the front end gathers into
        memory of its own.
    device : str
        Where ranks compute: "cpu" or "cuda".
    """

    sharding: Sharding
    precision: MixedPrecision
    weights: Literal["shared", "whole", "shard"]
    keep: int
    slot_per_unit: bool
    pool_units: int
    device: str = "cpu"

    @property
    def on_host(self) -> tuple[bool, bool, bool]:
        """Do compute copies, summed gradients, masters and moments live in host memory although the
        ranks compute on a device? On the CPU there is one home."""
        homes = self.sharding.offload
        if homes is None or self.device == "cpu":
            return (False, False, False)
        return (homes.params == "cpu", homes.grads == "cpu", homes.state == "cpu")

    def core(self) -> tuple[object, ...]:
        """The tuple that the C core takes."""
        p = self.precision
        return (
            ("flat", "per_parameter").index(self.sharding.partition),
            self.keep,
            self.slot_per_unit,
            ("shared", "whole", "shard").index(self.weights),
            self.pool_units,
            p.param,
            p.reduce,
            p.accumulate,
            (None, "float32", "split").index(p.master),
            p.moments,
            p.rounding == "stochastic",
            p.rounding_seed,
            *self.on_host,
            self.sharding.reduce_order == "ring",
        )


def resolve(
    world_size: int,
    *,
    sharding: Sharding,
    precision: Precision,
    produced: str = "float32",
    one_host: bool = True,
    pool: bool | int = True,
    device: str = "cpu",
) -> Policy:
    """Turn words into the three integers and five dtypes that the core knows.

    Parameters
    ----------
    world_size : int
        Ranks.
    sharding : Sharding
        What is kept where.
    precision : str or MixedPrecision
        A preset's name ("fp32", "bf16", "bf16-split", "bf16-pure", "bf16-pure-sr", "fp16") or a
        mix.
    produced : str
        Dtype in which gradients are produced: what ``reduce=None`` becomes.
    one_host : bool
        Whether all ranks share memory: what ``gather="auto"`` looks at.
    pool : bool or int
        Whether the core holds memory for gathered units, with stage 3 and "copy"; a number: for
        how many at once.
    device : str
        Of the world: on any but "cpu" weights lie in its memory, and are gathered by copies.

    Returns
    -------
    Policy
        With ``sharding.gather`` and ``precision.reduce`` decided.

    Raises
    ------
    ValueError
        ``replicate`` does not divide the world, the preset is unknown, or ``gather="view"`` where
        ranks cannot share weights: on several hosts, or on a device. ``Offload(params="cpu")`` on
        a device below stage 3. ``reduce_order="ring"`` on the CPU.
    """
    if isinstance(precision, str):
        if precision not in PRESETS:
            raise ValueError(f"precision={precision!r}: expected one of {', '.join(PRESETS)}")
        precision = PRESETS[precision]
    if world_size % sharding.replicate != 0:
        raise ValueError(
            f"Sharding(replicate={sharding.replicate}) does not divide the world size {world_size}"
        )
    gather = sharding.gather
    if gather == "auto":
        gather = "view" if one_host and device == "cpu" else "copy"
    if gather == "view" and not one_host:
        raise ValueError('Sharding(gather="view") needs all ranks on one host; use "copy"')
    if gather == "view" and device != "cpu":
        raise ValueError(
            f'Sharding(gather="view") shares weights in host memory, and this world computes on '
            f'{device}: use "copy", or "auto"'
        )
    if sharding.reduce_order == "ring" and device == "cpu":
        raise ValueError(
            'Sharding(reduce_order="ring") is NCCL\'s sum between GPUs, and this world computes on '
            'the CPU, where gradients are summed in float32 in the order of ranks: use "rank"'
        )
    weights: Literal["shared", "whole", "shard"] = "shared"
    if gather == "copy":
        weights = "shard" if sharding.stage == 3 else "whole"
    offload = sharding.offload
    if device != "cpu" and offload is not None and offload.params == "cpu" and weights != "shard":
        raise ValueError(
            f'Offload(params="cpu") at stage {sharding.stage}: weights that are whole on every '
            "rank are read in place and stay on the device; use stage 3, which gathers them when "
            "they are needed"
        )
    units = 1 if sharding.reshard_after_forward else 0
    if not isinstance(pool, bool):
        units = pool
    return Policy(
        sharding=replace(sharding, gather=gather),
        precision=replace(precision, reduce=precision.reduce or produced),
        weights=weights,
        keep=world_size if sharding.stage == 0 else sharding.replicate,
        slot_per_unit=sharding.stage <= 1,
        pool_units=units if pool else -1,
        device=device.partition(":")[0],
    )
