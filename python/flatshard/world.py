"""A world: ranks, and what they do together.

The collectives take NumPy arrays of float32, float64, bfloat16, float16, int32, int64 or uint8.
Worlds are made in job.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import _core, _log, trace
from ._reason import reason_of
from .errors import WorldError
from .mesh import Mesh
from .trace import Log

__all__ = ["Handle", "World"]

Array = NDArray[Any]
Op = Literal["sum", "mean", "max", "min"]
T = TypeVar("T")


class Handle(Generic[T]):
    """The result of a collective that was asked for with ``async_=True``.

    On one host a collective is memory traffic of the cores that also compute, so there is nothing
    to overlap: the handle is finished when it is returned. It exists so that code written for
    engines that do overlap runs unchanged.
    """

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        """The result."""
        return self._result

    def done(self) -> bool:
        """Always true on the node world."""
        return True


def _operand(x: Any) -> Array:
    """An array as it is; a Python or NumPy number as a scalar array."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, (int, float, np.generic)) and not isinstance(x, bool):
        return np.asarray(x)
    return x  # type: ignore[no-any-return]  # the core's message says what it expected


class World:
    """One rank's part in a world. Made by :func:`init`, :func:`local_world` and :meth:`split`.

    Every method that is marked collective must be called by every rank, in the same order, with the
    same operation, dtype and sizes; a difference raises `CollectiveMismatch` on all of them. Waits
    end: with `PeerLost` when a rank dies or fails, with `CollectiveTimeout` after ``timeout``
    seconds, with `KeyboardInterrupt` on Ctrl-C. After that the world is over for every rank.

    One thread of a rank uses its world at a time.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    local_rank : int
        This rank among those of its host.
    is_main : bool
        True on rank 0.
    threads : int
        Compute threads of this rank: ``FLATSHARD_THREADS``, else its share of the processors.
    device : str
        Where this rank computes: "cpu", or "cuda:N". Collectives of a world are over arrays in host
        memory all the same.
    """

    def __init__(
        self,
        core: _core.World,
        *,
        local_rank: int,
        on_close: Callable[[], None],
    ) -> None:
        self._core = core
        self._on_close = on_close
        self.rank: int = core.rank
        self.size: int = core.size
        self.local_rank = local_rank
        self.is_main = self.rank == 0
        self.threads: int = core.threads
        self.device = "cpu" if core.ordinal is None else f"{core.device}:{core.ordinal}"
        core.on_event = _warn

    def __repr__(self) -> str:
        return f"<flatshard.World rank {self.rank} of {self.size}>"

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            with contextlib.suppress(RuntimeError):  # closed in the block
                self._core.leave(True, reason_of(error))
        self.close()

    # ---- collectives ------------------------------------------------------------------------

    def barrier(self) -> None:
        """Waits until every rank has come. Collective.

        Raises
        ------
        WorldError
            `PeerLost`, `CollectiveTimeout` or `CollectiveMismatch`: the text says who came, who did
            not, and where each rank is.
        """
        self._core.barrier()

    @overload
    def all_reduce(
        self, x: Any, *, op: Op = ..., out: Array | None = ..., async_: Literal[False] = ...
    ) -> Array: ...
    @overload
    def all_reduce(
        self, x: Any, *, op: Op = ..., out: Array | None = ..., async_: Literal[True]
    ) -> Handle[Array]: ...

    def all_reduce(
        self, x: Any, *, op: Op = "sum", out: Array | None = None, async_: bool = False
    ) -> Array | Handle[Array]:
        """Element-wise reduction over all ranks, on every rank. Collective.

        Parameters
        ----------
        x : ndarray, C-contiguous, or a number
            Equal shape and dtype on all ranks.
        op : {"sum", "mean", "max", "min"}
            Sums run in rank order, in float32 for the 16-bit dtypes (rounded once; a mean is
            divided before that), and wrap for integers. A mean of integers is an error.
        out : ndarray, optional
            Where the result goes; ``out=x`` is in place. Default: a new array.
        async_ : bool
            Return a finished `Handle`.

        Returns
        -------
        ndarray
            Same shape and dtype as x; for a number a NumPy scalar.

        Notes
        -----
        A fence below 64 KiB of all ranks together. Else each rank reads its 1/W of every
        rank's x, and then the other parts of the result. In world memory (`symmetric`) with
        ``out=x`` nothing is copied into windows.
        """
        operand = _operand(x)
        result = self._core.all_reduce(operand, op, out)
        if operand is not x:
            result = result[()]
        return Handle(result) if async_ else result

    @overload
    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = ...,
        out: Array | None = ...,
        async_: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = ...,
        out: Array | None = ...,
        async_: Literal[True],
    ) -> Handle[Array]: ...

    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        out: Array | None = None,
        async_: bool = False,
    ) -> Array | Handle[Array]:
        """Every rank's rows, one after the other in rank order. Collective.

        Parameters
        ----------
        x : ndarray of shape (rows, ...), C-contiguous, or a number
            Equal dtype and trailing shape on all ranks.
        counts : sequence of int, optional
            Rows of every rank, equal on all of them. Default: all have as many as this one.
        out : ndarray of shape (sum of rows, ...), optional
        async_ : bool
            Return a finished `Handle`.

        Returns
        -------
        ndarray of shape (sum of rows, ...)
            From numbers: shape (size,).

        Notes
        -----
        Each rank writes the whole result once.
        """
        result = self._core.all_gather(_operand(x), counts, out)
        return Handle(result) if async_ else result

    @overload
    def reduce_scatter(
        self,
        x: Array,
        *,
        op: Op = ...,
        counts: Sequence[int] | None = ...,
        out: Array | None = ...,
        async_: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def reduce_scatter(
        self,
        x: Array,
        *,
        op: Op = ...,
        counts: Sequence[int] | None = ...,
        out: Array | None = ...,
        async_: Literal[True],
    ) -> Handle[Array]: ...

    def reduce_scatter(
        self,
        x: Array,
        *,
        op: Op = "mean",
        counts: Sequence[int] | None = None,
        out: Array | None = None,
        async_: bool = False,
    ) -> Array | Handle[Array]:
        """This rank's rows of the reduction over all ranks. Collective.

        Parameters
        ----------
        x : ndarray of shape (rows, ...), C-contiguous
            Equal shape and dtype on all ranks.
        op : {"mean", "sum", "max", "min"}
            As in `all_reduce`; integers need ``op="sum"``, "max" or "min".
        counts : sequence of int, optional
            Rows that go to each rank. Default: equal, and rows must divide by the ranks.
        out : ndarray of shape (rows of this rank, ...), optional
            Must not overlap x.
        async_ : bool
            Return a finished `Handle`.

        Returns
        -------
        ndarray of shape (rows of this rank, ...)

        Notes
        -----
        Each rank reads its 1/W of every rank's x: the bytes of x once, together.
        """
        result = self._core.reduce_scatter(x, op, counts, out)
        return Handle(result) if async_ else result

    @overload
    def broadcast(
        self, x: Any, *, root: int = ..., out: Array | None = ..., async_: Literal[False] = ...
    ) -> Array: ...
    @overload
    def broadcast(
        self, x: Any, *, root: int = ..., out: Array | None = ..., async_: Literal[True]
    ) -> Handle[Array]: ...

    def broadcast(
        self, x: Any, *, root: int = 0, out: Array | None = None, async_: bool = False
    ) -> Array | Handle[Array]:
        """The root's x, on every rank. Collective.

        Parameters
        ----------
        x : ndarray, C-contiguous, or a number
            Equal shape and dtype on all ranks; the values of the root count.
        root : int
            The rank that sends.
        out : ndarray, optional
            Where the result goes; ``out=x`` overwrites x. Default: a new array, x stays.
        async_ : bool
            Return a finished `Handle`.

        Returns
        -------
        ndarray
            Same shape and dtype as x.
        """
        operand = _operand(x)
        result = self._core.broadcast(operand, root, out)
        if operand is not x:
            result = result[()]
        return Handle(result) if async_ else result

    @overload
    def all_to_all(
        self, x: Array, *, out: Array | None = ..., async_: Literal[False] = ...
    ) -> Array: ...
    @overload
    def all_to_all(
        self, x: Array, *, out: Array | None = ..., async_: Literal[True]
    ) -> Handle[Array]: ...

    def all_to_all(
        self, x: Array, *, out: Array | None = None, async_: bool = False
    ) -> Array | Handle[Array]:
        """Sends block r of x to rank r, and returns what came, in rank order. Collective.

        Parameters
        ----------
        x : ndarray of shape (rows, ...), C-contiguous
            rows divide by the ranks; equal shape and dtype on all ranks.
        out : ndarray of the shape of x, optional
            Must not overlap x.
        async_ : bool
            Return a finished `Handle`.

        Returns
        -------
        ndarray of the shape of x
        """
        result = self._core.all_to_all(x, out)
        return Handle(result) if async_ else result

    def gather_rows(self, x: Array, *, total: int | None = None) -> Array:
        """Rows of every rank, however many each has. Collective.

        Parameters
        ----------
        x : ndarray of shape (rows, ...), C-contiguous
            Rows may differ between ranks, the rest may not.
        total : int, optional
            Keep the first ``total`` rows: what a sampler repeated to fill the last batch goes.

        Returns
        -------
        ndarray of shape (rows of all ranks, ...)
        """
        rows = self.all_gather(np.array([len(x)], dtype=np.int64)).tolist()
        gathered = self.all_gather(x, counts=rows)
        if total is not None and total > len(gathered):
            raise ValueError(f"total: {total} rows asked for, but all ranks have {len(gathered)}")
        return gathered if total is None else gathered[:total]

    def symmetric(
        self, shape: int | Sequence[int], dtype: DTypeLike = "float32", *, name: str = "array"
    ) -> Array:
        """A zeroed array in world memory. Collective.

        Collectives over such arrays read every rank's operand where it lies: an all-gather or
        reduce-scatter then copies nothing into windows. The memory is given back when the last rank
        has dropped its array.

        Parameters
        ----------
        shape : int or sequence of int
            Of this rank's array; equal on all ranks.
        dtype : dtype
        name : str
            Named in errors.

        Raises
        ------
        MemoryBudgetError
            On all ranks, before anything is taken, if the ranks' arrays together would not fit the
            memory that the control groups, limits and the host leave.
        """
        return self._core.symmetric(shape, dtype, name)

    # ---- parts, order, output ---------------------------------------------------------------

    def split(self, color: int | None, *, key: int = 0) -> World | None:
        """The world of the ranks that pass the same color. Collective.

        Parameters
        ----------
        color : int >= 0 or None
            None joins no part.
        key : int
            Order in the part; equal keys keep the order of ranks.

        Returns
        -------
        World or None
            A failure in any part ends all parts of the job.
        """
        if color is not None and color < 0:
            raise ValueError(f"color: expected 0 or more, or None, got {color}")
        part = self._core.split(-1 if color is None else color, key)
        if part is None:
            return None
        return World(part, local_rank=self.local_rank, on_close=lambda: None)

    def mesh(self, **axes: int) -> Mesh:
        """The ranks as a grid with named axes, a world for each. Collective.

        Parameters
        ----------
        **axes : int
            Length of each axis, the last one varying fastest; their product is the size of this
            world. One may be -1: what is left.

        Returns
        -------
        Mesh
            ``mesh["shard"]`` is the world of the ranks that differ from this one in it alone.

        Raises
        ------
        ValueError
            The lengths do not multiply to the size.
        """
        return Mesh(self, axes)

    @contextlib.contextmanager
    def first(self) -> Iterator[bool]:
        """Rank 0 runs the block before the others do: download once, then read. Collective.

        Yields
        ------
        bool
            True on rank 0.

        Raises
        ------
        WorldError
            On the other ranks, if the block failed on rank 0. The world stays usable.
        """
        went_well = np.ones((), dtype=np.uint8)
        if self.is_main:
            try:
                yield True
            except BaseException:
                with contextlib.suppress(Exception):
                    self._core.broadcast(np.zeros((), dtype=np.uint8), 0, None)
                raise
            self._core.broadcast(went_well, 0, None)
        else:
            if not self._core.broadcast(went_well, 0, None):
                raise WorldError(f"rank {self.rank}: the block of first() failed on rank 0")
            yield False

    def print(self, *values: object) -> None:
        """Prints the values on rank 0; does nothing elsewhere."""
        if self.is_main:
            print(*values, flush=True)

    # ---- limits, memory, end ----------------------------------------------------------------

    @contextlib.contextmanager
    def limit(self, *, timeout: float, report_after: float | None = None) -> Iterator[None]:
        """Other deadlines for the waits in a block, on this rank.

        Parameters
        ----------
        timeout : float, seconds
            A wait that takes longer raises `CollectiveTimeout`.
        report_after : float, seconds, optional
            A wait that takes longer is reported in the log. Default: unchanged.
        """
        before = self._core.deadlines()
        self._core.set_deadlines(timeout, before[1] if report_after is None else report_after)
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # closed in the block
                self._core.set_deadlines(*before)

    def memory(self) -> dict[str, tuple[int, int, int, int]]:
        """Bytes this rank holds, as the allocator counted them.

        Returns
        -------
        dict
            class -> (private, in world memory, peak of all, on the device), in bytes. World memory
            is charged to the rank that owns it; private memory includes what is pinned for the
            device.
        """
        return self._core.memory()

    def device_memory(self) -> dict[str, int]:
        """Bytes of this rank's GPU, whoever holds them.

        Returns
        -------
        dict of str to int
            "total" and "free" as the GPU says; "allocated": what this process took of it
            through flatshard; "reserved": the rest, which no plan knows:
            CUDA's context (some hundred MB for each process), NCCL's buffers, other libraries such
            as torch, other processes.

        Raises
        ------
        RuntimeError
            The world computes on the CPU, or is closed.
        """
        total, free, allocated = self._core.device_memory()
        reserved = max(0, total - free - allocated)
        return {"total": total, "free": free, "allocated": allocated, "reserved": reserved}

    def log(self) -> Log:
        """What every rank has done in this world so far: operations, bytes, seconds, waits.

        Always on. Reads the ranks' memory: it waits for nobody, may be called on one rank alone and
        at any time until the world is closed, also after a failure, when it tells what the lost
        rank did last. A part made by `split` has a log of its own.

        Returns
        -------
        Log
            ``print`` shows it as a table, ``rows`` and ``total`` give figures, ``trace`` writes a
            file for chrome://tracing or ui.perfetto.dev.

        Raises
        ------
        RuntimeError
            If the world is closed.

        Notes
        -----
        An operation costs two looks at the clock and a few stores, 0.1 us or so. Each rank keeps
        totals, and its last 4,096 operations, in a quarter of a megabyte of world memory.
        """
        return trace.read(self._core)

    def close(self) -> None:
        """Leaves the world. Never waits; a second call does nothing.

        Ranks that still wait for this one raise `PeerLost`.
        """
        self._core.close()
        self._on_close()


def _warn(text: str) -> None:
    _log.logger.warning("%s", text, extra=_log.every_rank)
