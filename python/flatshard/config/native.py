"""Settings as the options of ``flatshard train``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..policy import PRESETS
from .settings import LATER, Settings

__all__ = ["train_options"]

#: Options of an optimizer that the trainer has no words for, and the value that asks for nothing.
_PLAIN = {"amsgrad": False, "nesterov": False, "lr_decay": 0.0, "initial_accumulator_value": 0.0}


def train_options(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """What ``flatshard train`` is asked for by a configuration.

    Parameters
    ----------
    settings : Settings
        Read with every "auto" left open: what is open stays as the command line says.

    Returns
    -------
    (dict, list of str)
        Fields of TrainConfig, and sentences about what is not taken over and why that is no loss.

    Raises
    ------
    ConfigError
        Something that would change the result, and that the trainer has no option for.
    """
    made: dict[str, Any] = {}
    left: list[str] = []

    def take(name: str, value: Any) -> None:
        if value is not None and value is not LATER:
            made[name] = value

    given = settings.given
    if "sharding" in given:
        sharding = settings.sharding
        made["stage"], made["partition"] = sharding.stage, sharding.partition
        made["gather"] = sharding.gather
        if sharding.replicate > 1:
            _refuse(settings, f"replicate={sharding.replicate}")
        if not sharding.reshard_after_forward and sharding.gather == "copy":
            _refuse(settings, "reshard_after_forward=False with copies")
    if "precision" in given:
        names = [name for name, preset in PRESETS.items() if preset == settings.precision]
        if not names:
            _refuse(settings, f"{settings.precision}, which is no preset ({', '.join(PRESETS)})")
        made["precision"] = names[0]
    take("batch", settings.batch.micro)
    take("accumulate", settings.batch.accumulate)
    if "max_norm" in given:
        made["max_norm"] = settings.max_norm or 0.0
    if settings.optimizer is not None:
        _optimizer(settings, take)
    if settings.schedule is not None:
        _refuse(settings, f"the schedule {settings.schedule.name}: say --schedule and --warmup")
    if settings.ignored_modules:
        _refuse(settings, "ignored_modules")
    if "activation_checkpointing" in given:
        made["activation_checkpointing"] = settings.activation_checkpointing
    for name, is_there, text in (
        ("units", settings.units.by != "auto", "the native model's units are its layers"),
        ("steps_per_print", settings.steps_per_print is not None, "every step is shown"),
        ("timing", settings.timing, "--trace FILE writes where the time goes"),
        ("save", "save" in given, "each run ends with a checkpoint and the whole model"),
        ("efficient_loading", settings.efficient_loading, "always: each rank reads what it owns"),
    ):
        if is_there and name in given:
            left.append(f"{name}: {text}")
    return made, left


def _optimizer(settings: Settings, take: Callable[[str, Any], None]) -> None:
    assert settings.optimizer is not None
    options = dict(settings.optimizer.options)
    for name, plain in _PLAIN.items():
        if options.pop(name, plain) != plain:
            _refuse(settings, f"{name} of {settings.optimizer.name}")
    take("optimizer", settings.optimizer.name.lower())
    momentum = options.pop("momentum", None)
    if momentum is not None:
        take("betas", (momentum, 0.999))  # of SGD the trainer reads the first
    for name in ("lr", "betas", "eps", "weight_decay"):
        take(name, options.pop(name, None))
    for name in options:
        _refuse(settings, f"{name} of {settings.optimizer.name}")


def _refuse(settings: Settings, what: str) -> None:
    raise ConfigError(f"{settings.source}: flatshard train has no option for {what}")
