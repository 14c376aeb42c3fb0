"""Hugging Face Trainer and Accelerate over flatshard: change the import, keep the script.

``TrainingArguments``, ``Trainer``, ``Seq2SeqTrainingArguments`` and ``Seq2SeqTrainer`` take the
place of those of transformers, ``Accelerator`` that of accelerate. ``fsdp``, ``fsdp_config``,
``deepspeed`` and what ``accelerate launch`` puts into the environment are read by flatshard;
neither torch's FSDP nor DeepSpeed runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

importlib.import_module("..torch", __name__)  # says what is missing where torch is not installed

if TYPE_CHECKING:
    from ._accelerator import Accelerator
    from ._arguments import Seq2SeqTrainingArguments, TrainingArguments
    from ._trainer import Seq2SeqTrainer, Trainer, TrainerMixin

__all__ = [
    "Accelerator",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerMixin",
    "TrainingArguments",
]

# transformers takes seconds to import, and a script of Accelerate may do without it.
_HOMES = {
    "Accelerator": ("._accelerator", "accelerate"),
    "Seq2SeqTrainer": ("._trainer", "transformers"),
    "Seq2SeqTrainingArguments": ("._arguments", "transformers"),
    "Trainer": ("._trainer", "transformers"),
    "TrainerMixin": ("._trainer", "transformers"),
    "TrainingArguments": ("._arguments", "transformers"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, package = _HOMES[name]
    try:
        importlib.import_module(package)
        importlib.import_module("accelerate")
    except ImportError as error:
        raise ImportError(
            f"flatshard.hf.{name} needs {error.name}: pip install 'flatshard[hf]'"
        ) from error
    found = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
