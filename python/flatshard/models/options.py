"""What a training run is asked to do, checked before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import _device
from ..errors import ConfigError
from ..policy import PRESETS

__all__ = ["TrainConfig"]

_CHOICES = {
    "stage": (0, 1, 2, 3),
    "precision": tuple(PRESETS),
    "gather": ("auto", "view", "copy"),
    "partition": ("flat", "per_parameter"),
    "optimizer": ("adamw", "adam", "sgd", "lion", "adagrad"),
    "schedule": ("constant", "linear", "cosine"),
}
_LATER = {
    "precision": ("fp8",),
    "optimizer": ("lamb", "muon"),
}
SAVE_SIGNALS = ("SIGTERM", "SIGUSR1")

# How a field may differ when a run is resumed: freely, with --reschedule, else not at all.
_FREE, _RESCHEDULE = {"resume": "free"}, {"resume": "reschedule"}


def _free(default: Any) -> Any:
    return field(default=default, metadata=_FREE)


def _rescheduled(default: Any) -> Any:
    return field(default=default, metadata=_RESCHEDULE)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything :func:`flatshard.models.train.train` needs to know.

    Attributes
    ----------
    model : str
        A size by name (``tiny``, ``small``, ``32m``, ``125m``, ...), a ``config.json``, or a folder
        in Hugging Face's layout whose weights are trained further.
    data, tokenizer, glob, exclude, encoding, token_dtype, cache, holdout, seed
        See :func:`flatshard.models.data.tokens`. The seed also decides the initial weights.
    out : str
        Folder of the run: checkpoints, ``metrics.jsonl``, ``loss.png``, ``model/``.
    device : str
        Where ranks compute: ``cpu``, ``cuda`` (each on the GPU of its number) or ``cuda:N``.
    stage, gather, partition, precision
        See :class:`flatshard.Sharding` and the presets of precision.
    batch, length, accumulate : int
        Sequences of a rank's micro-batch, tokens of a sequence, micro-batches of a step.
    steps : int
        Optimizer steps of the whole run, those before a resume included.
    optimizer, lr, betas, eps, weight_decay, max_norm
        ``max_norm`` 0 does not clip; norms and biases are not decayed.
    warmup : int, optional
        Steps of linear warm-up, part of ``steps``. None: a tenth of them, at most 100.
    schedule : str
        ``constant``, ``linear`` or ``cosine``, after the warm-up.
    activation_checkpointing : bool
        Keep only each layer's input in forward, compute the rest again in backward.
    threads : int, optional
        Compute threads of a rank; None: its share of the cores.
    check_every : int
        Steps between comparisons of all copies that ranks must hold alike; 0: never.
    save_every, keep : int
        Steps between checkpoints (0: only the last), and how many stay.
    eval_every, eval_sequences : int
        Steps between evaluations (0: only the last), and held-out sequences of each.
    resume, reschedule : bool
        Go on from the newest checkpoint in ``out``, on any number of ranks and at any stage; allow
        other steps, lr, warm-up, schedule, batch or accumulation then.
    save_on : tuple of str
        Signals that end the run as Ctrl-C does, but with exit status 0 and a file ``stopped.json``.
    json : str, optional
        File for the result, written on failure too.
    trace : str, optional
        File for the ranks' operations, as chrome://tracing and ui.perfetto.dev read it; written on
        failure too.
    prompt, sample_tokens, temperature
        Of the text written at the end; ``sample_tokens`` 0 writes none.
    """

    model: str
    data: str = _free("stdlib")
    out: str = _free("run")
    tokenizer: str = "bytes"
    glob: tuple[str, ...] = _free(("*",))
    exclude: tuple[str, ...] = _free(())
    encoding: str = _free("utf-8")
    token_dtype: str = _free("uint16")
    cache: str | None = _free(None)
    holdout: float = 0.05
    seed: int = 0
    device: str = _free("cpu")
    stage: int = _free(3)
    gather: str = _free("auto")
    partition: str = _free("flat")
    precision: str = "fp32"
    batch: int = _rescheduled(8)
    length: int = 256
    accumulate: int = _rescheduled(1)
    steps: int = _rescheduled(500)
    optimizer: str = "adamw"
    lr: float = _rescheduled(1e-3)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    warmup: int | None = _rescheduled(None)
    schedule: str = _rescheduled("cosine")
    activation_checkpointing: bool = _free(False)
    threads: int | None = _free(None)
    save_every: int = _free(200)
    keep: int = _free(2)
    check_every: int = _free(0)
    eval_every: int = _free(100)
    eval_sequences: int = _free(64)
    resume: bool = _free(False)
    reschedule: bool = _free(False)
    save_on: tuple[str, ...] = _free(())
    json: str | None = _free(None)
    trace: str | None = _free(None)
    prompt: str = _free("def ")
    sample_tokens: int = _free(400)
    temperature: float = _free(0.7)

    def check(self) -> None:
        """Raises ConfigError naming the first field that cannot be, what it is, and what may be."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value in _LATER.get(name, ()):
                raise ConfigError(
                    f"{name} {value!r} is not there yet; choose one of {_listed(choices)}"
                )
            if value not in choices:
                raise ConfigError(f"{name} {value!r}: expected one of {_listed(choices)}")
        try:
            kind, _ = _device.parse(self.device)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if kind != "cpu" and self.gather == "view":
            raise ConfigError(
                f"gather 'view' shares weights in host memory; on device {self.device!r} use 'copy'"
            )
        for name in ("batch", "length", "accumulate", "steps", "keep", "eval_sequences"):
            self._at_least(name, 1)
        for name in ("save_every", "eval_every", "sample_tokens", "check_every"):
            self._at_least(name, 0)
        if self.warmup is not None:
            self._at_least("warmup", 0)
        if self.threads is not None:
            self._at_least("threads", 1)
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed {self.seed}: expected 0 to 2**64 - 1")
        for name in ("lr", "eps"):
            self._finite(name, above=0.0)
        for name in ("weight_decay", "max_norm", "temperature"):
            self._finite(name)
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas {self.betas}: expected two numbers in [0, 1)")
        if self.warmup_steps > self.steps:
            raise ConfigError(f"warmup {self.warmup} is longer than the run of {self.steps} steps")
        for name in self.save_on:
            if name not in SAVE_SIGNALS:
                raise ConfigError(f"save_on {name!r}: expected {' or '.join(SAVE_SIGNALS)}")
        if self.reschedule and not self.resume:
            raise ConfigError("reschedule goes with resume: a new run has no schedule to change")
        if not self.out:
            raise ConfigError("out is empty; name the folder of the run")

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, decided."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} {value}: expected at least {least}")

    def _finite(self, name: str, *, above: float | None = None) -> None:
        value = getattr(self, name)
        good = math.isfinite(value) and (value >= 0.0 if above is None else value > above)
        if not good:
            least = "at least 0" if above is None else f"more than {above:g}"
            raise ConfigError(f"{name} {value}: expected a finite number, {least}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        plain = dataclasses.asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in plain.items()
        }

    def check_resume(self, before: Mapping[str, Any]) -> None:
        """Raises ConfigError if this run would not be the one whose ``to_dict`` was kept.

        What changes no bit of the result may differ (where a run writes, how it is sharded), and
        the schedule where ``reschedule`` allows it.
        """
        now = self.to_dict()
        for entry in dataclasses.fields(self):
            name, kind = entry.name, entry.metadata.get("resume")
            if kind == "free" or name not in before or before[name] == now[name]:
                continue
            if kind == "reschedule":
                if not self.reschedule:
                    raise ConfigError(
                        f"{name} was {before[name]!r} and is now {now[name]!r}: that changes "
                        "the steps to come; say --reschedule if that is meant"
                    )
                continue
            raise ConfigError(
                f"{name} was {before[name]!r} when this run began and is now {now[name]!r}; "
                "resume with the same, or begin another run with another --out"
            )


def _listed(choices: tuple[Any, ...]) -> str:
    return ", ".join(str(choice) for choice in choices)
