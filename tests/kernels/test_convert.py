"""Conversion between float formats, exact for every 16-bit pattern and every way of rounding."""

import itertools

import numpy as np
import pytest
from kernel_reference import (
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    FORMATS,
    LENGTHS,
    Array,
    bits,
    mixed,
    rounded,
    same_bits,
    shifted,
)

from flatshard import _core

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("wide", [F32, F64], ids=str)
def test_every_16_bit_pattern(kernels: _core.Kernels, dtype: np.dtype, wide: np.dtype) -> None:
    half = np.arange(65536, dtype=np.uint16).view(dtype)
    out = np.empty(65536, wide)
    kernels.convert(out, half)
    with np.errstate(invalid="ignore"):
        assert same_bits(out, half.astype(np.float32).astype(wide))
    nan = np.isnan(out)
    assert nan.sum() == (2 * 127 if dtype == BF16 else 2 * 1023)
    back = np.empty(65536, dtype)
    kernels.convert(back, out)
    assert np.array_equal(back.view(np.uint16)[~nan], half.view(np.uint16)[~nan])
    assert np.isnan(back[nan].astype(np.float32)).all()
    # Sign kept, and quiet.
    quiet = 0x40 if dtype == BF16 else 0x200
    assert np.array_equal(back.view(np.uint16)[nan], half.view(np.uint16)[nan] | quiet)


def around_ties(dtype: np.dtype) -> Array:
    """float64 at, just below and just above the middle between neighbours of dtype, and on them."""
    fraction, _ = FORMATS[dtype]
    unsigned = np.uint16 if dtype.itemsize == 2 else np.uint32
    patterns = np.arange(0, 1 << 16, dtype=np.int64)
    if dtype == F32:
        patterns = (patterns << 16) | 0xABCD
    with np.errstate(invalid="ignore"):
        value = patterns.astype(unsigned).view(dtype).astype(np.float64)
    value = value[np.isfinite(value)]
    exponent = np.maximum(np.frexp(value)[1] - 1, FORMATS[dtype][1])
    step = np.ldexp(1.0, exponent - fraction)
    nudges = [0.0, 0.25, 0.5, 0.75]
    points = np.concatenate([value + np.sign(value) * step * nudge for nudge in nudges])
    return np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_fp64_is_rounded_once(kernels: _core.Kernels, dtype: np.dtype) -> None:
    x = np.concatenate(
        [around_ties(dtype), [np.inf, -np.inf, np.nan, 1e300, -1e300, 1e-310, 5e-324]]
    )
    out = np.empty(x.size, dtype)
    kernels.convert(out, x)
    want = rounded(x, dtype)
    assert np.array_equal(out.astype(np.float64), want, equal_nan=True)
    assert np.array_equal(np.signbit(out.astype(np.float64)), np.signbit(want))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_fp32_is_rounded_to_nearest_even(kernels: _core.Kernels, dtype: np.dtype) -> None:
    with np.errstate(over="ignore"):
        x = around_ties(dtype).astype(np.float32)
    # Every exponent, and every fraction that decides a rounding.
    grid = np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([x, grid])
    out = np.empty(x.size, dtype)
    kernels.convert(out, x)
    with np.errstate(invalid="ignore"):
        want = rounded(x.astype(np.float64), dtype)
    assert np.array_equal(out.astype(np.float64), want, equal_nan=True)


@pytest.mark.parametrize(
    ("dst", "src"), list(itertools.product(FLOATS, FLOATS)), ids=lambda dtype: str(dtype)
)
def test_every_pair_length_and_offset(
    kernels: _core.Kernels, rng: np.random.Generator, dst: np.dtype, src: np.dtype
) -> None:
    for n in LENGTHS:
        for offset in (0, 1, 3):
            x = mixed(rng, n, src, offset=offset)
            room = np.full(n + offset + 1, 7, dst)
            out = room[offset : offset + n]
            kernels.convert(out, x)
            assert np.array_equal(out.astype(np.float64), rounded(x.astype(np.float64), dst))
            assert (room[:offset] == 7).all() and room[offset + n] == 7


def test_copy(kernels: _core.Kernels, rng: np.random.Generator) -> None:
    for n in (*LENGTHS, 3 << 20):
        for offset in (0, 1, 63):
            src = rng.integers(0, 256, n, dtype=np.uint8)
            room = np.zeros(n + offset + 1, np.uint8)
            kernels.copy(room[offset : offset + n], src)
            assert np.array_equal(room[offset : offset + n], src)
            assert not room[:offset].any() and room[-1] == 0


def test_wrong_arrays_are_refused(kernels: _core.Kernels) -> None:
    x = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="5 elements, not 4"):
        kernels.convert(x, np.zeros(5, np.float32))
    with pytest.raises(TypeError, match="int32"):
        kernels.convert(x, np.zeros(4, np.int32))
    with pytest.raises((TypeError, ValueError)):
        kernels.convert(np.zeros(8, np.float32)[::2], x)
    with pytest.raises((TypeError, ValueError)):
        kernels.convert(x, np.zeros(17, np.uint8)[1:].view(np.float32))
    x.flags.writeable = False
    with pytest.raises(ValueError):
        kernels.convert(x, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="isa is 'sse9'"):
        _core.Kernels("sse9")


def test_helpers_see_differences() -> None:
    assert not same_bits(np.float32([0.0]), np.float32([-0.0]))
    assert same_bits(np.float32([np.nan]), -np.float32([np.nan]))
    assert shifted(np.arange(3), 2).tolist() == [0, 1, 2]
    assert bits(np.float32([1.0]))[0] == 0x3F800000
