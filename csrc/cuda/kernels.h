/* The elementwise operations of the device table on a GPU: conversion, sums over ranks, updates.
 *
 * Each call checks what it was given, starts kernels on a stream and returns: results are there
 * when the stream has come so far. Array pointers are device memory; structs are read before the
 * call returns. Element arithmetic is base/math.h and device/rules.h, compiled without contraction,
 * flush or approximation: given equal inputs, results have the bits of the CPU's tables (the
 * payload of a NaN that arithmetic makes excepted: processors differ in it). Nothing allocates. */
#ifndef FS_CUDA_KERNELS_H
#define FS_CUDA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "../base/dtype.h"
#include "../base/status.h"
#include "../device/device.h"

/* A stream of the device (cudaStream_t). The default stream, NULL, is refused: it waits for all
 * others. */
typedef struct fs_cuda_stream_of *fs_cuda_stream;

/* Sources of one sum: more ranks than that are refused. The pointers travel with the launch. */
#define FS_CUDA_SOURCES_MAX 256

/* Upper bound of the blocks of a grid: kernels walk in strides. */
#define FS_CUDA_BLOCKS_MAX 16384u

/* Bytes of scratch that a sum (or sum of squares) over n elements needs in device memory. */
size_t fs_cuda_sum_scratch_nbytes(size_t n);

/* Refusals shared by the operations, before anything starts: the default stream; a dtype that is
 * not a float. what: the operation; of: which of its dtypes, with a preposition. */
FS_NODISCARD fs_status
fs_cuda_check_stream(fs_cuda_stream stream, const char *what);

FS_NODISCARD fs_status
fs_cuda_check_float(fs_dtype dtype, const char *what, const char *of);

/* See fs_device.convert. */
FS_NODISCARD fs_status
fs_cuda_convert(fs_cuda_stream stream, void *dst, fs_dtype dst_dtype, const void *src,
                fs_dtype src_dtype, size_t n);

/* See fs_device.split, fs_device.join. */
FS_NODISCARD fs_status
fs_cuda_split(fs_cuda_stream stream, uint16_t *bf16, uint16_t *remainder, const void *src,
              fs_dtype src_dtype, size_t n);

FS_NODISCARD fs_status
fs_cuda_join(fs_cuda_stream stream, void *dst, fs_dtype dst_dtype, const uint16_t *bf16,
             const uint16_t *remainder, size_t n);

/* See fs_device.sum; sum->found is device memory or pinned host memory. sum->src is an array of
 * host memory. */
FS_NODISCARD fs_status
fs_cuda_sum(fs_cuda_stream stream, const fs_sum *sum, void *scratch, size_t scratch_nbytes);

/* See fs_device.sumsq. */
FS_NODISCARD fs_status
fs_cuda_sumsq(fs_cuda_stream stream, const void *x, fs_dtype dtype, size_t n, fs_sums *found,
              void *scratch, size_t scratch_nbytes);

/* See fs_device.find_nonfinite: the index goes to *out. */
FS_NODISCARD fs_status
fs_cuda_find_nonfinite(fs_cuda_stream stream, const void *x, fs_dtype dtype, size_t n,
                       uint64_t *out);

/* See fs_device.update. */
FS_NODISCARD fs_status
fs_cuda_update(fs_cuda_stream stream, const fs_update *update);

/* See fs_device.combine. */
FS_NODISCARD fs_status
fs_cuda_combine(fs_cuda_stream stream, int op, fs_dtype dtype, void *acc, const void *src,
                size_t n);

#endif
