"""Ctrl-C in a notebook's cell: the cell can be run again, or says what to do first."""

import pathlib
import signal

import numpy as np
import pytest
from living import SHAPES, arrays, reduce_all
from ranks import Ranks
from test_given_back import alone

import flatshard as fs

HERE = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(120)


class Interrupting:
    """The core's shards, with a Ctrl-C that comes as the n-th call of a method begins or ends.

    Python runs the handler of a signal when a call of C is over: "after" is where an interrupt of
    anything that takes long arrives."""

    def __init__(self, core, method, nth, after):
        self._there, self._method, self._left, self._after = core, method, nth, after

    def __getattr__(self, name):
        found = getattr(self._there, name)
        if name != self._method or self._left == 0:
            return found

        def call(*arguments):
            self._left -= 1
            if self._left == 0 and not self._after:
                raise KeyboardInterrupt
            result = found(*arguments)
            if self._left == 0:
                raise KeyboardInterrupt
            return result

        return call


def cell(shards, opt, step):
    """What a user runs again."""
    for unit in shards.units:
        with unit.gathered() as weights:
            assert weights[unit.names[0]].shape == SHAPES[unit.names[0]]
    reduce_all(shards, shards.world.rank, step)
    return opt.step(max_norm=1.0)


METHODS = ("gather", "release", "grad_put", "grad_publish", "round_end", "agree", "finish")


@pytest.mark.quick
@pytest.mark.parametrize("gather", ["view", "copy"])
@pytest.mark.parametrize("method", METHODS)
def test_a_cell_of_arrays(method, gather):
    """Every rank is interrupted at the same place (they share the terminal); zero(), and again. The
    step has been taken, or has not: what optimizer, core and weights say agrees."""

    def rank(world, nth, after, interrupted):
        shards = arrays(world, sharding=fs.Sharding(3, gather=gather), precision="bf16")
        opt = fs.AdamW(shards, lr=0.01)
        taken = []  # which steps' gradients moved the weights
        for step in range(4):
            if step == 1 and interrupted:
                core = shards._core
                shards._core = Interrupting(core, method, nth, after)
                before = opt.steps_applied
                with pytest.raises(KeyboardInterrupt):
                    cell(shards, opt, step)
                shards._core = core
                left = [unit for unit in shards.units if unit.state == "gathered"]
                assert bool(left) == (method == "release" and not after)
                for unit in left:  # Ctrl-C in the very release: by hand
                    unit.release()
                opt.zero()
                if opt.steps_applied > before:
                    assert (method, after) == ("finish", True)
                    taken.append(step)
                continue
            if step == 1 and not taken_of.get((nth, after)):
                continue
            assert cell(shards, opt, step)
            taken.append(step)
        assert opt.steps_applied == len(taken) == opt._steps.max()
        hashes = fs.weights_sha256(shards), fs.state_sha256(shards)
        world.barrier()
        shards.close()
        return taken, hashes

    taken_of = {}
    for nth in (1, 2, 3) if method not in ("round_end", "agree", "finish") else (1,):
        for after in (False, True):
            torn = fs.local_world(2).run(rank, nth, after, True)
            assert torn[0] == torn[1]
            taken_of[nth, after] = 1 in torn[0][0]
            straight = fs.local_world(2).run(rank, nth, after, False)
            assert torn == straight, (method, nth, after)


def test_forgetting_zero_says_so():
    def rank(world):
        shards = arrays(world)
        opt = fs.AdamW(shards, lr=0.01)
        core = shards._core
        shards._core = Interrupting(core, "agree", 1, True)
        with pytest.raises(KeyboardInterrupt):
            cell(shards, opt, 0)
        shards._core = core
        with pytest.raises(RuntimeError, match=r"step\(\) that was interrupted: call step\(\)"):
            cell(shards, opt, 0)
        assert opt.step(max_norm=1.0)  # ends it
        assert cell(shards, opt, 1)
        return opt.steps_applied

    assert fs.local_world(1).run(rank) == [2]


REAL = """
import random, signal, sys
from living import *
from flatshard.job import init
world = init(threads=1)
model = llama(world, sharding=fs.Sharding(3, gather="copy"), precision="bf16")
opt = fs.AdamW(model, lr=0.001)
shards = arrays(world)
moved = fs.SGD(shards, lr=0.001, momentum=0.9)
rng = random.Random(20240611)
model.forward_backward(*ids(0)); opt.step()
hits = by_hand = 0
for turn in range(400):
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00002, 0.0015))
        while True:
            model.forward_backward(*ids(turn))
            assert opt.step(max_norm=1.0)
            for unit in shards.units:
                with unit.gathered():
                    pass
            reduce_all(shards, turn)
            assert moved.step()
    except KeyboardInterrupt:
        hits += 1
    opt.zero()
    moved.zero()
    assert opt.steps_applied == opt._steps.max(), (turn, opt.steps_applied, opt._steps)
    assert moved.steps_applied == moved._steps.max(), turn
    for unit in (*model.shards.units, *shards.units):
        if unit.state == "gathered":  # as the release was about to begin
            unit.release()
            by_hand += 1
assert np.isfinite(model.shards.full("model.norm.weight").astype(np.float32)).all()
assert by_hand < 20, by_hand
print(hits)
"""


def test_four_hundred_real_interrupts():
    """SIGALRM stands for Ctrl-C, at seeded times, anywhere in forward, backward and step."""
    program = REAL.replace(
        "hits = by_hand = 0\n",
        "hits = by_hand = 0\nsignal.signal(signal.SIGALRM, signal.default_int_handler)\n",
    )
    assert int(alone(program)) == 400


def test_an_interrupt_in_a_wait_ends_the_world_and_the_next_one_works():
    """Two processes: one waits for the other in forward_backward or step when Ctrl-C comes. Both
    get a clear error, close, and go on in a new world."""
    program = f"""
        sys.path.insert(0, {str(HERE)!r})
        from living import *
        go = []
        signal.signal(signal.SIGUSR1, lambda *_: go.append(1))
        world = init(timeout=30)
        model = llama(world)
        opt = fs.AdamW(model, lr=0.01)
        model.forward_backward(*ids(world.rank))
        assert opt.step()
        try:
            if world.rank == 1:
                say("here")
                while not go:
                    time.sleep(0.01)
            else:
                say("waits")
            if os.environ["WHERE"] == "step" and world.rank == 0:
                opt.step()
            model.forward_backward(*ids(world.rank))
            assert False
        except KeyboardInterrupt:
            assert world.rank == 0
            say("interrupted")
        except errors.PeerLost as error:
            assert world.rank == 1 and "rank 0" in str(error) and "interrupted" in str(error)
        try:
            model.forward_backward(*ids(0))
            assert False
        except errors.PeerLost as error:
            assert "interrupted" in str(error), error
        except KeyboardInterrupt:
            assert world.rank == 0
        model.close(); world.close()
        with init(timeout=30) as world:
            model = llama(world)
            opt = fs.AdamW(model, lr=0.01)
            model.forward_backward(*ids(world.rank))
            assert opt.step()
            say("again")
    """
    for where in ("forward", "step"):
        with Ranks(2, program, WHERE=where) as job:
            job.wait_for(1, "here")
            job.wait_for(0, "waits")
            job.wait_until_asleep(0)
            job.signal(0, signal.SIGINT)
            job.wait_for(0, "interrupted")
            job.signal(1, signal.SIGUSR1)
            assert all("again" in out for out in job.all_well())


def test_arrays_stay_whole_after_an_interrupted_store():
    """A batch of stores that an exception ended: begun again, or written by hand, it is whole."""

    def rank(world):
        shards = arrays(world)
        with pytest.raises(KeyboardInterrupt), shards.units[0].gathered(write=True) as weights:
            weights["a.w"][:] = 9
            raise KeyboardInterrupt
        before = shards.full("a.w")
        assert not (before == 9).any(), "a block that fails stores nothing"
        with pytest.raises(KeyboardInterrupt), shards.storing() as store:
            store(0, 0, np.ones(SHAPES["a.w"], np.float32))
            raise KeyboardInterrupt
        shards.set_full("a.w", before)
        np.testing.assert_array_equal(shards.full("a.w"), before)

    fs.local_world(2).run(rank)
