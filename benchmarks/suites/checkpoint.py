"""Saving and loading a sharded state, against torch.distributed.checkpoint and the bare disk.

Bytes are those of all tensors together. Loading reads what was just written, from the system's
cache. Options: ranks=2, bytes=1200000000, folder=... (where to write; default: the system's
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

import numpy as np

from benchmarks.harness import Case, Contender, Settings, Suite
from benchmarks.ranks import Ranks

__all__ = ["SUITE", "open_checkpoint"]

TENSORS = 16
COLUMNS = 1024


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


@dataclasses.dataclass
class Disk:
    """One process that writes the bytes to a file and syncs it, or reads them."""

    action: str
    nbytes: int
    folder: pathlib.Path

    def __post_init__(self) -> None:
        self.name = f"one file, {self.action}"
        self.block = memoryview(bytearray(range(256)) * (1 << 14))
        self.times = self.nbytes // self.block.nbytes
        self.write()

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "bytes", "wb", buffering=0) as file:
            for _ in range(self.times):
                file.write(self.block)
            os.fsync(file.fileno())

    def read(self) -> None:
        with open(self.folder / "bytes", "rb", buffering=0) as file:
            for _ in range(self.times):
                file.readinto(self.block)

    def verify(self) -> None:
        assert (self.folder / "bytes").stat().st_size == self.times * self.block.nbytes

    def sample(self) -> float:
        started = time.perf_counter()
        if self.action == "save":
            self.write()
        else:
            self.read()
        return time.perf_counter() - started

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


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

    def job(name: str, function: str, action: str) -> Callable[[], Contender | None]:
        folder = pathlib.Path(above) / f"flatshard-benchmark-{os.getpid()}-{name.split()[0]}"
        return lambda: Cleaned(
            Ranks(name, function, n=n, action=action, nbytes=nbytes, folder=str(folder)), folder
        )

    def disk(action: str) -> Callable[[], Contender | None]:
        folder = pathlib.Path(above) / f"flatshard-benchmark-{os.getpid()}-disk"
        return lambda: Disk(action, nbytes, folder)

    found = []
    for action in ("save", "load"):
        who = [job("flatshard", "benchmarks.suites.checkpoint:open_checkpoint", action)]
        if torch:
            who.append(job("torch DCP", "benchmarks.peers.torch_world:open_checkpoint", action))
        who.append(disk(action))
        found.append(Case(f"{action} {nbytes / 1e9:.2f} GB, {n} ranks", who, nbytes / 1e9, "GB"))
    return found


SUITE = Suite("checkpoint", "save and load of a sharded state", cases)
