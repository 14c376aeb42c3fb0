"""A job that saves until it is killed. Run by test_crash.py: ``saver.py FOLDER SIZE ROWS [WAIT]``.

SIZE 0: ranks are processes, as the environment says; else that many threads. WAIT: the process
kills itself in the so-manieth wait after its first save.
"""

import os
import pathlib
import sys

import numpy as np

import flatshard as fs
from flatshard import _core, checkpoint


def say(text: str) -> None:
    """A line in one write: ranks that are threads talk at the same time."""
    os.write(1, f"{text}\n".encode())


def run(world: fs.World, folder: pathlib.Path, rows: int, wait: int) -> None:
    shards = fs.shard({"a.weight": np.zeros((rows, 64), np.float32)}, world)
    opt = fs.SGD(shards, lr=1.0, momentum=0.5)
    for step in range(1, 1000):
        value = np.full((rows, 64), step, np.float32)
        shards.set_full("a.weight", value)
        shards.set_full("a.weight", value / 2, "momentum_buffer")
        if step == 2 and wait > 0 and world.rank == world.size - 1:
            _core.wait_fault_at(wait, 1)
        try:
            background = step % 2 == 1
            checkpoint.save(
                folder, shards, opt, step=step, user=step, keep=2, background=background
            ).wait()
        except Exception as error:
            say(f"{type(error).__name__} {getattr(error, 'errno', None)}: {error}")
            raise
        if world.rank == 0:
            say(f"saved {step}")
        if wait > 0 and step == 2 and world.rank == world.size - 1:
            waits = _core.wait_fault_at(0, 0)
            say(f"clean {waits}")
        if wait > 0 and step == 3:
            return


def main() -> None:
    folder, size, rows = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    wait = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    say("ready")
    if size == 0:
        with fs.init(timeout=60.0) as world:
            run(world, folder, rows, wait)
    else:
        fs.local_world(size).run(run, folder, rows, wait)


if __name__ == "__main__":
    main()
