"""Right collectives: exact values for every operation, dtype, size and world; refusals."""

import re
import subprocess
import sys

import matrix
import numpy as np
import pytest
import ranks

from flatshard.errors import CollectiveMismatch, MemoryBudgetError
from flatshard.job import local_world
from flatshard.world import Handle, World

WORLDS = (1, 2, 3, 4, 5, 8)


@pytest.mark.parametrize("size", WORLDS)
def test_every_collective(size: int) -> None:
    done = local_world(size).run(matrix.check, matrix.spread())
    assert done == [done[0]] * size and done[0] > 2000


@pytest.mark.parametrize("size", WORLDS)
def test_large(size: int) -> None:
    dtypes = tuple(matrix.DTYPES) if size < 4 else ("float32", "bfloat16", "uint8")
    ops = ("sum", "mean") if size < 4 else ("sum",)
    local_world(size).run(matrix.check, [matrix.LARGE], dtypes, False, ops)


@pytest.mark.full
@pytest.mark.parametrize("size", WORLDS)
def test_large_with_every_operation(size: int) -> None:
    local_world(size, timeout=300).run(matrix.check, [matrix.LARGE])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_world_memory(size: int) -> None:
    sizes = [0, 1, 17, 1025, 40_000]
    local_world(size).run(matrix.check, sizes, tuple(matrix.DTYPES), True)


@pytest.mark.full
@pytest.mark.parametrize("size", WORLDS)
def test_every_size(size: int) -> None:
    local_world(size).run(matrix.check, range(1026))


def launch(size: int, program: str) -> subprocess.CompletedProcess[str]:
    """A program text on ranks that are processes, by flatshard launch."""
    return subprocess.run(
        [sys.executable, "-m", "flatshard.cli", "launch", "-n", str(size), program],
        env=ranks.environment(PYTHONPATH=f"{ranks.PACKAGE}:{ranks.PACKAGE.parent}/tests/comm"),
        capture_output=True,
        text=True,
        timeout=ranks.DEADLINE_S * 2,
    )


@pytest.mark.parametrize("size", WORLDS)
def test_processes(size: int, tmp_path) -> None:
    """The same lines run for processes; a few sizes, all dtypes, both kinds of memory."""
    program = tmp_path / "program.py"
    program.write_text(
        "import matrix\n"
        "from flatshard.job import init\n"
        "with init(timeout=60) as world:\n"
        "    done = matrix.check(world, [0, 1, 33, 1025])\n"
        "    done += matrix.check(world, [7, 30_000], ['float32', 'bfloat16', 'int64'], True)\n"
        "    done += matrix.check(world, [matrix.LARGE], ['float32', 'uint8'], False, ['sum'])\n"
        "    world.print(done, world.size)\n"
    )
    end = launch(size, str(program))
    assert end.returncode == 0, end.stderr
    done, world_size = map(int, end.stdout.split())
    assert world_size == size and done > 400


# ---- shapes, results, arguments -----------------------------------------------------------------


def on_ranks(size: int, function) -> list:
    return local_world(size, timeout=30).run(function)


@pytest.mark.quick
def test_shapes_and_numbers() -> None:
    def rank(world: World) -> None:
        x = np.arange(12, dtype=np.float32).reshape(6, 2) + world.rank
        assert world.all_gather(x[: world.rank + 1], counts=[1, 2, 3]).shape == (6, 2)
        assert world.reduce_scatter(x).shape == (2, 2)
        assert world.all_to_all(x).shape == (6, 2)
        assert world.all_reduce(2) == 6 and np.shape(world.all_reduce(2.5)) == ()
        assert world.all_gather(world.rank).tolist() == [0, 1, 2]
        assert world.broadcast(float(world.rank), root=2) == 2.0
        assert world.gather_rows(x[: world.rank]).shape == (3, 2)
        assert world.gather_rows(x[: world.rank], total=2).shape == (2, 2)
        empty = np.empty((0, 5), np.int32)
        assert world.all_gather(empty).shape == (0, 5)
        assert world.reduce_scatter(empty, op="sum").shape == (0, 5)
        out = np.empty(6, np.float32)
        assert world.all_gather(x[:1, 0].copy(), out=out[:3]) is not None
        assert out[:3].tolist() == [0, 1, 2]
        handle = world.all_reduce(x, async_=True)
        assert isinstance(handle, Handle) and handle.done()
        assert handle.wait()[0, 1] == 6.0

    on_ranks(3, rank)


@pytest.mark.quick
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_rows_of_a_data_set_come_once_and_in_order(size: int) -> None:
    """408 samples, in batches of 16 a rank; the last batch is filled up with the first samples."""
    samples, batch = 408, 16

    def rank(world: World) -> list[int]:
        found: list[int] = []
        for begin in range(0, samples, batch * size):
            places = np.arange(begin, begin + batch * size) % samples
            mine = places.reshape(size, batch)[world.rank]
            left = min(samples - begin, batch * size)
            rows = world.gather_rows(mine[:, None] * np.ones(3, np.int64), total=left)
            assert rows.shape == (left, 3) and (rows == rows[:, :1]).all()
            found += rows[:, 0].tolist()
        return found

    assert on_ranks(size, rank) == [list(range(samples))] * size


def refused(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.quick
def test_bad_arguments_name_themselves_and_hurt_nobody() -> None:
    """Every rank passes the same bad argument; the world goes on."""

    def rank(world: World) -> None:
        x = np.zeros(10, np.float32)
        read_only = np.zeros(10, np.float32)
        read_only.flags.writeable = False
        refused(lambda: world.all_reduce([1.0]), TypeError, "x: expected a numpy.ndarray")
        refused(lambda: world.all_reduce(x.astype(np.complex64)), TypeError, "dtype")
        refused(lambda: world.all_reduce(x[::2]), ValueError, "C-contiguous")
        refused(lambda: world.all_reduce(x, op="product"), ValueError, "op: .*product")
        refused(
            lambda: world.all_reduce(x.astype(np.int32), op="mean"), ValueError, "mean of int32"
        )
        refused(lambda: world.all_reduce(x, out=read_only), ValueError, "out: .*read-only")
        refused(lambda: world.all_reduce(x, out=x[:9]), ValueError, "out: has another shape")
        refused(lambda: world.all_reduce(x, out=x.astype(np.float64)), TypeError, "out: .*float32")
        refused(lambda: world.reduce_scatter(x[:9]), ValueError, "9 rows do not divide by 2")
        refused(lambda: world.reduce_scatter(x, counts=[4, 5]), ValueError, "sum to 9")
        refused(lambda: world.reduce_scatter(x, counts=[4]), ValueError, "expected 2 entries")
        refused(lambda: world.all_gather(x, counts=[1, 1]), ValueError, "counts: entry")
        refused(lambda: world.all_gather(x, counts=[-1, 1]), ValueError, "entry 0 is -1")
        refused(lambda: world.broadcast(x, root=2), ValueError, "root: rank 2")
        refused(lambda: world.all_to_all(x[:9]), ValueError, "9 rows")
        refused(lambda: world.all_to_all(x, out=x), ValueError, "overlaps")
        refused(lambda: world.split(-3), ValueError, "color")
        refused(lambda: world.symmetric(-1), ValueError, "negative")
        assert world.all_reduce(1) == 2

    on_ranks(2, rank)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (
            lambda w: w.all_reduce(np.zeros(4, np.float32)),
            lambda w: w.all_reduce(np.zeros(8, np.float32)),
            ("4 elements of float32", "8 elements of float32"),
        ),
        (
            lambda w: w.all_reduce(np.zeros(1000, np.float32)),
            lambda w: w.all_reduce(np.zeros(500, np.float64)),
            ("1000 elements of float32", "500 elements of float64"),
        ),
        (
            lambda w: w.all_reduce(np.zeros(4, np.float32), op="max"),
            lambda w: w.all_reduce(np.zeros(4, np.float32), op="min"),
            (r"\(max\)", r"\(min\)"),
        ),
        (lambda w: w.barrier(), lambda w: w.all_gather(1), ("barrier", "all_gather")),
        (
            lambda w: w.broadcast(1, root=0),
            lambda w: w.broadcast(1, root=1),
            ("from rank 0", "from rank 1"),
        ),
        (
            lambda w: w.all_gather(np.zeros(2), counts=[2, 3]),
            lambda w: w.all_gather(np.zeros(3), counts=[3, 3]),
            ("5 elements", "6 elements"),
        ),
        (
            lambda w: w.symmetric(10),
            lambda w: w.symmetric(100_000),
            ("4096 bytes", "401408 bytes"),
        ),
    ],
)
def test_a_difference_is_an_error_on_all_ranks(one, other, texts) -> None:
    """The text names both, with lines; the world is over, and the next call says the same."""

    def rank(world: World) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            (one if world.rank == 0 else other)(world)
        with pytest.raises(CollectiveMismatch):
            world.barrier()
        return str(caught.value)

    for report in on_ranks(2, rank):
        for text in texts:
            assert re.search(text, report), report
        assert report.count("test_collectives.py:") == 2


# ---- world memory -------------------------------------------------------------------------------


@pytest.mark.quick
def test_world_memory_is_counted_and_given_back() -> None:
    def rank(world: World) -> None:
        before = world.memory()["workspace"]
        x = world.symmetric((100, 100), "float64")
        assert not x.any() and x.shape == (100, 100) and x.dtype == np.float64
        assert world.memory()["workspace"][1] - before[1] == 81_920  # pages
        view = x[3:5]
        del x
        world.barrier()
        view[...] = world.rank + 1  # a view keeps its memory
        assert world.all_gather(view.copy())[-1, 0] == world.size
        world.barrier()
        del view
        assert world.memory()["workspace"][1] == before[1]

    on_ranks(2, rank)


def test_a_view_outlives_the_world() -> None:
    def rank(world: World) -> np.ndarray:
        x = world.symmetric(1000)
        x[:] = world.rank + 1
        world.close()
        return x

    for number, x in enumerate(on_ranks(2, rank)):
        assert (x == number + 1).all()
        x[:] = 9


@pytest.mark.quick
def test_what_does_not_fit_is_refused_before_it_is_taken() -> None:
    def rank(world: World) -> None:
        with pytest.raises(MemoryBudgetError, match=r"'huge' needs .* MiB"):
            world.symmetric(1 << 44, name="huge")
        world.barrier()

    on_ranks(2, rank)


def test_ranks_of_different_kinds_of_memory_agree() -> None:
    """One rank passes private memory, the others world memory: all go through windows."""

    def rank(world: World) -> None:
        there = world.symmetric(50_000)
        x = there if world.rank else np.empty(50_000, np.float32)
        x[:] = world.rank + 1
        assert (world.reduce_scatter(x, op="sum", counts=[20_000, 20_000, 10_000]) == 6).all()
        got = world.all_gather(x)
        assert (got == np.repeat([1, 2, 3], 50_000)).all()
        world.all_reduce(x, out=x)
        assert (x == 6).all()

    on_ranks(3, rank)


# ---- references ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_no_reference_leaks() -> None:
    def rank(world: World) -> None:
        x = np.zeros(16, np.float32)
        bad = x[::2]
        before = sys.getrefcount(x), sys.getrefcount(bad)
        for _ in range(300):
            world.all_reduce(x, out=x)
            world.all_gather(x)
            for call in (
                lambda: world.all_reduce(bad),
                lambda: world.all_reduce(x, out=bad),
                lambda: world.all_gather(x, counts=[1]),
                lambda: world.reduce_scatter(x, counts=[16]),
                lambda: world.broadcast(x, root=7),
            ):
                with pytest.raises((ValueError, TypeError)):
                    call()
        assert (sys.getrefcount(x), sys.getrefcount(bad)) == before

    on_ranks(2, rank)
