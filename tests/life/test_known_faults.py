"""Faults that users of other libraries reported, as small inputs with the right answer: what is
distributed, and what concerns threads and references. Those that other tests hold are not repeated:
reports that name op, fence and ranks, limits of one operation, ports in use, many jobs at once,
different models, signals during collectives, worlds of one."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from living import SHAPES, arrays, ids, llama, reduce_all
from ranks import Ranks, free_port
from test_given_back import alone

import flatshard as fs
from flatshard import _core

pytestmark = pytest.mark.timeout(120)

# ---- distributed --------------------------------------------------------------------------------


def test_memory_that_is_limited_is_an_error_before_it_is_used(template):
    """Room for 1 MB, a wish for 4: an error with name and sizes on every rank, the process lives,
    and what fits still works."""
    program = """
        import resource
        world = init(timeout=30, threads=1)
        world.barrier()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, limits[1]))
        try:
            world.symmetric(4 << 20, "uint8", name="segment")
            world.symmetric(4 << 20, "uint8", name="another")
            assert False
        except errors.MemoryBudgetError as error:
            assert "'segment'" in str(error) or "'another'" in str(error), error
            assert "of 8.0 MiB" in str(error) and "rank 1, 8.0 MiB" in str(error), error
            assert "RLIMIT_FSIZE" in str(error), error
        small = world.symmetric(100, name="small")
        small[:] = world.rank
        assert world.all_reduce(1) == 2
        say("alive")
    """
    for end in template.run(2, program):
        assert end.status == 0 and "alive" in end.out, end


def test_a_folder_that_cannot_be_used_is_named():
    """The abstract name is taken by a stranger and the folder for sockets cannot be made: an error
    of the system with the path, and no wait for ever."""
    port = free_port()
    name = f"{os.getuid()}/127.0.0.1:{port}/none/0/2/0"
    mask, prime = (1 << 64) - 1, 0x100000001B3
    first, second = 0xCBF29CE484222325, 0x6C62272E07BB0142
    for byte in name.encode():
        first = (first ^ byte) * prime & mask
        second = ((second ^ byte) * prime + 0x9E3779B97F4A7C15) & mask
    address = f"\0flatshard-{os.getuid()}-{first:016x}{second:016x}".encode()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(address)
        squatter.listen(8)
        taken = pathlib.Path(folder) / "flatshard"
        taken.write_text("a file stands where the folder should be")
        program = """
            try:
                init(timeout=3)
                assert False
            except (OSError, errors.WorldError) as error:
                say(f"{type(error).__name__}: {error}")
        """
        with Ranks(2, program, port=port, XDG_RUNTIME_DIR=folder) as job:
            zero, one = job.ends()
        assert zero.status == 0 and one.status == 0, (zero, one)
        assert str(taken) in zero.out, zero.out
        assert "rank 0" in one.out or str(taken) in one.out, one.out


@pytest.mark.parametrize(
    ("one", "other"),
    [((4, "float32"), (8, "float32")), ((1000, "float32"), (2000, "float32")),
     ((1000, "float32"), (2000, "bfloat16")), ((4 << 18, "float32"), (4 << 19, "bfloat16"))],
)  # fmt: skip
def test_lengths_and_dtypes_that_differ_give_no_result(one, other):
    """Small and large, also with the same number of bytes: both ranks learn both."""

    def rank(world):
        n, dtype = (one, other)[world.rank]
        x = np.ones(n, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        with pytest.raises(fs.CollectiveMismatch) as raised:
            world.all_reduce(x, out=x)
        assert (x == 1).all()
        return str(raised.value)

    for text in fs.local_world(2).run(rank):
        for n, dtype in (one, other):
            assert f"{n} elements of {dtype}" in text, text


@pytest.mark.parametrize("stage", range(4))
def test_backward_in_another_order_is_not_another_sum(stage):
    """Two layers of one size, whose gradients rank 1 brings the other way round."""

    def rank(world):
        params = {n: np.zeros((3, 5), np.float32) for n in ("first.w", "second.w")}
        shards = fs.shard(params, world, sharding=fs.Sharding(stage))
        opt = fs.SGD(shards, lr=1.0)
        units = list(shards.units) if world.rank == 1 else list(reversed(shards.units))
        for unit in units:
            value = {"first.w": 1.0, "second.w": 10.0}[unit.names[0]] * (world.rank + 1)
            unit.reduce({unit.names[0]: np.full((3, 5), value, np.float32)})
        assert opt.step()
        return shards.full("first.w"), shards.full("second.w")

    for first, second in fs.local_world(2).run(rank):
        assert (first == -1.5).all() and (second == -15.0).all()


def test_initial_values_that_differ_are_rank_0s(caplog):
    def rank(world):
        rng = np.random.default_rng(world.rank)
        shards = fs.shard({"w": rng.standard_normal(70).astype(np.float32)}, world)
        return shards.full("w"), fs.weights_sha256(shards)

    results = fs.local_world(2).run(rank)
    want = np.random.default_rng(0).standard_normal(70).astype(np.float32)
    for values, digest in results:
        np.testing.assert_array_equal(values, want)
        assert digest == results[0][1]
    assert "different initial values; all take those of rank 0" in caplog.text


def test_what_a_job_left_is_not_the_next_ones():
    """The same address and port, one job after the other, of another size, and after a kill."""
    program = """
        world = init(timeout=20)
        jobs = world.all_gather(float(os.environ["JOB"]))
        assert (jobs == float(os.environ["JOB"])).all(), jobs
        say("own")
        if os.environ["JOB"] == "3":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    port = free_port()
    for size in (3, 2):
        with Ranks(size, program, port=port, JOB=str(size)) as job:
            ends = job.ends()
        assert [end.out.strip() for end in ends] == ["own"] * size, ends


def test_a_name_that_another_job_has_is_refused():
    """Rank 0 of one job waits for its ranks; rank 0 of another with the same name says who."""
    program = """
        say("here")
        try:
            init(timeout=float(os.environ["WAIT"]))
        except (errors.WorldError, OSError) as error:
            say(f"{type(error).__name__}: {error}")
    """
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    port = free_port()
    text = f"os.environ.update({alone!r})\n" + textwrap.dedent(program)
    with Ranks(1, text, port=port, WAIT="5") as first:
        first.wait_for(0, "here")
        time.sleep(1.0)  # it listens
        with Ranks(1, text, port=port, WAIT="30") as second:
            (end,) = second.ends()
        assert "OSError: [Errno 98]" in end.out, end
        assert f"its rank 0 is process {first.pid(0)}" in end.out and str(port) in end.out, end
        assert "rank(s) 1 of 2 did not come" in first.ends()[0].out


def test_a_save_on_rank_0_alone_names_who_is_missing(template, tmp_path):
    program = """
        world = init(timeout=30, threads=1)
        shards = arrays(world)
        if world.rank == 0:
            try:
                with world.limit(timeout=0.7):
                    fs.checkpoint.save(os.environ["FOLDER"], shards, step=1)
            except errors.CollectiveTimeout as error:
                assert "rank 1" in str(error) and "did not come within 0.7 s" in str(error), error
                assert "rank 0: in save" in str(error), error
                say("named")
        else:
            time.sleep(1.5)
    """
    zero, one = template.run(2, program, FOLDER=str(tmp_path))
    assert zero.status == 0 and "named" in zero.out, zero
    assert one.status == 0, one
    assert os.listdir(tmp_path) == []


# ---- threads and references ---------------------------------------------------------------------


def ticks_during(call):
    """How often another Python thread ran, every 5 ms at best, while a call of the core lasted."""
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.wait(0.005):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before, begun = ticks[0], time.monotonic()
    call()
    ran, lasted = ticks[0] - before, time.monotonic() - begun
    stop.set()
    thread.join()
    return ran, lasted


def test_the_interpreter_runs_during_a_long_step_and_a_long_write(tmp_path):
    """A monitor thread goes on: at least one tick in each 50 ms, where ten would be possible."""
    with fs.init(threads=1) as world:
        shards = fs.shard({"w": np.ones(8_000_000, np.float32)}, world)
        opt = fs.AdamW(shards, lr=0.01)
        grads = {"w": np.ones(8_000_000, np.float32)}

        def step():
            for _ in range(3):
                shards.units[0].reduce(grads)
                assert opt.step(max_norm=1.0)

        for call in (step, lambda: fs.checkpoint.save(tmp_path, shards, opt, step=1)):
            ran, lasted = ticks_during(call)
            assert ran >= max(2, lasted / 0.05), (ran, lasted)
        shards.close()


def test_no_reference_stays_with_a_call_or_a_failed_one():
    def rank(world):
        shards = arrays(world)
        model = llama(world)
        fs.SGD(shards, lr=0.1, momentum=0.9)
        core, net = shards._core, model._core
        x = np.zeros(SHAPES["a.w"], np.float32)
        tokens = np.ascontiguousarray(ids(world.rank)[0])
        strided, wrong, short = x[:, ::2], x.astype(np.int32), np.zeros(3, np.float32)
        frozen = x.copy()
        frozen.flags.writeable = False
        watched = (x, tokens, strided, wrong, short, frozen)
        logits = np.empty((2, 11, 61), np.float32)
        before = [sys.getrefcount(array) for array in (*watched, logits)]
        failing = (
            lambda: core.grad_put(0, strided), lambda: core.grad_put(0, wrong),
            lambda: core.grad_put(0, short), lambda: core.grad_put(99, x),
            lambda: core.load(0, 0, 0, frozen), lambda: core.load(0, 77, 0, x),
            lambda: core.load(0, 0, 5, x), lambda: core.store(0, 0, 0, wrong),
            lambda: core.checksums(x), lambda: net.forward(tokens, wrong, None, False),
            lambda: net.forward(tokens, None, frozen, False), lambda: net.forward(x, None, None, 0),
            lambda: net.forward_backward(tokens, None, -1, False),
            lambda: core.finish(0, [], x, x, x, 0), lambda: core.finish(2, [1], x, x, x, 0),
        )  # fmt: skip
        for _ in range(300):
            core.load(0, 0, 0, x)
            net.forward(tokens, None, logits, False)
            for call in failing:
                with pytest.raises((ValueError, TypeError, IndexError)):
                    call()
        assert [sys.getrefcount(array) for array in (*watched, logits)] == before

    fs.local_world(2).run(rank)


def test_no_buffer_stays_exported():
    """Bytes that were checksummed can grow again, after a call and after one that failed."""
    text = bytearray(b"x" * 100)
    for _ in range(1000):
        _core.crc32c(text)
        with pytest.raises(TypeError):
            _core.crc32c(text, "not a number")
    text.extend(b"y")
    del text[:50]
    assert len(text) == 51


def test_what_was_read_does_not_hang_on_the_file(tmp_path):
    """Weights are copied out of their file: it may go, be cut short or be replaced. Token files are
    mapped: one that is gone is still read."""
    folder = tmp_path / "model"

    def save(world):
        model = llama(world)
        model.save_pretrained(folder)
        return fs.weights_sha256(model)

    (want,) = fs.local_world(1).run(save)

    def read(world):
        model = fs.models.Llama.from_pretrained(folder, world=world)
        file = folder / "model.safetensors"
        os.truncate(file, 10)
        file.unlink()
        model.loss(*ids(0))
        return fs.weights_sha256(model)

    assert fs.local_world(1).run(read) == [want]
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, (np.arange(5000) % 61).astype(np.uint16))

    def batches(world):
        data = fs.data.tokens(tokens, world=world, batch=2, length=8)
        tokens.unlink()
        first = next(iter(data))
        del data
        return first

    ((inputs, targets),) = fs.local_world(1).run(batches)
    assert inputs.shape == targets.shape == (2, 8) and (inputs < 61).all()


LONG_WRITE = """
import os, pathlib, signal, sys, threading
from living import *
with fs.init(threads=1) as world:
    shards = fs.shard({'w': np.zeros(20_000_000, np.float32)}, world)
    opt = fs.AdamW(shards, lr=0.1)
    def fire():
        written = pathlib.Path(sys.argv[1]).glob
        while not any(file.stat().st_size for file in written('.*/*.safetensors')): pass
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=fire).start()
    try:
        fs.checkpoint.save(sys.argv[1], shards, opt, step=1)
        print('committed')
    except KeyboardInterrupt:
        assert os.listdir(sys.argv[1]) == [], os.listdir(sys.argv[1])
        print('interrupted')
    fs.checkpoint.save(sys.argv[1], shards, opt, step=2)
    assert fs.checkpoint.verify(sys.argv[1]) == []
    shards.close()
"""


def test_an_interrupt_of_a_long_write(tmp_path):
    """Ctrl-C ends a save between two pieces: nothing is committed, nothing stays, and the next save
    of the same world works."""
    assert alone(LONG_WRITE, str(tmp_path)).split() == ["interrupted"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000002"]


def test_handlers_that_return_are_run_and_waits_go_on(template):
    """A handler written in Python runs promptly in the main thread, also while another thread of
    the process is the one that waits; no signal is lost."""
    program = """
        import threading
        world = init(timeout=30, threads=1)
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(time.monotonic()))
        world.barrier()
        if world.rank == 0:
            threads = [None, threading.Thread(target=world.barrier)]
            for thread in threads:
                timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
                timer.start()
                if thread is None:
                    world.barrier()
                else:
                    thread.start()
                    thread.join()
                timer.join()
            arrived = world.broadcast(np.zeros(2), root=1)
            assert len(seen) == 2 and all(s < a for s, a in zip(seen, arrived)), (seen, arrived)
        else:
            arrived = []
            for _ in range(2):
                time.sleep(0.8)
                arrived.append(time.monotonic())
                world.barrier()
            world.broadcast(np.array(arrived), root=1)
    """
    for end in template.run(2, program):
        assert end.status == 0, end


def test_reduce_takes_a_copy_of_what_it_is_given():
    """The caller may use its gradient again at once: what was reduced is what was passed."""

    def rank(world):
        shards = arrays(world, sharding=fs.Sharding(0))
        opt = fs.SGD(shards, lr=1.0)
        before = shards.full("a.w")
        reduce_all(shards, 1)
        grad = np.ones(SHAPES["a.w"], np.float32)
        opt.zero()
        shards.unit("a").reduce({"a.w": grad})
        grad[:] = 1e9
        del grad
        assert opt.step()
        return before - shards.full("a.w")

    for moved in fs.local_world(2).run(rank):
        np.testing.assert_allclose(moved, 1.0, rtol=1e-5)


def test_a_world_in_a_subprocess_ends_with_its_status(tmp_path):
    """A world of one in a folder that is removed before the interpreter ends: status 0, at once."""
    folder = tmp_path / "gone"
    folder.mkdir()
    text = "import os, flatshard; w = flatshard.init(); w.barrier(); os.rmdir(os.getcwd())"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=folder, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
