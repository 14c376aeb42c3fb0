"""Units: parameters that are gathered, released and reduced together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ._arrays import Array, as_array
from ._device_arrays import LEGACY_STREAM, DeviceArray, is_device_array, read_device_array
from ._kinds import WEIGHT

if TYPE_CHECKING:
    from ._shards import Shards

__all__ = ["Unit"]


class Unit:
    """Parameters that are gathered, released and reduced together. Made by :class:`Shards`."""

    def __init__(self, shards: Shards, index: int, name: str, params: Sequence[int]) -> None:
        self._shards = shards
        self._index = index
        self._params = tuple(params)
        self._streams: set[int] = set()  # of other libraries, that were given its weights
        #: The unit's name.
        self.name = name

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self._params)} parameters, {self.state})"

    @property
    def names(self) -> tuple[str, ...]:
        """First names of its parameters, in order."""
        return tuple(self._shards.parameters[p].name for p in self._params)

    @property
    def state(self) -> Literal["gathered", "released"]:
        """Whether the weights are readable here (by :meth:`gather`)."""
        return "gathered" if self._shards._core.gathers(self._index) else "released"

    def gather(self) -> dict[str, Any]:
        """Make the weights readable.

        Returns
        -------
        dict of str to read-only ndarray, or on a GPU to DeviceArray
            Every name (both of a tie) to the compute copy, whole shape, dtype ``precision.param``.
            With ``gather="view"`` these are the weights themselves and stay valid; with "copy" they
            are valid until :meth:`release`. A `DeviceArray` is for libraries of the GPU: they take
            it by DLPack, and what they are given then comes after the gather.

        Raises
        ------
        RuntimeError
            ``gather="copy"``: the pool is full; the text names the units that hold it.
        WorldError
            The job is over.

        Notes
        -----
        Every rank gathers the same units in the same order, as on a GPU; "copy" checks it
        at the next step. Cost: nothing with "view"; (world - 1) / world of the unit's bytes copied
        with "copy".
        """
        arrays = self._shards._core.gather(self._index)
        world = self._shards.world
        if world.device != "cpu":
            arrays = [DeviceArray(array, world, self._streams) for array in arrays]
        named: dict[str, Any] = {}
        for p, array in zip(self._params, arrays, strict=True):
            for name in self._shards.parameters[p].names:
                named[name] = array
        return named

    def release(self) -> None:
        """Give the buffer of a gathered unit back.

        Raises
        ------
        BufferError
            ``gather="copy"``: arrays of the unit are still in use.
        RuntimeError
            The unit is not gathered.
        """
        self._await_readers()
        self._shards._core.release(self._index)

    def _await_readers(self) -> None:
        """A GPU's pool takes the memory back after what other streams were given to read."""
        while self._streams:
            self._shards.world._core.after_stream(self._streams.pop())

    @contextlib.contextmanager
    def gathered(self, *, write: bool = False) -> Iterator[dict[str, Any]]:
        """The weights for the length of a ``with`` block.

        Parameters
        ----------
        write : bool
            Yield private, writable copies, in host memory; when the block ends without an
            exception, every rank stores its own part of its own copy (collective), masters
            included.

        Yields
        ------
        dict of str to ndarray, or on a GPU to DeviceArray
            As :meth:`gather`; read-only unless ``write``, and then always ndarray.

        Notes
        -----
        The arrays are not to be read after the block; with "copy" and stage 3 one that is still
        referred to is a BufferError, but for a block that ends by an exception, whose traceback may
        refer to it.

        With ``write`` a rank that writes another value than its peers changes its own part alone:
        compute the new value alike on every rank, or broadcast it first.
        """
        core, arrays = self._shards._core, {}
        before = core.gathers(self._index)
        try:
            arrays = self.gather()
            if not write:
                yield arrays
            else:
                yield from self._written(arrays)
        except BaseException:
            # Frames of the traceback may hold arrays: that must not hide what went wrong.
            arrays.clear()
            if core.gathers(self._index) > before:  # Ctrl-C may have come as gather() ended
                with contextlib.suppress(Exception):
                    self._await_readers()
                core.release(self._index, True)
            raise
        else:
            arrays.clear()
            self.release()

    def _written(self, arrays: dict[str, Any]) -> Iterator[dict[str, Array]]:
        copies: dict[str, Array] = {}
        for p in self._params:
            names = self._shards.parameters[p].names
            weights = arrays[names[0]]
            on_host = isinstance(weights, np.ndarray)
            copies[names[0]] = weights.copy() if on_host else weights.copy_to_host()
            for name in names[1:]:
                copies[name] = copies[names[0]]
        arrays.clear()
        yield copies
        with self._shards.storing() as store:
            for p in self._params:
                store(p, WEIGHT, copies[self._shards.parameters[p].name])

    def reduce(
        self, grads: Mapping[str, Any], *, count: int | None = None, stream: int = LEGACY_STREAM
    ) -> None:
        """Hand in this micro-batch's gradients of the unit; they are summed over ranks.

        Parameters
        ----------
        grads : mapping of str to ndarray, or on a GPU to its arrays
            Name (either of a tie; both add up) to gradient: whole shape, any float dtype. Copied
            before this returns. Names left out had no gradient. On a GPU, arrays in its memory are
            taken by DLPack or ``__cuda_array_interface__``, and copied in the order of ``stream``.
        count : int, optional
            Tokens or samples of this rank's micro-batch, where gradients are sums over them: the
            step divides by the sum of counts of all ranks and micro-batches. The same for every
            unit of a micro-batch. None on every rank: a plain mean over ranks, micro-batches added.
        stream : int
            For arrays in a GPU's memory: the stream that made them and may write to them again, as
            CUDA numbers it (``torch.cuda.current_stream().cuda_stream``). The copy comes after what
            it was given, and what it is given next after the copy. Default: the legacy default
            stream.

        Raises
        ------
        KeyError
            A name is not the unit's.
        ValueError
            A wrong shape, a frozen parameter, a count that differs within the micro-batch, or an
            array of another GPU than this rank's.
        TypeError
            No float dtype, or an array in a GPU's memory in a world on the CPU.

        Notes
        -----
        The first unit that comes a second time begins a new micro-batch; units that did not come
        are absent. Cost: one copy here, and one pass over the sum of all ranks' gradients of the
        owned part.
        """
        shards = self._shards
        pairs: list[tuple[int, Any]] = []
        on_device = False
        for name, grad in grads.items():
            p = shards.index(name)
            if p not in self._params:
                raise KeyError(f"{name} is not a parameter of unit {self.name}")
            parameter = shards.parameters[p]
            array: Any
            if is_device_array(grad):
                array = read_device_array(f"gradient of {name}", grad, shards.world, stream)
                on_device = True
            else:
                array = np.asarray(as_array(name, grad), order="C")  # a scalar stays one
            shape = tuple(array.shape)
            if shape != parameter.shape and not (parameter.shape == () and shape == (1,)):
                raise ValueError(f"gradient of {name}: shape {shape}, expected {parameter.shape}")
            if not shards.trains(name):
                raise ValueError(f"rank {shards.world.rank}: {name} is frozen and got a gradient")
            pairs.append((p, array))
        shards._begin_reduce(self._index, count)
        for p, array in pairs:
            shards._core.grad_put(p, array)
        if on_device:
            shards.world._core.stream_after(stream)
        shards._core.grad_publish(self._index, False)
