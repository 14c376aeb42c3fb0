/* Private to the CPU's filling of the table: the tables themselves, and what is not compiled per
 * instruction set. */
#ifndef FS_DEVICE_CPU_OPS_H
#define FS_DEVICE_CPU_OPS_H

#include "device.h"

/* One per set that this architecture has; see isa.h. */
extern const fs_device fs_device__baseline;
extern const fs_device fs_device__avx2;
extern const fs_device fs_device__avx512;
extern const fs_device fs_device__neon;

/* The library's kernels choose their own instructions (gemm.c). */
void
fs_cpu_gemm(const fs_exec *exec, const fs_gemm *gemm);

#endif
