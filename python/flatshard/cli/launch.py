"""``flatshard launch -n N script.py ...``: a script on N ranks of this machine.

The launcher makes the state that the ranks share and hands it down, so nothing has to be found: no
port is opened, no file is written. It sets the variables that torch, transformers and accelerate
read too. The first rank that fails ends the job: its exit status is the launcher's, the others get
their `PeerLost` and a few seconds, and nothing stays behind, even when the launcher is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from .. import _core

__all__ = ["launch", "main"]

POLL_S = 0.02
#: After the first failure: how long ranks have to end by themselves, and after SIGTERM.
END_S = 5.0
TERMINATE_S = 5.0
LOCATE_S = 0.5
AGREED_S = 60.0
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
PR_SET_PDEATHSIG = 1
BAD_USAGE = 2


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status of the job."""
    options = _parser().parse_args(arguments)
    if options.module:
        command = [sys.executable, "-u", "-m", options.script, *options.arguments]
    else:
        if not os.path.isfile(options.script):
            print(f"flatshard launch: there is no file {options.script}", file=sys.stderr)
            return BAD_USAGE
        command = [sys.executable, "-u", options.script, *options.arguments]
    return launch(
        command, options.ranks, threads=options.threads, master_port=options.master_port or 0
    )


def _parser() -> argparse.ArgumentParser:
    it = argparse.ArgumentParser(
        prog="flatshard launch",
        description="Starts a Python script on every rank of this machine.",
        allow_abbrev=False,
    )
    it.add_argument("-n", "--ranks", type=_at_least_one, required=True, help="number of ranks")
    it.add_argument(
        "--threads", type=_at_least_one, help="compute threads of each rank (default: its share)"
    )
    it.add_argument(
        "--master-port", type=int, help="for programs that use MASTER_PORT (default: a free one)"
    )
    it.add_argument("-m", "--module", action="store_true", help="script is the name of a module")
    it.add_argument("script", help="a Python file, or with -m a module")
    it.add_argument("arguments", nargs=argparse.REMAINDER, help="for the script")
    return it


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    threads: int | None = None,
    master_port: int = 0,
    environment: Mapping[str, str] = os.environ,
    agreed: Sequence[int] = (),
) -> int:
    """Runs a command on every rank, and waits until all have ended.

    Parameters
    ----------
    command : sequence of str
        Program and arguments, the same for every rank.
    ranks : int
    threads : int, optional
        Compute threads of each rank. Default: this rank's share of the processors.
    master_port : int
        0: a free one, kept for the job's life.
    environment : mapping
        What the ranks' variables are added to.
    agreed : sequence of int
        Exit statuses that ranks end with together and on purpose: nothing is said of them.

    Returns
    -------
    int
        0 if every rank ended with 0, else the exit status of the rank that failed first
        (128 + number for a signal).
    """
    share = max(1, _core.cpu_count() // ranks)
    job = _core.job_create(ranks)
    data, locks = job.files
    with _reserved_port(master_port) as port:
        common = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "FLATSHARD_JOB": f"{data}:{locks}:launch/{os.getpid()}/{time.time_ns()}",
        }
        if threads is not None:
            common["FLATSHARD_THREADS"] = str(threads)
        if threads is not None or "OMP_NUM_THREADS" not in environment:
            common["OMP_NUM_THREADS"] = str(threads or share)
        children: list[subprocess.Popen[bytes]] = []
        with _forwarding(children):
            try:
                for rank in range(ranks):
                    children.append(
                        subprocess.Popen(
                            list(command),
                            env={
                                **environment,
                                **common,
                                "RANK": str(rank),
                                "LOCAL_RANK": str(rank),
                            },
                            pass_fds=(data, locks),
                            stdin=None if rank == 0 else subprocess.DEVNULL,
                            start_new_session=True,  # signals reach a rank once: through us
                            preexec_fn=_die_with(os.getpid()),
                        )
                    )
                return _wait(children, job, agreed)
            finally:
                _end(children)
                job.close()


def _die_with(parent: int) -> Callable[[], None]:
    """For the child: the kernel kills it when the launcher's process ends, however that ends."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


@contextlib.contextmanager
def _reserved_port(port: int) -> Iterator[int]:
    """A port that nobody else is given while the block runs.

    The socket is bound and does not listen: rank 0 can bind it too (everybody who offers a
    rendezvous sets SO_REUSEADDR), another job that asks for a free port does not get it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: 127.0.0.1:{port}") from None
        yield holder.getsockname()[1]


@contextlib.contextmanager
def _forwarding(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Passes signals on to the ranks; what they mean is the ranks' business."""

    def forward(number: int, _frame: FrameType | None) -> None:
        for child in children:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    before = {}
    for name in FORWARDED:
        number = getattr(signal, name)
        # A signal that is ignored here (nohup) stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


def _say(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _wait(
    children: Sequence[subprocess.Popen[bytes]], job: _core.Job, agreed: Sequence[int]
) -> int:
    """Until all have ended, or one has failed."""
    while True:
        running = False
        for rank, child in enumerate(children):
            code = child.poll()
            if code is None:
                running = True
            elif code != 0:
                # Ranks that end together on purpose may still have something to write.
                _let_end(children, AGREED_S if code in agreed else END_S)
                if code not in agreed:
                    _tell_where(children, job)
                _end(children)
                return _first_failure(children, job, rank, agreed)
        if not running:
            return 0
        time.sleep(POLL_S)


def _first_failure(
    children: Sequence[subprocess.Popen[bytes]],
    job: _core.Job,
    seen_first: int,
    agreed: Sequence[int],
) -> int:
    """Names the rank that the ranks blame, whoever's process ended first; its exit status."""
    cause = job.cause()
    rank = cause[1] if cause is not None and cause[1] >= 0 else seen_first
    if not children[rank].returncode:
        rank = seen_first
    code = children[rank].returncode
    if code not in agreed:
        print(f"flatshard launch: rank {rank} {_say(code)}; the job is over", file=sys.stderr)
    return _status(code)


def _let_end(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Waits until all have ended, for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(POLL_S)


def _tell_where(children: Sequence[subprocess.Popen[bytes]], job: _core.Job) -> None:
    """Says what ranks are doing that are ended now, if none has waited, and so none has said it."""
    if job.cause() is not None or all(child.poll() is not None for child in children):
        return
    job.locate(LOCATE_S)
    report = job.report()
    if report.count("has not started") < len(children):  # flatshard's ranks, not just any program
        print(f"flatshard launch: the ranks that still run are ended: {report}", file=sys.stderr)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Asks ranks to end, kills them; each with the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [child for child in children if child.poll() is None]
        if not running:
            break
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
                os.killpg(child.pid, signal.SIGCONT)  # a stopped one could not end
        _let_end(running, TERMINATE_S)
    for child in children:
        # What a failed rank left running; after a clean end that is the script's own decision.
        if child.returncode:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
