/* Private to the CPU's filling of the table: the tables themselves, and what is not compiled per
 * instruction set. */
#ifndef FS_DEVICE_CPU_OPS_H
#define FS_DEVICE_CPU_OPS_H

#include "device.h"

/* One per set that this architecture has; see isa.h. */
extern const fs_device fs_device__baseline;
extern const fs_device fs_device__avx2;
extern const fs_device fs_device__avx512;
extern const fs_device fs_device__avx512_bf16;
extern const fs_device fs_device__neon;

/* The library's kernels choose their own instructions (gemm.c). */
void
fs_cpu_gemm(const fs_exec *exec, const fs_gemm *gemm);
void
fs_cpu_gemms(const fs_exec *exec, const fs_gemm *gemms, size_t n);

/* The same, but products that may be rounded to bf16 are, and are ours. AVX512_BF16. */
void
fs_cpu_gemm_bf16(const fs_exec *exec, const fs_gemm *gemm);
void
fs_cpu_gemms_bf16(const fs_exec *exec, const fs_gemm *gemms, size_t n);

/* Rows [row, row + rows) of C, at most FS_GEMM_ROWS; operands rounded to bf16, sums of fp32. */
void
fs_cpu_gemm_tile_bf16(const fs_gemm *gemm, size_t row, size_t rows);

/* Touches arrays of n elements, of 4 bytes or 2, as an operation would: reads the first read_n,
 * reads and writes the next update_n (flipping the bits of mask, which may be 0), writes mask to
 * the rest. For benchmarks. Returns all that was read, mixed. */
typedef struct fs_stream {
    uint32_t *const *arrays;
    const unsigned char *half; /* [arrays_n]: has the array 2-byte elements, so half the bytes? */
    size_t arrays_n, read_n, update_n;
    uint32_t mask;
    bool tiles; /* tile after tile of each array, the next ones asked for; else line after line */
    size_t n;
} fs_stream;
uint32_t
fs_cpu_stream(const fs_exec *exec, const fs_stream *stream);

#endif
