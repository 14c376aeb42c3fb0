"""A folder that may not be written: a clear error, and the checkpoint before is untouched."""

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

import flatshard as fs

PROGRAM = """
import os, sys
import numpy as np
import flatshard as fs

world = fs.init()
shards = fs.shard({"w": np.ones((40, 3), np.float32)}, world)
optimizer = fs.AdamW(shards, lr=0.1)
run = sys.argv[1]
fs.checkpoint.save(run, shards, optimizer, step=1)
os.chmod(run, 0o555)
if os.getuid() == 0:
    os.setuid(65534)  # permissions do not bind root
for background in (False, True):
    try:
        fs.checkpoint.save(run, shards, optimizer, step=2, background=background).wait()
    except OSError as error:
        print(type(error).__name__, error)
    else:
        raise SystemExit("it was saved")
next(iter(shards)).reduce({"w": np.ones((40, 3), np.float32)})
print(bool(optimizer.step()), fs.checkpoint.load(run, shards, optimizer).step)
"""


@pytest.fixture
def open_folder() -> Iterator[pathlib.Path]:
    """One that another user can come to, as pytest's own may not be."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        path.chmod(0o755)
        yield path


def test_a_folder_that_may_not_be_written(open_folder: pathlib.Path) -> None:
    run = open_folder / "run"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run)],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(fs.__file__).resolve().parent.parent)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, last = done.stdout.splitlines()
    assert first.startswith("PermissionError") and second.startswith("PermissionError")
    assert str(run) in first
    assert last == "True 1"
    assert [path.name for path in run.iterdir()] == ["step-000001"]
    run.chmod(0o755)
