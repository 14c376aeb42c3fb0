"""The matrix library: where it is, loading it, what it reaches. Nothing is loaded at import."""

from __future__ import annotations

import os
from pathlib import Path

from . import _core

__all__ = ["find", "flops", "load"]


def find() -> Path:
    """The CBLAS library that matrix products use.

    Returns
    -------
    Path
        What ``FLATSHARD_BLAS`` names, else the library of the package scipy-openblas32.

    Raises
    ------
    FileNotFoundError
        If neither is there; the text says what to do.
    """
    named = os.environ.get("FLATSHARD_BLAS")
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"FLATSHARD_BLAS={named!r}: no such file")
        return Path(named)
    try:
        import scipy_openblas32
    except ImportError:
        raise FileNotFoundError(
            "no matrix library: pip install scipy-openblas32, or name one with FLATSHARD_BLAS"
        ) from None
    folder = Path(scipy_openblas32.get_lib_dir())
    stem = scipy_openblas32.get_library()
    for name in (f"lib{stem}.so", f"lib{stem}.dylib"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"scipy-openblas32 has no shared library {stem} in {str(folder)!r}")


def load() -> str:
    """Loads the matrix library, once per process, held to one thread.

    Returns
    -------
    str
        Its version and the core it chose.
    """
    return str(_core.gemm_load(find()))


def flops(*, threads: int = 1, seconds: float = 0.2, dtype: str = "float32") -> float:
    """The best rate of products of this many threads.

    Parameters
    ----------
    threads : int
    seconds : float
        How long to measure.
    dtype : str
        In which a model computes: of bfloat16 where the processor multiplies that itself
        (``avx512_bf16``), the rate of such products; else that of single precision.

    Returns
    -------
    float
        FLOP/s of the best product of (512 x threads, 512, 512).
    """
    load()
    return float(_core.gemm_flops(seconds, threads, dtype))
