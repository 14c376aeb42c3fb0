"""Policies in the words of others (FSDP2's), read by duck type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ConfigError
from ..policy import PRESETS, LossScale, MixedPrecision, Offload, Sharding
from ._arrays import dtype_name

__all__ = ["Casts", "read_offload", "read_precision", "read_sharding", "refuse_others"]

#: Arguments of torch's fully_shard that are not taken, and what takes their place.
_OTHERS = {
    "mesh": "say world= (a flatshard.World; by default all ranks of the launcher)",
    "shard_placement_fn": "Parameters are sharded flat, so there is no dimension to choose; leave "
    "it out",
    "dp_mesh_dims": "say world= (a flatshard.World; by default all ranks of the launcher)",
}


def refuse_others(others: Mapping[str, Any]) -> None:
    """TypeError for arguments that fully_shard does not take, with what takes their place."""
    for name in others:
        cure = _OTHERS.get(name, "it takes world, units, sharding, reshard_after_forward, "
                           "mp_policy, offload_policy and ignored_params")  # fmt: skip
        raise TypeError(f"fully_shard() takes no argument {name}=: {cure}")


@dataclass(frozen=True)
class Casts:
    """What happens to the sharded module's inputs and outputs.

    Parameters
    ----------
    inputs : torch.dtype or None
        Floating-point inputs are cast to this.
    outputs : torch.dtype or None
        Floating-point outputs likewise.
    """

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None


def _name(value: Any, what: str) -> str | None:
    if value is None:
        return None
    try:
        return dtype_name(value)
    except TypeError as error:
        raise ConfigError(f"mp_policy.{what}: {error}") from None


def _of_fsdp(policy: Any, stored: torch.dtype) -> tuple[MixedPrecision, Casts]:
    """FSDP2: weights are stored as they are and computed with in param_dtype."""
    param = _name(policy.param_dtype, "param_dtype") or dtype_name(stored)
    master = "float32" if param != "float32" else None
    precision = MixedPrecision(
        param=param,
        reduce=_name(policy.reduce_dtype, "reduce_dtype"),
        master=master,
        loss_scale=LossScale() if param == "float16" else None,
    )
    inputs = policy.param_dtype if getattr(policy, "cast_forward_inputs", True) else None
    return precision, Casts(inputs, getattr(policy, "output_dtype", None))


def read_precision(policy: Any, dtypes: Sequence[torch.dtype]) -> tuple[MixedPrecision, Casts, str]:
    """The mix of a policy.

    Parameters
    ----------
    policy : None, str, MixedPrecision, or FSDP2's MixedPrecisionPolicy
        None: as the module's own dtype says.
    dtypes : sequence of torch.dtype
        Of the module's Parameters, without repetition.

    Returns
    -------
    (MixedPrecision, Casts, str)
        The mix, what happens to inputs and outputs, and in words where it comes from.

    Raises
    ------
    ConfigError
        An unknown policy, or Parameters of several dtypes and nothing that says which one is meant.
    """
    if isinstance(policy, str):
        if policy not in PRESETS:
            raise ConfigError(f"mp_policy={policy!r}: expected one of {', '.join(PRESETS)}")
        policy = PRESETS[policy]
    if isinstance(policy, MixedPrecision):
        computes = policy.param
        casts = Casts(getattr(torch, computes)) if computes != "float32" else Casts()
        return policy, casts, "mp_policy"
    if len(dtypes) > 1 and getattr(policy, "param_dtype", None) is None:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise ConfigError(
            f"the module's Parameters have several dtypes ({names}): say one with mp_policy=, for "
            'example "bf16", or convert the module first'
        )
    stored = dtypes[0] if dtypes else torch.float32
    if policy is None:
        preset = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype_name(stored)]
        return PRESETS[preset], Casts(), f"the module's own {stored}"
    if hasattr(policy, "param_dtype") and hasattr(policy, "reduce_dtype"):
        mixed, casts = _of_fsdp(policy, stored)
        return mixed, casts, type(policy).__name__
    raise ConfigError(
        f"mp_policy={policy!r}: expected the name of a preset, a flatshard.MixedPrecision, or "
        "torch.distributed.fsdp.MixedPrecisionPolicy"
    )


def read_offload(policy: Any) -> Offload | None:
    """An Offload from one, from FSDP2's OffloadPolicy or CPUOffloadPolicy, or from None."""
    if policy is None or isinstance(policy, Offload):
        return policy
    kind = type(policy).__name__
    if kind == "OffloadPolicy":
        return None
    if kind == "CPUOffloadPolicy":
        return Offload(params="cpu", grads="cpu", state="cpu")
    raise ConfigError(
        f"offload_policy={policy!r}: expected flatshard.Offload or "
        "torch.distributed.fsdp.CPUOffloadPolicy"
    )


def read_sharding(
    sharding: Sharding | int | None, reshard_after_forward: bool | int | None, offload: Any
) -> Sharding:
    """A Sharding with what the other arguments say of it."""
    if isinstance(sharding, int) and not isinstance(sharding, bool):
        sharding = Sharding(stage=sharding)
    if sharding is None:
        sharding = Sharding()
    if not isinstance(sharding, Sharding):
        raise ConfigError(
            f"sharding={sharding!r}: expected a flatshard.Sharding or a stage, 0 to 3"
        )
    if reshard_after_forward is not None:
        sharding = replace(sharding, reshard_after_forward=bool(reshard_after_forward))
    homes = read_offload(offload)
    return sharding if homes is None else replace(sharding, offload=homes)
