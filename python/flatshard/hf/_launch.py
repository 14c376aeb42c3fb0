"""Which processes there are, and what a launcher says of sharding: read once, before Accelerate."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping

import torch

from ..errors import ConfigError
from ..job import _of_thread

__all__ = [
    "asked_by_environment",
    "check_thread",
    "check_world_size",
    "force_cpu",
    "launched_ranks",
    "without_backends",
]

_log = logging.getLogger("flatshard")

#: What makes Accelerate and transformers load torch's FSDP or DeepSpeed.
_SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
#: What refuses by name: other backends that a launcher switches on.
_OTHERS = {"ACCELERATE_USE_MEGATRON_LM": "Megatron-LM", "ACCELERATE_USE_SAGEMAKER": "SageMaker"}


def _on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on", "t")


def launched_ranks() -> int:
    """How many processes a launcher says there are; 1 without one."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 1


def force_cpu() -> bool:
    """Whether Accelerate must be told to use the CPU: it otherwise takes several processes without
    an accelerator for that many jobs of one process."""
    return launched_ranks() > 1 and not torch.accelerator.is_available()


def check_thread() -> None:
    """Refuses ranks that are threads: Accelerate keeps its state once per process."""
    if getattr(_of_thread, "world", None) is not None:
        raise RuntimeError(
            "flatshard.hf inside local_world(): Accelerate and transformers hold their state once "
            "per process, so ranks cannot be threads; start processes with "
            "'flatshard launch -n N script.py'"
        )


def check_world_size(seen: int, what: str) -> None:
    """Raises unless Accelerate sees as many processes as the launcher started.

    Parameters
    ----------
    seen : int
        What Accelerate says.
    what : str
        Who was asked, and the cure.
    """
    ranks = launched_ranks()
    if seen != ranks:
        raise ConfigError(
            f"{ranks} processes were launched, but {what} sees {seen}: each would train a model of "
            "its own. Make flatshard.hf.TrainingArguments or flatshard.hf.Accelerator before "
            "anything of accelerate, or say use_cpu=True (cpu=True for Accelerator)"
        )


def asked_by_environment() -> bool:
    """Whether ``accelerate launch`` asks for FSDP, DeepSpeed or a parallelism of its own."""
    for name, backend in _OTHERS.items():
        if _on(name):
            raise ConfigError(f"{name} is set: flatshard does not run {backend}; unset it")
    names = (*_SWITCHES, "ACCELERATE_USE_PARALLELISM_CONFIG")
    return any(_on(name) for name in names)


@contextlib.contextmanager
def without_backends() -> Iterator[None]:
    """Hides the switches of torch's FSDP and DeepSpeed from Accelerate inside the block."""
    hidden = {name: os.environ.pop(name) for name in _SWITCHES if name in os.environ}
    try:
        yield
    finally:
        for name, value in hidden.items():
            os.environ[name] = value
