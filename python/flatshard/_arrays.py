"""Arrays of callers: anything NumPy can read, or that speaks DLPack on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "as_array", "raw"]

Array = npt.NDArray[Any]


def as_array(name: str, value: Any) -> Array:
    """A float array from anything NumPy understands, or that speaks DLPack on the CPU.

    Nothing is copied where the library lends its memory. Tensors that record gradients are read
    without recording. ``name`` says in errors whose array it is.
    """
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        array = np.asarray(value)
    else:
        try:
            array = _lent(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(
                f"{name}: a {type(value).__module__}.{type(value).__name__} that cannot be read as "
                f"an array of this host: {error}"
            ) from None
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name}: dtype {array.dtype}, expected a float dtype")
    return array


def _lent(value: Any) -> Array:
    """What speaks DLPack, as NumPy has it."""
    if getattr(value, "requires_grad", False):
        value = value.detach()
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):
        pass  # bfloat16, which NumPy's DLPack does not know; memory elsewhere
    if str(value.dtype) != "torch.bfloat16":
        return np.asarray(value)
    import ml_dtypes

    # NumPy cannot ask torch for these either: the bits, then, as integers of their size.
    bits: Array = np.asarray(value.contiguous().view(value.new_empty(0).short().dtype))
    return bits.view(ml_dtypes.bfloat16)


def raw(array: Array) -> memoryview:
    """The bytes of a contiguous array, of any dtype and shape."""
    return memoryview(array.reshape(-1).view(np.uint8).data)
