"""Ranks as processes that stay, and run one case after another: torch is imported once."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import select
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "python"

#: No case takes longer, whatever goes wrong.
DEADLINE_S = 200.0


def case_name(value: Any) -> str:
    """A parameter of a test as part of its id: a number of ranks, or the options of a case."""
    if isinstance(value, dict):
        return "-".join(str(v) for v in value.values())
    return f"world{value}"


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Gang:
    """``n`` ranks; ``run`` calls one function in all of them.

    A case is ``"file:function"`` in this folder; it is called with the world and keyword arguments,
    and returns what JSON can hold. After a failure new ranks are started.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._processes: list[subprocess.Popen[str]] = []

    def _start(self) -> None:
        drop = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "SLURM_", "FLATSHARD_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        path = os.pathsep.join(filter(None, [str(PACKAGE), str(HERE), kept.get("PYTHONPATH", "")]))
        port = _port()
        for rank in range(self.n):
            environment = {
                **kept,
                "PYTHONPATH": path,
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": "1",
                "FLATSHARD_THREADS": "1",
                "FLATSHARD_TIMEOUT": "60",
                "RANK": str(rank),
                "WORLD_SIZE": str(self.n),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.n),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # read after the rank's end
            process = subprocess.Popen(
                [sys.executable, str(HERE / "gang.py")],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            process.errors = errors  # type: ignore[attr-defined]
            self._processes.append(process)

    def stop(self) -> str:
        """Ends the ranks; gives what they wrote to stderr."""
        said = ""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            errors = process.errors  # type: ignore[attr-defined]
            errors.seek(0)
            said += f"--- stderr of rank {rank}\n{errors.read()[-4000:]}"
            errors.close()
        self._processes = []
        return said

    def _answer(self, process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
        assert process.stdout is not None
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([process.stdout], [], [], left)
        line = process.stdout.readline() if ready else ""
        if not line:
            return {"error": "no answer within the deadline" if not ready else "the rank ended"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, case: str, **arguments: Any) -> list[Any]:
        """What each rank returned; AssertionError with the tracebacks if one failed."""
        if not self._processes:
            self._start()
        deadline = time.monotonic() + DEADLINE_S
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([case, arguments]) + "\n")
            process.stdin.flush()
        answers = [self._answer(process, deadline) for process in self._processes]
        failed = [f"rank {r}: {a['error']}" for r, a in enumerate(answers) if "error" in a]
        if failed:
            raise AssertionError("\n".join([f"{case} {arguments}", *failed, self.stop()]))
        return [answer["value"] for answer in answers]


def main() -> None:
    """A rank: reads cases, runs them, answers."""
    out, sys.stdout = sys.stdout, sys.stderr
    import torch

    import flatshard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    world = flatshard.init()
    for line in sys.stdin:
        case, arguments = json.loads(line)
        try:
            file, _, name = case.partition(":")
            function = getattr(importlib.import_module(file), name)
            answer = {"value": function(world, **arguments)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=out, flush=True)
        if "error" in answer:
            os._exit(1)  # the others learn at once, not after the deadline


if __name__ == "__main__":
    main()
