#include "env.h"

#include <stdlib.h>

static const fs_env_entry table[] = {
    {"FLATSHARD_CPU", "instruction set of the kernels: baseline, avx2, avx512 or neon"},
    {"FLATSHARD_THREADS", "compute threads of each rank"},
    {"FLATSHARD_LOG",
     "level of the logger 'flatshard' (debug, info, warning, error); 'all:LEVEL' for every rank"},
    {"FLATSHARD_TIMEOUT", "seconds until a wait for other ranks raises"},
    {"FLATSHARD_REPORT_AFTER", "seconds until a wait for other ranks is reported in the log"},
    {"FLATSHARD_REPORT_SIGNAL",
     "real-time signal that asks a late rank for its Python line (default: a free one from 54 on); "
     "0: none"},
    {"FLATSHARD_BLAS", "path of the CBLAS library to load instead of scipy-openblas32"},
    {"FLATSHARD_CUDA_LIBRARY",
     "path of the library for device 'cuda' to load instead of the package's"},
    {"FLATSHARD_CUBLAS", "path of the cuBLAS library (libcublas.so.*) to load instead of others"},
    {"FLATSHARD_NCCL", "path of the NCCL library (libnccl.so.2) to load instead of others"},
    {"FLATSHARD_WATCH_WRITES",
     "1: PyTorch modules compare checksums of their weights to find writes through parameter.data"},
    {"FLATSHARD_JOB", "set by 'flatshard launch': how the ranks of a job find each other"},
    /* Read by setup.py; here so that a shell that keeps them set is not warned about them. */
    {"FLATSHARD_WERROR", "when building: 1 makes warnings errors"},
    {"FLATSHARD_DEBUG", "when building: 1 makes a build for a debugger"},
    {"FLATSHARD_SANITIZE", "when building: sanitizers of the compiler, such as address,undefined"},
    {"FLATSHARD_THREADS_ONLY", "when building: 1 leaves out worlds of processes"},
    {"FLATSHARD_TEST_DEVICE", "in the project's own tests: device of worlds that name none"},
    {"FLATSHARD_CUDA", "when building: 1 needs the CUDA library, 0 leaves it out"},
    {"FLATSHARD_MANYLINUX", "when building: 1 links for older systems, for a wheel"},
    {NULL, NULL},
};

const fs_env_entry *
fs_env_table(void)
{
    return table;
}

const char *
fs_env_get(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : NULL;
}
