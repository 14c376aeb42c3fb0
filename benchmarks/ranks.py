"""Contenders that are several processes: one command at a time, the slowest rank's time counts.

Each rank runs `python -m benchmarks.worker`, with the environment that torchrun would set, reads a
command a line from its standard input and answers one a line on its standard output. Between
commands a rank sleeps in a read, so that contenders that are not measured use no core.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

__all__ = ["Ranks"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """A contender made of `n` processes.

    job : "module:function"; every rank calls function(**arguments) and gets an object with
        verify(), sample() -> seconds and close().
    threads : compute threads of each rank.
    deadline : seconds one command may take.
    """

    def __init__(
        self,
        name: str,
        job: str,
        *,
        n: int,
        threads: int = 1,
        deadline: float = 600.0,
        **arguments: Any,
    ) -> None:
        self.name = name
        self.deadline = deadline
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the ranks
        port = str(free_port())
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(n):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(n),
                "LOCAL_WORLD_SIZE": str(n),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": f"benchmark-{os.getpid()}-{port}",
                "OMP_NUM_THREADS": str(threads),
                "FLATSHARD_THREADS": str(threads),
            }
            command = [sys.executable, "-m", "benchmarks.worker", job, json.dumps(arguments)]
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.errors,
                    text=True,
                )
            )
        try:
            self.ask("open")
        except BaseException:
            self.close()
            raise

    def ask(self, command: str) -> list[Any]:
        """Gives all ranks a command and collects their answers."""
        for process in self.processes:
            self.pipe(process.stdin).write(command + "\n")
            self.pipe(process.stdin).flush()
        # A rank that hangs is killed, which ends our read.
        timer = threading.Timer(self.deadline, self.kill)
        timer.start()
        try:
            lines = [self.pipe(process.stdout).readline() for process in self.processes]
        finally:
            timer.cancel()
        answers = [json.loads(line) if line.strip() else {"error": "ended"} for line in lines]
        wrong = [f"rank {r}: {a['error']}" for r, a in enumerate(answers) if "error" in a]
        if wrong:
            self.kill()
            self.errors.seek(0)
            raise RuntimeError(
                f"{self.name}: {command} failed: {'; '.join(wrong)}\n{self.errors.read()[-3000:]}"
            )
        return [answer["value"] for answer in answers]

    @staticmethod
    def pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def verify(self) -> None:
        self.ask("verify")

    def sample(self) -> float:
        return max(float(value) for value in self.ask("sample"))

    def close(self) -> None:
        """Ends the ranks; those that do not end by themselves are killed."""
        for process in self.processes:
            try:
                self.pipe(process.stdin).close()
            except OSError:
                pass  # it has ended already
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.pipe(process.stdout).close()
        self.errors.close()
