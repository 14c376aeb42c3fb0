"""Children that were forked, threads that are not the rank's, interpreters beside the main one."""

import pathlib
import threading

import numpy as np
import pytest
from living import SHAPES, arrays, ids, llama, reduce_all
from ranks import Ranks
from test_given_back import alone

import flatshard as fs

HERE = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(120)


def test_workers_of_a_data_loader():
    """Forked children load data while two ranks train. They may look at what they inherited, may
    use nothing that needs the world, and leave by return, exit, exception or a kill: the ranks
    train on, and see their own deaths although children hold the descriptors."""
    program = f"""
        sys.path.insert(0, {str(HERE)!r})
        from living import *
        import multiprocessing, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        world = init(timeout=30)
        model = llama(world)
        opt = fs.AdamW(model, lr=0.01)
        shards = arrays(world)
        view = shards.units[0].gather()["a.w"]
        model.forward_backward(*ids(world.rank))
        assert opt.step()
        before = view.copy()

        def refused(call):
            try:
                call()
            except RuntimeError as error:
                assert "parent process" in str(error), error
                return 1
            return 0

        def work(item):
            n = refused(world.barrier) + refused(lambda: world.all_reduce(1))
            n += refused(lambda: model.forward_backward(*ids(item)))
            n += refused(opt.step) + refused(lambda: model.loss(*ids(item)))
            n += refused(lambda: shards.set_full("a.w", before))
            n += refused(shards.units[0].gather) + refused(lambda: world.split(0))
            assert (view == before).all()
            if item == 3:
                model.close(); shards.close(); world.close()
            return n

        fork = multiprocessing.get_context("fork")
        pool = fork.Pool(2)
        result = pool.map_async(work, range(4))
        for step in range(3):
            model.forward_backward(*ids(world.rank, step))
            assert opt.step()
        assert result.get(30) == [8] * 4
        pool.close(); pool.join()
        for how in range(4):
            child = os.fork()
            if child == 0:
                if how == 0:
                    sys.exit(3)
                if how == 1:
                    raise LookupError
                if how == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                os._exit(4)
            os.waitpid(child, 0)
            assert world.all_reduce(1) == 2
            model.forward_backward(*ids(world.rank))
            assert opt.step()
        assert (view == before).all()
        if world.rank == 1:
            if os.fork() == 0:
                time.sleep(3)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            world.barrier()
        except errors.PeerLost as error:
            assert "rank 1" in str(error) and "died" in str(error)
            say("seen")
    """
    with Ranks(2, program) as job:
        (end,) = job.ends(0)
        assert end.status == 0 and "seen" in end.out, end


def test_a_child_makes_a_world_of_its_own():
    """fork, then init() in the child: told that it is the parent's; closed there, a new one works,
    and the parent's is as it was."""
    assert (
        alone(
            "import os, warnings\n"
            "warnings.simplefilter('ignore')\n"
            "from living import *\n"
            "from flatshard.job import init\n"
            "world = init(threads=2)\n"
            "shards = arrays(world)\n"
            "model = llama(world); model.forward_backward(*ids(0))\n"  # the pool has threads
            "child = os.fork()\n"
            "if child == 0:\n"
            "    try: init(); os._exit(1)\n"
            "    except RuntimeError as error: assert 'parent process' in str(error)\n"
            "    world.close()\n"
            "    mine = init(threads=2)\n"
            "    own = llama(mine); opt = fs.AdamW(own, lr=0.1)\n"
            "    own.forward_backward(*ids(1)); assert opt.step()\n"
            "    own.close(); mine.close()\n"
            "    os._exit(0)\n"
            "_, status = os.waitpid(child, 0)\n"
            "assert os.waitstatus_to_exitcode(status) == 0, status\n"
            "opt = fs.AdamW(model, lr=0.1); assert opt.step()\n"
            "print('fine')"
        ).strip()
        == "fine"
    )


# ---- threads ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_thread_that_is_not_the_ranks():
    """One thread of a rank at a time: another may take over; a second one at once is refused."""

    def rank(world):
        shards = arrays(world)
        opt = fs.SGD(shards, lr=0.1)
        failures = []

        def other(call):
            def run():
                try:
                    call()
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        def train():
            reduce_all(shards, 1)
            assert opt.step()

        other(train).join()  # on every rank: fine
        assert not failures, failures
        train()
        if world.rank == 0:
            waits = other(opt.zero)  # rank 1 does not come yet
            while True:
                try:
                    opt.step()
                except RuntimeError as error:
                    if "another" in str(error) or "in a call already" in str(error):
                        break
            with pytest.raises(RuntimeError, match=r"in a call of another thread|in use"):
                world.close()
            with pytest.raises(RuntimeError, match="in use by another"):
                shards.close()
            world_done.set()
            waits.join()
        else:
            assert world_done.wait(30)
            opt.zero()
        assert not failures, failures
        train()
        return fs.weights_sha256(shards)

    world_done = threading.Event()
    hashes = fs.local_world(2).run(rank)
    assert hashes[0] == hashes[1]


@pytest.mark.quick
def test_use_after_the_world_of_threads_is_over():
    kept = []

    def rank(world):
        shards = arrays(world)
        kept.append((world, shards, fs.SGD(shards, lr=0.1), llama(world)))
        world.barrier()

    fs.local_world(2).run(rank)
    for world, shards, opt, model in kept:
        for call in (
            world.barrier, opt.step, opt.zero, shards.units[0].gather, shards.check,
            lambda m=model: m.forward_backward(*ids(0)), lambda s=shards: reduce_all(s, 1),
        ):  # fmt: skip
            with pytest.raises((RuntimeError, fs.WorldError), match=r"closed|left"):
                call()
        model.close()
        shards.close()
        world.close()


@pytest.mark.quick
def test_no_signal_is_lost_to_a_thread_that_waits():
    """Ctrl-C while another thread of the process waits in a collective is the main thread's."""
    assert (
        alone(
            "import _thread, signal, threading, time\n"
            "from living import *\n"
            "def rank(world):\n"
            "    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])\n"
            "    if world.rank == 0: timer.start()\n"
            "    if world.rank == 1: time.sleep(1)\n"
            "    world.barrier()\n"
            "t = time.monotonic()\n"
            "try: fs.local_world(2).run(rank)\n"
            "except KeyboardInterrupt: print('interrupted')"
        ).strip()
        == "interrupted"
    )


# ---- other interpreters -------------------------------------------------------------------------


def test_subinterpreters_are_refused():
    """With NumPy they are none of ours: a clear ImportError, and the main interpreter goes on."""
    said = alone(
        "import sys\n"
        "try: import _xxsubinterpreters as sub\n"
        "except ImportError: import _interpreters as sub\n"
        "from living import *\n"
        "world = fs.init()\n"
        "one = sub.create()\n"
        "text = '''\n"
        "import sys\n"
        f"sys.path[:0] = {[str(pathlib.Path(fs.__file__).resolve().parent.parent)]!r}\n"
        "try:\n"
        "    from flatshard import _core\n"
        "    print('imported')\n"
        "except ImportError as error:\n"
        "    print('refused')\n"
        "'''\n"
        "sub.run_string(one, text)\n"
        "sub.destroy(one)\n"
        "model = llama(world); model.forward_backward(*ids(0))\n"
        "assert fs.AdamW(model, lr=0.1).step()\n"
        "print('fine')"
    )
    assert said.split() == ["refused", "fine"], said


@pytest.mark.quick
def test_a_second_import_is_no_second_core():
    """Popped from sys.modules and imported again (a notebook's autoreload): old objects are refused
    with a reason or work; nothing crashes."""
    assert (
        alone(
            "import sys\n"
            "from living import *\n"
            "world = fs.init()\n"
            "shards = arrays(world)\n"
            "old = fs._core\n"
            "for name in [n for n in sys.modules if n.split('.')[0] == 'flatshard']:\n"
            "    del sys.modules[name]\n"
            "import flatshard\n"
            "for call in (lambda: flatshard.shard({'w': np.ones(3, np.float32)}, world),\n"
            "             lambda: world.barrier(), lambda: shards.full('a.w')):\n"
            "    try: call()\n"
            "    except (TypeError, RuntimeError, ImportError): pass\n"
            "shards.close(); world.close()\n"
            "print('fine')"
        ).strip()
        == "fine"
    )


def test_arrays_may_be_read_by_any_thread():
    def rank(world):
        shards = arrays(world)
        with shards.units[0].gathered() as weights:
            sums = []
            threads = [
                threading.Thread(target=lambda: sums.append(float(weights["a.w"].sum())))
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            del threads
        return sums

    for sums in fs.local_world(2).run(rank):
        assert len(set(sums)) == 1 and len(sums) == 4
        assert np.isfinite(sums[0]) and SHAPES
