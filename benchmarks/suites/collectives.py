"""Collectives of fp32 over the ranks of a host.

Two lines for flatshard: over private memory, which other libraries have too, and over world memory,
where ranks read each other's arrays in place. Only the first is a comparison. Bytes are those of
the whole message, the sum of all parts. Options: ranks=2, bytes=4096,134217728,
ops=all_gather,reduce_scatter.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.harness import Case, Contender, Settings, Suite
from benchmarks.ranks import Ranks

__all__ = ["SUITE", "open_collective"]

OPS = ("barrier", "all_gather", "reduce_scatter", "all_reduce")
REPEATED = 1 << 20  # messages below this are sampled in bursts, as a single one is too short
BURST = 50


class Collective:
    """One rank of one collective of `numel` fp32 elements; memory is "private" or "world"."""

    def __init__(self, op: str, numel: int, memory: str) -> None:
        import flatshard as fs

        self.world = fs.init()
        self.op = op
        size, rank = self.world.size, self.world.rank
        self.burst = BURST if 4 * numel < REPEATED else 1
        whole = (np.arange(numel, dtype=np.float32) % 7) + np.float32(rank)
        part = whole[: numel // size].copy()
        if memory == "world":
            whole, part = self.shared(whole), self.shared(part)
        self.whole, self.part = whole, part
        # Results go to memory that is there already, as in the other libraries.
        self.out_whole = np.empty(numel, np.float32)
        self.out_part = np.empty(numel // size, np.float32)

    def shared(
        self, array: np.ndarray[tuple[int], np.dtype[np.float32]]
    ) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        held = self.world.symmetric(array.shape, dtype="float32")
        held[...] = array
        return held

    def work(self) -> None:
        if self.op == "all_gather":
            self.world.all_gather(self.part, out=self.out_whole)
        elif self.op == "reduce_scatter":
            self.world.reduce_scatter(self.whole, op="sum", out=self.out_part)
        elif self.op == "all_reduce":
            self.world.all_reduce(self.whole, op="sum", out=self.out_whole)
        else:
            self.world.barrier()

    def verify(self) -> None:
        self.work()
        numel, size, rank = len(self.whole), self.world.size, self.world.rank
        base = np.arange(numel, dtype=np.float32) % 7
        total = base * size + size * (size - 1) / 2
        share = numel // size
        if self.op == "all_gather":
            expected = np.concatenate([base[:share] + r for r in range(size)])
            np.testing.assert_array_equal(self.out_whole, expected)
        elif self.op == "reduce_scatter":
            np.testing.assert_array_equal(self.out_part, total[rank * share : (rank + 1) * share])
        elif self.op == "all_reduce":
            np.testing.assert_array_equal(self.out_whole, total)

    def sample(self) -> float:
        self.world.barrier()
        started = time.perf_counter()
        for _ in range(self.burst):
            self.work()
        return (time.perf_counter() - started) / self.burst

    def close(self) -> None:
        self.world.close()


def open_collective(op: str, numel: int, memory: str) -> Collective:
    return Collective(op, numel, memory)


def cases(settings: Settings) -> Sequence[Case]:
    options = settings.options
    n = int(options.get("ranks", 2))
    sizes = options.get("bytes", "65536" if settings.smoke else "4096,1048576,134217728").split(",")
    torch = settings.peers and importlib.util.find_spec("torch") is not None

    def ours(op: str, numel: int, memory: str) -> Callable[[], Contender | None]:
        name = "flatshard" if op == "barrier" else f"flatshard, {memory} memory"
        job = "benchmarks.suites.collectives:open_collective"
        return lambda: Ranks(name, job, n=n, op=op, numel=numel, memory=memory)

    def gloo(op: str, numel: int) -> Callable[[], Contender | None]:
        job = "benchmarks.peers.torch_world:open_collective"
        return lambda: Ranks("torch over gloo, private memory", job, n=n, op=op, numel=numel)

    found = []
    for op in options.get("ops", ",".join(OPS)).split(","):
        for nbytes in sizes[:1] if op == "barrier" else sizes:
            numel = int(nbytes) // 4 // n * n
            who = [ours(op, numel, "private")]
            if op != "barrier":
                who.append(ours(op, numel, "world"))
            if torch:
                who.append(gloo(op, numel))
            title = f"{op}, {n} ranks" + ("" if op == "barrier" else f", {4 * numel:,} bytes")
            found.append(Case(title, who, 1.0 if op == "barrier" else 4e-9 * numel,
                              "fence" if op == "barrier" else "GB"))  # fmt: skip
    return found


SUITE = Suite("collectives", "barrier, all-gather, reduce-scatter, all-reduce", cases)
