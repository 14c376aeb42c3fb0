"""Saving and loading a sharded state, against torch.distributed.checkpoint and the bare disk.

Bytes are those of all tensors together. Loading reads what was just written, from the system's
cache. "plain files" is the same number of processes that write the same bytes and sync, or read
them to memory. The last case is training while a save is written behind it: against steps alone.
Options: ranks=2, bytes=1200000000, model=32m, folder=... (where to write; default: the system's
temporary folder).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Case, Contender, Settings, Suite
from benchmarks.ranks import Ranks

if TYPE_CHECKING:
    from flatshard.checkpoint import Saving

__all__ = ["SUITE", "open_behind", "open_checkpoint", "open_plain"]

TENSORS = 16
COLUMNS = 1024
CHUNK = 4 << 20
#: Steps of a sample that a save is written behind.
STEPS = 8


class Checkpoint:
    """One rank that saves or loads fp32 weights and both moments of AdamW."""

    def __init__(self, action: str, nbytes: int, folder: str) -> None:
        import flatshard as fs

        self.fs, self.world = fs, fs.init()
        self.action, self.folder = action, pathlib.Path(folder)
        rows = nbytes // 12 // TENSORS // COLUMNS  # weight and two moments, 4 bytes each
        shape = (rows, COLUMNS)
        params = {f"tensor.{k}": np.full(shape, k + 1, np.float32) for k in range(TENSORS)}
        self.shards = fs.shard(params, self.world, unit_of=lambda name: name)
        self.optimizer = fs.AdamW(self.shards, lr=1e-3)
        for unit in self.shards.units:
            unit.reduce({name: np.ones(shape, np.float32) for name in unit.names})
        assert self.optimizer.step()
        self.save()

    def save(self) -> None:
        if self.world.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.world.barrier()
        self.fs.checkpoint.save(self.folder, self.shards, self.optimizer, step=1)

    def load(self) -> None:
        self.fs.checkpoint.load(self.folder, self.shards, self.optimizer)

    def verify(self) -> None:
        before = self.fs.weights_sha256(self.shards), self.fs.state_sha256(self.shards)
        for unit in self.shards.units:
            for name in unit.names:
                whole = self.shards.full(name)
                self.shards.set_full(name, np.zeros_like(whole))
        assert self.fs.weights_sha256(self.shards) != before[0]
        self.load()
        after = self.fs.weights_sha256(self.shards), self.fs.state_sha256(self.shards)
        assert after == before, "what was loaded is not what was saved"

    def sample(self) -> float:
        self.world.barrier()
        started = time.perf_counter()
        if self.action == "save":
            self.save()
        else:
            self.load()
        self.world.barrier()
        return time.perf_counter() - started

    def close(self) -> None:
        self.world.close()


def open_checkpoint(action: str, nbytes: int, folder: str) -> Checkpoint:
    return Checkpoint(action, nbytes, folder)


class Plain:
    """One rank that writes its part of the bytes from memory to a file and syncs it, or reads it
    to memory that it already has: no header, checksum or agreement."""

    def __init__(self, action: str, nbytes: int, folder: str) -> None:
        import flatshard as fs

        self.world = fs.init()  # its barrier alone
        self.action = action
        place = pathlib.Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self.path = place / f"rank-{self.world.rank}"
        draw = np.random.default_rng(self.world.rank)
        self.bytes = draw.integers(0, 256, nbytes // self.world.size, np.uint8)
        self.view = memoryview(self.bytes.data)
        self.write()

    def write(self) -> None:
        self.path.unlink(missing_ok=True)
        with open(self.path, "wb", buffering=0) as file:
            for begin in range(0, len(self.view), CHUNK):
                file.write(self.view[begin : begin + CHUNK])
            os.fsync(file.fileno())

    def read(self) -> None:
        at = 0
        with open(self.path, "rb", buffering=0) as file:
            while at < len(self.view):
                at += file.readinto(self.view[at : at + CHUNK]) or 0

    def verify(self) -> None:
        before = self.bytes.copy()
        self.bytes[:] = 0
        self.read()
        assert (self.bytes == before).all(), "what was read is not what was written"

    def sample(self) -> float:
        self.world.barrier()
        started = time.perf_counter()
        if self.action == "save":
            self.write()
        else:
            self.read()
        self.world.barrier()
        return time.perf_counter() - started

    def close(self) -> None:
        self.world.close()


def open_plain(action: str, nbytes: int, folder: str) -> Plain:
    return Plain(action, nbytes, folder)


class Behind:
    """One rank that takes a few training steps; with ``saving``, a save is written behind them."""

    def __init__(self, model: str, batch: int, length: int, saving: bool, folder: str) -> None:
        import flatshard as fs

        self.fs, self.world = fs, fs.init()
        self.saving, self.folder = saving, pathlib.Path(folder)
        self.model = fs.models.Llama.from_config(model, world=self.world, precision="bf16")
        self.optimizer = fs.AdamW(self.model, lr=1e-4)
        vocabulary = self.model.config.vocab_size
        draw = np.random.default_rng(self.world.rank)
        self.ids = draw.integers(0, vocabulary, (batch, length + 1)).astype(np.int32)
        self.number = 0
        self.step()

    def step(self) -> None:
        self.model.forward_backward(self.ids[:, :-1], self.ids[:, 1:])
        assert self.optimizer.step()

    def save(self) -> Saving:
        self.number += 1
        return self.fs.checkpoint.save(
            self.folder, self.model, self.optimizer, step=self.number, keep=1, background=True
        )

    def verify(self) -> None:
        """What is committed is the moment of the call, whatever the steps after it did."""
        before = self.fs.weights_sha256(self.model), self.fs.state_sha256(self.model)
        self.world.barrier()
        saving = self.save()
        self.step()
        saving.wait()
        self.fs.checkpoint.load(self.folder, self.model, self.optimizer)
        after = self.fs.weights_sha256(self.model), self.fs.state_sha256(self.model)
        self.world.barrier()
        assert after == before, "a step after the call has reached the file"

    def sample(self) -> float:
        self.world.barrier()
        started = time.perf_counter()
        saving = self.save() if self.saving else None
        for _ in range(STEPS):
            self.step()
        if saving is not None:
            saving.wait()
        self.world.barrier()
        return time.perf_counter() - started

    def close(self) -> None:
        self.world.close()


def open_behind(model: str, batch: int, length: int, saving: bool, folder: str) -> Behind:
    return Behind(model, batch, length, saving, folder)


@dataclasses.dataclass
class Cleaned:
    """A contender whose folder is removed when it closes."""

    inner: Contender
    folder: pathlib.Path

    def __post_init__(self) -> None:
        self.name = self.inner.name

    def verify(self) -> None:
        self.inner.verify()

    def sample(self) -> float:
        return self.inner.sample()

    def close(self) -> None:
        self.inner.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def cases(settings: Settings) -> Sequence[Case]:
    options = settings.options
    n = int(options.get("ranks", 2))
    nbytes = int(options.get("bytes", 12 << 20 if settings.smoke else 1_200_000_000))
    above = options.get("folder") or tempfile.gettempdir()
    torch = settings.peers and importlib.util.find_spec("torch") is not None

    def job(name: str, function: str, **arguments: Any) -> Callable[[], Contender | None]:
        place = f"flatshard-benchmark-{os.getpid()}-{name.replace(' ', '-')}"
        folder = pathlib.Path(above) / place
        return lambda: Cleaned(Ranks(name, function, n=n, folder=str(folder), **arguments), folder)

    here = "benchmarks.suites.checkpoint"
    found = []
    for action in ("save", "load"):
        what = {"action": action, "nbytes": nbytes}
        who = [job("flatshard", f"{here}:open_checkpoint", **what)]
        if torch:
            who.append(job("torch DCP", "benchmarks.peers.torch_world:open_checkpoint", **what))
        who.append(job("plain files", f"{here}:open_plain", **what))
        found.append(Case(f"{action} {nbytes / 1e9:.2f} GB, {n} ranks", who, nbytes / 1e9, "GB"))
    model = options.get("model") or ("tiny" if settings.smoke else "32m")
    how = {"model": model, "batch": 4, "length": 32 if settings.smoke else 256}
    found.append(
        Case(
            f"{STEPS} steps of {model}, {n} ranks",
            [
                job("with a save behind", f"{here}:open_behind", saving=True, **how),
                job("alone", f"{here}:open_behind", saving=False, **how),
            ],
            STEPS,
            "steps",
        )
    )
    return found


SUITE = Suite("checkpoint", "save and load of a sharded state", cases)
