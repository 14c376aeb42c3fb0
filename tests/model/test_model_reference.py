"""The float64 reference's backward against central differences of its forward."""

from collections.abc import Callable

import model_reference as ref
import numpy as np
import pytest
from model_reference import Array

pytestmark = pytest.mark.quick

STEP = 1e-5


def differences(f: Callable[[Array], Array], x: Array, dy: Array) -> Array:
    """d sum(f(x) * dy) / dx, element by element."""
    slope = np.zeros_like(x)
    flat, out = x.reshape(-1), slope.reshape(-1)
    for i in range(flat.size):
        kept = flat[i]
        flat[i] = kept + STEP
        above = np.sum(f(x) * dy)
        flat[i] = kept - STEP
        below = np.sum(f(x) * dy)
        flat[i] = kept
        out[i] = (above - below) / (2 * STEP)
    return slope


def close(got: Array, want: Array) -> None:
    assert np.abs(want).max() > 1e-3, "a gradient of nothing proves nothing"
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7 * np.abs(want).max())


def test_embed(rng: np.random.Generator) -> None:
    table, tokens = rng.normal(size=(5, 3)), np.array([1, 4, 1, 0], np.int32)
    dy = rng.normal(size=(4, 3))
    close(
        ref.embed_grad(5, tokens, 1.7, dy),
        differences(lambda t: ref.embed(t, tokens, 1.7), table, dy),
    )


def test_norm(rng: np.random.Generator) -> None:
    x, weight, dy = rng.normal(size=(4, 6)), rng.normal(size=6), rng.normal(size=(4, 6))
    dx, dweight = ref.norm_grad(x, weight, 1e-2, dy)
    close(dx, differences(lambda a: ref.norm(a, weight, 1e-2), x, dy))
    close(dweight, differences(lambda a: ref.norm(x, a, 1e-2), weight, dy))


def test_rotate(rng: np.random.Generator) -> None:
    x, dy, angles = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4)), rng.normal(size=(3, 2))
    close(ref.rotate(dy, -angles), differences(lambda a: ref.rotate(a, angles), x, dy))


@pytest.mark.parametrize("window", [0, 3])
def test_attention(rng: np.random.Generator, window: int) -> None:
    q, dy = rng.normal(size=(2, 4, 5, 3)), rng.normal(size=(2, 4, 5, 3))
    k, v = rng.normal(size=(2, 2, 5, 3)), rng.normal(size=(2, 2, 5, 3))
    dq, dk, dv = ref.attention_grad(q, k, v, window, dy)
    close(dq, differences(lambda a: ref.attention(a, k, v, window), q, dy))
    close(dk, differences(lambda a: ref.attention(q, a, v, window), k, dy))
    close(dv, differences(lambda a: ref.attention(q, k, a, window), v, dy))


def test_swiglu(rng: np.random.Generator) -> None:
    gate, up, dy = (rng.normal(size=(3, 5)) * 2 for _ in range(3))
    dgate, dup = ref.swiglu_grad(gate, up, dy)
    close(dgate, differences(lambda a: ref.swiglu(a, up), gate, dy))
    close(dup, differences(lambda a: ref.swiglu(gate, a), up, dy))


def test_xent(rng: np.random.Generator) -> None:
    logits, targets = rng.normal(size=(4, 7)) * 3, np.array([2, ref.IGNORED, 0, 6], np.int32)
    want = differences(lambda a: ref.xent(a, targets, 0.6), logits, np.ones(4))
    close(ref.xent_grad(logits, targets, 0.6), want)
    assert not ref.xent_grad(logits, targets, 0.6)[1].any()
