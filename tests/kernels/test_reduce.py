"""Sums over ranks with norm and non-finite test in one pass, and the two scans."""

import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
from kernel_reference import (
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    LENGTHS,
    Array,
    mixed,
    normal,
    rank_sum,
    rounded,
    same_bits,
    sumsq,
)

from flatshard import _core

pytestmark = pytest.mark.quick


def absmax(x: Array) -> float:
    return float(np.abs(x.astype(np.float64)).max(initial=0.0))


@pytest.mark.parametrize("place", [0, 5, 15, 16, 1023, 1024, 1030, 33000, 69999, 70000])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_magnitude_wherever_it_is(
    kernels: _core.Kernels, dtype: np.dtype, place: int
) -> None:
    """In every lane, in the rest of a vector, in the last tile; negative; huge and subnormal."""
    for value in (-2.0, 3e4, -1e-5) if dtype == F16 else (-2.0, 1e30, -1e-30, 1e-39):
        x = np.full(70001, value / 4, dtype)
        x[place] = value
        acc = np.empty(70001, dtype)
        assert kernels.sum(acc, [x])[2] == abs(float(x[place]))


@pytest.mark.parametrize("world", [*range(1, 10), 17])
def test_sum_in_rank_order(kernels: _core.Kernels, rng: np.random.Generator, world: int) -> None:
    for n in LENGTHS:
        for offset in (0, 3):
            sources: list[Array | None] = [mixed(rng, n, offset=offset) for _ in range(world)]
            for r in range(world):
                if world > 2 and rng.random() < 0.25:
                    sources[r] = None
            want = rank_sum(sources, n)
            acc = mixed(rng, n, offset=1)
            got, finite, largest = kernels.sum(acc, sources)
            assert same_bits(acc, want)
            assert got == sumsq(want) and largest == absmax(want)
            assert finite is True

            old = mixed(rng, n)
            acc = old.copy()
            got, finite, largest = kernels.sum(acc, sources, accumulate=True)
            assert same_bits(acc, old + want)
            assert got == sumsq(old + want) and largest == absmax(old + want)


def test_absent_everywhere(kernels: _core.Kernels) -> None:
    acc = np.full(2000, np.nan, np.float32)
    assert kernels.sum(acc, [None, None, None]) == (0.0, True, 0.0)
    assert not acc.any()
    acc[:] = 3.0
    assert kernels.sum(acc, [], accumulate=True) == (18000.0, True, 3.0)
    assert (acc == 3.0).all()


@pytest.mark.parametrize("src", [BF16, F16], ids=str)
@pytest.mark.parametrize("dst", [F32, BF16, F16], ids=str)
def test_low_precision_is_summed_in_fp32_and_rounded_once(
    kernels: _core.Kernels, rng: np.random.Generator, src: np.dtype, dst: np.dtype
) -> None:
    for n in LENGTHS:
        sources = [normal(rng, n, src) for _ in range(5)]
        want = rounded(rank_sum(sources, n).astype(np.float64), dst).astype(dst)
        acc = np.zeros(n, dst)
        got, finite, largest = kernels.sum(acc, sources)
        assert same_bits(acc, want)
        assert got == sumsq(want) and finite and largest == absmax(want)


def test_small_contributions_of_low_precision_are_kept(kernels: _core.Kernels) -> None:
    """1 + 512 times 2^-9: bf16 additions would stay at 1."""
    acc = np.ones(50, np.float32)
    part = np.full(50, 2.0**-9, BF16)
    for _ in range(128):
        kernels.sum(acc, [part] * 4, accumulate=True)
    assert (acc == 2.0).all()


def test_fp64(kernels: _core.Kernels, rng: np.random.Generator) -> None:
    for n in LENGTHS:
        sources = [rng.standard_normal(n) for _ in range(3)]
        acc = np.empty(n, F64)
        got, _, largest = kernels.sum(acc, sources)
        want = sources[0] + sources[1] + sources[2]
        assert same_bits(acc, want) and got == sumsq(want) and largest == absmax(want)
        narrow = np.empty(n, F32)
        kernels.sum(narrow, sources)
        assert same_bits(narrow, want.astype(np.float32))
        wide = np.ones(n, F64)
        kernels.sum(wide, [x.astype(np.float32) for x in sources], accumulate=True)
        narrowed = rank_sum([x.astype(np.float32) for x in sources], n)
        assert same_bits(wide, 1.0 + narrowed.astype(np.float64))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_bad_element_anywhere(
    kernels: _core.Kernels, rng: np.random.Generator, dtype: np.dtype, bad: float
) -> None:
    for n, place in [(1, 0), (17, 16), (1025, 1024), (10007, 0), (70001, 70000), (70001, 33000)]:
        x = normal(rng, n, dtype)
        assert kernels.find_nonfinite(x) == n
        x[place] = bad
        x[n - 1] = bad
        assert kernels.find_nonfinite(x) == place
        acc = np.zeros(n, F64 if dtype == F64 else F32)
        value, finite, largest = kernels.sum(acc, [normal(rng, n, dtype), x])
        assert finite is False
        assert not np.isfinite(value) and not np.isfinite(largest)
        assert not np.isfinite(acc[place])
    assert kernels.find_nonfinite(np.arange(5, dtype=np.int32)) == 5


def test_a_sum_that_overflows_is_not_finite(kernels: _core.Kernels) -> None:
    x = np.full(40, 3e38, np.float32)
    acc = np.empty(40, np.float32)
    assert kernels.sum(acc, [x, x]) == (np.inf, False, np.inf)
    half = np.full(40, 60000, F16)
    low = np.empty(40, F16)
    assert kernels.sum(low, [half, half]) == (np.inf, False, np.inf)
    wide = np.empty(40, F32)
    assert kernels.sum(wide, [half, half]) == (40 * 120000.0**2, True, 120000.0)


def test_squares_neither_overflow_nor_vanish(kernels: _core.Kernels) -> None:
    for size in (1e30, 1e-30):
        x = np.full(10007, size, np.float32)
        want = float(np.sum(x.astype(np.float64) ** 2))
        assert kernels.sumsq(x) == pytest.approx(want, rel=1e-13)
        acc = np.empty_like(x)
        assert kernels.sum(acc, [x]) == (kernels.sumsq(x), True, float(np.abs(x).max()))
    # An element that stays finite in fp32 but whose square does not: still finite.
    assert kernels.sum(np.empty(1, np.float32), [np.float32([3e38])])[1] is True


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sumsq_is_close_and_has_the_promised_bits(
    kernels: _core.Kernels, rng: np.random.Generator, dtype: np.dtype
) -> None:
    for n in LENGTHS:
        x = mixed(rng, n, dtype, offset=1)
        got = kernels.sumsq(x)
        assert got == sumsq(x)
        assert got == pytest.approx(float(np.sum(x.astype(np.float64) ** 2)), rel=1e-12)


def test_same_bits_on_every_table(
    every_table: Callable[[], list[_core.Kernels]], rng: np.random.Generator
) -> None:
    """Several waves of tasks: 5 million elements."""
    n = 5_000_003
    sources = [normal(rng, n), None, normal(rng, n)]
    results = []
    for kernels in every_table():
        acc = np.empty(n, np.float32)
        results.append((kernels.sum(acc, sources), kernels.sumsq(acc), acc))
    for other in results[1:]:
        assert other[:2] == results[0][:2]
        assert same_bits(other[2], results[0][2])


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_threads_take_part_and_do_not_show(
    isa: str, rng: np.random.Generator, threads: int
) -> None:
    n = 1_000_003
    x, y = normal(rng, n), normal(rng, n)
    acc = np.empty(n, np.float32)
    want = _core.Kernels(isa).sum(acc, [x, y])
    many = _core.Kernels(isa, threads=threads)
    assert many.threads_used == 0
    deadline = time.monotonic() + 60
    while many.threads_used < threads and time.monotonic() < deadline:
        out = np.empty(n, np.float32)
        assert many.sum(out, [x, y]) == want
        assert same_bits(out, acc)
    assert many.threads_used == threads


def test_combine(kernels: _core.Kernels, rng: np.random.Generator) -> None:
    names = {"sum": np.add, "max": np.maximum, "min": np.minimum}
    for dtype in (F32, F64, BF16, F16, np.int32, np.int64, np.uint8):
        dtype = np.dtype(dtype)
        for n in LENGTHS:
            if dtype in FLOATS:
                a, b = mixed(rng, n, dtype, offset=1), mixed(rng, n, dtype)
                if n > 3:
                    a[1] = b[2] = np.nan
            else:
                info = np.iinfo(dtype)
                a = rng.integers(info.min, info.max, n, dtype, endpoint=True)
                b = rng.integers(info.min, info.max, n, dtype, endpoint=True)
            for name, function in names.items():
                acc = a.copy()
                kernels.combine(name, acc, b)
                with np.errstate(invalid="ignore", over="ignore"):
                    if dtype in (BF16, F16):
                        wide = function(a.astype(np.float32), b.astype(np.float32))
                        want = rounded(wide.astype(np.float64), dtype).astype(dtype)
                    else:
                        want = function(a, b)
                assert np.array_equal(
                    acc.astype(np.float64), want.astype(np.float64), equal_nan=dtype in FLOATS
                ), (dtype, n, name)
    with pytest.raises(ValueError, match="op is 'mean'"):
        kernels.combine("mean", np.zeros(1), np.zeros(1))


def test_stream_touches_what_it_says(kernels: _core.Kernels, rng: np.random.Generator) -> None:
    """The memory bound of benchmarks reads and writes every element."""
    for n, tiles in itertools.product((1, 1023, 70001), (False, True)):
        a, b, c = (normal(rng, n) for _ in range(3))
        old_a, old_b = a.copy(), b.copy()
        mixed_bits = kernels.stream((a, b, c), 1, 1, 1 << 31, tiles)
        assert mixed_bits == int(np.bitwise_xor.reduce(a.view(np.uint32)))
        assert same_bits(a, old_a) and same_bits(b, -old_b)
        assert (c.view(np.uint32) == 1 << 31).all()
    for n, tiles in itertools.product((2, 1026, 70002), (False, True)):
        a, b = normal(rng, n), normal(rng, n)
        half, other = (normal(rng, n).astype(np.float16) for _ in range(2))
        words = half.view(np.uint32).copy()
        mixed_bits = kernels.stream((a, half, b, other), 1, 1, 1 << 31, tiles)
        assert mixed_bits == int(np.bitwise_xor.reduce(a.view(np.uint32)))
        assert np.array_equal(half.view(np.uint32), words ^ (1 << 31))
        assert (b.view(np.uint32) == 1 << 31).all() and (other.view(np.uint32) == 1 << 31).all()
    with pytest.raises(ValueError, match="3 elements of float16: expected float32, or an even"):
        kernels.stream((np.zeros(3, np.float16),), 0, 1, 0, False)
    with pytest.raises(ValueError, match="1 arrays, 2 read, 0 updated"):
        kernels.stream((a,), 2, 0, 0, False)
