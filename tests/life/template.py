"""Ranks as processes, forked from one that has imported everything: a job takes tenths of a second.

    with Template() as template:
        ends = template.run(2, program, FLATSHARD_TIMEOUT="2")

A rank is a child of the template. It runs the program's text as ``__main__`` and ends as a script
does: exit handlers, finalizers and the interpreter's own end included. Run by itself, this file is
the template: it reads a job a line, and answers each with a line.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
DEADLINE_S = 40.0

PREAMBLE = """
    import os, signal, sys, time
    import numpy as np
    import flatshard
    from flatshard import _core, errors
    from flatshard.job import init
    from living import *

    def say(text):
        print(text, flush=True)
"""


class Template:
    """The process that forks, for a ``with`` block."""

    def __enter__(self) -> Template:
        from ranks import environment, free_port

        self._port = free_port
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "template.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=DEADLINE_S)
        self._process.stdout.close()

    def run(self, n: int, program: str, *, stops: int = -1, **variables: str) -> list[Any]:
        """How n ranks end. stops: a rank that a signal stops; it is killed when the others are
        done."""
        from ranks import End

        assert self._process.stdin is not None and self._process.stdout is not None
        text = textwrap.dedent(PREAMBLE) + textwrap.dedent(program)
        job = {"n": n, "program": text, "stops": stops, "port": self._port(), "set": variables}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the template has ended"
        return [End(**end) for end in json.loads(answer)]


# ---- in the template ----------------------------------------------------------------------------


def become_rank(job: dict[str, Any], rank: int, out: Any, err: Any) -> None:
    """In the child: its files and variables."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for there, here in ((nothing, 0), (out.fileno(), 1), (err.fileno(), 2)):
        os.dup2(there, here)
    n = str(job["n"])
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=n, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=n,
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]), **job["set"],
    )  # fmt: skip


def wait_for(pids: dict[int, int], stops: int) -> dict[int, int]:
    """Statuses by rank; nobody outlives the deadline."""
    statuses: dict[int, int] = {}
    end = time.monotonic() + DEADLINE_S
    while len(statuses) < len(pids):
        for rank, pid in pids.items():
            ended, status = (0, 0) if rank in statuses else os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[rank] = os.waitstatus_to_exitcode(status)
        late = time.monotonic() > end
        others_done = stops >= 0 and len(statuses) == len(pids) - 1 and stops not in statuses
        for rank, pid in pids.items():
            if rank not in statuses and (late or others_done):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return statuses


def main() -> None:
    """Reads jobs until there are no more. A rank leaves by what its program raises."""
    sys.path.insert(0, str(HERE))
    importlib.import_module("living")  # with all that it imports: once, for all ranks

    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        files = [
            [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
            for _ in range(job["n"])
        ]
        pids = {}
        for rank in range(job["n"]):
            pids[rank] = os.fork()
            if pids[rank] == 0:
                become_rank(job, rank, *files[rank])
                exec(compile(job["program"], "<rank>", "exec"), {"__name__": "__main__"})
                sys.exit(0)
        statuses = wait_for(pids, job["stops"])
        ends = []
        for rank, pair in enumerate(files):
            texts = []
            for file in pair:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
                file.close()
            ends.append({"status": statuses[rank], "out": texts[0], "err": texts[1]})
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    main()
