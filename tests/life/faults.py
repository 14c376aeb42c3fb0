"""What can befall a rank, and where: the product of cases, and what each rank of a case does.

A rank trains a step, then comes to a point. There the victim suffers its fault and the others do
what ranks do at that point, and then what comes next. What each survivor saw is one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from typing import Any, NamedTuple

import numpy as np
from living import SHAPES, arrays

import flatshard as fs
from flatshard import _core

FAULTS = ("kill", "stop", "exception", "exit", "skip", "wrong size")
POINTS = ("gather", "reduce", "verdict", "published", "split", "alloc", "save", "idle")

#: How long a survivor may wait: the right error comes before, or it is another one (the test prints
#: how long it took). A rank that is stopped is found by its deadline alone.
PATIENCE_S = 5.0
STOP_S = 0.6


class Case(NamedTuple):
    """One point of the product."""

    fault: str
    point: str
    size: int
    ranks: str

    @property
    def victim(self) -> int:
        """The last rank of two, an inner or the first one of four."""
        if self.size == 2:
            return 1
        return 2 if FAULTS.index(self.fault) % 2 else 0

    @property
    def name(self) -> str:
        """For test ids."""
        return f"{self.fault} at {self.point}, {self.size} {self.ranks}".replace(" ", "-")


def product() -> list[Case]:
    """Every case there is: threads do not die or stop by themselves, and doing nothing has neither
    a size nor a collective to skip."""
    cases = itertools.product(FAULTS, POINTS, (2, 4), ("processes", "threads"))
    return [
        case
        for case in map(Case._make, cases)
        if not (case.ranks == "threads" and case.fault in ("kill", "stop"))
        and not (case.point == "idle" and case.fault in ("skip", "wrong size"))
    ]


# ---- what is right ------------------------------------------------------------------------------


def expected(case: Case) -> tuple[str, str]:
    """The survivors' error and what its text says of the victim; error "": all goes well."""
    rank = f"rank {case.victim}"
    if case.fault == "kill":
        return "PeerLost", f"{rank} (pid PID) died"
    if case.fault == "stop":
        return "CollectiveTimeout", f"{rank} (pid PID) did not come within {STOP_S} s"
    failed = f"{rank} (pid PID) failed: " if case.ranks == "processes" else f"{rank} failed: "
    if case.fault == "exception":
        return "PeerLost", failed + "LookupError: the victim's own"
    if case.fault == "exit":
        who = f"{rank} (pid PID) left" if case.ranks == "processes" else f"{rank} left"
        return "PeerLost", who
    if case.fault == "skip":
        return {
            # A unit that does not come is absent: legal, and the step is taken.
            "reduce": ("", ""),
        }.get(case.point, ("CollectiveMismatch", "ranks called different operations at one fence"))
    return {
        # Refused where it is wrong, before anything is sent: there it is an exception.
        "gather": ("CollectiveMismatch", "ranks called different operations at one fence"),
        "reduce": ("PeerLost", failed + "ValueError: gradient of b.w: shape (3,)"),
        "verdict": ("CollectiveMismatch", "ranks called different operations at one fence"),
        "published": ("PeerLost", failed + f"ValueError: {rank}: max_norm is 2, but grad_norm()"),
        "split": ("PeerLost", failed + "ValueError: color: expected 0 or more"),
        "alloc": ("CollectiveMismatch", "allocation of world memory of"),
        "save": ("ValueError", "step"),
    }[case.point]


#: What a report says the survivors are in: where ranks wait at this point.
OPERATIONS = {
    "gather": ("reduce", "end of the gradients"),
    "reduce": ("reduce", "end of the gradients"),
    "verdict": ("agreement on the step", "end of the gradients"),
    "published": ("publishing of the weights",),
    "split": ("split",),
    "alloc": ("allocation of world memory",),
    "save": ("save", "all_gather"),
    "idle": ("barrier",),
}


class Left(Exception):
    """A thread's rank returns early."""


# ---- what a rank does ---------------------------------------------------------------------------


class Rank:
    """One rank of a case."""

    def __init__(self, world: fs.World, case: Case, folder: str) -> None:
        self.world, self.case, self.folder = world, case, folder
        self.is_victim = world.rank == case.victim
        self.shards = arrays(world, sharding=fs.Sharding(3, gather="copy"))
        self.opt = fs.AdamW(self.shards, lr=0.01)
        self.backward()
        assert self.opt.step(max_norm=1.0)
        world.barrier()

    def forward(self, units: Any) -> None:
        for unit in units:
            with unit.gathered():
                pass

    def reduce(self, unit: fs.Unit) -> None:
        unit.reduce({n: np.ones(SHAPES[n], np.float32) for n in unit.names})

    def backward(self) -> None:
        for unit in reversed(self.shards.units):
            self.reduce(unit)

    def suffer(self, waits: int) -> bool:
        """The victim's fault; ``waits``: the wait from now on in which a death or stop falls, 0:
        here. True when the caller must leave out its call."""
        fault = self.case.fault
        if not self.is_victim:
            return False
        if fault in ("kill", "stop"):
            number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
            if waits:
                _core.wait_fault_at(waits, 1 if fault == "kill" else 2)
            else:
                os.kill(os.getpid(), number)
        elif fault == "exception":
            raise LookupError("the victim's own")
        elif fault == "exit":
            if self.case.ranks == "threads":
                raise Left
            sys.exit(0)
        return fault == "skip"

    def wrong(self) -> bool:
        return self.is_victim and self.case.fault == "wrong size"

    def at_gather(self) -> None:
        units = self.shards.units
        self.forward(units[:1])
        if not self.suffer(0):
            self.forward(units[2:] if self.wrong() else units[1:2])
        self.backward()
        self.opt.step(max_norm=1.0)

    def at_reduce(self) -> None:
        last, middle, first = reversed(self.shards.units)
        self.reduce(last)
        if not self.suffer(0):
            if self.wrong():
                middle.reduce({"b.w": np.ones(3, np.float32)})
            self.reduce(middle)
        self.reduce(first)
        self.opt.step(max_norm=1.0)

    def at_verdict(self) -> None:
        self.backward()
        if not self.suffer(2):  # the first wait is where the gradients end
            self.opt.step(max_norm=2.0 if self.wrong() else 1.0)

    def at_published(self) -> None:
        self.backward()
        self.opt.grad_norm(max_norm=1.0)
        if not self.suffer(1):
            self.opt.step(max_norm=2.0 if self.wrong() else 1.0)

    def at_split(self) -> None:
        if not self.suffer(1):
            self.world.split(-3 if self.wrong() else 0)

    def at_alloc(self) -> None:
        if not self.suffer(1):
            self.world.symmetric(9000 if self.wrong() else 1000)

    def at_save(self) -> None:
        if not self.suffer(3):
            step = -1 if self.wrong() else 1
            fs.checkpoint.save(self.folder, self.shards, self.opt, step=step)

    def at_idle(self) -> None:
        self.suffer(0)

    def run(self) -> dict[str, Any]:
        """Comes to the point, goes on to the next fence; what was seen."""
        patience = STOP_S if self.case.fault == "stop" else PATIENCE_S
        self.world._core.set_deadlines(patience, 60.0)
        begun = time.monotonic()
        seen = {"error": "", "text": "", "seconds": 0.0}
        try:
            getattr(self, f"at_{self.case.point}")()
            begun = time.monotonic()
            self.world.barrier()
        except (fs.FlatshardError, ValueError) as error:
            if isinstance(error, ValueError) and self.is_victim and self.case.point != "save":
                raise
            seen = {"error": type(error).__name__, "text": str(error)}
            seen["seconds"] = time.monotonic() - begun
        return seen


def run_process() -> None:
    """A rank of processes: prints what it saw, and that nothing of the world is left in it."""
    case = Case(*json.loads(os.environ["CASE"]))
    world = fs.init(timeout=30, threads=1)
    rank = Rank(world, case, os.environ["FOLDER"])
    print(json.dumps({"pid": os.getpid()}), flush=True)
    seen = rank.run()
    rank.shards.close()
    world.close()
    maps = open("/proc/self/maps", encoding="utf-8").read()  # noqa: SIM115
    seen["left"] = maps.count("flatshard-data") + sum(
        "flatshard" in os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    )
    print(json.dumps(seen), flush=True)


def run_threads(case: Case, folder: str) -> list[dict[str, Any] | None]:
    """A case of thread ranks: what each saw, None for a victim that left."""
    seen: list[dict[str, Any] | None] = [None] * case.size

    def rank(world: fs.World) -> None:
        there = Rank(world, case, folder)
        try:
            seen[world.rank] = there.run()
        except Left:
            pass
        finally:
            there.shards.close()

    try:
        fs.local_world(case.size, timeout=30.0, threads=1).run(rank)
    except (LookupError, ValueError):
        pass  # the victim's own
    return seen
