"""What stands behind an optimizer, ours or an adopted one: its groups over one sharded module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import optim as engines
from ..optim import ParamGroup, StepResult
from . import _registry
from ._arrays import as_array, as_tensor

if TYPE_CHECKING:
    from ._module import Sharded

__all__ = ["HYPERPARAMETERS", "Binding"]

#: What a group of torch's holds, by its name there, that a `ParamGroup` has too.
HYPERPARAMETERS = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "lr_decay")


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
            for name in HYPERPARAMETERS:
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
