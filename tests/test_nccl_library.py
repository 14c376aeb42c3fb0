"""NCCL itself: the real library has every function that csrc/cuda calls, by the same prototypes.

The real one loads without a driver and says its version; whether it moves data is for machines with
GPUs.
"""

import ctypes
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from flatshard import _device

ROOT = pathlib.Path(__file__).resolve().parent.parent
FUNCTIONS = dict(
    re.findall(
        r'\{"(nccl\w+)", &out->(\w+)\}',
        (ROOT / "csrc/cuda/nccl_load.cu").read_text(encoding="utf-8"),
    )
)


def real_library() -> pathlib.Path | None:
    """What FLATSHARD_NCCL names, else the library of an installed wheel."""
    named = os.environ.get("FLATSHARD_NCCL")
    return pathlib.Path(named) if named else next(iter(_device.installed("nccl")), None)


@pytest.mark.quick
def test_the_stand_in_has_every_function() -> None:
    assert len(FUNCTIONS) >= 15, "the table of functions in nccl_load.cu is not found"
    text = (ROOT / "tests/cudasim/nccl.cpp").read_text(encoding="utf-8")
    assert set(re.findall(r"^(nccl\w+)\(", text, re.MULTILINE)) == set(FUNCTIONS)


@pytest.fixture(scope="module")
def real() -> pathlib.Path:
    path = real_library()
    if path is None:
        pytest.skip("no NCCL here: no wheel nvidia-nccl-cu13, and FLATSHARD_NCCL is not set")
    return path


def test_the_real_one_loads(real: pathlib.Path) -> None:
    library = ctypes.CDLL(str(real))
    assert [name for name in FUNCTIONS if not hasattr(library, name)] == []
    version = ctypes.c_int()
    assert library.ncclGetVersion(ctypes.byref(version)) == 0
    assert 21800 <= version.value < 30000
    library.ncclGetErrorString.restype = ctypes.c_char_p
    assert b"progress" in library.ncclGetErrorString(7)


# Compared by the compiler with NVIDIA's own header, which the wheel brings along.
COMPARISON = """
#include <type_traits>
#include <nccl.h>
#include "cuda/nccl.cuh"

/* A parameter as our prototypes have it: enums are ints, handles and structs are ours. */
template <typename T> struct as_ours { typedef T type; };
template <> struct as_ours<ncclComm_t> { typedef nccl_communicator type; };
template <> struct as_ours<ncclComm_t *> { typedef nccl_communicator *type; };
template <> struct as_ours<ncclUniqueId> { typedef nccl_id type; };
template <> struct as_ours<ncclUniqueId *> { typedef nccl_id *type; };
template <> struct as_ours<ncclConfig_t *> { typedef nccl_config *type; };
template <> struct as_ours<ncclResult_t> { typedef int type; };
template <> struct as_ours<ncclResult_t *> { typedef int *type; };
template <> struct as_ours<ncclDataType_t> { typedef int type; };
template <> struct as_ours<ncclRedOp_t> { typedef int type; };
template <typename R, typename... P>
typename as_ours<R>::type (*ours(R (*)(P...)))(typename as_ours<P>::type...);

#define SAME_FUNCTION(theirs, member) \\
    static_assert(std::is_same<decltype(ours(&theirs)), decltype(nccl_functions::member)>::value, \\
                  #theirs)
#define SAME_NUMBER(theirs, number) static_assert((long)(theirs) == (long)(number), #theirs)
#define SAME_FIELD(theirs, field) \\
    static_assert(offsetof(ncclConfig_t, theirs) == offsetof(nccl_config, field), #theirs)

SAME_NUMBER(sizeof(ncclUniqueId), sizeof(nccl_id));
SAME_NUMBER(sizeof(ncclResult_t), sizeof(int));
SAME_NUMBER(sizeof(ncclDataType_t), sizeof(int));
SAME_NUMBER(sizeof(ncclRedOp_t), sizeof(int));
SAME_NUMBER(ncclSuccess, NCCL_SUCCESS);
SAME_NUMBER(ncclInProgress, NCCL_IN_PROGRESS);
SAME_NUMBER(ncclUint8, NCCL_U8);
SAME_NUMBER(ncclInt32, NCCL_I32);
SAME_NUMBER(ncclInt64, NCCL_I64);
SAME_NUMBER(ncclFloat16, NCCL_F16);
SAME_NUMBER(ncclFloat32, NCCL_F32);
SAME_NUMBER(ncclFloat64, NCCL_F64);
SAME_NUMBER(ncclBfloat16, NCCL_BF16);
SAME_NUMBER(ncclSum, NCCL_SUM);
SAME_NUMBER(NCCL_API_MAGIC, NCCL_CONFIG_MAGIC);
SAME_NUMBER(NCCL_CONFIG_UNDEF_INT, NCCL_UNDEFINED);
SAME_FIELD(size, size);
SAME_FIELD(magic, magic);
SAME_FIELD(version, version);
SAME_FIELD(blocking, blocking);
SAME_FIELD(cgaClusterSize, cga_cluster_size);
SAME_FIELD(minCTAs, min_blocks);
SAME_FIELD(maxCTAs, max_blocks);
SAME_FIELD(netName, network);
SAME_FIELD(splitShare, split_share);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 26, 0)
SAME_FIELD(trafficClass, traffic_class);
#endif
"""


def test_the_real_one_has_these_prototypes(real: pathlib.Path, tmp_path: pathlib.Path) -> None:
    header = real.parent.parent / "include" / "nccl.h"
    compiler = os.environ.get("CXX", "g++").split()
    if not header.is_file() or shutil.which(compiler[0]) is None:
        pytest.skip(f"no header {header}, or no C++ compiler")
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):  # included, and not needed
        (tmp_path / name).write_text("")
    source = tmp_path / "compare.cpp"
    lines = [f"SAME_FUNCTION({theirs}, {member});" for theirs, member in FUNCTIONS.items()]
    text = COMPARISON + "\n".join(lines) + "\n"

    def compiled() -> subprocess.CompletedProcess[str]:
        source.write_text(text)
        folders = [tmp_path, ROOT / "tests" / "cudasim", header.parent, ROOT / "csrc"]
        return subprocess.run(
            [*compiler, "-std=c++17", "-fsyntax-only", *[f"-I{x}" for x in folders], str(source)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    done = compiled()
    assert done.returncode == 0, done.stdout[-3000:]
    text = text.replace("SAME_FUNCTION(ncclSend, send)", "SAME_FUNCTION(ncclSend, receive)")
    assert compiled().returncode != 0, "another prototype would not be seen"
