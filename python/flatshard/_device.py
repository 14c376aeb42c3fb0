"""Devices: the words for them, and the library behind "cuda". Nothing is loaded at import."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path

from . import _core
from .errors import ConfigError

__all__ = ["check_ordinal", "installed", "library", "load", "parse"]

#: In the package, where a build with nvcc puts it.
LIBRARY = Path(__file__).with_name("libfs_cuda.so")

#: Files of the packages that NVIDIA distributes its libraries in, under ``nvidia/``.
FILES = {
    "cublas": ("cu13/lib/libcublas.so.13", "cublas/lib/libcublas.so.12"),
    "nccl": ("nccl/lib/libnccl.so.2",),
}


def parse(device: str) -> tuple[str, int | None]:
    """The kind and the number of a device: "cpu", "cuda" or "cuda:N".

    Raises
    ------
    ValueError
        For any other word.
    """
    found = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", device) if isinstance(device, str) else None
    if found is None or (found[1] == "cpu" and found[2] is not None):
        raise ValueError(f"device={device!r}: expected 'cpu', 'cuda' or 'cuda:N'")
    return found[1], None if found[2] is None else int(found[2])


def library() -> Path:
    """The library of the device "cuda": what ``FLATSHARD_CUDA_LIBRARY`` names, else the package's.

    Raises
    ------
    ConfigError
        It is not there; the text says how to get it.
    """
    named = os.environ.get("FLATSHARD_CUDA_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"FLATSHARD_CUDA_LIBRARY={named!r}: no such file")
        return Path(named)
    if not LIBRARY.is_file():
        raise ConfigError(
            "device 'cuda': this installation has no libfs_cuda.so: nvcc was not found when it was "
            "built, or was not asked for. Install from source with FLATSHARD_CUDA=1 and nvcc: on "
            "the path, in CUDA_HOME, or of the packages nvidia-cuda-nvcc, nvidia-cuda-runtime and "
            "nvidia-cuda-cccl; 'flatshard env' says what is here"
        )
    return LIBRARY


def installed(name: str) -> list[Path]:
    """Where installed packages keep one of NVIDIA's libraries, "cublas" or "nccl"."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    paths = [Path(folder) / file for folder in folders for file in FILES[name]]
    return [path for path in paths if path.is_file()]


@functools.lru_cache(maxsize=1)
def _load(path: Path) -> _core.Device:
    return _core.device_load(path, installed("cublas"), installed("nccl"))


def load() -> _core.Device:
    """The library of the device "cuda", loaded once per process. Starts no device yet.

    Raises
    ------
    ConfigError
        As of :func:`library`, or it does not load, or is of another build than this package.
    """
    path = library()
    try:
        return _load(path.resolve())
    except NotImplementedError as error:
        raise ConfigError(f"device 'cuda': {error}") from None


def check_ordinal(device: _core.Device, ordinal: int, whose: str) -> None:
    """Whether a device with this number can be used here. Starts CUDA.

    Parameters
    ----------
    device : _core.Device
        The library.
    ordinal : int
        The device's number.
    whose : str
        For whom, in the error.

    Raises
    ------
    ConfigError
        No driver, one that is too old, no device at all, or none with this number.
    """
    try:
        count = device.count()
    except NotImplementedError as error:
        raise ConfigError(f"device 'cuda': {error}") from None
    if ordinal >= count:
        raise ConfigError(
            f"{whose} needs device cuda:{ordinal}, and this process may use {count} "
            f"(cuda:0 to cuda:{count - 1}); start fewer ranks, or see CUDA_VISIBLE_DEVICES. Where "
            "every rank is shown one device of its own, use device='cuda:0'"
        )
