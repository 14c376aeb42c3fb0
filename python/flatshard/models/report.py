"""What a run tells: a bar or lines, ``metrics.jsonl``, the loss curve, the result as JSON."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import statistics
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = [
    "RESULT_KEYS",
    "Display",
    "Meter",
    "Metrics",
    "StepReport",
    "TrainResult",
    "draw_loss",
    "own_pss",
    "plain",
    "reason",
    "size",
    "write_file",
    "write_result",
]

# The keys of --json, in order. After a failure there is "error" too.
RESULT_KEYS = (
    "params",
    "world_size",
    "stage",
    "precision",
    "steps",
    "tokens_per_second",
    "step_ms",
    "mfu",
    "loss_first",
    "loss_last",
    "eval_loss",
    "grad_norm_last",
    "weights_sha256",
    "memory",
)
WARM_UP_STEPS = 2  # left out of the median: they touch memory for the first time


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as ``on_step`` and ``metrics.jsonl`` get it.

    Attributes
    ----------
    step, steps : int
        Steps done, and of the whole run.
    loss : float
        Mean over the targets of all ranks and micro-batches, nats a token.
    grad_norm, lr : float
    applied : bool
        False where the step was skipped; ``reason`` says why.
    tokens : int
        Targets counted since the run began, all ranks.
    tokens_per_second, step_ms : float
        Of this step.
    mfu : float
        6 x parameters x tokens per second over the rate of products of all ranks: on a CPU as
        measured, on a GPU its documented peak where one is known.
    memory : int
        Bytes this rank holds.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float
    lr: float
    applied: bool
    reason: str
    tokens: int
    tokens_per_second: float
    step_ms: float
    mfu: float
    memory: int


@dataclass(frozen=True)
class TrainResult:
    """How a run ended; the fields of ``--json`` and what a caller in Python wants besides.

    Attributes
    ----------
    params, world_size, stage, precision
    steps : int
        Done when it ended, skipped ones included.
    steps_skipped : int
        Of these, how many moved nothing; ``metrics.jsonl`` has the reason of each.
    tokens_per_second, step_ms, mfu : float or None
        Medians over this start's steps after the second.
    loss_first, loss_last, eval_loss, grad_norm_last : float or None
        Nats a token; the first is of the run's first step, whatever start that was in.
    weights_sha256 : str
    memory : dict
        Class of memory -> ``{"rank": bytes of this rank, "host": bytes of all ranks of the host}``.
    pss : int
        Most proportional set size of all ranks together, bytes, as seen after evaluations and at
        the end: what the host spends, interpreter and libraries included; 0 where the system does
        not say.
    interrupted : str or None
        The signal that ended it before ``steps``.
    checkpoint, model : Path or None
        The last checkpoint, and the folder in Hugging Face's layout.
    sample : str or None
        The text written at the end.
    """

    params: int
    world_size: int
    stage: int
    precision: str
    steps: int
    steps_skipped: int
    tokens_per_second: float | None
    step_ms: float | None
    mfu: float | None
    loss_first: float | None
    loss_last: float | None
    eval_loss: float | None
    grad_norm_last: float | None
    weights_sha256: str
    memory: dict[str, dict[str, int]]
    pss: int
    interrupted: str | None
    checkpoint: Path | None
    model: Path | None
    sample: str | None


class Meter:
    """Speed of a run from the seconds and tokens of its steps.

    Parameters
    ----------
    params : int
        Parameters of the model.
    flops : float
        What all ranks reach in matrix products together, FLOP/s.
    source : str
        Where that figure is from.
    """

    def __init__(self, params: int, flops: float, source: str) -> None:
        self.params, self.flops, self.source = params, flops, source
        self._seconds: list[float] = []
        self._tokens: list[int] = []
        self._recent: deque[tuple[float, int]] = deque(maxlen=8)

    def add(self, seconds: float, tokens: int) -> None:
        """Notes one step."""
        self._seconds.append(seconds)
        self._tokens.append(tokens)
        self._recent.append((seconds, tokens))

    def mfu(self, tokens_per_second: float) -> float:
        """Model FLOP utilisation: attention and recomputation are not counted."""
        return 6.0 * self.params * tokens_per_second / self.flops if self.flops > 0 else math.nan

    @property
    def recent(self) -> float:
        """Tokens per second over the last steps, for the bar."""
        seconds = sum(s for s, _ in self._recent)
        return sum(t for _, t in self._recent) / seconds if seconds > 0 else math.nan

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the steps after the second; of all where there are no more than two."""
        rates = [t / s for s, t in zip(self._seconds, self._tokens, strict=True) if s > 0]
        return statistics.median(rates[WARM_UP_STEPS:] or rates) if rates else None

    @property
    def step_ms(self) -> float | None:
        """Median over the steps after the second, milliseconds."""
        if not self._seconds:
            return None
        return 1e3 * statistics.median(self._seconds[WARM_UP_STEPS:] or self._seconds)

    def formula(self) -> str:
        """The sentence that says what MFU means here."""
        return (
            f"MFU is 6 x {self.params:,} parameters x tokens/s / {self.flops / 1e9:.0f} GFLOP/s, "
            f"{self.source}"
        )


class Display:
    """A bar where standard error is a terminal with a size, else plain lines on standard output.

    Parameters
    ----------
    steps, done : int
        Of the whole run, and before this start.
    on : bool
        False on every rank but the first: then nothing is shown.
    """

    def __init__(self, steps: int, done: int, *, on: bool = True) -> None:
        self._on, self._steps = on, steps
        self._every = max(1, steps // 20)
        self._first = done + 1
        self._bar: Any = None
        if on and _is_screen(sys.stderr):
            from tqdm import tqdm

            self._bar = tqdm(
                total=steps, initial=done, dynamic_ncols=True, unit="step", smoothing=0.1
            )

    def step(self, report: StepReport, speed: float, mfu: float) -> None:
        """Shows one step; ``speed`` in tokens a second and ``mfu`` are of the last few."""
        if not self._on:
            return
        skipped = "" if report.applied else f"  SKIPPED ({report.reason})"
        text = (
            f"loss {report.loss:.3f}  norm {report.grad_norm:.2f}  lr {report.lr:.1e}  "
            f"{speed:,.0f} tok/s  MFU {mfu:.0%}  {size(report.memory)}{skipped}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(1)
            return
        shown = report.step % self._every == 0 or report.step in (self._first, self._steps)
        if shown or not report.applied:
            print(f"step {report.step:>5}/{self._steps}  {text}", flush=True)

    def note(self, text: str) -> None:
        """One line that stays."""
        if not self._on:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Leaves the bar where it is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _is_screen(stream: Any) -> bool:
    """Is this a terminal with room for a bar? Some say they are one and have no size."""
    try:
        return bool(stream.isatty()) and min(os.get_terminal_size(stream.fileno())) > 0
    except (OSError, ValueError):
        return False


def own_pss() -> int:
    """Proportional set size of this process, bytes: its private pages and its part of shared ones,
    so that the sizes of all ranks add up to what the host spends. 0 where
    the system does not say."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def size(nbytes: float) -> str:
    """Bytes in a person's words."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return (
                f"{nbytes:.0f} {unit}" if nbytes >= 100 or unit == "B" else f"{nbytes:.1f} {unit}"
            )
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


class Metrics:
    """``metrics.jsonl``: one object a step or evaluation, flushed as it comes.

    Parameters
    ----------
    file : path
    after : int
        Lines of later steps are taken away first: a resumed run writes them again.
    """

    def __init__(self, file: Path, *, after: int = 0) -> None:
        kept = [line for line in _lines(file) if line["step"] <= after]
        if file.exists():
            text = "".join(json.dumps(line) + "\n" for line in kept)
            write_file(file, text.encode())
        self._file: IO[str] = open(file, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, **values: Any) -> None:
        """Appends one object; numbers that are not finite become null."""
        self._file.write(json.dumps(plain(values), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a metrics file; a last line cut short by a kill is left out."""
    lines: list[dict[str, Any]] = []
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        return lines
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            lines.append(value)
    return lines


def plain(value: Any) -> Any:
    """Values as JSON has them: no NaN, no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def write_file(file: Path, content: bytes, *, replace: bool = True) -> None:
    """Writes a file whole: a reader sees the old one or the new one.

    Without ``replace`` a file that is there stays: of several writers the first one wins.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    hidden = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident():x}")
    try:
        with open(hidden, "wb") as stream:
            stream.write(content)
        if replace:
            os.replace(hidden, file)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(hidden, file)
    finally:
        hidden.unlink(missing_ok=True)


def write_result(
    file: str | os.PathLike[str], values: Mapping[str, Any], *, replace: bool = True
) -> None:
    """Writes the object of ``--json``: every key of RESULT_KEYS, null where unknown.

    Without ``replace`` a result that is there stays: of ranks that fail, the first one to fail
    knows the cause.
    """
    content = {key: plain(values.get(key)) for key in RESULT_KEYS}
    if values.get("error") is not None:
        content["error"] = str(values["error"])
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_file(Path(file), text.encode(), replace=replace)


def reason(error: BaseException) -> str:
    """An exception in one sentence, its kind first."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def draw_loss(metrics: Path, picture: Path) -> str | None:
    """Draws the curve of a metrics file.

    Returns
    -------
    str or None
        None where the picture was drawn, else the sentence that says why not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return f"no {picture.name}: matplotlib is not installed (pip install 'flatshard[plot]')"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = _lines(metrics)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    held = [
        (line["step"], line["eval_loss"]) for line in lines if line.get("eval_loss") is not None
    ]
    if steps:
        axes.plot(*zip(*steps, strict=True), linewidth=0.8, label="training batch")
    if held:
        axes.plot(*zip(*held, strict=True), marker="o", markersize=3, label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    if steps or held:
        axes.legend()
    figure.savefig(picture, dpi=120)
    return None
