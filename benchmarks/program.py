"""A contender that is a program: one command a line on its standard input, one answer a line.

It answers "ok VALUE" or "error TEXT"; what it is given on its command line says what it measures.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Sequence
from typing import IO

__all__ = ["Program"]


class Program:
    """deadline : seconds one command may take."""

    def __init__(self, name: str, command: Sequence[str], *, deadline: float = 300.0) -> None:
        self.name, self.deadline = name, deadline
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the program
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    @staticmethod
    def pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream

    def ask(self, command: str) -> str:
        """What follows "ok" in the answer."""
        timer = threading.Timer(self.deadline, self.process.kill)
        timer.start()
        try:
            self.pipe(self.process.stdin).write(command + "\n")
            self.pipe(self.process.stdin).flush()
            line = self.pipe(self.process.stdout).readline().strip()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        word, _, rest = line.partition(" ")
        if word != "ok":
            self.errors.seek(0)
            said = rest or f"ended: {self.errors.read()[-2000:]}"
            raise RuntimeError(f"{self.name}: {command}: {said}")
        return rest

    def verify(self) -> None:
        self.ask("verify")

    def sample(self) -> float:
        return float(self.ask("sample"))

    def close(self) -> None:
        try:
            self.pipe(self.process.stdin).close()
        except BrokenPipeError:
            pass  # it has ended already
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.pipe(self.process.stdout).close()
        self.errors.close()
