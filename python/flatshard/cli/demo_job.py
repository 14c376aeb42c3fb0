"""A rank of the jobs that ``flatshard demo`` starts: trains, and says what it does in a file."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import flatshard as fs

__all__ = ["Job", "events_of", "main"]


@dataclass(frozen=True)
class Job:
    """What one job does; the same on every rank.

    Parameters
    ----------
    events : path
        Folder that gets ``rank-R.jsonl`` of each rank.
    batch : int
        Sequences of a rank's batch.
    steps : int
        Last step.
    stage : int
        What each rank keeps.
    checkpoints : path, optional
        Folder to resume from, or with ``save_every`` to save to.
    save_every : int
        Steps between checkpoints; 0: save none, and resume from the newest.
    hash_at : tuple of int
        Steps after which the hash of the weights is said; what is loaded is always hashed.
    model, precision : str
    length : int
        Tokens of a sequence.
    lr : float
    """

    events: str
    batch: int
    steps: int
    stage: int = 3
    checkpoints: str | None = None
    save_every: int = 0
    hash_at: tuple[int, ...] = ()
    model: str = "small"
    precision: str = "bf16"
    length: int = 64
    lr: float = 1e-3

    def text(self) -> str:
        """For the command line of the ranks."""
        return json.dumps(asdict(self))


def events_of(folder: str, rank: int) -> list[dict[str, Any]]:
    """What a rank has said so far, without a line that it has not ended."""
    try:
        with open(os.path.join(folder, f"rank-{rank}.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file.read().split("\n")[:-1]]
    except FileNotFoundError:
        return []


class _Events:
    """One rank's file: each event is one write, so that a kill leaves whole lines."""

    def __init__(self, folder: str, rank: int) -> None:
        path = os.path.join(folder, f"rank-{rank}.jsonl")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def say(self, event: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"event": event, **values}) + "\n").encode())


def main(arguments: list[str]) -> None:
    """Runs one rank of a job.

    Parameters
    ----------
    arguments : list of str
        ``Job.text()``.
    """
    values = json.loads(arguments[0])
    job = Job(**{**values, "hash_at": tuple(values["hash_at"])})
    with fs.init(timeout=60.0) as world:
        events = _Events(job.events, world.rank)
        events.say("start", pid=os.getpid())
        try:
            _train(world, job, events)
        except fs.PeerLost as error:
            events.say("lost", text=str(error))
            raise


def _train(world: fs.World, job: Job, events: _Events) -> None:
    empty = world.memory()
    model = fs.models.Llama.from_config(
        job.model, world=world, sharding=fs.Sharding(job.stage), precision=job.precision
    )
    opt = fs.AdamW(model, lr=job.lr, weight_decay=0.1, no_decay=("*norm*",))
    data = fs.data.tokens("stdlib", world=world, batch=job.batch, length=job.length)
    step = 0
    if job.checkpoints is not None and not job.save_every:
        loaded = fs.checkpoint.load(job.checkpoints, model, opt)
        data.restore(loaded.user)
        step = loaded.step
        digest = fs.weights_sha256(model)
        events.say("loaded", step=step, skipped=loaded.skipped, weights=digest)
    batches = iter(data)
    started = time.perf_counter()
    while step < job.steps:
        events.say("begin", step=step + 1)
        batch = next(batches)
        loss = model.forward_backward(batch.inputs, batch.targets)
        step = opt.step(max_norm=1.0).step
        events.say("step", step=step, loss=loss.mean)
        if step in job.hash_at:
            events.say("hash", step=step, weights=fs.weights_sha256(model))
        if job.checkpoints is not None and job.save_every and step % job.save_every == 0:
            fs.checkpoint.save(job.checkpoints, model, opt, step=step, user=data.state())
    events.say("trained", seconds=time.perf_counter() - started)
    held = {
        name: sum(row[:2]) + row[3] - sum(empty[name][:2]) - empty[name][3]
        for name, row in world.memory().items()
    }
    events.say("memory", params=model.params, held=held)


if __name__ == "__main__":
    main(sys.argv[1:])
