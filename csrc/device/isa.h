/* How kernels are compiled once per instruction set, without compiler flags of their own.
 *
 * A kernel is plain C in a file NAME.inc of this folder: static functions, no globals. kernels.inc
 * includes every such file and ends in the table. Each isa_SET.c turns its instruction set on by
 * pragma and includes kernels.inc, so the same source becomes code for each set; fs_device_cpu
 * picks one table at run time. Nothing outside this folder sees a kernel by name.
 *
 * To add a kernel file:
 *   1. write csrc/device/NAME.inc. Operations of the table are named FS_KERNEL(op), which gives
 *      fs_op__avx2 and so on: the set shows in a profile. Helpers are plain static functions;
 *   2. add #include "NAME.inc" to kernels.inc, above the table;
 *   3. add the row to the table at the end of kernels.inc (the model's operations: to the
 *      initialiser FS_MODEL_OPS_ROWS, which model.inc defines).
 *
 * What a kernel file may use: FS_ISA_FLOATS (floats in a vector register: 4, 8 or 16), base/math.h,
 * the headers below, tiles.h, vector extensions of GCC (vector_size); intrinsics only in copy.inc,
 * for the fused multiply-add of attention_tiles.inc, and, where FS_ISA_F16C is defined, for the
 * conversions of fp16 in formats.inc. System headers belong here, above the
 * pragmas. An unused static function is no warning.
 *
 * Matrix products are not among them: they are the library's (gemm.c) or, of bf16, gemm_bf16.c. */
#ifndef FS_DEVICE_ISA_H
#define FS_DEVICE_ISA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../base/build.h"
#include "../base/checked.h"
#include "cpu_ops.h"
#include "device.h"

#define FS_KERNEL_JOIN_(name, isa) fs_##name##__##isa
#define FS_KERNEL_NAME_(name, isa) FS_KERNEL_JOIN_(name, isa)
#define FS_KERNEL(name) FS_KERNEL_NAME_(name, FS_ISA)

/* The text of FS_ISA, for the table's name. */
#define FS_ISA_TEXT_(isa) #isa
#define FS_ISA_TEXT(isa) FS_ISA_TEXT_(isa)

/* Inner loops that must be part of their caller to be vectorised with it. */
#define FS_INLINE static inline __attribute__((always_inline))

#endif
