"""Optimizer steps against the papers in float64, and the promises about bits."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_reference import (
    BF16,
    F16,
    F32,
    LENGTHS,
    Array,
    adam,
    adam_slack,
    hyper,
    mixed,
    normal,
    rounded,
    same_bits,
    ulps,
)

from flatshard import _core

pytestmark = pytest.mark.quick

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}

#: Rules by the names of these tests: that of the kernel, and how many moments it is given.
RULES = {
    "sgd": ("sgd", 1),
    "adam": ("adam", 2),
    "adamw": ("adamw", 2),
    "amsgrad": ("adam", 3),
    "amsgradw": ("adamw", 3),
    "lion": ("lion", 1),
    "adagrad": ("adagrad", 1),
}


def step_scalars(rule: str, step: int, **changes: Any) -> dict[str, float]:
    return hyper(**{**SETTINGS, **changes}, step=step, decoupled=rule in ("adamw", "lion"))


# ---- against float64 ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["adam", "adamw"])
def test_adam_against_the_papers(
    kernels: _core.Kernels, rng: np.random.Generator, rule: str
) -> None:
    """One step from any state: at most 4 units in the last place, and gradients scaled on load."""
    for n in LENGTHS:
        for offset, step in ((0, 1), (1, 7), (3, 1000)):
            w, g = normal(rng, n, offset=offset), normal(rng, n, offset=1)
            m = normal(rng, n, offset=offset) * np.float32(0.1)
            v = np.square(normal(rng, n, offset=offset)) + np.float32(1e-3)
            before = w.astype(np.float64)
            scaled = (g * np.float32(0.25)).astype(np.float64)
            size = np.maximum(np.abs(scaled), np.abs(m)) + SETTINGS["weight_decay"] * np.abs(w)
            scalars = step_scalars(rule, step)
            want = adam(
                before,
                m.astype(np.float64),
                v.astype(np.float64),
                scaled,
                **SETTINGS,
                step=step,
                decoupled=rule == "adamw",
            )
            kernels.update(rule, g, weight=w, moment1=m, moment2=v, grad_scale=0.25, **scalars)
            # The state is made up, so steps are larger than lr: their size counts too.
            slack = adam_slack(m, v, size, scalars)
            assert ulps(w, want[0], np.abs(want[0] - before), slack=slack) <= 4
            assert ulps(m, want[1], size) <= 2
            assert ulps(v, want[2], size**2) <= 2


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_against_float64(
    kernels: _core.Kernels, rng: np.random.Generator, nesterov: bool, decay: float
) -> None:
    for n in LENGTHS:
        w, momentum = normal(rng, n), np.full(n, np.nan, np.float32)
        plain = w.copy()
        w64, b64 = w.astype(np.float64), np.zeros(n)
        for step in range(3):
            g = normal(rng, n)
            g64 = g.astype(np.float64) * 0.5 + decay * w64
            b64 = g64 if step == 0 else 0.9 * b64 + g64
            w64 = w64 - 0.1 * (g64 + 0.9 * b64 if nesterov else b64)
            kernels.update(
                "sgd",
                g,
                weight=w,
                moment1=momentum,
                lr=0.1,
                decay=decay,
                beta1=0.9,
                nesterov=nesterov,
                first=step == 0,
                grad_scale=0.5,
            )
            before = plain.astype(np.float64)
            kernels.update("sgd", g, weight=plain, lr=0.1, decay=decay, grad_scale=0.5)
            want = before - 0.1 * (g.astype(np.float64) * 0.5 + decay * before)
            assert ulps(plain, want, 0.1) <= 3
        assert ulps(w, w64, 1.0) <= 8
        assert ulps(momentum, b64, 1.0) <= 8


def test_lion_and_adagrad_against_float64(kernels: _core.Kernels, rng: np.random.Generator) -> None:
    """One step from any state. Lion: the weight within 2 units in the last place (sign, product,
    difference), the momentum within 2 of its terms. Adagrad: 3, its sum of squares 4 (a square
    has twice the error)."""
    for n in LENGTHS:
        w, g = normal(rng, n, offset=1), normal(rng, n, offset=3)
        m, s = normal(rng, n) * np.float32(0.1), np.square(normal(rng, n)) + np.float32(1e-3)
        w64, g64, m64 = w.astype(np.float64), g.astype(np.float64) * 0.5, m.astype(np.float64)
        blend = 0.9 * m64 + (1 - 0.9) * g64
        clear = np.abs(blend) > 1e-6
        want = np.where(clear, w64 * (1 - 0.01 * 0.1) - 0.01 * np.sign(blend), 0)
        momentum = 0.95 * m64 + (1 - 0.95) * g64
        size = np.maximum(np.abs(m64), np.abs(g64))
        lion = w.copy()
        scalars = step_scalars("lion", 1)
        kernels.update("lion", g, weight=lion, moment1=m, grad_scale=0.5, **scalars)
        assert ulps(np.where(clear, lion, 0), want, np.where(clear, np.abs(w64), 1)) <= 2
        assert ulps(m, momentum, size) <= 2

        decayed = g64 + 0.1 * w64
        total = s.astype(np.float64) + decayed**2
        moved = 0.01 * decayed / (np.sqrt(total) + 1e-6)
        size = np.abs(g64) + 0.1 * np.abs(w64)
        kernels.update(
            "adagrad", g, weight=w, moment1=s, grad_scale=0.5, decay=0.1, step_size=0.01, eps=1e-6
        )
        # A gradient that cancels against decay has the error of its terms, and so have its step
        # and its square.
        slack = 0.01 * np.spacing(size.astype(np.float32)).astype(np.float64) / np.sqrt(total)
        assert ulps(w, w64 - moved, np.abs(w64), slack=slack) <= 3
        assert ulps(s, total, size**2) <= 4


def test_decay_shrinks_the_old_weight(kernels: _core.Kernels) -> None:
    """w = 1, g = 1, lr = decay = 0.1: 1 * 0.99 - 0.1 = 0.89; decay after the step gives 0.891."""
    w, m, v = np.ones(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    scalars = hyper(lr=0.1, eps=0.0, weight_decay=0.1, step=1, decoupled=True)
    kernels.update("adamw", np.ones(1, np.float32), weight=w, moment1=m, moment2=v, **scalars)
    assert w[0] == pytest.approx(0.89, abs=1e-7)


def test_epsilon_comes_after_the_bias_correction(kernels: _core.Kernels) -> None:
    """g = 1e-3 with eps = 1e-3, first step: lr / 2 after, about lr * 0.03 before the correction."""
    w, m, v = np.zeros(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    g = np.full(1, 1e-3, np.float32)
    kernels.update("adam", g, weight=w, moment1=m, moment2=v, **hyper(lr=1.0, eps=1e-3, step=1))
    assert w[0] == pytest.approx(-0.5, abs=1e-5)


def test_scalars_are_rounded_once_from_fp64(kernels: _core.Kernels) -> None:
    """1 - 0.9 in fp64 rounds to another fp32 number than 1.0f - 0.9f."""
    assert np.float32(1.0) - np.float32(0.9) != np.float32(1.0 - 0.9)
    w, m, v = np.zeros(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    kernels.update("adam", np.ones(1, np.float32), weight=w, moment1=m, moment2=v, **hyper(lr=0.1))
    assert m[0] == np.float32(1.0 - 0.9)
    assert v[0] == np.float32(1.0 - 0.999)


def test_master_keeps_what_bf16_would_lose(kernels: _core.Kernels) -> None:
    """Eight SGD steps of 0.001 from 1: the fp32 master reaches 0.992, its bf16 copy 0.9921875; with
    bf16 weights alone each step is rounded away."""
    master, weight = np.ones(5, np.float32), np.ones(5, BF16)
    alone = np.ones(5, BF16)
    g = np.ones(5, BF16)
    for _ in range(8):
        kernels.update("sgd", g, weight=weight, master=master, lr=0.001)
        kernels.update("sgd", g, weight=alone, lr=0.001)
    assert master == pytest.approx(0.992, abs=1e-6)
    assert (weight.astype(np.float32) == 0.9921875).all()
    assert (alone.astype(np.float32) == 1.0).all()


# ---- formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("weights", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("grads", [F32, BF16, F16], ids=str)
def test_formats_are_load_and_store_around_the_fp32_rule(
    kernels: _core.Kernels,
    rng: np.random.Generator,
    grads: np.dtype,
    weights: np.dtype,
    moments: np.dtype,
) -> None:
    """Any format gives the bits of: widen, step in fp32, round."""

    def narrow(x: Array, dtype: np.dtype) -> Array:
        return rounded(x.astype(np.float64), dtype).astype(dtype)

    scalars = step_scalars("adamw", 3)
    for n in (17, 1025, 10007):
        g, w = normal(rng, n, grads, offset=1), normal(rng, n, weights, offset=3)
        m, v = normal(rng, n, moments), np.abs(normal(rng, n, moments, offset=1))
        fp32 = {
            "weight": w.astype(np.float32),
            "moment1": m.astype(np.float32),
            "moment2": v.astype(np.float32),
        }
        master = fp32["weight"].copy()
        copy = np.zeros(n, weights)
        m2, v2 = m.copy(), v.copy()
        kernels.update("adamw", g.astype(np.float32), **fp32, **scalars)
        kernels.update("adamw", g, weight=w, moment1=m, moment2=v, **scalars)
        assert same_bits(w, narrow(fp32["weight"], weights))
        assert same_bits(m, narrow(fp32["moment1"], moments))
        assert same_bits(v, narrow(fp32["moment2"], moments))

        kernels.update("adamw", g, weight=copy, master=master, moment1=m2, moment2=v2, **scalars)
        assert same_bits(master, fp32["weight"])
        assert same_bits(copy, w) and same_bits(m2, m) and same_bits(v2, v)


def test_state_moves_where_the_weight_is_not_ours(
    kernels: _core.Kernels, rng: np.random.Generator
) -> None:
    n = 2000
    g, w = normal(rng, n), normal(rng, n, BF16)
    m, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
    m2, v2, w2 = m.copy(), v.copy(), w.copy()
    scalars = step_scalars("adam", 1)
    kernels.update("adam", g, weight=w, moment1=m, moment2=v, **scalars)
    before = w2.copy()
    kernels.update("adam", g, weight_read=w2, moment1=m2, moment2=v2, **scalars)
    assert same_bits(w2, before) and not same_bits(w, before)
    assert same_bits(m2, m) and same_bits(v2, v)


# ---- bits ---------------------------------------------------------------------------------------


def run_steps(kernels: _core.Kernels, rule: str, start: Array, grads: list[Array]) -> list[Array]:
    """Master, bf16 copy and moments after the steps."""
    n = start.size
    master, weight = start.copy(), start.astype(BF16)
    kernel_rule, moments_n = RULES[rule]
    moments: dict[str, Any] = {f"moment{m + 1}": np.zeros(n, np.float32) for m in range(moments_n)}
    for step, g in enumerate(grads, 1):
        scalars = {**step_scalars(kernel_rule, step), "first": step == 1}
        kernels.update(
            kernel_rule,
            g,
            weight=weight,
            master=master,
            **moments,
            grad_scale=0.7,
            **scalars,
        )
    return [master, weight, *moments.values()]


@pytest.mark.parametrize("rule", RULES)
def test_same_bits_on_every_table(
    every_table: Callable[[], list[_core.Kernels]], rng: np.random.Generator, rule: str
) -> None:
    n = 70001
    start, grads = mixed(rng, n), [mixed(rng, n) for _ in range(4)]
    want: list[Array] | None = None
    for kernels in every_table():
        got = run_steps(kernels, rule, start, grads)
        want = want or got
        for a, b in zip(got, want, strict=True):
            assert same_bits(a, b), kernels.name


@pytest.mark.parametrize("rule", RULES)
def test_in_pieces_and_whole(kernels: _core.Kernels, rng: np.random.Generator, rule: str) -> None:
    """A step cut into pieces anywhere gives the bits of the whole."""
    n = 5000
    start, grads = normal(rng, n), [normal(rng, n) for _ in range(3)]
    whole = run_steps(kernels, rule, start, grads)
    cuts = [0, 1, 10, 1023, 2047, 4000, n]
    pieces = [
        run_steps(kernels, rule, start[a:b].copy(), [g[a:b].copy() for g in grads])
        for a, b in itertools.pairwise(cuts)
    ]
    for i, array in enumerate(whole):
        assert same_bits(np.concatenate([piece[i] for piece in pieces]), array)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_threads_take_part_and_do_not_show(
    isa: str, rng: np.random.Generator, threads: int
) -> None:
    n = 300_007
    start, grads = normal(rng, n), [normal(rng, n) for _ in range(2)]
    want = run_steps(_core.Kernels(isa), "adamw", start, grads)
    many = _core.Kernels(isa, threads=threads)
    deadline = time.monotonic() + 60
    while many.threads_used < threads and time.monotonic() < deadline:
        for a, b in zip(run_steps(many, "adamw", start, grads), want, strict=True):
            assert same_bits(a, b)
    assert many.threads_used == threads


# ---- special values -----------------------------------------------------------------------------


def test_tiny_moments_become_zero(kernels: _core.Kernels) -> None:
    """A gradient that stays zero: moments reach exact zero, and never a subnormal number."""
    tiny = 2.0**-100
    w = np.ones(40, np.float32)
    m, v = np.full(40, 1.0, np.float32), np.full(40, 1.0, np.float32)
    g = np.zeros(40, np.float32)
    scalars = hyper(lr=1e-3, betas=(0.5, 0.5), step=50)
    for step in range(110):
        kernels.update("adam", g, weight=w, moment1=m, moment2=v, **scalars)
        assert (m == 0).all() or (m >= tiny).all(), step
        assert (v == 0).all() or (v >= tiny).all(), step
    assert not m.any() and not v.any()
    assert np.isfinite(w).all()
    # Exactly at the bound it stays; just below it goes; both signs.
    for value, kept in ((2 * tiny, True), (2 * tiny * (1 - 2.0**-24), False)):
        for sign in (1.0, -1.0):
            b = np.full(3, sign * value, np.float32)
            kernels.update("sgd", g[:3], weight=w[:3], moment1=b, lr=0.1, beta1=0.5)
            assert (b == (sign * np.float32(tiny) if kept else 0)).all()


def test_zero_gradient_first_step(kernels: _core.Kernels) -> None:
    w, m, v = np.ones(20, np.float32), np.zeros(20, np.float32), np.zeros(20, np.float32)
    kernels.update(
        "adamw", np.zeros(20, np.float32), weight=w, moment1=m, moment2=v, **hyper(lr=0.1)
    )
    # decay is 0.0 in these scalars, so the weight itself would vanish: use 1 for "no decay".
    assert not w.any()
    w = np.ones(20, np.float32)
    scalars = hyper(lr=0.1, decoupled=True)
    kernels.update("adamw", np.zeros(20, np.float32), weight=w, moment1=m, moment2=v, **scalars)
    assert (w == 1).all() and not m.any() and not v.any()


def test_a_bad_gradient_spoils_its_element_only(
    kernels: _core.Kernels, rng: np.random.Generator
) -> None:
    n = 1025
    for bad in (np.nan, np.inf):
        g = normal(rng, n)
        g[1000] = bad
        w, m, v = normal(rng, n), np.zeros(n, np.float32), np.zeros(n, np.float32)
        kernels.update("adamw", g, weight=w, moment1=m, moment2=v, **step_scalars("adamw", 1))
        spoilt = ~np.isfinite(w)
        assert spoilt[1000] and spoilt.sum() == 1
        assert not np.isfinite(m[1000]) and np.isfinite(np.delete(m, 1000)).all()


def test_wrong_arrays_are_refused(kernels: _core.Kernels) -> None:
    g, w = np.zeros(4, np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="moment1 and moment2"):
        kernels.update("adamw", g, weight=w)
    with pytest.raises(ValueError, match="one of master, weight"):
        kernels.update("sgd", g)
    with pytest.raises(ValueError, match="rule is 'lamb'"):
        kernels.update("lamb", g, weight=w)
    with pytest.raises(ValueError, match="lion and adagrad need moment1"):
        kernels.update("lion", g, weight=w)
    with pytest.raises(ValueError, match="moment2 and moment3 are for adam"):
        kernels.update("adagrad", g, weight=w, moment1=w.copy(), moment3=w.copy())
    with pytest.raises(ValueError, match="moment1 has 3 elements, not 4"):
        kernels.update("sgd", g, weight=w, moment1=np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="master is bfloat16"):
        kernels.update("sgd", g, master=np.zeros(4, BF16))
    with pytest.raises(TypeError, match="moment1 is float32, moment2 float16"):
        kernels.update("adam", g, weight=w, moment1=w.copy(), moment2=np.zeros(4, F16))
