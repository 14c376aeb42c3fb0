"""Writing a checkpoint: a hidden folder, a file from each rank, an index, one rename."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from . import _core, blas
from ._folders import BLOCK_NBYTES, FORMAT, readable, steps, write_index
from ._together import exchange, on_first, shards_of, stored_dtype
from ._version import __version__

if TYPE_CHECKING:
    from .optim import Optimizer
    from .shard import Shards

__all__ = ["Saving", "hidden_folder", "machine", "save", "settle"]

_HIDDEN = ".saving-"
_REMOVED = ".removing-"


class Saving:
    """A save that was asked for. Made by :func:`save`.

    Attributes
    ----------
    folder : str
        The folder of the checkpoint, once it is committed.
    step : int
        Its step.
    """

    def __init__(self, folder: str, step: int, finish: Callable[[], None] | None = None) -> None:
        self.folder = folder
        self.step = step
        self._finish = finish

    def __repr__(self) -> str:
        state = "committed" if self._finish is None else "being written"
        return f"Saving({self.folder!r}, step={self.step}, {state})"

    def wait(self) -> Saving:
        """Return when the checkpoint is committed. Collective after a save in the background.

        Returns
        -------
        Saving
            Itself.

        Raises
        ------
        OSError
            The disk is full, or could not be written: the same on every rank. The half checkpoint
            is removed.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return self


#: The save of each model that is still being written.
_pending: weakref.WeakKeyDictionary[Shards, Saving] = weakref.WeakKeyDictionary()


def settle(shards: Shards) -> None:
    """Wait for the save of these shards that is still being written, if there is one."""
    saving = _pending.pop(shards, None)
    if saving is not None:
        saving.wait()


def save(
    directory: str | os.PathLike[str],
    target: Any,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    user: Any = None,
    kind: Literal["sharded"] = "sharded",
    keep: int | None = None,
    background: bool = False,
) -> Saving:
    """Write a checkpoint of weights and optimizer state. Collective.

    Parameters
    ----------
    directory : path
        The run's folder; created if missing. The checkpoint becomes ``step-NNNNNN`` in it.
    target : Shards or anything with ``.shards``
        What to save.
    optimizer : Optimizer, optional
        Its moments, step counts and groups are saved too.
    step : int
        The step that the weights are at, equal on all ranks.
    user : JSON-able, optional
        Anything to get back from :func:`load`: data position, schedule, random state. Ranks may
        give different values; then each gets its own back, at the same number of ranks.
    kind : "sharded"
        One file per rank. For plain Hugging Face files see :func:`export`.
    keep : int, optional
        Keep the last ``keep`` checkpoints of the folder; older ones go after this one is committed.
    background : bool
        Copy what is to be written, and return while it is. The checkpoint is committed by
        ``Saving.wait()``, which every rank calls, or by the next ``save`` or ``load`` of the same
        target; a program that ends before leaves none. One save at a time.

    Returns
    -------
    Saving
        Committed, unless in the background.

    Raises
    ------
    OSError
        The disk is full (checked before anything is written, and while writing), a quota is
        reached, or the folder cannot be written. Earlier checkpoints are untouched and the half one
        is removed.
    RuntimeError
        A step did not finish: what would be saved is torn.
    TypeError, ValueError
        ``user`` is not JSON-able, ``step`` is negative or differs between ranks.
    NotImplementedError
        Another kind.

    Notes
    -----
    Writes masters (compute copies are their rounding) and moments once over all ranks: with Adam in
    bf16 12 bytes per parameter. Each rank needs 4 MiB of buffer; in the background also a copy of
    its part of all that, until it is written.
    """
    shards = shards_of(target)
    if kind != "sharded":
        raise NotImplementedError(
            f"save(kind={kind!r}): only one file per rank is offered; checkpoint.export writes "
            "plain Hugging Face files"
        )
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep}: expected at least 1, or None to keep all")
    world = shards.world
    parent = os.path.abspath(os.fspath(directory))
    try:
        shards._core.check_whole()  # local: only a job that is over for everyone leaves a torn step
    except RuntimeError as error:
        good = steps(parent)
        last = (
            f"the last good checkpoint there is of step {good[0]}" if good else "there is none yet"
        )
        raise RuntimeError(f"{error}; not saved to {parent}: {last}") from None
    settle(shards)
    told = exchange(world, lambda: _local_part(step, user))
    if any(each["step"] != step for each in told):
        steps_told = ", ".join(str(each["step"]) for each in told)
        raise ValueError(f"save: ranks are at different steps: {steps_told}")
    users = [each["user"] for each in told]
    if all(each == users[0] for each in users):
        users = users[:1]
    moments = 0 if optimizer is None else len(shards._moments)
    with contextlib.ExitStack() as stack:
        begun = on_first(world, lambda: stack.enter_context(hidden_folder(parent, step)))
        # Now, not when the files are written: in the background the optimizer moves on.
        values = _index_of(target, shards, optimizer, begun["serial"], step, users)
        if background:
            snapshot = _core.shards_snapshot(shards._core, begun["hidden"], moments)
            write = _Write(snapshot, begun["hidden"])
            del snapshot
            finish = functools.partial(
                _finish, shards, write, values, begun, parent, keep, stack.pop_all()
            )
            saving = _pending[shards] = Saving(begun["final"], step, finish)
            return saving
        blocks = _core.shards_save(shards._core, begun["hidden"], moments)
        _commit(shards, values, blocks, begun, parent, keep)
    return Saving(begun["final"], step)


class _Write(threading.Thread):
    """Writes this rank's file; the result is (bytes, checksums) or an exception."""

    def __init__(self, snapshot: Any, folder: str) -> None:
        super().__init__(name="flatshard-save")
        self._snapshot = snapshot
        self._folder = folder
        self._file: tuple[int, bytes] | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._file = _core.snapshot_write(self._snapshot, self._folder)
        except Exception as error:
            self._error = error
        finally:
            self._snapshot = None  # gives the copy back

    def result(self) -> tuple[int, str]:
        """Bytes and checksums (in hexadecimal) of the file; raises what went wrong."""
        self.join()
        if self._file is None:
            raise self._error or RuntimeError("the file was not written")
        return self._file[0], self._file[1].hex()


def _finish(
    shards: Shards,
    write: _Write,
    values: dict[str, Any],
    begun: dict[str, Any],
    parent: str,
    keep: int | None,
    stack: contextlib.ExitStack,
) -> None:
    """The second half of a save in the background. Collective."""
    with stack:
        if _pending.get(shards) is not None:
            del _pending[shards]
        told = exchange(shards.world, write.result)
        blocks = tuple((nbytes, bytes.fromhex(crcs)) for nbytes, crcs in told)
        _commit(shards, values, blocks, begun, parent, keep)


def _commit(
    shards: Shards,
    values: dict[str, Any],
    blocks: tuple[tuple[int, bytes], ...],
    begun: dict[str, Any],
    parent: str,
    keep: int | None,
) -> None:
    """Write the index, rename, remove what is over. Collective."""
    world = shards.world
    files = [
        {
            "name": f"rank-{rank:05d}-of-{world.size:05d}.safetensors",
            "nbytes": nbytes,
            "crc32c": crcs.hex(),
        }
        for rank, (nbytes, crcs) in enumerate(blocks)
    ]
    text = b""

    def make() -> None:
        nonlocal text
        text = write_index({**values, "files": files})

    on_first(world, make)
    _core.io_commit(world._core, begun["hidden"], begun["final"], parent, text)
    if keep is not None:
        on_first(world, lambda: _prune(parent, keep))


def _local_part(step: int, user: Any) -> dict[str, Any]:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step={step!r}: a whole number from 0 was expected")
    try:
        back = json.loads(json.dumps(user, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"user: cannot be saved as JSON: {error}") from None
    return {"step": step, "user": back}


@contextlib.contextmanager
def hidden_folder(parent: str, step: int) -> Iterator[dict[str, Any]]:
    """On rank 0: a hidden folder to write into, locked while its save lives, removed at its end."""
    os.makedirs(parent, exist_ok=True)
    _remove_leftovers(parent)
    serial = 1 + max((i.serial for i in readable(parent)), default=0)
    name = f"step-{step:06d}"
    final, again = os.path.join(parent, name), 1
    while os.path.lexists(final):  # saved before at this step; the serial tells which is newer
        again += 1
        final = os.path.join(parent, f"{name}-{again}")
    hidden = os.path.join(parent, f"{_HIDDEN}{os.path.basename(final)}-{serial}-{os.getpid()}")
    os.mkdir(hidden)
    lock = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: leftovers stay
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield {"hidden": hidden, "final": final, "serial": serial}
    finally:
        # Committed, it has its other name by now, and nothing is here to remove.
        shutil.rmtree(hidden, ignore_errors=True)
        os.close(lock)


def _remove_leftovers(parent: str) -> None:
    """Remove half checkpoints of jobs that were killed: those that nobody holds locked."""
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        if name.startswith(_REMOVED):
            shutil.rmtree(path, ignore_errors=True)
        if not name.startswith(_HIDDEN) or os.path.islink(path) or not os.path.isdir(path):
            continue
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # another job is saving right now, or the file system has no locks
        finally:
            os.close(lock)


def _prune(parent: str, keep: int) -> None:
    for index in readable(parent)[keep:]:
        # Renamed first: a kill while removing must not leave a half one under its good name.
        removed = os.path.join(parent, _REMOVED + os.path.basename(index.folder))
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(index.folder, removed)
        shutil.rmtree(removed, ignore_errors=True)


def _index_of(
    target: Any,
    shards: Shards,
    optimizer: Optimizer | None,
    serial: int,
    step: int,
    users: list[Any],
) -> dict[str, Any]:
    """What an index says beside its files."""
    policy, world = shards.policy, shards.world
    return {
        "format": FORMAT,
        "writer": f"flatshard {__version__}",
        "serial": serial,
        "step": step,
        "world_size": world.size,
        "stage": policy.sharding.stage,
        "partition": policy.sharding.partition,
        "param_dtype": policy.precision.param,
        "moments_dtype": None if optimizer is None else policy.precision.moments,
        "crc32c_block_nbytes": BLOCK_NBYTES,
        "machine": machine(),
        "optimizer": None if optimizer is None else optimizer.state(),
        "user": users,
        "parameters": [
            {
                "name": p.name,
                "tied_name": p.tied_name,
                "shape": list(p.shape),
                "dtype": stored_dtype(shards, p.trainable),
                "trainable": p.trainable,
                "group": p.group,
            }
            for p in shards.parameters
        ],
        "model": _model_of(target, shards),
    }


def _model_of(target: Any, shards: Shards) -> dict[str, Any] | None:
    """The config.json of a target that has one: an export then needs the checkpoint alone."""
    to_hf = getattr(getattr(target, "config", None), "to_hf", None)
    return None if to_hf is None else to_hf(dtype=shards.policy.precision.param)


def machine() -> dict[str, Any]:
    """What the bits of a run depend on beside its configuration."""
    return {
        "isa": _core.cpu_isa(),
        "blas": blas.load() if _core.gemm_is_loaded() else None,
        "build": _core.build_id(),
    }
