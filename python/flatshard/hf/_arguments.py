"""TrainingArguments with flatshard in the place of FSDP and DeepSpeed."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import transformers

from .. import config
from ..config import LATER, Settings
from ..errors import ConfigError
from . import _launch
from ._accelerator import refuse_precision
from ._settings import field_of, read

__all__ = ["Seq2SeqTrainingArguments", "TrainingArguments", "settings_of", "take"]

_log = logging.getLogger("flatshard")


def take(args: transformers.TrainingArguments) -> Any:
    """What arguments say of sharding, in the form of ``flatshard=``; the fields that would start
    FSDP or DeepSpeed are emptied.

    Parameters
    ----------
    args : TrainingArguments
        Changed; what the caller put into its fields is not.

    Raises
    ------
    ConfigError
        They ask for two things.
    """
    spec = getattr(args, "flatshard", None)
    found: dict[str, Any] = {}
    options = args.fsdp
    if isinstance(options, str) and options.strip().lower() in ("true", "false", ""):
        options = options.strip().lower() == "true"  # of a command line
    if options:
        said = field_of(args.fsdp_config) or {}
        found["fsdp"] = said if options is True else {"options": _options(options), "config": said}
    elif args.fsdp_config:
        _log.warning("fsdp_config is ignored: fsdp is not set (pass fsdp=True)")
    if args.deepspeed:
        found["deepspeed"] = field_of(args.deepspeed)
    if len(found) > 1:
        raise ConfigError("fsdp and deepspeed are both set: leave one out")
    if getattr(args, "sharded_ddp", False):
        if found:
            raise ConfigError(f"sharded_ddp and {next(iter(found))} are both set: leave one out")
        # Optimizer state and gradients sharded, as FairScale's ShardedDDP had them.
        found = {"stage": 2}
    if found and spec not in (None, found):
        raise ConfigError(f"flatshard and {next(iter(found))} are both set: leave one out")
    args.fsdp = None
    args.fsdp_config = None
    args.fsdp_plugin_args = None
    args.deepspeed = None
    if hasattr(args, "sharded_ddp"):
        args.sharded_ddp = False
    return found or spec


def _options(options: Any) -> str:
    if isinstance(options, str):
        return options
    return " ".join(str(getattr(one, "value", one)) for one in options)


def settings_of(args: transformers.TrainingArguments, spec: Any, *, steps: Any = LATER) -> Settings:
    """The settings, with "auto" filled from the arguments.

    Parameters
    ----------
    args : TrainingArguments
        Read.
    spec : object
        From `take`.
    steps : int, optional
        Of the run, once they are known.
    """
    auto = {
        "learning_rate": args.learning_rate,
        "adam_beta1": args.adam_beta1,
        "adam_beta2": args.adam_beta2,
        "adam_epsilon": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "fp16": args.mixed_precision == "fp16",
        "bf16": args.mixed_precision == "bf16",
        "max_steps": steps,
        "warmup_steps": LATER if steps is LATER else args.get_warmup_steps(steps),
        "hidden_size": LATER,
    }
    reader: Any = read
    if spec is None and _launch.asked_by_environment():
        reader, spec = config.accelerate, os.environ
    settings: Settings = reader(
        spec,
        world_size=_launch.launched_ranks(),
        auto=auto,
        gradient_checkpointing=bool(args.activation_checkpointing),
    )
    if settings.activation_checkpointing and args.activation_checkpointing:
        raise ConfigError(
            f"{settings.source}: activation_checkpointing, and activation_checkpointing (or "
            "gradient_checkpointing) of TrainingArguments: activations would be recomputed twice; "
            "leave one out"
        )
    return settings


class _Fields:
    """What both classes of arguments do."""

    flatshard: Any
    sharded_ddp: bool

    def __post_init__(self) -> None:
        _launch.check_thread()
        if isinstance(self.flatshard, str) and self.flatshard.lstrip().startswith("{"):
            self.flatshard = json.loads(self.flatshard)
        if isinstance(self.flatshard, Mapping):
            self.flatshard = copy.deepcopy(dict(self.flatshard))
        self.flatshard = take(self)
        if _launch.force_cpu():
            self.use_cpu = True
        with _launch.without_backends():
            super().__post_init__()  # type: ignore[misc]
        refuse_precision(self.mixed_precision)  # type: ignore[attr-defined]
        _launch.check_world_size(self.world_size, "TrainingArguments")  # type: ignore[attr-defined]
        # Wrong keys are refused here; "auto" that depends on the run is filled when it starts.
        settings_of(self, self.flatshard)


@dataclasses.dataclass
class TrainingArguments(_Fields, transformers.TrainingArguments):  # type: ignore[misc]
    """The TrainingArguments of transformers, with two more fields.

    ``fsdp``, ``fsdp_config`` and ``deepspeed`` are read by flatshard, and move into the field
    ``flatshard``: neither FSDP nor DeepSpeed runs. The caller's dict stays as it was.

    Parameters
    ----------
    flatshard : dict or str, optional
        ``{"stage": 2, "precision": "bf16"}``, ``{"fsdp": {...}}``, ``{"deepspeed": {...}}``, or the
        path of an ``fsdp_config``, a DeepSpeed JSON or an Accelerate YAML.
    sharded_ddp : bool
        Optimizer state and gradients sharded, parameters whole: stage 2.

    Raises
    ------
    ConfigError
        A key that is unknown or refused, or two fields that contradict each other.
    """

    flatshard: dict[str, Any] | str | None = dataclasses.field(
        default=None,
        metadata={"help": "How flatshard shards: a path or a JSON dict. Default: stage 3."},
    )
    sharded_ddp: bool = dataclasses.field(
        default=False,
        metadata={"help": "Shard optimizer state and gradients (stage 2)."},
    )


@dataclasses.dataclass
class Seq2SeqTrainingArguments(
    _Fields,
    transformers.Seq2SeqTrainingArguments,  # type: ignore[misc]
):
    """The Seq2SeqTrainingArguments of transformers, with the fields of `TrainingArguments`.

    Parameters
    ----------
    flatshard : dict or str, optional
        As in `TrainingArguments`.
    sharded_ddp : bool
        As in `TrainingArguments`.
    """

    flatshard: dict[str, Any] | str | None = dataclasses.field(
        default=None,
        metadata={"help": "How flatshard shards: a path or a JSON dict. Default: stage 3."},
    )
    sharded_ddp: bool = dataclasses.field(
        default=False,
        metadata={"help": "Shard optimizer state and gradients (stage 2)."},
    )
