"""Arrays in a GPU's memory: ours, given out by gathered units, and those of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from ._arrays import Array
from ._layout import numpy_dtype

if TYPE_CHECKING:
    from .world import World

__all__ = ["DeviceArray", "is_device_array", "read_device_array", "to_host"]

#: DLPack's number for the memory of a CUDA device.
_CUDA = 2
#: CUDA's name for its legacy default stream, where no stream is given.
LEGACY_STREAM = 1


class DeviceArray:
    """A parameter's weights in the memory of this rank's GPU. Made by ``Unit.gather``.

    Read-only: it may be the weight itself. Libraries of the GPU take it without a copy, by DLPack
    (``torch.from_dlpack``, ``jax.dlpack.from_dlpack``, ``cupy.from_dlpack``) or by
    ``__cuda_array_interface__``; the host by :meth:`copy_to_host` alone.

    Attributes
    ----------
    shape : tuple of int
        Whole shape, row-major.
    dtype : dtype
        Of NumPy; bfloat16 is that of ml_dtypes.
    device : str
        "cuda:N".
    """

    def __init__(self, core: _core.DeviceArray, world: World, streams: set[int]) -> None:
        self._core = core
        self._world = world
        self._streams = streams
        self.shape = core.shape
        self.dtype: np.dtype[Any] = numpy_dtype(core.dtype)
        self.device = f"cuda:{core.ordinal}"

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device!r})"

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.size * self.dtype.itemsize

    def copy_to_host(self) -> Array:
        """A private copy as an ndarray; waits for the device."""
        out = np.empty(self.shape, self.dtype)
        self._world._core.fetch(self._core, out)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise TypeError(
            f"an array of {self.device} is not copied to the host implicitly: say copy_to_host()"
        )

    # ---- for other libraries ----------------------------------------------------------------

    def _hand_to(self, stream: int) -> None:
        """What the stream is given from now on comes after what we were given; and our next use of
        the memory, once the unit is released, after what the stream is given until then."""
        self._world._core.stream_after(stream)
        self._streams.add(stream)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule of the memory itself; ``stream`` is the consumer's, as DLPack says."""
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                f"an array of {self.device} is not copied to another device: say copy_to_host()"
            )
        if copy:
            raise BufferError("a DLPack copy is not made here: copy what from_dlpack returns")
        if stream == 0:
            raise BufferError(
                "stream=0 may be the default stream of either kind: give 1 (legacy) or 2 "
                "(per thread), as DLPack asks"
            )
        if stream != -1:
            self._hand_to(LEGACY_STREAM if stream is None else stream)
        return self._core.dlpack(max_version is not None and tuple(max_version) >= (1, 0))

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self._core.ordinal

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.kind != "f":
            raise AttributeError(f"__cuda_array_interface__ has no {self.dtype}: use DLPack")
        self._hand_to(LEGACY_STREAM)
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._core.pointer, True),
            "strides": None,
            "version": 3,
            "stream": LEGACY_STREAM,
        }


def is_device_array(value: Any) -> bool:
    """Whether a value is an array in a GPU's memory, by what it says of itself."""
    if isinstance(value, np.ndarray):
        return False
    where = getattr(value, "__dlpack_device__", None)
    if where is not None:
        try:
            return int(where()[0]) == _CUDA
        except (BufferError, ValueError):  # of a place that DLPack has no number for
            return False
    return hasattr(value, "__cuda_array_interface__")


def read_device_array(
    name: str, value: Any, world: World, stream: int = LEGACY_STREAM
) -> _core.DeviceArray:
    """Another library's array where it lies, ready for what this rank's device is given next.

    Parameters
    ----------
    name : str
        Whose array it is, in errors.
    value : object
        What speaks DLPack or ``__cuda_array_interface__``, in a GPU's memory.
    world : World
        On that GPU.
    stream : int
        The caller's stream, on which the values were made.

    Raises
    ------
    TypeError, ValueError
        No float dtype of ours, not row-major, or of another device; nothing was read.
    """
    where = f"rank {world.rank}: {name}"
    if world.device == "cpu":
        raise TypeError(
            f"{where}: an array in a GPU's memory, and this world computes on the CPU: copy it to "
            "the host first"
        )
    if getattr(value, "requires_grad", False):
        value = value.detach()
    if hasattr(value, "__dlpack__"):
        kind, ordinal = value.__dlpack_device__()
        _check_place(where, int(kind), int(ordinal), world)
        # The producer makes the stream that it is told wait for its own: the caller's.
        try:
            owner: Any = value.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:  # of before DLPack 1.0
            owner = value.__dlpack__(stream=stream)
        pointer, dtype, shape, kind, ordinal, row_major = _core.dlpack_read(owner)
        _check_place(where, kind, ordinal, world)
    else:
        row_major = True
        pointer, dtype, shape, ordinal = _read_interface(where, value, world)
        owner = value
    if not row_major:
        raise ValueError(f"{where}: not contiguous in row-major order; make it so first")
    if dtype is None or numpy_dtype(dtype).kind not in "fV":
        raise TypeError(f"{where}: dtype {dtype}, expected a float dtype")
    world._core.after_stream(stream)
    return _core.device_array(pointer, dtype, tuple(shape), ordinal, owner)


def _check_place(where: str, kind: int, ordinal: int, world: World) -> None:
    if kind != _CUDA or world.device != f"cuda:{ordinal}":
        raise ValueError(
            f"{where} lies on {'cuda' if kind == _CUDA else f'DLPack device type {kind}'}:"
            f"{ordinal}, and this rank computes on {world.device}"
        )


def _read_interface(where: str, value: Any, world: World) -> tuple[int, str, tuple[int, ...], int]:
    said = value.__cuda_array_interface__
    dtype, shape = np.dtype(said["typestr"]), tuple(said["shape"])
    strides = said.get("strides")
    expected = np.empty(shape, np.dtype("V1")).strides
    if strides is not None and tuple(strides) != tuple(s * dtype.itemsize for s in expected):
        raise ValueError(f"{where}: not contiguous in row-major order; make it so first")
    made_on = said.get("stream")
    if made_on is not None:
        world._core.after_stream(int(made_on))
    # The interface does not say which device: the rank's own, or a failure of the copy.
    return int(said["data"][0]), dtype.name, shape, int(world.device.partition(":")[2])


def to_host(name: str, value: Any, world: World) -> Array:
    """A private copy of another library's array on the host; waits for the device."""
    array = read_device_array(name, value, world)
    out = np.empty(array.shape, numpy_dtype(array.dtype))
    world._core.fetch(array, out)
    return out
