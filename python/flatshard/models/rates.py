"""What the devices of a world could reach: the denominator of model FLOP utilisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _core, _device, blas

if TYPE_CHECKING:
    from ..world import World

__all__ = ["peak_of", "rate"]

SECONDS = 0.2

#: Documented peak of dense bfloat16 and float16 products, FLOP/s, by words of the device's name.
#: The first line whose words are all there, and none of whose others, is the device's.
PEAKS: tuple[tuple[tuple[str, ...], tuple[str, ...], float], ...] = (
    (("A100",), (), 312e12),
    (("H100", "HBM3"), ("NVL", "PCIe"), 989e12),  # SXM
    (("H200",), ("NVL",), 989e12),
)


def peak_of(name: str, dtype: str) -> float | None:
    """Documented peak of a device for dense products.

    Parameters
    ----------
    name : str
        As the driver tells it.
    dtype : str
        Of the operands.

    Returns
    -------
    float or None
        FLOP/s; None where none is known here.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    for words, others, flops in PEAKS:
        if all(word in name for word in words) and not any(word in name for word in others):
            return flops
    return None


def rate(world: World, dtype: str) -> tuple[float, str]:
    """What all ranks of a world reach in matrix products together. Collective.

    Parameters
    ----------
    world : World
    dtype : str
        In which the model computes.

    Returns
    -------
    (float, str)
        FLOP/s, and where the figure is from.
    """
    world.barrier()  # on the CPU ranks share cores: all of them measure at once
    if world.device == "cpu":
        mine = blas.flops(threads=world.threads, seconds=SECONDS, dtype=dtype)
        source = "the rate of products measured on the same cores at start"
    else:
        ordinal = world._core.ordinal or 0
        name = _device.load().describe(ordinal)
        peak = peak_of(name, dtype)
        if peak is not None:
            mine = peak
            source = f"{world.size} x the documented dense {dtype} peak of {name}"
        else:
            mine = _core.world_gemm_flops(world._core, dtype, SECONDS)
            source = f"the rate of {dtype} products measured on the same device(s) at start"
    return float(world.all_reduce(mine)), source
