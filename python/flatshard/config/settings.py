"""What a configuration means: the typed result of every reader, and what became of each key."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from ..errors import ConfigError
from ..policy import PRESETS, MixedPrecision, Sharding

if TYPE_CHECKING:
    from ..optim import Optimizer
    from ..schedule import Schedule

__all__ = ["LATER", "Batch", "Key", "OptimizerSettings", "ScheduleSettings", "Settings", "Units"]

Fate = Literal["done", "noted", "refused"]


class _Later:
    """The one value of its kind; see LATER."""

    def __repr__(self) -> str:
        return "filled when training starts"


#: In ``auto=``: this value will be known when training starts. What depends on it stays open.
LATER: Final = _Later()


@dataclass(frozen=True)
class Key:
    """What became of one key of a configuration.

    Parameters
    ----------
    path : str
        The key with the sections around it, as ``zero_optimization.stage``.
    value : object
        As it was read, "auto" resolved.
    fate : {"done", "noted", "refused"}
        "done": it decides a field. "noted": it has no effect here, and the text says why.
        "refused": it is unknown, wrong or not offered; only in ``ConfigError.keys``.
    text : str
        What it decides, the mechanism that takes its place, or what is wrong with it.
    auto : str
        Where a value that was "auto" came from; empty for others.
    """

    path: str
    value: object
    fate: Fate
    text: str
    auto: str = ""


@dataclass(frozen=True)
class Units:
    """How a model is cut into units, which are gathered and released together.

    Parameters
    ----------
    by : {"auto", "classes", "size", "whole"}
        "auto": the layers that the model itself names. "classes": modules of these classes.
        "size": modules of at least ``min_num_params`` parameters. "whole": one unit, which saves
        no memory on a gathered model.
    classes : tuple of str
        Class names, with "classes".
    min_num_params : int
        With "size".
    """

    by: Literal["auto", "classes", "size", "whole"] = "auto"
    classes: tuple[str, ...] = ()
    min_num_params: int = 0

    def match(self, present: Iterable[str]) -> tuple[str, ...]:
        """The classes to wrap, once the model is known.

        Parameters
        ----------
        present : iterable of str
            Names of the classes of the model's modules.

        Returns
        -------
        tuple of str
            ``classes``; empty unless ``by`` is "classes".

        Raises
        ------
        ConfigError
            A class is not in the model. The text lists what is, the nearest first: a unit is
            never the whole model because of a misspelt class.
        """
        there = sorted(set(present))
        for name in self.classes:
            if name in there:
                continue
            low = {other.lower(): other for other in there}
            near = difflib.get_close_matches(name.lower(), low, n=1, cutoff=0.6)
            hint = f"did you mean {low[near[0]]}? " if near else ""
            raise ConfigError(
                f"transformer_layer_cls_to_wrap: the model has no module of class {name!r}; "
                f"{hint}Its classes are {', '.join(there)}"
            )
        return self.classes

    def unit_of(self) -> Callable[[str], str] | None:
        """``shard(unit_of=)`` for arrays: None for the default, by the first number in a name.

        Raises
        ------
        ConfigError
            With "size": arrays have no modules to measure.
        """
        if self.by == "size":
            raise ConfigError(
                "SIZE_BASED_WRAP measures modules, and arrays have none; use "
                "TRANSFORMER_BASED_WRAP, or give shard(unit_of=)"
            )
        return (lambda name: "model") if self.by == "whole" else None


@dataclass(frozen=True)
class Batch:
    """Batch sizes; ``train = micro * accumulate * world_size`` where all are known.

    Parameters
    ----------
    train : int or None
        Samples of a step, over all ranks.
    micro : int or None
        Samples of a rank's micro-batch.
    accumulate : int or None
        Micro-batches of a step.
    """

    train: int | None = None
    micro: int | None = None
    accumulate: int | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer of flatshard and its hyperparameters.

    Parameters
    ----------
    name : str
        "SGD", "Adam", "AdamW", "Lion", "Adagrad" or "LAMB".
    options : mapping
        Keyword arguments of it; every default of the framework that was read is written out.
    """

    name: str
    options: Mapping[str, Any]

    def build(self, target: Any, **changes: Any) -> Optimizer:
        """Opens the optimizer. Collective.

        Parameters
        ----------
        target : Shards or anything with ``.shards``
            What to optimize.
        **changes
            Arguments that take the place of, or join, ``options``.

        Returns
        -------
        Optimizer
        """
        from .. import optim

        for name, value in self.options.items():
            if value is LATER and name not in changes:
                raise ConfigError(f"{name} of the optimizer was left open; give it here")
        made: Optimizer = getattr(optim, self.name)(target, **{**self.options, **changes})
        return made


@dataclass(frozen=True)
class ScheduleSettings:
    """A learning rate as a function of the step, in the form of the framework that was read.

    Parameters
    ----------
    name : str
        "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest" or "OneCycle".
    options : mapping
        Its parameters; every default is written out.
    """

    name: str
    options: Mapping[str, Any]

    def _known(self) -> Mapping[str, Any]:
        for name, value in self.options.items():
            if value is LATER:
                raise ConfigError(
                    f"scheduler.params.{name} was left open; read the configuration again once "
                    "its value is known"
                )
        return self.options

    def rate(self, lr: float) -> Schedule:
        """The rate by step.

        Parameters
        ----------
        lr : float
            The optimizer's, for schedules that are relative to it.

        Returns
        -------
        callable
            Step number (0 = the first) to learning rate.

        Raises
        ------
        ConfigError
            A parameter was left open with ``LATER``.
        """
        from .schedules import RATES

        return RATES[self.name](lr, dict(self._known()))

    def betas(self) -> Callable[[int], tuple[float, float]] | None:
        """The decay rates of the moments by step, where the schedule moves them too.

        Returns
        -------
        callable or None
            Step number to ``betas``; None where they stay.
        """
        from .schedules import one_cycle_betas

        if self.name == "OneCycle" and self.options["cycle_momentum"]:
            return one_cycle_betas(dict(self._known()))
        return None


@dataclass(frozen=True)
class Settings:
    """What a configuration asks for. Made by the readers of ``flatshard.config``.

    Parameters
    ----------
    source : str
        Where it was read, for messages.
    kind : {"fsdp", "deepspeed", "accelerate", "flatshard"}
        Whose form it had.
    sharding : Sharding
        Stage, partition, offload and the rest.
    precision : MixedPrecision
        fp32 where the configuration says nothing; see ``given``.
    units : Units
        How a module is wrapped.
    ignored_modules : str or tuple of str
        Pattern that the whole name of a module must match, or names: left unsharded.
    batch : Batch
        What is known of the batch sizes.
    max_norm : float or None
        The gradient is clipped to this 2-norm; None: it is not.
    optimizer : OptimizerSettings or None
        None: the script's own.
    schedule : ScheduleSettings or None
        None: the script's own.
    activation_checkpointing : bool
        Recompute activations in backward.
    save : {"full", "sharded"}
        Kind of checkpoint.
    save_16bit : bool
        Beside a checkpoint the weights are written in the compute dtype.
    efficient_loading : bool
        Weights are read by the ranks that own them, never whole by each.
    steps_per_print : int or None
        Steps between lines about the run; None: no lines.
    timing : bool
        Show where the time of a step goes.
    allow_unused : bool
        A parameter without gradient on any rank is no error.
    allow_untested_optimizer : bool
        The script may bring an optimizer of a class that flatshard does not know.
    tag_validation : {"warn", "ignore", "fail"}
        What happens when ranks save one checkpoint under different names.
    world_size : int or None
        Ranks that the configuration is for; None: any number.
    given : frozenset of str
        Names of the fields above that the configuration decided; the others hold defaults.
    keys : tuple of Key
        What became of each key.
    """

    source: str
    kind: Literal["fsdp", "deepspeed", "accelerate", "flatshard"]
    sharding: Sharding = field(default_factory=Sharding)
    precision: MixedPrecision = field(default_factory=lambda: PRESETS["fp32"])
    units: Units = field(default_factory=Units)
    ignored_modules: str | tuple[str, ...] = ()
    batch: Batch = field(default_factory=Batch)
    max_norm: float | None = None
    optimizer: OptimizerSettings | None = None
    schedule: ScheduleSettings | None = None
    activation_checkpointing: bool = False
    save: Literal["full", "sharded"] = "full"
    save_16bit: bool = False
    efficient_loading: bool = False
    steps_per_print: int | None = None
    timing: bool = False
    allow_unused: bool = True
    allow_untested_optimizer: bool = False
    tag_validation: Literal["warn", "ignore", "fail"] = "warn"
    world_size: int | None = None
    given: frozenset[str] = frozenset()
    keys: tuple[Key, ...] = field(default=(), repr=False)

    def check_world(self, world_size: int) -> None:
        """Raises ConfigError unless the configuration fits a world of this size.

        Parameters
        ----------
        world_size : int
            Ranks.
        """
        if self.world_size not in (None, world_size):
            raise ConfigError(
                f"{self.source} is for {self.world_size} ranks, and this world has {world_size}"
            )
        if world_size % self.sharding.replicate:
            raise ConfigError(
                f"{self.source}: {self.sharding.replicate} replicas do not divide a world of "
                f"{world_size} ranks"
            )

    def module_options(self, module: Any) -> dict[str, Any]:
        """Arguments of ``flatshard.torch.fully_shard``: ``fully_shard(m, **s.module_options(m))``.

        Parameters
        ----------
        module : torch.nn.Module
            What will be sharded.

        Returns
        -------
        dict
            ``sharding``, ``units``, ``ignored_params``, and ``mp_policy`` where a precision was
            given.

        Raises
        ------
        ConfigError
            A class or module that is named is not in the module.
        """
        from .modules import module_options

        return module_options(self, module)

    def attach(self, target: Any) -> None:
        """Lets ``flatshard.describe`` show what became of each key, beside what it describes.

        Parameters
        ----------
        target : Shards or anything with ``.shards``
            What was opened with ``sharding`` and ``precision`` of these settings.

        Raises
        ------
        ConfigError
            The target was opened with a sharding or precision other than what was given.
        """
        policy = target.shards.policy
        asked = dataclasses.replace(self.sharding, gather=policy.sharding.gather)
        precision = self.precision
        if precision.reduce is None:
            precision = dataclasses.replace(precision, reduce=policy.precision.reduce)
        for what, here, there in (
            ("sharding", asked, policy.sharding),
            ("precision", precision, policy.precision),
        ):
            if what in self.given and here != there:
                raise ConfigError(
                    f"{self.source} asks for {here}, but the target was opened with {there}: pass "
                    f"{what}=settings.{what} when opening it"
                )
        target.shards.settings = self

    def table(self) -> str:
        """What became of each key, one a line."""
        return table(self.source, self.keys)


def table(source: str, keys: Sequence[Key]) -> str:
    """What became of keys, one a line.

    Parameters
    ----------
    source : str
        Whose keys they are.
    keys : sequence of Key
    """
    rows = [(key.path, short(key.value) + key.auto, key.fate, key.text) for key in keys]
    lines = [f"{source}: {len(rows)} keys" if rows else f"{source}: no keys"]
    width = [min(48, max((len(row[i]) for row in rows), default=0)) for i in range(3)]
    for path, value, fate, text in rows:
        lines.append(f"{path:{width[0]}}  {value:{width[1]}}  {fate:{width[2]}}  {text}".rstrip())
    return "\n".join(lines)


def short(value: object) -> str:
    """A value as a configuration spells it, cut to forty characters; never fails."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str):
        text = value
    else:
        try:
            text = reprlib.repr(value)
        except ValueError:  # a whole number of thousands of digits has no decimal form
            text = "a huge number"
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:37] + "..."
