"""Optimizers over shards: fused, mixed-precision, with a verdict for every step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ._groups import ParamGroup
from ._optimizer import Optimizer
from ._result import StepResult

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Optimizer",
    "ParamGroup",
    "StepResult",
]


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum.

    Parameters
    ----------
    lr : float
        Learning rate.
    momentum : float
        Factor of the momentum buffer; 0 keeps none.
    nesterov : bool
        Nesterov's form of momentum.
    weight_decay : float
        L2 penalty, added to the gradient.
    target, no_decay, max_skips, check_every
        As for :class:`Optimizer`. Collective.

    Notes
    -----
    The form is ``torch.optim.SGD``'s with dampening 0: the first step sets the buffer to the
    gradient.
    """

    _rule = 0
    _rule_name = "SGD"

    def __init__(
        self,
        target: Any,
        *,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        no_decay: Iterable[str] = (),
        max_skips: int = 20,
        check_every: int = 0,
    ) -> None:
        super().__init__(
            target,
            options={
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
            },
            moments=("momentum_buffer",) if momentum else (),
            no_decay=no_decay,
            max_skips=max_skips,
            check_every=check_every,
        )


class _AdamFamily(Optimizer):
    def __init__(
        self,
        target: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        no_decay: Iterable[str] = (),
        max_skips: int = 20,
        check_every: int = 0,
    ) -> None:
        super().__init__(
            target,
            options={
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
            moments=("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())),
            no_decay=no_decay,
            max_skips=max_skips,
            check_every=check_every,
        )


class Adam(_AdamFamily):
    """Adam.

    Parameters
    ----------
    lr : float
        Learning rate.
    betas : (float, float)
        Decay rates of the two moments.
    eps : float
        Added to the root of the bias-corrected second moment.
    weight_decay : float
        L2 penalty, added to the gradient.
    amsgrad : bool
        Divide by the root of the largest second moment so far, a third state array.
    target, no_decay, max_skips, check_every
        As for :class:`Optimizer`. Collective.

    References
    ----------
    Kingma & Ba 2015, algorithm 1, in the form of ``torch.optim.Adam``.
    """

    _rule = 1
    _rule_name = "Adam"


class AdamW(_AdamFamily):
    """Adam with decoupled weight decay.

    Parameters
    ----------
    weight_decay : float
        The old weight is multiplied by 1 - lr * weight_decay.
    target, lr, betas, eps, amsgrad, no_decay, max_skips, check_every
        As for :class:`Adam`.

    References
    ----------
    Loshchilov & Hutter 2019, algorithm 2, in the form of ``torch.optim.AdamW``.
    """

    _rule = 2
    _rule_name = "AdamW"


class Lion(Optimizer):
    """Lion: the sign of a blend of gradient and momentum, with decoupled weight decay.

    Parameters
    ----------
    lr : float
        Learning rate: by how much each element moves; commonly a third to a tenth of AdamW's.
    betas : (float, float)
        Share of the momentum in the blend whose sign is taken, and decay rate of the momentum.
    weight_decay : float
        The old weight is multiplied by 1 - lr * weight_decay.
    target, no_decay, max_skips, check_every
        As for :class:`Optimizer`. Collective.

    Notes
    -----
    One state array, "exp_avg". An element whose blend is exactly 0 does not move, decay aside.

    References
    ----------
    Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", program 1.
    """

    _rule = 3
    _rule_name = "Lion"

    def __init__(
        self,
        target: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        no_decay: Iterable[str] = (),
        max_skips: int = 20,
        check_every: int = 0,
    ) -> None:
        super().__init__(
            target,
            options={"lr": lr, "betas": betas, "weight_decay": weight_decay},
            moments=("exp_avg",),
            no_decay=no_decay,
            max_skips=max_skips,
            check_every=check_every,
        )


class Adagrad(Optimizer):
    """Adagrad.

    Parameters
    ----------
    lr : float
        Learning rate.
    lr_decay : float
        The t-th update of a parameter uses lr / (1 + (t - 1) * lr_decay).
    eps : float
        Added to the root of the sum of squares.
    weight_decay : float
        L2 penalty, added to the gradient.
    initial_accumulator_value : float
        What sums of squares begin with.
    target, no_decay, max_skips, check_every
        As for :class:`Optimizer`. Collective.

    Notes
    -----
    One state array, "sum", in ``precision.moments``: a bfloat16 sum of squares stops growing once
    it is 256 times the next square.

    References
    ----------
    Duchi, Hazan & Singer 2011, in the form of ``torch.optim.Adagrad``.
    """

    _rule = 4
    _rule_name = "Adagrad"

    def __init__(
        self,
        target: Any,
        *,
        lr: float,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        no_decay: Iterable[str] = (),
        max_skips: int = 20,
        check_every: int = 0,
    ) -> None:
        initial = initial_accumulator_value
        if not (math.isfinite(initial) and initial >= 0):
            raise ValueError(
                f"initial_accumulator_value={initial!r}: expected a finite number, 0 or more"
            )
        super().__init__(
            target,
            options={"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay},
            moments=("sum",),
            no_decay=no_decay,
            max_skips=max_skips,
            check_every=check_every,
        )
        if initial:
            self._shards.fill("sum", initial)
