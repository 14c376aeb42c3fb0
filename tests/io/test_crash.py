"""A save may end at any point, by any cause: the last committed checkpoint always loads."""

import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import flatshard as fs
from flatshard import _core, checkpoint

pytestmark = pytest.mark.timeout(240)

HERE = pathlib.Path(__file__).resolve().parent
DEADLINE = 60.0
LONG = pytest.mark.timeout(900)


def start(folder, size, rows, wait=0, limit=None, **environment) -> subprocess.Popen[str]:
    """A saver; ``limit``: the most bytes that a file may get."""

    def before() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    package = str(pathlib.Path(fs.__file__).resolve().parent.parent)
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, str(HERE / "saver.py"), *map(str, (folder, size, rows, wait))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**clean, "PYTHONPATH": package, **environment},
        preexec_fn=before,
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    """Its lines, when it has ended; killed at the deadline."""
    try:
        out, _ = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    return out.splitlines()


def last_saved(lines: list[str]) -> int:
    return max((int(line.split()[1]) for line in lines if line.startswith("saved")), default=0)


def check(folder: pathlib.Path, rows: int, at_least: int) -> int:
    """The newest checkpoint loads, on another number of ranks, and is whole."""

    def load(world):
        shards = fs.shard({"a.weight": np.zeros((rows, 64), np.float32)}, world)
        opt = fs.SGD(shards, lr=1.0, momentum=0.5)
        loaded = checkpoint.load(folder, shards, opt)
        assert loaded.skipped == () and loaded.user == loaded.step >= at_least
        assert (shards.full("a.weight") == loaded.step).all()
        assert (shards.full("a.weight", "momentum_buffer") == loaded.step / 2).all()
        return loaded.step

    assert checkpoint.verify(folder) == []
    return fs.local_world(2).run(load)[0]


def point(folder: pathlib.Path) -> str:
    """Where in a save the job was when it was killed."""
    hidden = [name for name in os.listdir(folder) if name.startswith(".saving-")]
    if not hidden:
        return "between"
    try:
        inside = os.listdir(folder / hidden[0])
        sizes = [(folder / hidden[0] / name).stat().st_size for name in inside]
    except FileNotFoundError:  # renamed while we looked
        return "between"
    if "index.json" in inside:
        return "index written"
    return "files" if sum(sizes) > 0 else "begun"


@pytest.mark.parametrize(
    ("wanted", "seed"),
    [
        pytest.param(10, 20240611, id="ten"),
        *(
            pytest.param(40, seed, id=f"forty-{seed}", marks=[pytest.mark.full, LONG])
            for seed in range(5)
        ),
    ],
)
def test_killed_at_random_times(tmp_path, wanted, seed) -> None:
    """kill -9 from outside at seeded times; the next job starts from what the last one left."""
    rows = 30_000
    rng = random.Random(seed)
    points = {"between": 0, "begun": 0, "files": 0, "index written": 0}
    rare = points if wanted > 20 else ("between", "files")
    kills = 0
    while kills < wanted or min(points[point] for point in rare) < 5:
        kills += 1
        assert kills <= wanted + 60, (seed, points)
        process = start(tmp_path, 3, rows)
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("saved"):
            line = process.stdout.readline()
            assert line, "the job ended by itself"
            lines.append(line)
        if rng.random() < 0.5:  # at one of the points, whenever that is
            at, deadline = rng.choice(["begun", "files", "index written"]), time.monotonic() + 2.0
            while point(tmp_path) != at and time.monotonic() < deadline:
                pass
        else:
            time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        rest = finish(process)
        assert process.returncode == -signal.SIGKILL
        saved = last_saved(lines + rest)
        points[point(tmp_path)] += 1
        assert check(tmp_path, rows, saved) in (saved, saved + 1)
    print(f"seed {seed}: {kills} kills: {points}")
    # The next save clears away what the kills left.
    process = start(tmp_path, 1, 10, wait=10**6)
    assert any(line.startswith("clean") for line in finish(process))
    left = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert left == []


def test_killed_at_every_fence(tmp_path) -> None:
    """The process dies in the n-th wait of a save, n = 1, 2, 3 ... until the save ends first."""
    rows = 500
    for wait in range(1, 200):
        folder = tmp_path / str(wait)
        lines = finish(start(folder, 2, rows, wait=wait))
        if any(line.startswith("clean") for line in lines):
            assert wait > 10, f"only {wait} waits in a save"
            assert check(folder, rows, 3) == 3
            break
        assert check(folder, rows, 1) in (1, 2), wait
    else:
        pytest.fail("the save never ended")


def processes(folder, size, rows, wait=0) -> list[subprocess.Popen[str]]:
    """Ranks that are processes; the last one kills itself in a wait."""
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
        "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{wait}",
    }
    return [
        start(folder, 0, rows, wait, RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in range(size)
    ]


@pytest.mark.parametrize("wait", [2, 5, 8])
def test_one_process_of_three_is_killed(tmp_path, wait) -> None:
    """The others raise, remove the half checkpoint, and the last good one loads."""
    ranks = processes(tmp_path, 3, 2000, wait)
    lines = [finish(process) for process in ranks]
    assert ranks[2].returncode == -signal.SIGKILL
    for rank in (0, 1):
        assert ranks[rank].returncode == 1
        assert any(line.startswith("PeerLost") and "rank 2" in line for line in lines[rank]), lines
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert check(tmp_path, 2000, 1) == 1


@pytest.mark.parametrize("size", [1, 3])
def test_a_full_disk(tmp_path, size) -> None:
    """Writing stops half way: a named OSError on all ranks, the old checkpoint untouched."""
    rows = 20_000
    lines = finish(start(tmp_path, size, rows, wait=10**6))
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-000003").iterdir()}
    lines = finish(start(tmp_path, size, rows, limit=rows * 64 * 4 // size))
    failed = [line for line in lines if line.startswith("OSError 27: ")]  # EFBIG
    assert len(failed) == size, lines
    assert all("could not write at byte" in line and ".safetensors" in line for line in failed)
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000003"]
    after = {path.name: path.read_bytes() for path in (tmp_path / "step-000003").iterdir()}
    assert before == after
    assert check(tmp_path, rows, 3) == 3


def test_room_is_checked_before_anything_is_written(tmp_path) -> None:
    with pytest.raises(OSError, match="are needed and") as caught:
        _core.io_room_check(str(tmp_path), 1 << 62)
    assert caught.value.errno == 28
    _core.io_room_check(str(tmp_path), 1)


def test_a_folder_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")

    def body(world):
        shards = fs.shard({"a": np.zeros(3, np.float32)}, world)
        with pytest.raises(NotADirectoryError):
            checkpoint.save(tmp_path / "file" / "run", shards, step=1)
        with pytest.raises(OSError, match="file"):
            checkpoint.save(tmp_path / "file", shards, step=1)

    fs.local_world(2).run(body)
    assert os.listdir(tmp_path) == ["file"]


def test_another_job_that_saves_right_now_is_left_alone(tmp_path) -> None:
    """Only hidden folders that nobody holds are leftovers."""
    import fcntl

    held, dead = tmp_path / ".saving-step-000001-1-1", tmp_path / ".saving-step-000002-2-2"
    held.mkdir()
    dead.mkdir()
    lock = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shards_saved = fs.local_world(1).run(
            lambda world: checkpoint.save(
                tmp_path, fs.shard({"a": np.zeros(3, np.float32)}, world), step=5
            )
        )
        assert shards_saved[0].step == 5
        assert held.exists() and not dead.exists()
    finally:
        os.close(lock)
