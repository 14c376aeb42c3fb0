"""What kernels are compared with: float64 NumPy from the formulas, knowing nothing of csrc."""

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)
FLOATS = (F32, F64, BF16, F16)

# Around tiles of 1,024, vectors of 16 and tasks of 32 tiles.
LENGTHS = (0, 1, 15, 16, 17, 1023, 1024, 1025, 10007, 70001)

Array = np.ndarray[Any, Any]

# Fraction bits, and the exponent of the smallest normal number.
FORMATS = {F32: (23, -126), BF16: (7, -126), F16: (10, -14)}


def rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """float64 values rounded once to dtype, ties to even, as float64."""
    if dtype == F64:
        return x
    fraction, smallest = FORMATS[dtype]
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(x)[1] - 1, smallest)
        quantum = np.ldexp(1.0, exponent - fraction)
        y = np.rint(x / quantum) * quantum
        largest = (2.0 - 2.0**-fraction) * 2.0 ** (1 - smallest)
        y = np.where(np.abs(y) > largest, np.copysign(np.inf, x), y)
    return np.where(np.isfinite(x), np.copysign(y, x), x)


def bits(x: Array) -> Array:
    """Bit patterns, with every NaN made the same."""
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64, 1: np.uint8}[x.dtype.itemsize]
    out = x.view(unsigned).copy()
    if x.dtype in FLOATS:
        out[np.isnan(x.astype(np.float64))] = np.iinfo(unsigned).max
    return out


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def mixed(
    rng: np.random.Generator, n: int, dtype: np.dtype[Any] = F32, *, offset: int = 0
) -> Array:
    """Values of every size, zeros of both signs and subnormals; `offset` elements off alignment."""
    x = rng.standard_normal(n) * np.exp2(rng.integers(-20, 20, n).astype(np.float64))
    kind = rng.integers(0, 40, n)
    x = np.where(kind == 0, 0.0, x)
    x = np.where(kind == 1, -0.0, x)
    x = np.where(kind == 2, x * 2.0**-140, x)
    return shifted(np.clip(x, -6e4, 6e4).astype(dtype), offset)


def normal(
    rng: np.random.Generator, n: int, dtype: np.dtype[Any] = F32, *, offset: int = 0
) -> Array:
    return shifted(rng.standard_normal(n).astype(dtype), offset)


def shifted(x: Array, offset: int) -> Array:
    """A copy whose first element lies `offset` elements after the start of its memory."""
    room = np.zeros(x.size + offset, x.dtype)
    room[offset:] = x
    return room[offset:]


def sumsq(x: Array) -> float:
    """Sum of squares in the order that is promised: 16 lanes, folded in halves, tile by tile."""
    total = 0.0
    wide = x.astype(np.float64)
    for at in range(0, wide.size, 1024):
        tile = np.zeros(1024)
        part = wide[at : at + 1024]
        tile[: part.size] = part
        lanes = np.zeros(16)
        with np.errstate(all="ignore"):
            for row in (tile * tile).reshape(64, 16):
                lanes = lanes + row
            while lanes.size > 1:
                lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
            total += float(lanes[0])
    return total


def rank_sum(sources: Iterable[Array | None], n: int) -> Array:
    """fp32 sum in rank order; absent sources add nothing."""
    total: Array | None = None
    for source in sources:
        if source is not None:
            wide = source.astype(np.float32)
            total = wide if total is None else total + wide
    return np.zeros(n, np.float32) if total is None else total


def hyper(
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int = 1,
    decoupled: bool = False,
) -> dict[str, float]:
    """The scalars of one step of Adam or AdamW, in float64; the call rounds each once to fp32."""
    b1, b2 = betas
    return {
        "lr": lr,
        "decay": 1.0 - lr * weight_decay if decoupled else weight_decay,
        "beta1": b1,
        "beta2": b2,
        "one_minus_beta1": 1.0 - b1,
        "one_minus_beta2": 1.0 - b2,
        "eps": eps,
        "step_size": lr / (1.0 - b1**step),
        "inv_sqrt_bc2": (1.0 - b2**step) ** -0.5,
    }


def adam(
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
) -> tuple[Array, Array, Array]:
    """One step in float64, from the papers (Kingma and Ba 2015; Loshchilov and Hutter 2019)."""
    b1, b2 = betas
    if not decoupled:
        g = g + weight_decay * w
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    m_hat = m / (1 - b1**step)
    v_hat = v / (1 - b2**step)
    old = w * (1 - lr * weight_decay) if decoupled else w
    return old - lr * m_hat / (np.sqrt(v_hat) + eps), m, v


def unit(want: Array, scale: Array | float) -> Array:
    """One unit in the last place of max(|want|, scale), fp32, as float64."""
    size = np.maximum(np.abs(want), scale).astype(np.float32)
    return np.spacing(np.maximum(size, np.float32(2.0**-126))).astype(np.float64)


def ulps(got: Array, want: Array, scale: Array | float, *, slack: Array | float = 0.0) -> float:
    """Largest distance, less slack, in units of the last place of max(|want|, scale)."""
    if got.size == 0:
        return 0.0
    distance = np.abs(got.astype(np.float64) - want.astype(np.float64)) - slack
    return float(np.max(distance / unit(want, scale)))


def adam_slack(m: Array, v: Array, size: Array, scalars: dict[str, float]) -> Array:
    """What two units in the moments do to the weight.

    Where a gradient nearly cancels against decay or the old moment, m is small against the terms it
    came from, and Adam divides by its size: the weight moves by a step whose relative error is that
    of m, whoever computes it.
    """
    m, v, size = (x.astype(np.float64) for x in (m, v, size))
    denom = np.sqrt(v) * scalars["inv_sqrt_bc2"] + scalars["eps"]
    step = scalars["step_size"] / denom
    with np.errstate(divide="ignore", invalid="ignore"):
        of_v = np.where(v > 0, unit(v, size**2) / v, 0.0)
    return step * 2 * unit(m, size) + np.abs(step * m) * of_v
