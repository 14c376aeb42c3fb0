"""close() gives everything back: a hundred times over, and in any order."""

import gc
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from living import SHAPES, arrays, held, ids, llama, reduce_all, settle
from ranks import Ranks, environment

import flatshard as fs

HERE = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(120)


def alone(program: str, *arguments: str, timeout: float = 100.0) -> str:
    """Runs a text in a process of its own: what it holds is its own. With one malloc arena: each
    new thread would otherwise begin one of its own, up to eight for each core."""
    text = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        capture_output=True, text=True, timeout=timeout, check=False,
        env={**environment(), "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_hundred_worlds_of_threads(tmp_path):
    grew = alone(
        "from living import *\n"
        "def use(): fs.local_world(2, threads=2).run(everything, sys.argv[1])\n"
        "print(settle(use, first=20, then=100))",
        str(tmp_path),
    )
    assert grew.strip() == "{}"


def test_a_hundred_worlds_of_processes(tmp_path):
    """The same two processes join, train, save, leave; all ranks, one after the other."""
    program = f"""
        sys.path.insert(0, {str(HERE)!r})
        from living import everything, settle
        def use():
            with init(timeout=60) as world:
                everything(world, {str(tmp_path)!r})
        say(settle(use, first=10, then=100))
    """
    with Ranks(2, program) as job:
        assert [out.strip() for out in job.all_well()] == ["{}"] * 2


def test_a_hundred_models_in_one_world_and_its_ledger():
    """The world stays; shards come and go: the ledger says the same after each."""
    program = f"""
        sys.path.insert(0, {str(HERE)!r})
        from living import everything, settle
        world = init(timeout=60)
        everything(world)
        now = lambda: {{name: row[:2] for name, row in world.memory().items()}}
        before = now()
        def use():
            everything(world)
            assert now() == before, (before, now())
        say(settle(use, first=10, then=40))
        world.close()
    """
    with Ranks(2, program) as job:
        assert [out.strip() for out in job.all_well()] == ["{}"] * 2


def test_failures_give_back_what_they_took():
    """Refused and interrupted openings, a hundred times: nothing stays of them either."""
    grew = alone(
        "from living import *\n"
        "from flatshard import _core\n"
        "def use():\n"
        "    def rank(world):\n"
        "        try: fs.shard({'w': np.ones(world.rank + 1, np.float32)}, world)\n"
        "        except fs.CollectiveMismatch: pass\n"
        "        try: fs.shard({'w': 'x'}, world)\n"
        "        except TypeError: pass\n"
        "        world.barrier()\n"
        "        if world.is_main: _core.alloc_fail_at(9)\n"
        "        try: arrays(world)\n"
        "        except (MemoryError, fs.WorldError): pass\n"
        "        if world.is_main: _core.alloc_fail_at(0)\n"
        "        raise LookupError\n"
        "    try: fs.local_world(2).run(rank)\n"
        "    except (LookupError, MemoryError, fs.WorldError): pass\n"
        "print(settle(use, first=20, then=60))",
    )
    assert grew.strip() == "{}"


# ---- side by side -------------------------------------------------------------------------------


def trained(world, which, steps=4):
    """Models trained in turn, in one world: {name: (weights, moments)}."""
    make = {
        "llama": lambda: llama(world, sharding=fs.Sharding(3, gather="copy")),
        "arrays": lambda: arrays(world, sharding=fs.Sharding(0)),
    }
    models = {name: make[name]() for name in which}
    opts = {n: (fs.AdamW if n == "llama" else fs.Lion)(m, lr=0.01) for n, m in models.items()}
    for step in range(steps):
        for name, model in models.items():  # all backwards before the first step
            if name == "llama":
                model.forward_backward(*ids(world.rank, step))
            else:
                reduce_all(model, world.rank, step)
        for opt in opts.values():
            assert opt.step(max_norm=1.0)
    hashes = {n: (fs.weights_sha256(m), fs.state_sha256(m)) for n, m in models.items()}
    world.barrier()
    for model in models.values():
        model.close()
    return hashes


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 3])
def test_two_models_and_two_optimizers_side_by_side(size):
    both = fs.local_world(size).run(trained, ["llama", "arrays"])
    other = fs.local_world(size).run(trained, ["arrays", "llama"])
    one = fs.local_world(size).run(trained, ["llama"])
    two = fs.local_world(size).run(trained, ["arrays"])
    for rank in range(size):
        assert both[rank] == other[rank] == {**one[rank], **two[rank]}


@pytest.mark.quick
def test_the_second_lives_on_when_the_first_is_closed():
    def rank(world):
        first, second = arrays(world), arrays(world)
        opts = [fs.SGD(first, lr=0.1), fs.SGD(second, lr=0.1)]
        reduce_all(first, 1)
        reduce_all(second, 1)
        first.close()  # with gradients under way: nobody waits for them
        assert opts[1].step()
        with pytest.raises(RuntimeError, match="closed"):
            opts[0].step()
        return fs.weights_sha256(second)

    assert len(set(fs.local_world(2).run(rank))) == 1


# ---- in any order -------------------------------------------------------------------------------

ORDERS = """
from living import *
import itertools
from flatshard.job import init
names = ("world", "model", "opt", "shards", "unit", "view", "part")
for how in ("del", "close", "cycle"):
    for order in itertools.islice(itertools.permutations(names), int(sys.argv[1]), None, 997):
        held_by = {}
        held_by["world"] = world = init()
        held_by["model"] = model = llama(world)
        held_by["opt"] = opt = fs.AdamW(model, lr=0.01)
        held_by["shards"] = shards = arrays(world)
        held_by["unit"] = unit = shards.units[0]
        held_by["view"] = view = unit.gather()["a.w"]
        held_by["part"] = part = world.split(0)
        model.forward_backward(*ids(0)); opt.step()
        want = view.copy()
        if how == "cycle":
            ring = [held_by]; ring.append(ring); held_by["ring"] = ring
            del ring
        closers = {n: getattr(held_by[n], "close", None) for n in names}
        if how != "close":
            closers["world"]()   # the process keeps its world until it is closed
        del world, model, opt, shards, unit, part
        for name in order:
            if how == "close" and closers[name] is not None:
                closers[name]()
            if name == "view":
                assert (view == want).all()
                del view
            held_by.pop(name)
            gc.collect()
        closers.clear(); del held_by; gc.collect()
print("fine")
"""


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (31, 62))])
def test_objects_go_in_any_order(first):
    """Dropped, closed, or found by the garbage collector in a ring: some of the orders of seven
    objects, each in a world of its own."""
    assert alone(ORDERS, str(first)).strip() == "fine"


# ---- views --------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_views_outlive_shards_and_world(size, stage):
    """Arrays of gathered units: readable for as long as they are there, whoever has closed what."""

    def rank(world, gather):
        shards = arrays(world, sharding=fs.Sharding(stage, gather=gather))
        views = {n: a for unit in shards.units for n, a in unit.gather().items()}
        want = {n: shards.full(n) for n in SHAPES}
        world.barrier()
        shards.close()
        world.close()
        del shards, world
        gc.collect()
        return views, want

    gathers = ["view", "copy"] if stage < 3 else ["view"]
    for gather in gathers:
        for views, want in fs.local_world(size).run(rank, gather):
            for name, view in views.items():
                assert not view.flags.writeable
                np.testing.assert_array_equal(view, want[name])


@pytest.mark.quick
def test_views_of_a_pool_hold_it_back():
    """gather="copy" at stage 3: the buffer is used again, so a close says who still looks at it."""

    def rank(world):
        shards = arrays(world, sharding=fs.Sharding(3, gather="copy"))
        view = shards.units[0].gather()["a.w"]
        part = view[2:4]
        del view
        with pytest.raises(BufferError, match="1 arrays of unit a are in use"):
            shards.close()
        kept = part.copy()
        np.testing.assert_array_equal(part, kept)
        del part
        world.barrier()
        shards.close()
        shards.close()

    fs.local_world(2).run(rank)


def test_views_outlive_the_process_of_a_peer():
    """Rank 1 closes and ends, or is killed: rank 0 still reads what both had mapped."""
    program = f"""
        sys.path.insert(0, {str(HERE)!r})
        from living import arrays, SHAPES, fs
        world = init(timeout=30)
        shards = arrays(world)
        views = {{n: a for unit in shards.units for n, a in unit.gather().items()}}
        want = {{n: shards.full(n) for n in SHAPES}}
        there = world.symmetric(100)
        there[:] = 3
        world.barrier()
        if world.rank == 1:
            if os.environ["HOW"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            shards.close()
            sys.exit(0)
        try:
            world.barrier()
        except errors.PeerLost:
            pass
        if os.environ["HOW"] == "close":
            shards.close()
        world.close()
        del world, shards
        import gc
        gc.collect()
        assert all((views[n] == want[n]).all() for n in SHAPES) and (there == 3).all()
        say("read")
    """
    for how in ("close", "kill", "leave"):
        with Ranks(2, program, HOW=how) as job:
            (end,) = job.ends(0)
            assert end.status == 0 and "read" in end.out, end


def test_a_hundred_reruns_of_a_cell_hold_one_model():
    """A notebook's cell that opens what is open: the same world, and the old model goes when its
    name is taken by the new one."""
    assert (
        alone(
            "from living import *\n"
            "from flatshard.job import init\n"
            "rows = []\n"
            "for _ in range(100):\n"
            "    world = init()\n"
            "    model = llama(world)\n"
            "    opt = fs.AdamW(model, lr=0.01)\n"
            "    model.forward_backward(*ids(0)); opt.step()\n"
            "    gc.collect()\n"
            "    rows.append({n: r[:2] for n, r in world.memory().items()})\n"
            "assert all(row == rows[1] for row in rows[2:]), (rows[1], rows[-1])\n"
            "model.close(); world.close()\n"
            "print(init() is not world)"
        ).strip()
        == "True"
    )


def test_held_counts_what_a_leak_would_leave(tmp_path):
    """The measure itself: a kept file, mapping, thread and array are seen."""
    kept = []

    def leak():
        kept.append(open(tmp_path / "x", "w"))  # noqa: SIM115

    before = held()
    grew = settle(leak, first=1, then=3)
    assert set(grew) == {"files"}, grew
    for file in kept:
        file.close()
    assert held()["files"] == before["files"]
    assert grew["files"][1] == before["files"] + 4
