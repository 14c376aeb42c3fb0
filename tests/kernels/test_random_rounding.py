"""Rounding at random: unbiased, independent, and the same bits wherever it is done."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_reference import BF16, Array, mixed, same_bits

from flatshard import _core

pytestmark = pytest.mark.quick

N = 1_000_000
#: Between 1 and the next bf16 number, 1 + 2^-7.
FRACTIONS = (0.0, 2.0**-16, 0.01, 0.25, 0.5, 0.9, 1 - 2.0**-16)


def rounded(kernels: _core.Kernels, x: Array, *, key: int = 7, at: int = 0) -> Array:
    """x rounded at random: one step of plain SGD from a zero weight, with lr 1."""
    out = np.zeros(x.size, BF16)
    kernels.update("sgd", -x, weight=out, lr=1.0, stochastic=True, random_key=key, at=at)
    return out


def mix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def random32(key: int, counter: Array) -> Array:
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    x = counter.astype(np.uint32) + low
    for last in (high, np.uint32(0)):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        x = (x ^ (x >> np.uint32(16))) + last
    return x


def expected(x: Array, *, key: int, stream: int = 0, at: int = 0) -> Array:
    """The definition, in NumPy: up where 16 random bits and those cut off carry."""
    counter = at + np.arange(x.size, dtype=np.uint64)
    random = np.empty(x.size, np.uint32)
    for part in np.unique(counter >> np.uint64(32)):
        here = counter >> np.uint64(32) == part
        of_part = mix64((mix64((key + stream) % 2**64) + int(part)) % 2**64)
        random[here] = random32(of_part, (counter[here] & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64) + (random >> np.uint32(16))
    return (bits >> np.uint64(16)).astype(np.uint16).view(BF16)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_the_mean_is_kept(kernels: _core.Kernels, fraction: float) -> None:
    """A million roundings: the share that goes up within 3 sigma of the fraction."""
    x = np.full(N, 1 + fraction * 2.0**-7, np.float32)
    up = rounded(kernels, x).astype(np.float64) - 1
    assert set(np.unique(up)) <= {0.0, 2.0**-7}
    sigma = np.sqrt(fraction * (1 - fraction) / N)
    assert abs(up.mean() * 2.0**7 - fraction) <= 3 * sigma
    down = rounded(kernels, -x)
    assert same_bits(down, -rounded(kernels, x)), "by size: the same for both signs"


def test_what_bf16_holds_stays(kernels: _core.Kernels) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    exact = patterns[np.isfinite(patterns.astype(np.float32))]
    with np.errstate(all="ignore"):
        got = rounded(kernels, exact.astype(np.float32))
    assert (got == exact).all()
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    got = rounded(kernels, special).astype(np.float32)
    assert got[0] == np.inf and got[1] == -np.inf and np.isnan(got[2])


def test_neighbours_steps_and_parameters_are_independent(kernels: _core.Kernels) -> None:
    """Correlations of a million coin throws, along the array and between keys: within 4 sigma."""
    x = np.full(N, 1 + 0.5 * 2.0**-7, np.float32)
    coin = {k: (rounded(kernels, x, key=k) > 1) * 2.0 - 1 for k in (7, 8, 7 + 2**32, 7 + 2**63)}
    first = coin[7]
    for lag in (1, 2, 3, 8, 16, 64, 1024, 65536):
        assert abs((first[lag:] * first[:-lag]).mean()) <= 4 / np.sqrt(N - lag)
    for other in (8, 7 + 2**32, 7 + 2**63):
        assert abs((first * coin[other]).mean()) <= 4 / np.sqrt(N)
        for lag in (1, 2, 16):
            assert abs((first[lag:] * coin[other][:-lag]).mean()) <= 4 / np.sqrt(N - lag)


def test_random_bits_are_uniform(kernels: _core.Kernels) -> None:
    """Chi-squared over 256 values of the upper random byte: fractions of a ladder pick it out."""
    ladder = (1 + (np.arange(256) * 2.0**-8) * 2.0**-7).astype(np.float32)
    count = np.zeros(256)
    for key in range(40):
        up = rounded(kernels, np.tile(ladder, 256), key=key) > 1
        count += up.reshape(256, 256).sum(axis=0)
    share = np.arange(256) / 256
    sigma = np.sqrt(np.maximum(share * (1 - share), 1e-9) * 256 * 40)
    assert count[0] == 0
    z = (count - share * 256 * 40)[1:] / sigma[1:]
    assert np.abs(z).max() <= 4.5 and abs((z**2).sum() - 255) <= 4 * np.sqrt(2 * 255)


def test_the_definition(kernels: _core.Kernels, rng: np.random.Generator) -> None:
    """The bits of an implementation of its own, from any first element, over 2^32 too."""
    x = mixed(rng, 5000) + np.float32(0)  # no -0: 0 - 0 is none
    for at in (0, 1, 12345, 2**32 - 2500, 5 * 2**32 - 1):
        assert same_bits(
            rounded(kernels, x, key=2**63 + 5, at=at), expected(x, key=2**63 + 5, at=at)
        )


def test_moments_have_numbers_of_their_own(
    kernels: _core.Kernels, rng: np.random.Generator
) -> None:
    n = 3000
    g = rng.standard_normal(n).astype(np.float32)
    arrays: dict[str, Any] = {f"moment{m}": np.zeros(n, BF16) for m in (1, 2, 3)}
    weight = rng.standard_normal(n).astype(BF16)
    wide = {k: v.astype(np.float32) for k, v in {**arrays, "weight": weight}.items()}
    scalars: dict[str, Any] = {
        "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "one_minus_beta1": 0.1, "one_minus_beta2": 0.01,
        "eps": 1e-6, "step_size": 1.0, "inv_sqrt_bc2": 10.0,
    }  # fmt: skip
    kernels.update("adam", g, **wide, **scalars)
    kernels.update("adam", g, weight=weight, **arrays, **scalars, stochastic=True, random_key=99)
    for stream, name in enumerate(("weight", "moment1", "moment2", "moment3")):
        got = weight if name == "weight" else arrays[name]
        assert same_bits(got, expected(wide[name], key=99, stream=stream)), name


def test_same_bits_on_every_table_and_in_pieces(
    every_table: Callable[[], list[_core.Kernels]], rng: np.random.Generator
) -> None:
    x = mixed(rng, 70001)
    want = rounded(every_table()[0], x, at=11)
    for kernels in every_table():
        assert same_bits(rounded(kernels, x, at=11), want), kernels.name
        cuts = [0, 1, 1023, 1024, 40000, 70001]
        pieces = [rounded(kernels, x[a:b], at=11 + a) for a, b in itertools.pairwise(cuts)]
        assert same_bits(np.concatenate(pieces), want), kernels.name
