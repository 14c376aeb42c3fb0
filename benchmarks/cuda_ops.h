/* What the programs of operations on a GPU share: cuda_ops.c runs them, cuda_rows.c has those of a
 * model's rows. Everything ends the program when it fails: it is a child of the benchmark. */
#ifndef FS_BENCHMARKS_CUDA_OPS_H
#define FS_BENCHMARKS_CUDA_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/device.h"
#include "device/runtime.h"

#define ARRAYS_MAX 12

typedef struct bench {
    fs_exec exec, cpu;
    const fs_runtime *runtime;
    fs_event *done;
    void *arrays[ARRAYS_MAX]; /* device */
    size_t nbytes[ARRAYS_MAX], arrays_n;
    size_t times;
    void (*run)(struct bench *);
    void (*verify)(struct bench *);
    size_t numel, sources; /* of step and sum; of copy: bytes */
    fs_update update;
    fs_sum sum;
    const void *sources_at[64];
    fs_sums *found; /* pinned */
    fs_gemm gemm;
    fs_attention attention;
    bool backward;
} bench;

extern bench b;

void
die(const char *text);

/* Host memory; whoever asks frees it. */
void *
host(size_t nbytes);

/* Zeroed device memory, given back at the end. */
void *
room(const char *what, size_t nbytes);

/* n values of dtype between -size and size, the same for a seed; speeds depend on what bits are
 * like, so never zeros. A million are drawn and repeated. */
void *
drawn(const char *what, size_t n, fs_dtype dtype, uint64_t seed, float size);

/* Bytes of a device array, once everything before is done. */
void
fetch(void *to, const void *device, size_t nbytes);

/* n elements as fp32; whoever asks frees them. */
float *
fetch_f32(const void *device, size_t n, fs_dtype dtype);

/* Device memory that holds what lies on the host. */
void *
upload(const char *what, const void *from, size_t nbytes);

void
same(const char *what, const void *got, const void *want, size_t nbytes);

/* NAME=NUMBER of the command line. */
size_t
option(int argc, char **argv, const char *name);

/* Prepares an operation of cuda_rows.c; false: it has none of that name. */
bool
open_rows(const char *what, int argc, char **argv);

#endif
