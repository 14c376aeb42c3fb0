"""The log of a world: every operation with its bytes and waits, and the trace made of it."""

import json
import pathlib
import threading
import time
from typing import Any

import numpy as np
import pytest
from ranks import Ranks

import flatshard
from flatshard import _core
from flatshard.trace import Log

UNITS, NUMEL, STEPS = 4, 5000, 3


def train(world: flatshard.World, sharding: flatshard.Sharding) -> tuple[Log, Log]:
    """STEPS steps over UNITS units of NUMEL floats: logs of before and after."""
    params = {f"layers.{i}.w": np.ones(NUMEL, np.float32) for i in range(UNITS)}
    shards = flatshard.shard(params, world, sharding=sharding)
    optimizer = flatshard.SGD(shards, lr=0.1)
    world.barrier()
    before = world.log()
    world.barrier()
    for _ in range(STEPS):
        for unit in shards:
            unit.gather()
            unit.release()
        for unit in shards:
            unit.reduce({name: np.ones(NUMEL, np.float32) for name in unit.names})
        optimizer.step()
    world.barrier()
    after = world.log()
    world.barrier()
    return before, after


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 3])
def test_counts_and_bytes(size: int) -> None:
    """Of collectives the message; of sums what is read of all ranks' gradients; control apart."""

    def body(world: flatshard.World) -> None:
        n = 100_003
        before = world.log()
        world.barrier()
        for _ in range(5):
            world.all_reduce(np.ones(n, np.float32))
        world.all_gather(np.ones((7, 2), np.float64))
        world.broadcast(np.ones(10, np.int64), root=size - 1)
        world.reduce_scatter(np.ones((size, 3), np.float32))
        world.all_to_all(np.ones((size, 3), np.float32))
        log = world.log().since(before)
        mine = {(row.op, row.unit): row for row in log if row.rank == world.rank}
        wanted = {
            "all_reduce": (5, 5 * n * 4),
            "all_gather": (1, size * 14 * 8),
            "broadcast": (1, 80),
            "reduce_scatter": (1, size * 12),
            "all_to_all": (1, size * 12),
        }
        for op, (count, nbytes) in wanted.items():
            row = mine[op, ""]
            assert (row.count, row.nbytes, row.control) == (count, nbytes, False), row
            assert 0 <= row.waited <= row.seconds
        assert mine["barrier", ""].count == 1 and mine["barrier", ""].control
        assert set(mine) == {(op, "") for op in (*wanted, "barrier")}
        data = log.total(rank=world.rank, control=False)
        assert (data.count, data.nbytes) == (9, sum(nbytes for _, nbytes in wanted.values()))
        world.barrier()

    flatshard.local_world(size).run(body)


@pytest.mark.quick
@pytest.mark.parametrize("gather", ["view", "copy"])
def test_units(gather: Any) -> None:
    size = 2
    logs = flatshard.local_world(size).run(train, flatshard.Sharding(stage=3, gather=gather))
    before, after = logs[0]
    log = after.since(before)
    for i in range(UNITS):
        unit = f"layers.{i}"
        summed = log.total(op="reduce", unit=unit)
        # Each element of the unit is summed by one rank, which reads it from all of them.
        assert summed.count == size * STEPS
        assert summed.nbytes == STEPS * NUMEL * 4 * size
        gathered = log.total(op="gather", unit=unit)
        copies = STEPS * size if gather == "copy" else 0  # in view there is nothing to do
        assert (gathered.count, gathered.nbytes) == (copies, copies * NUMEL * 4)
    for op in ("end of the gradients", "agreement on the step", "publishing of the weights"):
        row = log.total(op=op)
        assert row.count == size * STEPS and log.total(op=op, control=False).count == 0
    # Every rank sees the same rows of every rank, once nothing moves any more.
    assert [row for row in logs[1][1] if row.rank == 0 and row.op == "reduce"] == [
        row for row in after if row.rank == 0 and row.op == "reduce"
    ]


@pytest.mark.quick
def test_a_wait_is_told_to_the_operation_and_the_unit() -> None:
    """Rank 1 comes late to a barrier, and late with a unit that rank 0 needs the room of."""
    ready = [threading.Event(), threading.Event()]

    def body(world: flatshard.World) -> list[float]:
        params = {f"layers.{i}.w": np.ones(64, np.float32) for i in range(UNITS)}
        shards = flatshard.shard(params, world, sharding=flatshard.Sharding(stage=2))
        optimizer = flatshard.SGD(shards, lr=0.1)
        before = world.log()
        if world.rank == 0:
            ready[0].set()
        else:
            ready[0].wait(20)
            time.sleep(0.2)
        world.barrier()
        for i, unit in enumerate(shards):
            if world.rank == 0 and i == 2:
                ready[1].set()
            if world.rank == 1 and i == 0:
                ready[1].wait(20)
                time.sleep(0.2)
            unit.reduce({name: np.ones(64, np.float32) for name in unit.names})
        optimizer.step()
        log = world.log().since(before)
        world.barrier()
        room = [log.total(rank=0, op="room for gradients", unit=f"layers.{i}") for i in range(4)]
        return [log.total(rank=0, op="barrier").waited, *(row.waited for row in room)]

    # Rank 0 was in each of the waits before rank 1 slept, but for the time to get there.
    barrier, *room = flatshard.local_world(2).run(body)[0]
    assert barrier > 0
    assert room[1] > 0 and room[1] == max(room)  # units come from the last one on: two have room


@pytest.mark.quick
def test_the_ring_keeps_the_last_and_totals_count_all() -> None:
    def body(world: flatshard.World) -> None:
        log = world.log()
        already = sum(row.count for row in log if row.rank == world.rank)
        for _ in range(5000):
            world.barrier()
        log = world.log()
        mine = [event for event in log.events if event.rank == world.rank]
        assert log.total(rank=world.rank).count == already + 5000
        assert 4000 <= len(mine) <= 4096
        done = [event for event in mine if event.op != "wait"]
        assert {event.op for event in done} == {"barrier"}
        assert log.lost[world.rank] + len(mine) >= already + 5000
        # Nothing is allocated by an operation, and what is held stays as it was.
        held = world.memory()
        world.barrier()  # the count is the process's: the other rank has what it asked for
        if world.rank == 0:
            _core.alloc_fail_at(0)
        world.barrier()
        for _ in range(100):
            world.barrier()
        if world.rank == 0:
            assert _core.alloc_fail_at(0) == 0
        world.barrier()
        assert world.memory() == held

    flatshard.local_world(2).run(body)


def test_more_units_than_there_are_names() -> None:
    """The rest is counted under no name; nothing is lost."""

    def body(world: flatshard.World) -> None:
        params = {f"layers.{i}.w": np.ones(1, np.float32) for i in range(300)}
        shards = flatshard.shard(params, world)
        optimizer = flatshard.SGD(shards, lr=0.1)
        for unit in shards:
            unit.reduce({name: np.ones(1, np.float32) for name in unit.names})
        optimizer.step()
        log = world.log()
        named = {row.unit for row in log if row.op == "reduce"}
        assert len(named) == 256 and "" in named
        assert log.total(op="reduce").count == 300

    flatshard.local_world(1).run(body)


@pytest.mark.quick
def test_parts_have_logs_of_their_own_and_a_closed_world_has_none() -> None:
    def body(world: flatshard.World) -> flatshard.World:
        part = world.split(world.rank)
        assert part is not None
        before = world.log()
        part.all_reduce(1)
        assert part.log().total(op="all_reduce").count == 1
        assert world.log().since(before).total(rank=world.rank, op="all_reduce").count == 0
        return world

    world = flatshard.local_world(2).run(body)[0]
    with pytest.raises(RuntimeError, match="closed"):
        world.log()


# ---- the table and the trace --------------------------------------------------------------------


@pytest.mark.quick
def test_the_table() -> None:
    _, log = flatshard.local_world(2).run(train, flatshard.Sharding(stage=3, gather="copy"))[0]
    lines = str(log).splitlines()
    assert lines[0].split()[:4] == ["operation", "unit", "calls", "bytes"]
    assert all(len(line) <= 100 for line in lines)
    table = {tuple(line[:41].split()): line for line in lines}
    assert (
        f"{2 * STEPS} " in table["gather", "layers.0"] and "120.0 kB" in table["gather", "layers.0"]
    )
    # Data first, each part with its sum.
    order = [line.split()[:2] for line in lines]
    assert order.index(["all", "data"]) < order.index(["all", "control"]) == len(lines) - 1
    assert "operations" in repr(log)


def check_trace(path: pathlib.Path, size: int) -> dict[int, list[dict[str, Any]]]:
    """Events of each rank, sorted; each stands inside the one it begins in, or after it."""
    trace = json.loads(path.read_text())
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert {(e["tid"], e["args"]["name"]) for e in named if e["name"] == "thread_name"} == {
        (rank, f"rank {rank}") for rank in range(size)
    }
    tracks: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(size)}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X") and event["pid"] == 0
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0, event
            assert event["cat"] in ("data", "control") and event["name"]
            assert 0 <= event["args"]["waited_us"] <= event["dur"] + 0.002
            assert event["args"]["bytes"] >= 0
            tracks[event["tid"]].append(event)
    for events in tracks.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_ends: list[float] = []
        for event in events:
            while open_ends and open_ends[-1] <= event["ts"] + 0.002:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + 0.002, (event, open_ends)
            open_ends.append(end)
    return tracks


@pytest.mark.quick
def test_the_trace_of_processes(tmp_path: pathlib.Path) -> None:
    """One clock: every rank is in the k-th barrier before any has left it."""
    path = tmp_path / "trace.json"
    program = f"""
        world = init(timeout=50)
        params = {{f"layers.{{i}}.w": np.ones(50_000, np.float32) for i in range(4)}}
        shards = flatshard.shard(params, world)
        optimizer = flatshard.AdamW(shards, lr=0.1)
        world.barrier()
        for turn in range(10):
            if turn % 3 == world.rank:
                time.sleep(0.02)
            for unit in shards:
                unit.reduce({{name: np.ones(50_000, np.float32) for name in unit.names}})
            optimizer.step()
            world.barrier()
        world.barrier()
        if world.rank == 1:
            world.log().trace({str(path)!r})
        world.barrier()
    """
    with Ranks(3, program) as job:
        job.all_well()
    tracks = check_trace(path, 3)
    barriers = [[e for e in events if e["name"] == "barrier"] for events in tracks.values()]
    # Another rank may not yet have written down the last one when rank 1 reads.
    assert [len(found) >= 11 for found in barriers] == [True] * 3
    for together in zip(*(found[:11] for found in barriers), strict=True):
        begin = max(event["ts"] for event in together)
        end = min(event["ts"] + event["dur"] for event in together)
        assert begin <= end + 0.002, together
    for events in tracks.values():
        names = [event["name"] for event in events]
        assert all(names.count(f"reduce layers.{i}") == 10 for i in range(4))
    # Somebody waited, and summed meanwhile what was ready.
    assert any(event["name"].startswith("wait") for events in tracks.values() for event in events)


@pytest.mark.quick
def test_the_log_after_a_death() -> None:
    """Survivors read what the dead rank did last, and the report says it."""
    program = """
        world = init(timeout=50)
        for _ in range(3):
            world.all_reduce(np.ones(1000, np.float32))
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            world.barrier()
        except errors.PeerLost as error:
            log = world.log()
            assert log.total(rank=1, op="all_reduce").nbytes == 12000
            assert [e.op for e in log.events if e.rank == 1 and e.op != "wait"][-1] == "barrier"
            last = "its last operations: all_reduce {0}, all_reduce {0}, barrier {0}"
            said = " ".join(line for line in str(error).splitlines() if "operations" in line)
            import re
            ago = "[0-9.]+ s ago"
            assert re.search(re.escape(last).replace(re.escape("{0}"), ago), said), error
            say("told")
    """
    with Ranks(2, program) as job:
        first, _ = job.ends()
        assert first.status == 0 and "told" in first.out, first
