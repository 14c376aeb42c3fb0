"""cuBLAS itself: every function that csrc/cuda calls is in the real library, and in its stand-in.

The real one loads without a driver, and without a GPU a handle is refused; what its products are is
for a machine with one.
"""

import ctypes
import os
import pathlib
import re

import pytest

from flatshard import _device

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = re.findall(
    r'\{"(cublas\w+)", &out->', (ROOT / "csrc/cuda/cublas.cu").read_text(encoding="utf-8")
)


def real_library() -> pathlib.Path | None:
    """What FLATSHARD_CUBLAS names, else the library of an installed wheel."""
    named = os.environ.get("FLATSHARD_CUBLAS")
    return pathlib.Path(named) if named else next(iter(_device.installed("cublas")), None)


@pytest.mark.quick
def test_the_stand_in_has_every_function() -> None:
    assert len(NAMES) >= 10, "the table of functions in cublas.cu is not found"
    text = (ROOT / "tests/cudasim/cublas.cpp").read_text(encoding="utf-8")
    assert set(re.findall(r"^(cublas\w+)\(", text, re.MULTILINE)) == set(NAMES)


@pytest.fixture(scope="module")
def real() -> ctypes.CDLL:
    path = real_library()
    if path is None:
        pytest.skip("no cuBLAS here: no wheel nvidia-cublas, and FLATSHARD_CUBLAS is not set")
    return ctypes.CDLL(str(path))


def test_the_real_one_has_every_function(real: ctypes.CDLL) -> None:
    missing = [name for name in NAMES if not hasattr(real, name)]
    assert missing == []


def test_the_real_one_speaks_as_expected(real: ctypes.CDLL) -> None:
    version = ctypes.c_int()
    assert real.cublasGetProperty(0, ctypes.byref(version)) == 0
    assert version.value in (12, 13)
    real.cublasGetStatusString.restype = ctypes.c_char_p
    assert real.cublasGetStatusString(0) == b"success"
    assert b"allocation" in real.cublasGetStatusString(3)
    handle = ctypes.c_void_p()
    # Sizes are looked at before the handle is used for anything: none means "not initialized" (1).
    arguments = [handle, 0, 0, *[ctypes.c_int64(1)] * 3, None, None, 0, ctypes.c_int64(1), None, 0]
    arguments += [ctypes.c_int64(1), None, None, 0, ctypes.c_int64(1), 69, -1]
    assert real.cublasGemmEx_64(*arguments) == 1
