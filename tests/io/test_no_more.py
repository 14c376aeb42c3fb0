"""A file system that is read-only, and a quota that is used up: what a save says and leaves."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import flatshard as fs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts and loader of Linux")

HERE = pathlib.Path(__file__).resolve().parent

# Few kernels have quotas: the two calls that tell of a used-up one, before the C library's.
QUOTA = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/types.h>

_Atomic long quota_nbytes = 1L << 40; /* that may still be written */
_Atomic int quota_at_sync;

ssize_t pwrite(int fd, const void *bytes, size_t nbytes, off_t at)
{
    ssize_t (*next)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, "pwrite");
    if (atomic_fetch_sub(&quota_nbytes, (long)nbytes) < (long)nbytes) {
        errno = EDQUOT;
        return -1;
    }
    return next(fd, bytes, nbytes, at);
}

ssize_t pwrite64(int fd, const void *bytes, size_t nbytes, off_t at)
{
    return pwrite(fd, bytes, nbytes, at);
}

int fsync(int fd)
{
    int (*next)(int) = dlsym(RTLD_NEXT, "fsync");
    if (quota_at_sync) {
        errno = EDQUOT;
        return -1;
    }
    return next(fd);
}
"""


def save(kind: str, folder: pathlib.Path, **variables: str) -> list[str]:
    """What both ranks said of both saves."""
    done = subprocess.run(
        [sys.executable, str(HERE / "no_more.py"), kind, str(folder)],
        env={
            **os.environ,
            "PYTHONPATH": str(pathlib.Path(fs.__file__).resolve().parent.parent),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.returncode == 77:
        pytest.skip(f"no mounts of one's own here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4, lines
    return lines


def test_a_read_only_file_system(tmp_path: pathlib.Path) -> None:
    for line in save("read-only", tmp_path):
        assert line.startswith("EROFS ") and str(tmp_path / "run") in line, line
        assert "Read-only file system" in line, line


@pytest.mark.parametrize(
    ("kind", "words"),
    [("written", r"\.safetensors: could not write at byte \d+"), ("synced", "could not sync")],
)
def test_a_quota_that_is_used_up(tmp_path: pathlib.Path, kind: str, words: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the library that stands before the C library")
    source, library = tmp_path / "quota.c", tmp_path / "quota.so"
    source.write_text(QUOTA)
    command = [compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    for line in save(kind, tmp_path, LD_PRELOAD=str(library)):
        assert line.startswith("EDQUOT "), line
        assert re.search(rf"{words}.*: Disk quota exceeded", line), line
