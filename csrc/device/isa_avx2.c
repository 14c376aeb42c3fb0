/* The kernels for AVX2. See isa.h. */
#include "isa.h"

#if defined(__x86_64__)

#define FS_ISA avx2
#define FS_ISA_FLOATS 8
#define FS_ISA_F16C

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx,avx2,fma,f16c,bmi,bmi2,lzcnt"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx,avx2,fma,f16c,bmi,bmi2,lzcnt")
#endif

#include "kernels.inc"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
