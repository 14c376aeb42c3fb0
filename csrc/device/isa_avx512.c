/* The kernels for AVX-512, and the tables of processors with it. See isa.h. */
#include "isa.h"

#if defined(__x86_64__)

#define FS_ISA avx512
#define FS_ISA_FLOATS 16
#define FS_ISA_F16C

#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx,avx2,fma,f16c,bmi,bmi2,lzcnt,avx512f,avx512bw,avx512cd,avx512dq," \
                          "avx512vl"))), apply_to = function)
#pragma clang attribute push(__attribute__((min_vector_width(512))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx,avx2,fma,f16c,bmi,bmi2,lzcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")
#pragma GCC target("prefer-vector-width=512")
#endif

#include "kernels.inc"

/* The same kernels, and the processor's products of bf16 (gemm_bf16.c). */
const fs_device fs_device__avx512_bf16 =
    FS_TABLE("avx512_bf16", fs_cpu_gemm_bf16, fs_cpu_gemms_bf16);

#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
