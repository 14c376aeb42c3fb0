"""Optimizer steps against torch.optim, element by element."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kernel_reference import LENGTHS, adam_slack, hyper, normal, same_bits, ulps

from flatshard import _core

SHORT = LENGTHS[:-1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().numpy().copy()


def one_step(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, g: np.ndarray[Any, Any]
) -> None:
    parameter.grad = torch.from_numpy(g.copy())
    optimizer.step()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("rule", ["adam", "adamw"])
def test_adam_steps_from_the_same_state(
    kernels: _core.Kernels, rng: np.random.Generator, rule: str, eps: float, decay: float
) -> None:
    """Each of six steps starts from torch's state: at most 2 ulp for moments, 3 for weights."""
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[rule]
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": eps, "weight_decay": decay}
    for n in SHORT:
        parameter = torch.nn.Parameter(torch.from_numpy(normal(rng, n)))
        optimizer = kind([parameter], **settings, foreach=False, fused=False)
        w = numpy(parameter)
        m, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        for step in range(1, 7):
            g = normal(rng, n) * np.float32(10.0 ** rng.integers(-4, 3))
            # Decay in the gradient belongs to the scale of the moments too.
            size = np.abs(g) + (np.abs(decay * w) if rule == "adam" else 0)
            scalars = hyper(**settings, step=step, decoupled=rule == "adamw")
            kernels.update(rule, g, weight=w, moment1=m, moment2=v, **scalars)
            one_step(optimizer, parameter, g)
            if n == 0:
                continue
            state = optimizer.state[parameter]
            assert ulps(m, numpy(state["exp_avg"]), size) <= 2
            assert ulps(v, numpy(state["exp_avg_sq"]), size**2) <= 2
            slack = adam_slack(m, v, size, scalars)
            assert ulps(w, numpy(parameter), settings["lr"], slack=slack) <= 3
            w, m, v = numpy(parameter), numpy(state["exp_avg"]), numpy(state["exp_avg_sq"])


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_steps_from_the_same_state(
    kernels: _core.Kernels,
    rng: np.random.Generator,
    momentum: float,
    nesterov: bool,
    decay: float,
) -> None:
    for n in SHORT:
        parameter = torch.nn.Parameter(torch.from_numpy(normal(rng, n)))
        optimizer = torch.optim.SGD(
            [parameter],
            lr=0.1,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=decay,
            foreach=False,
            fused=False,
        )
        w, b = numpy(parameter), np.full(n, 99, np.float32)
        for step in range(1, 6):
            g = normal(rng, n)
            size = np.maximum(np.abs(g), np.abs(b) if step > 1 else 0)
            moments = {"moment1": b} if momentum else {}
            kernels.update(
                "sgd",
                g,
                weight=w,
                **moments,
                lr=0.1,
                decay=decay,
                beta1=momentum,
                nesterov=nesterov,
                first=step == 1,
            )
            one_step(optimizer, parameter, g)
            if n == 0:
                continue
            # The step is up to 0.1 * (1 + momentum) times gradient and buffer.
            assert ulps(w, numpy(parameter), np.maximum(size, 0.1)) <= 3
            w = numpy(parameter)
            if momentum:
                buffer = numpy(optimizer.state[parameter]["momentum_buffer"])
                assert ulps(b, buffer, size) <= 3
                b = buffer


def test_fifty_steps_stay_together(kernels: _core.Kernels, rng: np.random.Generator) -> None:
    """Without resetting: weights within 1e-6 of their largest, with an eps above rounding noise."""
    n = 10007
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.1}
    parameter = torch.nn.Parameter(torch.from_numpy(normal(rng, n)))
    optimizer = torch.optim.AdamW([parameter], **settings)
    w = numpy(parameter)
    m, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
    for step in range(1, 51):
        g = normal(rng, n)
        scalars = hyper(**settings, step=step, decoupled=True)
        kernels.update("adamw", g, weight=w, moment1=m, moment2=v, **scalars)
        one_step(optimizer, parameter, g)
    assert np.abs(w - numpy(parameter)).max() <= 1e-6 * np.abs(w).max()


def test_subnormals_survive_a_caller_that_flushes_them(kernels: _core.Kernels) -> None:
    """Torch and other libraries may set the processor's flush-to-zero mode for this thread."""
    x = np.full(100, 1e-40, np.float32)
    out = np.empty(100, np.float64)
    acc = np.empty(100, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        kernels.convert(out, x)
        kernels.sum(acc, [x, x])
    finally:
        torch.set_flush_denormal(False)
    assert (out == x.astype(np.float64)).all() and out[0] > 0
    assert same_bits(acc, x + x) and acc[0] > 0
