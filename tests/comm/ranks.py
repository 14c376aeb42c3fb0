"""Ranks as processes, started as torchrun does: each one's end, output and errors apart."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"

#: No rank lives longer than this, whatever goes wrong.
DEADLINE_S = 60.0


def environment(**more: str) -> dict[str, str]:
    """This one without a launcher's variables, and with the package in its path."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMIX_", "SLURM_", "FLATSHARD_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    path = os.pathsep.join(filter(None, [str(PACKAGE), kept.get("PYTHONPATH", "")]))
    return {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


def free_port() -> int:
    """A number that names a job; nobody listens on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class End:
    """How a rank ended: its status (negative: the signal), and what it wrote."""

    status: int
    out: str
    err: str


class Ranks:
    """``n`` processes that run a program text, for a ``with`` block.

    The program gets ``world = init(...)`` only if it calls it; ``say(text)`` prints a line that
    `wait_for` can see.
    """

    PREAMBLE = """
        import os, signal, sys, time
        import numpy as np
        import flatshard
        from flatshard.job import init
        from flatshard import errors

        def say(text):
            print(text, flush=True)
    """

    def __init__(
        self,
        n: int,
        program: str,
        *,
        port: int | None = None,
        path: pathlib.Path | None = None,
        **variables: str,
    ) -> None:
        """With path, the program is a file there; else a text."""
        self.n = n
        text = textwrap.dedent(self.PREAMBLE) + textwrap.dedent(program)
        command = ["-c", text]
        if path is not None:
            path.write_text(text)
            command = [str(path)]
        port = port or free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, *command],
                env=environment(
                    RANK=str(rank),
                    WORLD_SIZE=str(n),
                    LOCAL_RANK=str(rank),
                    LOCAL_WORLD_SIZE=str(n),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                    **variables,
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(n)
        ]
        self.said = [""] * n

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def wait_for(self, rank: int, line: str) -> None:
        """Reads a rank's output up to a line it says."""
        stream = self.processes[rank].stdout
        assert stream is not None
        while True:
            got = stream.readline()
            self.said[rank] += got
            if got.strip() == line:
                return
            if not got:
                raise AssertionError(
                    f"rank {rank} ended without saying {line!r}: {self.said[rank]!r}\n"
                    f"{self.processes[rank].communicate()[1]}"
                )

    def wait_until_asleep(self, rank: int) -> None:
        """Until the process sleeps in the kernel: it is in the wait it was about to begin."""
        for _ in range(2000):
            stat = pathlib.Path(f"/proc/{self.pid(rank)}/stat").read_text()
            if stat.rsplit(")", 1)[1].split()[0] == "S":
                return
            time.sleep(0.005)
        raise AssertionError(f"rank {rank} does not sleep")

    def ends(self, *ranks: int) -> list[End]:
        """The ends of these ranks (default: all)."""
        found = []
        for rank in ranks or range(self.n):
            process = self.processes[rank]
            out, err = process.communicate(timeout=DEADLINE_S)
            found.append(End(process.returncode, self.said[rank] + out, err))
        return found

    def all_well(self) -> list[str]:
        """Every rank ended with 0: their outputs."""
        ends = self.ends()
        for rank, end in enumerate(ends):
            assert end.status == 0, f"rank {rank} ended with {end.status}:\n{end.out}\n{end.err}"
        return [end.out for end in ends]
