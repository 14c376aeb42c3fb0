"""The folder of a run: what is in it, and whose it is.

::

    OUT/run.json          the configuration the run began with
    OUT/metrics.jsonl     one line a step and an evaluation
    OUT/step-000200/      checkpoints
    OUT/loss.png          the curve
    OUT/model/            the trained model in Hugging Face's layout
    OUT/sample.txt        what it writes
    OUT/stopped.json      where a signal of --save-on stopped it; gone when it is resumed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .options import TrainConfig
from .report import write_file

__all__ = ["RunFolder"]

RUN_FORMAT = 1


class RunFolder:
    """Paths of a run, and the checks that keep two runs apart.

    Parameters
    ----------
    path : str or path
        Need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.loss = self.path / "loss.png"
        self.model = self.path / "model"
        self.sample = self.path / "sample.txt"
        self.stopped = self.path / "stopped.json"

    def checkpoints(self) -> list[Path]:
        """Committed checkpoints, oldest step first."""
        return sorted(index.parent for index in self.path.glob("step-*/index.json"))

    def check(self, config: TrainConfig) -> None:
        """Raises ConfigError if a run cannot begin, or be resumed, here. Writes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"out {str(self.path)!r} is a file; name a folder")
        if config.resume:
            self._check_resume(config)
            return
        ours = (self.run, self.metrics, self.model, *self.path.glob("step-*"))
        there = [file.name for file in ours if file.exists()]
        if there:
            cure = "--resume goes on with it" if self.checkpoints() else "it left no checkpoint"
            raise ConfigError(
                f"out {str(self.path)!r} holds another run ({', '.join(there)}): {cure}; "
                "another run needs another --out"
            )

    def _check_resume(self, config: TrainConfig) -> None:
        if not self.run.is_file():
            raise ConfigError(
                f"nothing to resume: {str(self.path)!r} holds no run; "
                "leave out --resume to begin one"
            )
        try:
            kept = json.loads(self.run.read_text("utf-8"))
            before: Mapping[str, Any] = kept["config"]
            version = kept["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{str(self.run)!r} is damaged: {error}") from None
        if version != RUN_FORMAT:
            raise ConfigError(
                f"{str(self.run)!r} has format {version!r}; this version reads {RUN_FORMAT}"
            )
        if not self.checkpoints():
            raise ConfigError(
                f"nothing to resume: the run in {str(self.path)!r} ended before its first "
                "checkpoint; remove the folder and begin it anew"
            )
        config.check_resume(before)

    def begin(self, config: TrainConfig) -> None:
        """Makes the folder this run's. Of one rank."""
        content = {"format": RUN_FORMAT, "config": config.to_dict()}
        write_file(self.run, (json.dumps(content, indent=1) + "\n").encode())
        self.stopped.unlink(missing_ok=True)

    def note_stop(self, signal: str, step: int, checkpoint: Path) -> None:
        """Writes the marker of a stop that a signal asked for. Of one rank."""
        content = {"signal": signal, "step": step, "checkpoint": checkpoint.name}
        write_file(self.stopped, (json.dumps(content) + "\n").encode())
