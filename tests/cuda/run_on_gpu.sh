#!/usr/bin/env bash
# What a machine without a GPU cannot prove, on one that has one: bits of every kernel, training,
# offload, NCCL, sanitizers, speed. From a clean checkout, without internet, in under eight minutes.
#
#     tests/cuda/run_on_gpu.sh                  everything, results in build/gpu (or in $OUT)
#     tests/cuda/run_on_gpu.sh --dry-run        the same stages against the stand-in, at tiny sizes
#     tests/cuda/run_on_gpu.sh --only train     some stages; --list names them
#
# PYTHON chooses the interpreter (3.10 or newer, with NumPy, ml_dtypes and setuptools; torch for the
# comparisons). Needs nvcc, a C and a C++ compiler, and make.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OUT="${OUT:-build/gpu}"
exec "${PYTHON:-python3}" tests/cuda/gpu_stages.py "$@"
