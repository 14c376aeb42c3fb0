"""How a process ends: in any order, with or without close(), whatever is still open. No hang, no
signal but the one that was sent, the status the script meant, and nothing left in memory or on
disk."""

import os
import pathlib
import time

import pytest

pytestmark = pytest.mark.timeout(120)

OPEN = """
    world = init(timeout=30)
    model = llama(world, sharding=fs.Sharding(3, gather="copy"))
    opt = fs.AdamW(model, lr=0.01)
    shards = arrays(world)
    view = shards.units[0].gather()["a.w"]
    part = world.split(0)
    there = world.symmetric(1000)
    model.forward_backward(*ids(world.rank))
    assert opt.step()
    world.barrier()
"""
ENDS = {
    "falls off the end": "",
    "sys.exit": "    sys.exit(0)\n",
    "the other rank first": "    time.sleep(0.5 * (1 - world.rank))\n",
    "rank 0 first": "    time.sleep(0.5 * world.rank)\n",
    "closed by one": "    if world.rank: world.close()\n",
    "world closed first": "    world.close(); model.close(); shards.close(); part.close()\n",
    "part closed last": (
        "    model.close(); shards.close(); world.close(); del world\n    part.close()\n"
    ),
    "in a ring": "    ring = [world, model, opt, view, part]; ring.append(ring); del ring\n",
    "held by a module": (
        "    sys.held = [world, model, view]\n    import builtins; builtins.x = part\n"
    ),
    "gradients under way": "    reduce_all(shards, 1)\n    model.forward_backward(*ids(1))\n",
    "an exception at exit": (
        "    import atexit\n    def late(): model.loss(*ids(0))\n    atexit.register(late)\n"
    ),
    "used in a finalizer": (
        "    class Late:\n"
        "        def __init__(self): self.things = shards, view\n"
        "        def __del__(self):\n"
        "            try: self.things[0].full('a.w')\n"
        "            except Exception: pass\n"
        "    late = Late()\n"
    ),
    "a daemon thread computes": (
        "    import threading\n"
        "    def run():\n"
        "        while True: float(view.sum())\n"
        "    threading.Thread(target=run, daemon=True).start()\n"
    ),
    "a save in the background": (
        "    fs.checkpoint.save(os.environ['FOLDER'], model, opt, step=1, background=True)\n"
    ),
    "without cleaning up": "    sys.stdout.flush(); os._exit(0)\n",
}


def left_in_memory() -> set[str]:
    """Shared memory and sockets of ours."""
    files = {str(p) for p in pathlib.Path("/dev/shm").glob("*flatshard*")}
    sockets = pathlib.Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
    return files | {line.split()[-1] for line in sockets if "flatshard" in line}


def stays(before: set[str]) -> set[str]:
    """What was not there and does not go: other jobs of this host come and go."""
    left = left_in_memory() - before
    end = time.monotonic() + 5.0
    while left and time.monotonic() < end:
        time.sleep(0.02)
        left &= left_in_memory()
    return left


SOME = (
    "falls off the end", "rank 0 first", "closed by one", "in a ring", "gradients under way",
    "used in a finalizer", "a save in the background",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.full) for n in ENDS]
)
def test_two_ranks_end(name, tmp_path, template):
    before = left_in_memory()
    ends = template.run(2, OPEN + ENDS[name], FOLDER=str(tmp_path))
    for rank, end in enumerate(ends):
        assert end.status == 0, (rank, end)
        expected = name in ("an exception at exit", "used in a finalizer", "gradients under way")
        assert expected or "Traceback" not in end.err, end.err
    assert not stays(before)
    hidden = [entry for entry in os.listdir(tmp_path) if entry.startswith(".")]
    assert name == "a save in the background" or not os.listdir(tmp_path)
    assert len(hidden) <= 1  # a save that its process did not wait for; the next one clears it away


def test_a_status_is_the_scripts(template):
    """An exception, a status, a signal: each rank's own, and the peers learn the reason."""
    how = """
    try:
        if world.rank == 0:
            raise LookupError("rank 0 has failed")
        time.sleep(0.3)
        world.barrier()
    except errors.PeerLost as error:
        assert "rank 0 has failed" in str(error), error
        sys.exit(5)
    """
    first, second = template.run(2, OPEN + how)
    assert first.status == 1 and "LookupError: rank 0 has failed" in first.err
    assert second.status == 5, second


def test_ranks_as_threads_end_with_their_process(template):
    """A process of thread ranks that ends while they compute, wait, or have failed."""
    program = """
        import threading, _thread
        def rank(world):
            if world.rank == 0:
                threading.Timer(0.3, _thread.interrupt_main).start()
                shards = arrays(world)
                while True:
                    shards.full("a.w")
            world.symmetric(100)
        try:
            flatshard.local_world(2).run(rank)
        except (KeyboardInterrupt, errors.FlatshardError):
            say("over")
    """
    (end,) = template.run(1, program)
    assert end.status == 0 and "over" in end.out, end
