"""Ranks as threads: results, failures, Ctrl-C, nothing left; and worlds of one."""

import os
import signal
import threading
import time
import traceback

import numpy as np
import pytest

import flatshard
from flatshard import _core
from flatshard.errors import CollectiveTimeout, PeerLost, WorldError
from flatshard.job import init, local_world
from flatshard.world import World

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def no_threads_stay():
    """Rank threads end with their world; one that was in Python when it did ends a moment later."""
    yield
    deadline = time.monotonic() + 10.0
    left = ["unknown"]
    while left and time.monotonic() < deadline:
        left = [t.name for t in threading.enumerate() if t.name.startswith("flatshard rank")]
        time.sleep(0.01 if left else 0)
    assert not left, left


def test_results_in_rank_order() -> None:
    def rank(world: World, a: int, b: str) -> tuple:
        assert world.is_main == (world.rank == 0) and world.local_rank == world.rank
        assert world.threads >= 1
        return world.rank, world.size, a, b

    assert local_world(3).run(rank, 4, "x") == [(r, 3, 4, "x") for r in range(3)]


def test_the_first_failure_is_what_the_caller_sees() -> None:
    def rank(world: World) -> None:
        world.barrier()
        if world.rank == 1:
            raise LookupError("the cause")
        world.barrier()

    with pytest.raises(LookupError, match="the cause") as caught:
        local_world(4).run(rank)
    lines = "".join(traceback.format_tb(caught.value.__traceback__))
    assert 'raise LookupError("the cause")' in lines


def test_the_others_learn_why() -> None:
    texts = {}

    def rank(world: World) -> None:
        world.barrier()
        if world.rank == 1:
            raise LookupError("the cause")
        try:
            world.barrier()
        except PeerLost as error:
            texts[world.rank] = str(error)

    with pytest.raises(LookupError):
        local_world(3).run(rank)
    assert set(texts) == {0, 2}
    assert all("rank 1 failed: LookupError: the cause" in text for text in texts.values()), texts


def test_deadline() -> None:
    def rank(world: World) -> None:
        if world.rank == 1:
            time.sleep(1.0)
        world.barrier()

    with pytest.raises(CollectiveTimeout, match=r"rank 1 did not come within 0\.3 s"):
        local_world(2, timeout=0.3).run(rank)


def test_interrupt_in_the_main_thread() -> None:
    """Rank threads wait for ever; Ctrl-C ends the call and every rank."""
    ended = []

    def rank(world: World) -> None:
        if world.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            while True:
                time.sleep(0.01)
                world._core.usable()
        try:
            world.barrier()
        finally:
            ended.append(world.rank)

    with pytest.raises(KeyboardInterrupt):
        local_world(3, timeout=50).run(rank)
    assert sorted(ended) == [1, 2]


def test_worlds_in_parallel_and_inside_each_other() -> None:
    """Many at once, no names that could clash; a rank may run a world of its own."""
    results = {}

    def inner(world: World, base: int) -> float:
        return float(world.all_reduce(float(base)))

    def rank(world: World, base: int) -> float:
        assert init() is world
        own = local_world(2).run(inner, base + world.rank)
        assert init() is world
        return float(world.all_reduce(own[0]))

    def one(base: int) -> None:
        results[base] = local_world(3).run(rank, base)

    threads = [threading.Thread(target=one, args=(base,)) for base in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {base: [2.0 * (3 * base + 3)] * 3 for base in range(6)}


def test_run_can_be_called_again_after_a_failure() -> None:
    world = local_world(2)

    def rank(world: World, fail: bool) -> int:
        if fail and world.rank:
            raise ValueError("once")
        return int(world.all_reduce(1))

    with pytest.raises(ValueError, match="once"):
        world.run(rank, True)
    assert world.run(rank, False) == [2, 2]


def test_a_world_that_is_closed_says_so() -> None:
    def rank(world: World) -> None:
        world.barrier()
        world.close()
        world.close()
        with pytest.raises(RuntimeError, match="closed"):
            world.barrier()

    local_world(2).run(rank)


def test_one_thread_of_a_rank_at_a_time() -> None:
    def rank(world: World) -> None:
        if world.rank == 1:
            refused.wait(20)
            world.barrier()
            return
        other = threading.Thread(target=world.barrier)
        other.start()
        time.sleep(0.3)  # it waits for rank 1, which waits for us
        with pytest.raises(RuntimeError, match="in a call already"):
            world.barrier()
        with pytest.raises(RuntimeError, match="another thread"):
            world.close()
        refused.set()
        other.join()

    refused = threading.Event()
    local_world(2, timeout=20).run(rank)


def test_split_and_order() -> None:
    def rank(world: World) -> None:
        part = world.split(world.rank % 2, key=-world.rank)
        assert part is not None
        evens, odds = [4, 2, 0], [3, 1]
        mine = odds if world.rank % 2 else evens
        assert part.all_gather(world.rank).tolist() == mine
        none = world.split(0 if world.rank == 4 else None)
        assert (none is None) == (world.rank != 4)
        log.append(("in", world.rank))
        with world.first() as is_first:
            assert is_first == (world.rank == 0)
            log.append(("first", world.rank))
        world.barrier()

    log: list = []
    local_world(5).run(rank)
    order = [rank for what, rank in log if what == "first"]
    assert order[0] == 0 and sorted(order) == list(range(5))


def test_first_fails_on_all_and_the_world_goes_on() -> None:
    def rank(world: World) -> int:
        with pytest.raises(OSError if world.is_main else WorldError), world.first():
            raise OSError("disk full")
        return int(world.all_reduce(1))

    assert local_world(3).run(rank) == [3, 3, 3]


def test_print_is_rank_0s(capsys: pytest.CaptureFixture[str]) -> None:
    local_world(3).run(lambda world: world.print("once", world.rank))
    assert capsys.readouterr().out == "once 0\n"


def test_memory_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATSHARD_THREADS", "3")
    assert local_world(2).run(lambda world: world.threads) == [3, 3]
    assert local_world(2, threads=2).run(lambda world: world.threads) == [2, 2]
    monkeypatch.setenv("FLATSHARD_THREADS", "many")
    with pytest.raises(ValueError, match="FLATSHARD_THREADS=many"):
        local_world(2).run(lambda world: world.threads)
    monkeypatch.delenv("FLATSHARD_THREADS")

    def rank(world: World) -> dict:
        assert world.threads == max(1, _core.cpu_count() // 2)
        return world.memory()

    for memory in local_world(2).run(rank):
        private, shared, peak, device = memory["windows"]
        assert private > 0 and shared > 0 and peak == private + shared and device == 0
        assert memory["weights"] == (0, 0, 0, 0)


@pytest.mark.parametrize("n", [0, -1, 2.0, True, 5000])
def test_bad_sizes(n) -> None:
    with pytest.raises(ValueError, match=r"ranks"):
        local_world(n).run(lambda world: None)


def test_threads_and_timeouts_are_checked() -> None:
    with pytest.raises(ValueError, match="threads"):
        local_world(2, threads=0)
    with pytest.raises(ValueError, match="timeout"):
        local_world(2, timeout=0)


# ---- a world of one -----------------------------------------------------------------------------


def test_alone() -> None:
    with init() as world:
        assert (world.rank, world.size, world.local_rank, world.is_main) == (0, 1, 0, True)
        assert init() is world is flatshard.init()
        assert world.all_reduce(3.0, op="mean") == 3.0
        assert world.reduce_scatter(np.arange(5.0)).tolist() == [0, 1, 2, 3, 4]
        x = world.symmetric(4)
        assert world.all_gather(x) is not x
        part = world.split(3)
        assert part is not None and part.size == 1
        part.barrier()
    with init() as again:
        assert again is not world


def test_what_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="backend='nccl'"):
        init(backend="nccl")
    with pytest.raises(ValueError, match="timeout"):
        init(timeout=-1)


def test_delays_change_nothing() -> None:
    """A random pause before every wait: the same results."""

    def rank(world: World) -> list:
        x = np.arange(30_000, dtype=np.float32) + world.rank
        return [world.all_reduce(x).sum(), world.all_gather(x).sum(), world.reduce_scatter(x).sum()]

    want = local_world(3).run(rank)
    _core.wait_set_delay(11, 3000)
    try:
        assert local_world(3).run(rank) == want
    finally:
        _core.wait_set_delay(0, 0)


def test_failing_allocations_end_every_rank() -> None:
    """The n-th allocation fails, n = 1, 2, 3 ...: nobody hangs, and memory errors are named so."""

    def rank(world: World) -> None:
        x = world.symmetric(1000)
        world.all_reduce(x, out=x)
        part = world.split(0)
        assert part is not None
        part.barrier()

    failures = 0
    for nth in range(1, 200):
        _core.alloc_fail_at(nth)
        try:
            local_world(2, timeout=20).run(rank)
            failed = False
        except (MemoryError, PeerLost):
            failed = True
        made = _core.alloc_fail_at(0)
        failures += failed
        if made < nth:
            assert not failed
            break
    assert failures > 15
