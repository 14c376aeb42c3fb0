"""Saves on a file system that takes no more. Run by test_no_more.py: ``no_more.py KIND FOLDER``.

KIND is ``read-only``: a mount of this process's own, which goes with it; or ``written`` or
``synced``: where a quota is found used up, by the library that the test put before the C
library's. One checkpoint is saved, then the file system takes no more, and two saves say what they
think of it. Ends with status 77, and the reason, where mounts are not to be had.
"""

import ctypes
import errno
import hashlib
import os
import pathlib
import sys

import numpy as np

import flatshard as fs

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18
NOT_TO_BE_HAD = 77
ROWS = 20_000

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) != 0:
        print(f"{name}: {os.strerror(ctypes.get_errno())}")
        raise SystemExit(NOT_TO_BE_HAD)


def mount_own(folder: pathlib.Path) -> None:
    """Memory at the folder. Another user than root needs a root of its own for that."""
    user = os.getuid()
    call("unshare", CLONE_NEWNS | (CLONE_NEWUSER if user != 0 else 0))
    if user != 0:
        pathlib.Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"none", bytes(folder), b"tmpfs", 0, b"size=64m")


def take_no_more(kind: str, folder: pathlib.Path) -> None:
    if kind == "read-only":
        call("mount", b"none", bytes(folder), None, MS_REMOUNT | MS_RDONLY, None)
    elif kind == "written":
        ctypes.c_long.in_dll(libc, "quota_nbytes").value = ROWS * 64 * 4
    else:
        ctypes.c_int.in_dll(libc, "quota_at_sync").value = 1


def give_back() -> None:
    ctypes.c_long.in_dll(libc, "quota_nbytes").value = 1 << 40
    ctypes.c_int.in_dll(libc, "quota_at_sync").value = 0


def digest(folder: pathlib.Path) -> str:
    content = b"".join(p.name.encode() + p.read_bytes() for p in sorted(folder.iterdir()))
    return hashlib.sha256(content).hexdigest()


def rank(world: fs.World, kind: str, folder: pathlib.Path) -> list[str]:
    run = folder / "run"
    shards = fs.shard({"w": np.ones((ROWS, 64), np.float32)}, world)
    optimizer = fs.SGD(shards, lr=0.1, momentum=0.5)
    fs.checkpoint.save(run, shards, optimizer, step=1)
    before = digest(run / "step-000001")
    said = []
    for background in (False, True):
        world.barrier()
        if world.rank == 0:
            take_no_more(kind, folder)
        world.barrier()
        try:
            fs.checkpoint.save(run, shards, optimizer, step=2, background=background).wait()
        except OSError as error:
            said.append(f"{errno.errorcode[error.errno or 0]} {error}")
        else:
            said.append("it was saved")
        world.barrier()
        assert os.listdir(run) == ["step-000001"], os.listdir(run)
    assert digest(run / "step-000001") == before
    next(iter(shards)).reduce({"w": np.ones((ROWS, 64), np.float32)})
    assert optimizer.step().applied
    assert fs.checkpoint.load(run, shards, optimizer).step == 1
    if kind != "read-only":  # with room again, the next save is whole
        world.barrier()
        give_back()
        world.barrier()
        fs.checkpoint.save(run, shards, optimizer, step=2)
        assert fs.checkpoint.load(run, shards, optimizer).step == 2
        assert fs.checkpoint.verify(run) == []
    return said


def main() -> None:
    kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if kind == "read-only":
        mount_own(folder)
    for said in fs.local_world(2).run(rank, kind, folder):
        print(*said, sep="\n")


if __name__ == "__main__":
    main()
