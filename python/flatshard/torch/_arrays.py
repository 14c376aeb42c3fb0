"""Tensors as arrays and back, without a copy; dtypes by name."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._layout import numpy_dtype

__all__ = ["as_array", "as_tensor", "borrow_array", "dtype_name", "torch_dtype"]

_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"; TypeError for what flatshard does not compute in."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TypeError(f"{dtype}: expected float32, bfloat16 or float16") from None


def torch_dtype(name: str) -> torch.dtype:
    """ "float32" -> torch.float32."""
    for dtype, known in _NAMES.items():
        if known == name:
            return dtype
    raise TypeError(f"dtype {name!r}: expected float32, bfloat16 or float16")


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a dense CPU tensor as a C-contiguous array; copied only if it is strided, or
    lies on a GPU (waits)."""
    tensor = tensor.detach().cpu()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        array: npt.NDArray[Any] = tensor.view(torch.int16).numpy()
        return array.view(numpy_dtype("bfloat16"))
    array = tensor.numpy()
    return array


def borrow_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A dense CPU tensor's memory as a flat array that must not outlive this very moment: nothing
    keeps the memory, and torch is not told, so the storage may be resized afterwards."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return np.empty(0, numpy_dtype(dtype_name(tensor.dtype)))
    memory = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memory, dtype=numpy_dtype(dtype_name(tensor.dtype)))


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor with a storage of its own over a writeable array's memory, which it keeps alive."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
