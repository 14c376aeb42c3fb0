"""Optimizers in torch's form over sharded Parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .. import optim as engines
from ..optim import ParamGroup, StepResult
from . import _registry
from ._arrays import as_array, as_tensor

if TYPE_CHECKING:
    from ._module import Sharded

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Binding", "Lion"]

Params = Iterable[Any]

#: What torch's optimizers take and that chooses between implementations of the same arithmetic.
_IMPLEMENTATIONS = {"foreach", "fused", "capturable", "decoupled_weight_decay"}


class Binding:
    """An optimizer's groups over one sharded module: what moves its weights.

    Parameters
    ----------
    rule : str
        Name of the class in ``flatshard.optim``.
    param_groups : list of dict
        Of a torch optimizer; hyperparameters are read from it at every step.
    """

    def __init__(self, rule: str, param_groups: list[dict[str, Any]]) -> None:
        self.rule = rule
        self.param_groups = param_groups
        self.sharded: Sharded | None = None
        self.engine: Any = None
        self._pending: Mapping[str, Any] | None = None
        self._seen: tuple[int, ...] = ()
        self._names: list[list[str]] = []

    # -- finding the module -----------------------------------------------------------------------

    def parameters(self) -> list[Any]:
        """Every Parameter of every group."""
        return [p for group in self.param_groups for p in group["params"]]

    def bind(self, what: str) -> Sharded:
        """The sharded module of the Parameters, found when first needed. Collective then.

        Raises
        ------
        ValueError
            They are not sharded, or not all in one module; or it has an optimizer.
        """
        if self.sharded is not None:
            return self.sharded
        sharded = _registry.sharded_of(self.parameters(), what)
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if _registry.entry_of(parameter) is None:
                    raise ValueError(
                        f"{what}: Parameter {place} of a group (shape {tuple(parameter.shape)}) is "
                        "not part of the sharded module: give it an optimizer of its own"
                    )
        if sharded.optimizer is not None:
            raise ValueError(
                f"{what}: this {type(sharded.module).__name__} is moved by another optimizer "
                "already; put all Parameters into one optimizer, as groups, or shard the parts as "
                "modules of their own"
            )
        engine_class = getattr(engines, self.rule)
        self.engine = engine_class(sharded.shards, **self._engine_options())
        self.sharded = sharded
        sharded.optimizer = self
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.load(pending)
        return sharded

    def _engine_options(self) -> dict[str, Any]:
        first = self.param_groups[0]
        options: dict[str, Any] = {"lr": float(first["lr"])}
        if self.rule == "SGD":
            options["momentum"] = max(float(g.get("momentum", 0.0)) for g in self.param_groups)
        if self.rule in ("Adam", "AdamW"):
            options["amsgrad"] = bool(first.get("amsgrad", False))
            if any(bool(g.get("amsgrad", False)) != options["amsgrad"] for g in self.param_groups):
                raise ValueError("amsgrad differs between groups: set it alike in all of them")
        if self.rule == "Adagrad":
            options["initial_accumulator_value"] = float(first.get("initial_accumulator_value", 0))
        return options

    # -- groups -----------------------------------------------------------------------------------

    def follow_groups(self) -> None:
        """Takes the hyperparameters as they stand in ``param_groups`` now."""
        assert self.sharded is not None
        seen = tuple(len(g["params"]) for g in self.param_groups)
        if seen != self._seen:
            last = len(self.param_groups)
            self.engine._group_of[:] = last
            for number, group in enumerate(self.param_groups):
                for parameter in group["params"]:
                    entry = _registry.entry_of(parameter)
                    if entry is None or entry.sharded is not self.sharded:
                        raise ValueError(
                            f"group {number} holds a Parameter of shape {tuple(parameter.shape)} "
                            "that is not part of the sharded module"
                        )
                    self.engine._group_of[entry.place] = number
            self._names = [[] for _ in range(last + 1)]
            for member, number in zip(
                self.sharded.shards.parameters, self.engine._group_of, strict=True
            ):
                if member.trainable:
                    self._names[number].append(member.name)
            self._seen = seen
        groups = [self._group(i, g) for i, g in enumerate(self.param_groups)]
        # What no group holds has gradients, as in torch, and does not move.
        groups.append(ParamGroup("held", tuple(self._names[-1]), lr=0.0, weight_decay=0.0))
        self.engine.groups = groups

    def take_groups(self) -> None:
        """The reverse of `follow_groups`, after a checkpoint was loaded."""
        saved = {group.name: group for group in self.engine.groups}
        for number, group in enumerate(self.param_groups):
            values = saved.get(str(number))
            if values is None:
                continue
            for name in ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "lr_decay"):
                if name in group:
                    group[name] = getattr(values, name)
        self._seen = ()

    def _group(self, number: int, group: Mapping[str, Any]) -> ParamGroup:
        betas = group.get("betas", (0.9, 0.999))
        return ParamGroup(
            str(number),
            tuple(self._names[number]),
            lr=float(group["lr"]),
            weight_decay=float(group.get("weight_decay", 0.0)),
            betas=(float(betas[0]), float(betas[1])),
            eps=float(group.get("eps", 1e-8)),
            momentum=float(group.get("momentum", 0.0)),
            nesterov=bool(group.get("nesterov", False)),
            lr_decay=float(group.get("lr_decay", 0.0)),
        )

    # -- the step ---------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """The whole step. Collective."""
        sharded = self.bind("step")
        self.follow_groups()
        sharded.before_step("step")
        try:
            result: StepResult = self.engine.step()
        finally:
            sharded.after_step()
        return result

    # -- state ------------------------------------------------------------------------------------

    def state(self) -> dict[int, dict[str, Any]]:
        """The state of each Parameter by its number, as torch has it: whole, private tensors. On
        one host no other rank takes part."""
        found: dict[int, dict[str, Any]] = {}
        if self.sharded is None:
            return found if self._pending is None else dict(self._pending["state"])
        shards = self.sharded.shards
        for number, parameter in enumerate(self.parameters()):
            entry = _registry.entry_of(parameter)
            if entry is None:
                continue
            steps = int(self.engine._steps[entry.place])
            if steps == 0:
                continue
            name = self.sharded.members[entry.place].name
            row: dict[str, Any] = {}
            if self.rule != "SGD":
                row["step"] = torch.tensor(float(steps))
            for moment in shards._moments:
                row[moment] = as_tensor(shards.full(name, moment))
            found[number] = row
        return found

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over the state of `state`, or of the same class of torch. Collective once bound;
        before, it waits for that."""
        if self.sharded is None:
            self._pending = saved
            return
        shards = self.sharded.shards
        parameters = self.parameters()
        state = saved["state"]
        with shards.storing() as store:
            for number, row in state.items():
                entry = _registry.entry_of(parameters[int(number)])
                if entry is None:
                    continue
                for moment in shards._moments:
                    if moment not in row:
                        raise ValueError(
                            f"the saved state of Parameter {number} has no {moment}: it has "
                            f"{', '.join(map(str, row)) or 'nothing'}"
                        )
                    store(entry.place, shards._kind(moment), as_array(row[moment]))
                self.engine._steps[entry.place] = int(row.get("step", 1))
        applied = [int(n) for n in self.engine._steps]
        self.engine._applied = max(applied, default=0)


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
    known = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "lr_decay")
    values = {name: group[name] for name in known if name in group}
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
    params : iterable of Parameter, or of dict
        As for ``torch.optim``; may be made before or after `fully_shard`.
    lr : float
        Learning rate.
    betas : (float, float)
        Decay rates of the two moments.
    eps : float
        Added to the root of the bias-corrected second moment.
    weight_decay : float
        The old weight is multiplied by 1 - lr * weight_decay.
    amsgrad : bool
        Divide by the root of the largest second moment so far.
    **others
        ``foreach``, ``fused`` and ``capturable`` are accepted and change nothing; ``maximize`` and
        ``differentiable`` must be False.
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
