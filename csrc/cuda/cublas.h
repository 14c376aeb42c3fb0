/* Matrix products on a GPU, by NVIDIA's cuBLAS, which is loaded when it is first asked for.
 *
 * One handle a stream, with a workspace of fixed size that the caller gives: so cuBLAS takes no
 * memory that nobody counts, and equal shapes, leading dimensions and alignments give equal bits on
 * one kind of GPU with one version of cuBLAS. Products of fp32 are pedantic (no TF32); those of
 * bf16 and fp16 are summed in fp32 and rounded once. */
#ifndef FS_CUDA_CUBLAS_H
#define FS_CUDA_CUBLAS_H

#include <stddef.h>

#include "../base/status.h"
#include "../device/device.h"
#include "kernels.h"

/* A handle of cuBLAS, bound to a stream. For one thread at a time. */
typedef struct fs_cublas fs_cublas;

/* Loads cuBLAS of CUDA 12 or 13, once per process; a second call keeps the first library. Looked
 * for as base/library.h says: FLATSHARD_CUBLAS, the process, paths (files of installed packages,
 * NULL-ended, or NULL), the system. *out_description (may be NULL): version and where it was found,
 * valid for the process's life. FS_EUNSUPPORTED says what was tried or what is wrong with what was
 * found. Thread-safe. */
FS_NODISCARD fs_status
fs_cublas_load(const char *const *paths, const char **out_description);

/* Bytes of workspace that NVIDIA recommends for a compute capability (9.0 is 90). */
size_t fs_cublas_workspace_nbytes(int capability);

/* A handle for products on stream, on the calling thread's device. workspace: device memory,
 * aligned to 256 bytes, the caller's until the handle is closed; no other stream may use it.
 * FS_ESTATE before fs_cublas_load. May wait for the device. */
FS_NODISCARD fs_status
fs_cublas_open(fs_cuda_stream stream, void *workspace, size_t workspace_nbytes, fs_cublas **out);

/* Waits for the handle's stream. NULL is fine. */
FS_NODISCARD fs_status
fs_cublas_close(fs_cublas *cublas);

/* See fs_device.gemm. A and B of fp32, bf16 or fp16, C of the same dtype or fp32; sizes up to 2^63.
 * A C of beta 0 is not read. */
FS_NODISCARD fs_status
fs_cuda_gemm(fs_cublas *cublas, const fs_gemm *gemm);

/* See fs_device.gemms: one after the other on the stream. All are checked before any starts. */
FS_NODISCARD fs_status
fs_cuda_gemms(fs_cublas *cublas, const fs_gemm *gemms, size_t n);

#endif
