"""Hyperparameters by group of parameters."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ._layout import matching

if TYPE_CHECKING:
    from ._shards import Shards

__all__ = ["ParamGroup", "check_number", "make_groups"]


def check_number(name: str, value: Any) -> None:
    """Refuse a hyperparameter that is no finite number, or below 0."""
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}: expected a finite number, 0 or more")


@dataclass
class ParamGroup:
    """Hyperparameters of some parameters; fields may be changed between steps.

    Parameters
    ----------
    name : str
        "default", "no_decay", or a name given to ``shard(groups=)``.
    params : tuple of str
        Names of its parameters.
    lr, weight_decay : float
        Learning rate and weight decay.
    betas : (float, float)
        Decay rates of the moments (Adam family); of blend and momentum (Lion).
    eps : float
        Added to the root of the second moment.
    momentum : float
        Of SGD.
    nesterov : bool
        Of SGD.
    lr_decay : float
        Of Adagrad.
    lr_fixed : bool
        The group was given a learning rate of its own: ``step(lr=)`` leaves it alone.
    """

    name: str
    params: tuple[str, ...]
    lr: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    nesterov: bool = False
    lr_fixed: bool = False
    lr_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "eps", "momentum", "lr_decay"):
            check_number(name, getattr(self, name))
        betas = self.betas
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas={betas!r}: expected two numbers in [0, 1)")
        for beta in betas:
            if not isinstance(beta, (int, float)) or not 0.0 <= beta < 1.0:
                raise ValueError(f"betas={betas!r}: expected two numbers in [0, 1)")
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov=True needs momentum")

    def core(self) -> tuple[float, float, float, float, float, float, bool, float]:
        """The tuple that the C core takes."""
        self.__post_init__()
        beta1, beta2 = self.betas
        return (
            float(self.lr),
            float(beta1),
            float(beta2),
            float(self.eps),
            float(self.weight_decay),
            float(self.momentum),
            self.nesterov,
            float(self.lr_decay),
        )


def make_groups(
    shards: Shards, options: Mapping[str, Any], no_decay: tuple[str, ...], rule: str
) -> tuple[list[ParamGroup], npt.NDArray[np.int32]]:
    """The groups of an optimizer, and each parameter's index into them.

    The first named group whose pattern matches has a parameter; else "no_decay" has what its
    patterns match, if there is decay at all; else "default". ``rule`` is the optimizer's name.
    """
    # A pattern may match nothing in this model, a name may not.
    matching("no_decay", [n for n in no_decay if not set(n) & set("*?[")], shards.parameters)
    members: dict[str, list[str]] = {}
    group_of = np.zeros(len(shards.parameters), np.int32)
    decays = bool(options["weight_decay"]) and bool(no_decay)
    chosen: list[str] = []
    for parameter in shards.parameters:
        choice = "default"
        for named in shards.groups:
            if any(fnmatch.fnmatchcase(n, m) for n in parameter.names for m in named.match):
                choice = named.name
                break
        else:
            exempt = any(fnmatch.fnmatchcase(n, m) for n in parameter.names for m in no_decay)
            if decays and exempt:
                choice = "no_decay"
        chosen.append(choice)
        if parameter.trainable:
            members.setdefault(choice, []).append(parameter.name)
    own = {named.name: dict(named.options) for named in shards.groups}
    groups = []
    for name in dict.fromkeys(["default", *(n for n in members if n != "default")]):
        values = {**options, **own.get(name, {})}
        if name == "no_decay":
            values["weight_decay"] = 0.0
        try:
            group = ParamGroup(
                name,
                tuple(members.get(name, ())),
                lr_fixed="lr" in own.get(name, {}),
                **values,
            )
        except TypeError:
            unknown = sorted(set(own.get(name, {})) - set(options))
            raise ValueError(
                f"groups[{name!r}]: {rule} has no option {', '.join(unknown)}"
            ) from None
        groups.append(group)
    numbers = {group.name: i for i, group in enumerate(groups)}
    for p, name in enumerate(chosen):
        group_of[p] = numbers.get(name, 0)
    return groups, group_of
