"""The world of a job: ``init`` for the processes of a launcher, ``local_world`` for threads."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import _core, _device, _locate, _log, _start
from ._reason import reason_of
from .errors import ConfigError
from .world import World

__all__ = ["LocalWorld", "init", "local_world"]

T = TypeVar("T")

_log.setup()
_log.warn_unknown_variables(_core.env_table())

TIMEOUT_S = 1800.0
REPORT_AFTER_S = 30.0
LOCAL_TIMEOUT_S = 60.0

# ---- the job's world ----------------------------------------------------------------------------


class _Process:
    """The world of this process, if it has one, and how often there was one."""

    world: World | None = None
    job: _core.Job | None = None
    worlds = 0


_of_thread = threading.local()


def _seconds(name: str, given: float) -> float:
    """A duration: the environment variable if set (whoever runs a script may not own it)."""
    text = os.environ.get(name)
    if not text:
        return float(given)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ConfigError(f"{name}={text}: expected a number of seconds above 0")
    return seconds


def _positive(name: str, seconds: float) -> float:
    if not seconds > 0:
        raise ValueError(f"{name}: expected seconds above 0, got {seconds}")
    return seconds


def init(
    *,
    device: str = "cpu",
    backend: str = "auto",
    timeout: float = TIMEOUT_S,
    report_after: float = REPORT_AFTER_S,
    threads: int | None = None,
) -> World:
    """The world of this job. Collective over the processes that a launcher started.

    ``flatshard launch``, torchrun, mpirun (Open MPI) and srun are recognised by their environment;
    without any of them the world has one rank. A second call returns the same world until it is
    closed. Inside a function that `local_world` runs, it is that rank's world.

    Parameters
    ----------
    device : {"cpu", "cuda", "cuda:N"}
        Where ranks compute, and shards lie. "cuda": each on the GPU with the number of its rank on
        this host (``LOCAL_RANK``); a number is for one rank a process may see, or for each rank
        being shown its own.
    backend : {"auto", "node"}
        What connects them: the memory of one host.
    timeout : float, seconds
        How long a wait for other ranks may take (``FLATSHARD_TIMEOUT`` overrides).
    report_after : float, seconds
        When a wait is reported in the log (``FLATSHARD_REPORT_AFTER`` overrides).
    threads : int, optional
        Compute threads of this rank (default ``FLATSHARD_THREADS``, else its share of the
        processors this process may use).

    Raises
    ------
    WorldError
        If ranks did not come in time, or the world of an earlier call is over and was not closed.
    ConfigError
        If the environment is incomplete or contradicts itself, or the device cannot be used: the
        text says what is missing.
    NotImplementedError
        If the ranks are on several hosts, or for a backend that is not there yet.
    """
    world: World | None = getattr(_of_thread, "world", None) or _Process.world
    if world is not None:
        world._core.usable()
        kind, ordinal = _device.parse(device)
        here = world.device if ordinal is not None else world.device.partition(":")[0]
        if kind != "cpu" and here != device:
            raise ConfigError(
                f"device={device!r}: the world of this process is on {world.device!r} already; "
                "close it first"
            )
        return world
    kind, ordinal = _device.parse(device)
    if backend not in ("auto", "node"):
        raise NotImplementedError(f"backend={backend!r} is not there yet: use 'auto' or 'node'")
    timeout = _seconds("FLATSHARD_TIMEOUT", _positive("timeout", timeout))
    report_after = _seconds("FLATSHARD_REPORT_AFTER", _positive("report_after", report_after))
    if threads is not None and threads < 1:
        raise ValueError(f"threads: expected 1 or more, got {threads}")

    place = _start.find_place()
    ordinal = place.local_rank if ordinal is None else ordinal
    library = None
    if kind == "cuda":
        _core.close_due()  # of worlds before
        library = _device.load()
        _device.check_ordinal(library, ordinal, f"rank {place.rank} (by LOCAL_RANK or the like)")
    _log.set_rank(place.rank, thread_only=False)
    job = _join(place, timeout)
    _log.set_keep(lambda text: job.say(place.rank, text), thread_only=False)
    try:
        _locate.start(job)
        core = job.world(
            rank=place.rank,
            ranks=place.local_size,
            timeout=timeout,
            report_after=report_after,
            threads=threads or 0,
            device=library,
            ordinal=ordinal,
        )
    except BaseException as error:
        job.leave(place.rank, True, reason_of(error))
        _end(job)
        raise
    if _Process.worlds == 0:
        atexit.register(_at_exit)
        # Called when the main thread has ended, before other threads are waited for.
        getattr(threading, "_register_atexit", lambda call: None)(_main_thread_ended)
    _Process.worlds += 1
    _Process.job = job
    _Process.world = World(core, local_rank=place.local_rank, on_close=_forget)
    _log.logger.info(
        "rank %d of %d (%s), %d threads, %s",
        place.rank, place.size, place.launcher, core.threads,
        core.device if core.ordinal is None else _Process.world.device,
    )  # fmt: skip
    return _Process.world


def _join(place: _start.Place, timeout: float) -> _core.Job:
    if place.size == 1:
        return _core.job_threads(1)
    # What was handed down serves once; a later world of the same job finds its ranks by name.
    files = place.files if place.files is not None and _Process.worlds == 0 else (-1, -1)
    return _core.job_join(
        rank=place.rank,
        size=place.size,
        name=f"{os.getuid()}/{place.name}/{_Process.worlds}",
        parent=place.parent,
        folder=_start.socket_folder(),
        data_fd=files[0],
        lock_fd=files[1],
        timeout=timeout,
    )


def _forget() -> None:
    job, _Process.world, _Process.job = _Process.job, None, None
    if job is not None:
        _end(job)


def _end(job: _core.Job) -> None:
    _log.set_keep(None, thread_only=False)
    _locate.stop(job)
    job.close()


def _main_thread_ended() -> None:
    """After an exception in the main thread: ends the waits of the threads that it waits for."""
    world = _Process.world
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if world is not None and error is not None:
        with contextlib.suppress(RuntimeError):
            world._core.leave(True, reason_of(error))


def _at_exit() -> None:
    """Tells the others why this process ends, so that none waits for it."""
    world, job = _Process.world, _Process.job
    if world is None or job is None:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    with contextlib.suppress(RuntimeError):  # another thread is in a call: leaving has told it
        if error is not None:
            world._core.leave(True, reason_of(error))
        else:
            world._core.leave(False, "its program ended (sys.exit, or the end of the script)")
        world.close()


# ---- ranks as threads ---------------------------------------------------------------------------

#: How long threads get to end after an interrupt: those that wait end at once.
END_S = 10.0


class LocalWorld:
    """Ranks as threads of this process. Made by :func:`local_world`."""

    def __init__(
        self,
        size: int,
        *,
        timeout: float,
        threads: int | None,
        device: _core.Device | None = None,
        first: int = 0,
    ) -> None:
        self.size = size
        self._timeout = timeout
        self._threads = threads
        self._device = device
        self._first = first

    def __repr__(self) -> str:
        return f"<flatshard.LocalWorld of {self.size} ranks>"

    def run(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Calls ``function(world, *args)`` on every rank, each in a thread of its own.

        Parameters
        ----------
        function : callable
            Its first argument is the rank's `World`.
        *args
            Passed to every rank as they are.

        Returns
        -------
        list
            The result of each rank, in rank order.

        Raises
        ------
        Exception
            What the first failing rank raised, with its traceback.
        KeyboardInterrupt
            On Ctrl-C: every rank's wait ends first.
        """
        _core.close_due()
        job = _core.job_threads(self.size)
        ranks = [_Rank(job, rank, self, function, args) for rank in range(self.size)]
        try:
            for rank in ranks:
                rank.thread.start()
            for rank in ranks:
                while rank.thread.is_alive():
                    rank.thread.join(0.5)  # signal handlers run between
        except BaseException:
            job.interrupt()
            end = time.monotonic() + END_S
            for rank in ranks:
                if rank.thread.ident is not None:
                    rank.thread.join(max(0.0, end - time.monotonic()))
            raise
        finally:
            job.close()
        _core.close_due()
        failed = [rank for rank in ranks if rank.error is not None]
        if failed:
            first = min(failed, key=lambda rank: rank.failed_at)
            error = first.error
            assert error is not None
            if sys.version_info >= (3, 11):
                error.add_note(f"on rank {first.rank} of local_world({self.size})")
            try:
                raise error
            finally:
                del error, first, failed, ranks  # the traceback would keep itself alive
        return [rank.result for rank in ranks]


class _Rank:
    """One rank of a LocalWorld.run: its thread, and what came of it."""

    _failures = 0
    _lock = threading.Lock()

    def __init__(
        self, job: _core.Job, rank: int, local: LocalWorld, function: Callable[..., Any], args: Any
    ) -> None:
        self.rank = rank
        self.result: Any = None
        self.error: BaseException | None = None
        self.failed_at = 0
        self.thread = threading.Thread(
            target=self._main,
            args=(job, local, function, args),
            name=f"flatshard rank {rank}",
            daemon=True,  # an interrupted rank that computes on does not keep the process
        )

    def _main(
        self, job: _core.Job, local: LocalWorld, function: Callable[..., Any], args: Any
    ) -> None:
        reason = None
        world = None
        _log.set_rank(self.rank, thread_only=True)
        _log.set_keep(lambda text: job.say(self.rank, text), thread_only=True)
        try:
            core = job.world(
                rank=self.rank,
                ranks=local.size,
                timeout=_seconds("FLATSHARD_TIMEOUT", local._timeout),
                report_after=_seconds("FLATSHARD_REPORT_AFTER", REPORT_AFTER_S),
                threads=local._threads or 0,
                device=local._device,
                ordinal=local._first + self.rank,
            )
            world = World(core, local_rank=self.rank, on_close=lambda: None)
            _of_thread.world = world
            self.result = function(world, *args)
        except BaseException as error:
            self.error = error
            reason = reason_of(error)
            # Before the others can know: whoever fails because of us comes later.
            with _Rank._lock:
                _Rank._failures += 1
                self.failed_at = _Rank._failures
        finally:
            job.leave(self.rank, reason is not None, reason or "its function returned")
            _log.set_keep(None, thread_only=True)
            _of_thread.world = None
            if world is not None:
                with contextlib.suppress(RuntimeError):
                    world.close()


def local_world(
    n: int,
    *,
    device: str = "cpu",
    timeout: float = LOCAL_TIMEOUT_S,
    threads: int | None = None,
) -> LocalWorld:
    """A world of n ranks that are threads of this process: for notebooks and tests.

    No ports, no processes, nothing to clean up. Python code of ranks takes turns (there is one
    interpreter lock); the library's own work runs at the same time.

    Parameters
    ----------
    n : int
        Ranks.
    device : {"cpu", "cuda", "cuda:N"}
        Where ranks compute: with "cuda" rank r on GPU r, with a number from that GPU on.
    timeout : float, seconds
        How long a wait for other ranks may take.
    threads : int, optional
        Compute threads of each rank (default ``FLATSHARD_THREADS``, else its share).

    Raises
    ------
    ConfigError
        There are fewer GPUs than ranks, or none can be used: the text says why.

    Examples
    --------
    >>> import numpy as np, flatshard
    >>> flatshard.local_world(2).run(lambda world: float(world.all_reduce(float(world.rank + 1))))
    [3.0, 3.0]
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"n: expected 1 or more ranks, got {n!r}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads: expected 1 or more, got {threads}")
    timeout = _positive("timeout", timeout)
    kind, ordinal = _device.parse(device)
    if kind == "cpu":
        return LocalWorld(n, timeout=timeout, threads=threads)
    library, first = _device.load(), ordinal or 0
    _device.check_ordinal(library, first + n - 1, f"rank {n - 1} of local_world({n})")
    return LocalWorld(n, timeout=timeout, threads=threads, device=library, first=first)
