"""Arrays of callers: anything NumPy can read, or that speaks DLPack on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "as_array", "raw"]

Array = npt.NDArray[Any]


def as_array(name: str, value: Any) -> Array:
    """A float array from anything NumPy understands, or that speaks DLPack on the CPU."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        array = np.asarray(value)
    else:
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError):
            array = np.asarray(value)  # bfloat16, which NumPy's DLPack does not know
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name}: dtype {array.dtype}, expected a float dtype")
    return array


def raw(array: Array) -> memoryview:
    """The bytes of a contiguous array, of any dtype and shape."""
    return memoryview(array.reshape(-1).view(np.uint8).data)
