"""What all optimizers have in common: groups, the step and its verdict, what is saved."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from ._groups import ParamGroup, check_number, make_groups
from ._result import REASONS, StepResult
from ._same import check_same
from ._scaler import Scaler
from ._shards import Shards
from .errors import NonFiniteError

__all__ = ["Optimizer"]

_log = logging.getLogger("flatshard")

#: In the order in which the core numbers them.
_NORMS = (2.0, math.inf)
_APPLIED, _SKIPPED, _IN_ROW, _LAST = range(4)
#: Of the reason of a skip, as other ranks are told it.
_REASON_NBYTES = 240


class Optimizer:
    """What all optimizers have in common. Not for use by itself.

    Parameters
    ----------
    target : Shards or anything with ``.shards``
        What to optimize. Opening is collective: the state is allocated here.
    options : mapping
        Hyperparameters of the default group.
    moments : sequence of str
        Names of the state of each element.
    no_decay : iterable of str
        Shell patterns (``fnmatch``) of parameter names whose weight decay is 0. A pattern may match
        nothing; a name without wildcards may not.
    max_skips : int
        Skipped steps in a row that raise NonFiniteError.
    check_every : int
        Every so many applied steps, :meth:`Shards.check` before the update; 0: never.

    Raises
    ------
    CollectiveMismatch
        Ranks differ in the rule or in a hyperparameter; on all ranks, and the world stays usable.
    """

    _rule: ClassVar[int]
    _rule_name: ClassVar[str]

    def __init__(
        self,
        target: Any,
        *,
        options: Mapping[str, Any],
        moments: Sequence[str],
        no_decay: Iterable[str],
        max_skips: int,
        check_every: int,
    ) -> None:
        self._shards = cast(Shards, target.shards)
        if max_skips < 1:
            raise ValueError(f"max_skips={max_skips!r}: expected at least 1")
        if check_every < 0:
            raise ValueError(f"check_every={check_every!r}: expected 0 or more")
        self._max_skips = max_skips
        self._check_every = check_every
        #: Hyperparameters by group; change fields between steps.
        self.groups, self._group_of = make_groups(
            self._shards, options, tuple(no_decay), type(self).__name__
        )
        check_same(
            self._shards.world,
            f"optimizer {type(self).__name__}",
            {
                "rule": self._rule_name,
                "moments": list(moments),
                "max_skips": max_skips,
                "check_every": check_every,
                "groups": {group.name: dataclasses.asdict(group) for group in self.groups},
            },
        )
        self._shards._core.open_moments(len(moments))
        self._shards._moments = tuple(moments)
        #: Applied updates of each parameter.
        self._steps = np.zeros(len(self._shards.parameters), np.int64)
        #: Steps applied, skipped, skipped in a row, and what the last one was, as the core counts.
        self._books = np.zeros(4, np.int64)
        self._skip_reason: str | None = None
        self._max_norm: float | None = None
        self._norm_type = 2.0
        self._scaler = Scaler(self._shards.policy.precision.loss_scale)
        self._shards._core.set_loss_scale(self._scaler.core)

    def __repr__(self) -> str:
        rows = [
            f"  {g.name}: {len(g.params)} parameters, lr {g.lr:g}, weight decay {g.weight_decay:g}"
            for g in self.groups
        ]
        return "\n".join([f"{type(self).__name__}, {self._applied} steps", *rows])

    # -- the learning rate ------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """Learning rate of the default group; setting it sets every group without one of its
        own."""
        return self.groups[0].lr

    @lr.setter
    def lr(self, lr: float) -> None:
        check_number("lr", lr)
        for group in self.groups:
            if not group.lr_fixed:
                group.lr = lr

    @property
    def loss_scale(self) -> float:
        """By what losses, and so gradients, must be multiplied before backward; 1 without loss
        scaling. The native models do it themselves. Constant between steps."""
        self._catch_up()
        return self._scaler.scale

    @property
    def steps_applied(self) -> int:
        """Steps that moved the weights."""
        return self._applied

    @property
    def steps_skipped(self) -> int:
        """Steps that were skipped."""
        return int(self._books[_SKIPPED])

    @property
    def _applied(self) -> int:
        return int(self._books[_APPLIED])

    @_applied.setter
    def _applied(self, steps: int) -> None:
        self._books[_APPLIED] = steps

    # -- the step ---------------------------------------------------------------------------------

    def skip(self, reason: str) -> None:
        """Ask for the coming step to be skipped on every rank: this rank's batch failed.

        Call it where an exception, or want of memory, ended this rank's micro-batch, wherever that
        was, and then :meth:`step` like every other rank. Nothing moves on any rank; gradients that
        were reduced since the last step are dropped.

        Parameters
        ----------
        reason : str
            Told to every rank (its first 240 bytes), in the log and in ``StepResult.skipped``.

        Raises
        ------
        TypeError
            The reason is no text.

        Notes
        -----
        The others finish their micro-batches without this rank: it counts as absent from where it
        failed, and goes with the loss fences of the native models until they step. Fences that a
        script adds between backward and step (``world.all_reduce`` of a loss) are its own to pair:
        put them behind the step. Costs one small exchange, and only in a step that is skipped so.
        An exception that ended the world (``WorldError``, ``KeyboardInterrupt`` in a wait) cannot
        be skipped.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason: expected text, got {type(reason).__name__}")
        self._catch_up()
        self._skip_reason = reason

    def _agree(
        self, max_norm: float | None, norm_type: float
    ) -> tuple[bool, int, float, float, int, int, int]:
        if norm_type not in _NORMS:
            raise ValueError(
                f"norm_type={norm_type!r}: this version has the 2-norm (2.0) and the infinity-norm "
                "(math.inf)"
            )
        if max_norm is not None and not (max_norm > 0 and math.isfinite(max_norm)):
            if max_norm == math.inf:
                max_norm = None  # no clipping, as torch has it
            else:
                raise ValueError(f"max_norm={max_norm!r}: expected a number above 0, or None")
        self._shards.end_micro_batch()
        verdict: tuple[bool, int, float, float, int, int, int]
        verdict = self._shards._core.agree(
            max_norm or 0.0, _NORMS.index(norm_type), self._skip_reason is not None
        )
        return verdict

    def grad_norm(self, *, max_norm: float | None = None, norm_type: float = 2.0) -> float:
        """Phase one of a step: every rank's gradients are in, and all agree on the norm.
        Collective.

        Parameters
        ----------
        max_norm : float, optional
            Norm to clip to; remembered for :meth:`step`, which then does not repeat the work.
        norm_type : float
            2.0, or ``math.inf`` for the largest magnitude; the same on every rank, and remembered
            likewise.

        Returns
        -------
        float
            Norm of the averaged gradient over all ranks, before clipping; NaN when not finite. A
            tied parameter counts once, a frozen one not at all.

        Raises
        ------
        ValueError
            A ``norm_type`` other than these two. Nothing moved.
        """
        self._catch_up()
        verdict = self._agree(max_norm, norm_type)
        self._max_norm = max_norm
        self._norm_type = norm_type
        return verdict[2]

    def step(
        self,
        *,
        max_norm: float | None = None,
        norm_type: float | None = None,
        lr: float | None = None,
    ) -> StepResult:
        """Average, clip, update and publish. Collective.

        Parameters
        ----------
        max_norm : float, optional
            Clip the global norm of the averaged gradient to this.
        norm_type : float, optional
            2.0, or ``math.inf`` for the largest magnitude; None: what :meth:`grad_norm` was asked
            for, else 2.0.
        lr : float, optional
            Learning rate of this and later steps, for groups without one of their own.

        Returns
        -------
        StepResult
            What happened, equal on every rank.

        Raises
        ------
        RuntimeError
            No rank had a gradient. Nothing moved.
        NonFiniteError
            ``max_skips`` steps in a row were skipped. Nothing moved.
        CollectiveMismatch
            ``check_every``: copies that must be equal differ. Nothing moved.
        WorldError
            A rank died, left, or called something else. If that was between verdict and
            publishing, a later save refuses this model.

        Notes
        -----
        Three fences and one read and write of the owned state; no bytes move between ranks except
        with ``gather="copy"``, where stages 0 to 2 copy the other ranks' weights in.
        """
        self._catch_up()
        if lr is not None:
            self.lr = lr
        core = [group.core() for group in self.groups]  # checked before anything is agreed on
        if max_norm is None:
            max_norm = self._max_norm
        if norm_type is None:
            norm_type = self._norm_type
        applied, reason, norm, clip, bad_param, bad_rank, count = self._agree(max_norm, norm_type)
        if applied and self._check_every and (self._applied + 1) % self._check_every == 0:
            self._shards.check()
        skip_reason, scale = self._skip_reason, self._scaler.scale
        self._shards._core.finish(
            self._rule, core, self._group_of, self._steps, self._books, reason
        )
        overflow = self._catch_up()
        skipped: tuple[tuple[int, str], ...] = ()
        if REASONS[reason] == "rank_skipped":
            skipped = self._tell(skip_reason)
        nonfinite = None
        if bad_param >= 0:
            nonfinite = (self._shards.parameters[bad_param].name, bad_rank)
        result = StepResult(
            applied=applied,
            reason=REASONS[reason],
            step=self._applied,
            grad_norm=norm,
            clip_coef=clip,
            loss_scale=scale,
            nonfinite=nonfinite,
            count=count or None,
            skipped=skipped,
        )
        self._account(result)
        if overflow is not None:
            raise overflow
        return result

    def _catch_up(self) -> NonFiniteError | None:
        """Draw the consequences of the last step, once, although a Ctrl-C ended it: what it was
        asked for is done with, and the loss scale follows. An overflow at the lowest scale."""
        last = int(self._books[_LAST])
        if last == 0:
            return None
        self._books[_LAST] = 0
        self._skip_reason = None
        self._max_norm, self._norm_type = None, 2.0
        try:
            self._scaler.follow(REASONS[last - 1])
        except NonFiniteError as error:
            return error
        self._shards._core.set_loss_scale(self._scaler.core)
        return None

    def _tell(self, reason: str | None) -> tuple[tuple[int, str], ...]:
        """Which ranks asked for a skip, and why. Collective."""
        mine = np.zeros(_REASON_NBYTES + 1, np.uint8)
        if reason is not None:
            text = reason.encode("utf-8", "replace")[:_REASON_NBYTES]
            mine[0] = 1
            mine[1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
        told = self._shards.world.all_gather(mine).reshape(-1, mine.size)
        return tuple(
            (rank, row[1:].tobytes().rstrip(b"\0").decode("utf-8", "ignore"))
            for rank, row in enumerate(told)
            if row[0]
        )

    def _account(self, result: StepResult) -> None:
        if result.applied:
            if result.step == 1 and result.count is None:
                _log.info("no count= was given: gradients are a plain mean over ranks, and those "
                          "of several micro-batches add up")  # fmt: skip
            return
        if result.reason == "no_gradient":
            raise RuntimeError(
                "step() without a gradient on any rank: nothing was reduced since the last step"
            )
        in_row = int(self._books[_IN_ROW])
        why = result.reason
        if result.nonfinite is not None:
            name, rank = result.nonfinite
            source = f"rank {rank}" if rank >= 0 else "the sum over ranks or a factor"
            why = f"the gradient of {name} is not finite, from {source}"
        elif result.skipped:
            why = "; ".join(f"rank {rank} asked for it: {text}" for rank, text in result.skipped)
        if in_row == 1:
            _log.warning("step skipped after %d applied: %s", self._applied, why)
        if in_row >= self._max_skips:
            raise NonFiniteError(f"{in_row} steps in a row were skipped, the last because {why}")

    def zero(self) -> None:
        """Drop the gradients since the last step, and one that was agreed on and not taken.
        Collective."""
        self._shards.end_micro_batch()
        self._shards._core.grad_drop()
        self._catch_up()
        self._max_norm, self._norm_type = None, 2.0
        self._skip_reason = None

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but the moments, as JSON-able values: rule, groups, step counts."""
        self._catch_up()
        return {
            "rule": self._rule_name,
            "applied": self._applied,
            "skipped": self.steps_skipped,
            "skips_in_row": int(self._books[_IN_ROW]),
            "moments": list(self._shards._moments),
            "scaler": self._scaler.state() if self._scaler.policy is not None else None,
            "groups": [
                {
                    "name": g.name,
                    "params": list(g.params),
                    "lr": g.lr,
                    "weight_decay": g.weight_decay,
                    "betas": list(g.betas),
                    "eps": g.eps,
                    "momentum": g.momentum,
                    "nesterov": g.nesterov,
                    "lr_decay": g.lr_decay,
                    "lr_fixed": g.lr_fixed,
                }
                for g in self.groups
            ],
            "frozen": [self._shards.parameters[p].name for p in sorted(self._shards._frozen)],
            "steps": {
                p.name: int(n)
                for p, n in zip(self._shards.parameters, self._steps, strict=True)
                if p.trainable
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave, what was frozen included. Collective where that
        differs from what is frozen now.

        Parameters
        ----------
        state : mapping
            Of an optimizer with the same rule over the same parameters.

        Raises
        ------
        ValueError
            Another rule, other moments, or other parameters; nothing is changed.
        """
        if state["rule"] != self._rule_name:
            raise ValueError(
                f"the saved optimizer is {state['rule']}, this one is {self._rule_name}"
            )
        if list(state["moments"]) != list(self._shards._moments):
            raise ValueError(
                f"the saved optimizer keeps {state['moments']}, "
                f"this one {list(self._shards._moments)}"
            )
        trainable = {p.name for p in self._shards.parameters if p.trainable}
        differ = sorted(trainable.symmetric_difference(state["steps"]))
        if differ:
            raise ValueError(f"the saved optimizer differs in parameters: {', '.join(differ[:5])}")
        saved = [ParamGroup(**{**g, "params": tuple(g["params"]), "betas": tuple(g["betas"])})
                 for g in state["groups"]]  # fmt: skip
        numbers = {name: i for i, g in enumerate(saved) for name in g.params}
        if set(numbers) != trainable:
            raise ValueError("the saved groups do not cover the trainable parameters")
        shards = self._shards
        frozen = frozenset(shards.index(name) for name in state.get("frozen", ()))
        if frozen != shards._frozen:
            if shards.world.is_main:
                _log.warning(
                    "the optimizer's state says what is frozen: %s", sorted(state["frozen"])
                )
            shards.set_frozen(frozen)
        self.groups = saved
        for p, parameter in enumerate(self._shards.parameters):
            self._group_of[p] = numbers.get(parameter.name, 0)
            self._steps[p] = state["steps"].get(parameter.name, 0)
        self._books[:] = state["applied"], state["skipped"], state["skips_in_row"], 0
        if state.get("scaler") is not None and self._scaler.policy is not None:
            self._scaler.restore(state["scaler"])
            self._shards._core.set_loss_scale(self._scaler.core)
