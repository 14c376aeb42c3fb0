"""Optimizers in torch's form over sharded Parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

from ..optim import ParamGroup, StepResult
from . import _registry
from ._binding import HYPERPARAMETERS, Binding

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]

Params = Iterable[Any]

#: What torch's optimizers take and that chooses between implementations of the same arithmetic.
_IMPLEMENTATIONS = {"foreach", "fused", "capturable", "decoupled_weight_decay"}


class _Optimizer(torch.optim.Optimizer):
    """What the optimizers here have in common."""

    _rule: ClassVar[str]
    _refused: ClassVar[dict[str, Any]] = {"maximize": False, "differentiable": False}

    def __init__(self, params: Params, defaults: dict[str, Any], others: dict[str, Any]) -> None:
        for name, value in others.items():
            if name in _IMPLEMENTATIONS:
                continue
            if name not in self._refused:
                raise TypeError(f"{type(self).__name__} has no argument {name!r}")
            if value != self._refused[name]:
                raise ValueError(
                    f"{type(self).__name__}({name}={value!r}): this version offers "
                    f"{name}={self._refused[name]!r} alone"
                )
        self._flatshard: Any = None
        super().__init__(params, defaults)
        for group in self.param_groups:
            ParamGroup("", (), **_checked(group))
        self._flatshard = Binding(self._rule, self.param_groups)
        _registry.optimizers.add(self)

    @property
    def loss_scale(self) -> float:
        """By what `flatshard.torch.backward` multiplies losses; 1 without loss scaling."""
        self._flatshard.bind("loss_scale")
        scale: float = self._flatshard.engine.loss_scale
        return scale

    def skip(self, reason: str) -> None:
        """Ask for the coming step to be skipped on every rank: this rank's batch failed.

        Parameters
        ----------
        reason : str
            Logged on this rank.
        """
        self._flatshard.bind("skip")
        self._flatshard.engine.skip(reason)

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:
        """Average over ranks, clip as asked before, update and publish. Collective.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss and its gradients; its result is dropped.

        Returns
        -------
        StepResult
            What happened, equal on every rank; truthy if weights moved. Gradients are gone
            afterwards: every Parameter's ``grad`` is None.

        Raises
        ------
        RuntimeError
            No rank had a gradient; a Parameter was written in place; a backward had failed.
        NonFiniteError
            Too many steps in a row were skipped.
        WorldError
            A rank died, left, or called something else.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        result: StepResult = self._flatshard.step()
        return result

    def state_dict(self) -> dict[str, Any]:
        """torch's form, interchangeable with the class of the same name in ``torch.optim``: whole
        tensors, on any rank. On one host no other rank takes part.

        Returns
        -------
        dict
            "state" by number of the Parameter, and "param_groups".
        """
        packed: dict[str, Any] = super().state_dict()
        return {"state": self._flatshard.state(), "param_groups": packed["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave. Collective.

        Parameters
        ----------
        state_dict : dict
            Of this class, or of the class of this name in ``torch.optim``, over Parameters in the
            same order; equal on every rank.

        Raises
        ------
        ValueError
            Groups of other sizes, or a state without the moments of this class.
        """
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._flatshard.param_groups = self.param_groups
        self._flatshard.load(state_dict)


def _checked(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: group[name] for name in HYPERPARAMETERS if name in group}
    values["lr"] = float(values["lr"])
    values.setdefault("weight_decay", 0.0)
    return values


class SGD(_Optimizer):
    """Stochastic gradient descent with momentum, over sharded Parameters.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        As for ``torch.optim``; may be made before or after `fully_shard`.
    lr : float
        Learning rate.
    momentum : float
        Factor of the momentum buffer; 0 keeps none.
    dampening : float
        0; nothing else is offered.
    weight_decay : float
        L2 penalty, added to the gradient.
    nesterov : bool
        Nesterov's form of momentum.
    **others
        ``foreach`` and ``fused`` are accepted and change nothing; ``maximize`` and
        ``differentiable`` must be False.
    """

    _rule = "SGD"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **others: Any,
    ) -> None:
        if dampening != 0:
            raise ValueError(f"SGD(dampening={dampening!r}): this version offers 0 alone")
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
            others,
        )


class Adam(_Optimizer):
    """Adam, over sharded Parameters.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        As for ``torch.optim``; may be made before or after `fully_shard`.
    lr : float
        Learning rate.
    betas : (float, float)
        Decay rates of the two moments.
    eps : float
        Added to the root of the bias-corrected second moment.
    weight_decay : float
        L2 penalty, added to the gradient.
    amsgrad : bool
        Divide by the root of the largest second moment so far.
    **others
        ``foreach``, ``fused`` and ``capturable`` are accepted and change nothing; ``maximize`` and
        ``differentiable`` must be False.
    """

    _rule = "Adam"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
            },
            others,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay, over sharded Parameters.

    Parameters
    ----------
    weight_decay : float
        The old weight is multiplied by 1 - lr * weight_decay.
    params, lr, betas, eps, amsgrad, **others
        As for `Adam`.
    """

    _rule = "AdamW"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **others)


class Lion(_Optimizer):
    """Lion, over sharded Parameters.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        As for ``torch.optim``; may be made before or after `fully_shard`.
    lr : float
        By how much each element moves.
    betas : (float, float)
        Share of the momentum in the blend whose sign is taken, and decay rate of the momentum.
    weight_decay : float
        The old weight is multiplied by 1 - lr * weight_decay.
    """

    _rule = "Lion"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, {})


class Adagrad(_Optimizer):
    """Adagrad, over sharded Parameters.

    Parameters
    ----------
    params : iterable of Parameter, or of dict
        As for ``torch.optim``; may be made before or after `fully_shard`.
    lr : float
        Learning rate.
    lr_decay : float
        The t-th update of a parameter uses lr / (1 + (t - 1) * lr_decay).
    weight_decay : float
        L2 penalty, added to the gradient.
    initial_accumulator_value : float
        What sums of squares begin with.
    eps : float
        Added to the root of the sum of squares.
    **others
        ``foreach`` and ``fused`` are accepted and change nothing; ``maximize`` and
        ``differentiable`` must be False.
    """

    _rule = "Adagrad"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **others: Any,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "eps": eps,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
            },
            others,
        )
