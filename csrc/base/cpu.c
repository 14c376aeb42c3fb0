/* Processor features, floating-point state, and how many processors there are to use. */
#define _GNU_SOURCE
#include "cpu.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

#include "env.h"

static const char *const isa_names[FS_ISA_COUNT] = {
    [FS_ISA_BASELINE] = "baseline",
    [FS_ISA_AVX2] = "avx2",
    [FS_ISA_AVX512] = "avx512",
    [FS_ISA_AVX512_BF16] = "avx512_bf16",
    [FS_ISA_NEON] = "neon",
};

const char *
fs_isa_name(fs_isa isa)
{
    return (int)isa >= 0 && isa < FS_ISA_COUNT ? isa_names[isa] : "unknown";
}

#if defined(__x86_64__)

/* Which register files the system saves on a switch (extended control register 0). */
static uint64_t
saved_register_files(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

static int
has_all(uint32_t word, uint32_t bits)
{
    return (word & bits) == bits;
}

/* True if every feature that the isa_SET.c of isa turns on is there, and the system saves its
 * registers. */
static int
x86_runs(fs_isa isa)
{
    uint32_t a, b, c, d, b7, c1, extended_c;
    if (!__get_cpuid(1, &a, &b, &c, &d)) {
        return 0;
    }
    c1 = c;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        return 0;
    }
    b7 = b;
    if (!__get_cpuid(0x80000001u, &a, &b, &c, &d)) {
        return 0;
    }
    extended_c = c;
    if (!has_all(c1, bit_AVX | bit_FMA | bit_F16C | bit_OSXSAVE) ||
        !has_all(b7, bit_AVX2 | bit_BMI | bit_BMI2) || !has_all(extended_c, bit_LZCNT)) {
        return 0;
    }
    uint64_t files = saved_register_files();
    if ((files & 0x06u) != 0x06u) { /* xmm, ymm */
        return 0;
    }
    if (isa == FS_ISA_AVX2) {
        return 1;
    }
    if (!has_all(b7, bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL) ||
        (files & 0xe6u) != 0xe6u) { /* and mask registers, both parts of zmm */
        return 0;
    }
    return isa == FS_ISA_AVX512 ||
           (__get_cpuid_count(7, 1, &a, &b, &c, &d) && has_all(a, bit_AVX512BF16));
}

#endif

int
fs_isa_runs_here(fs_isa isa)
{
    switch (isa) {
    case FS_ISA_BASELINE:
        return 1;
#if defined(__x86_64__)
    case FS_ISA_AVX2:
    case FS_ISA_AVX512:
    case FS_ISA_AVX512_BF16:
        return x86_runs(isa);
#endif
#if defined(__aarch64__)
    case FS_ISA_NEON:
        return 1;
#endif
    default:
        return 0;
    }
}

fs_status
fs_isa_choose(fs_isa *out)
{
    const char *wanted = fs_env_get("FLATSHARD_CPU");
    if (wanted == NULL) {
        static const fs_isa best_first[] = {FS_ISA_AVX512_BF16, FS_ISA_AVX512, FS_ISA_AVX2,
                                            FS_ISA_NEON};
        *out = FS_ISA_BASELINE;
        for (size_t i = 0; i < sizeof best_first / sizeof best_first[0]; i++) {
            if (fs_isa_runs_here(best_first[i])) {
                *out = best_first[i];
                break;
            }
        }
        return FS_OK;
    }
    for (int isa = 0; isa < FS_ISA_COUNT; isa++) {
        if (strcmp(wanted, isa_names[isa]) == 0) {
            if (!fs_isa_runs_here((fs_isa)isa)) {
                return FS_FAIL(FS_EUNSUPPORTED, "FLATSHARD_CPU=%s: this processor or system does "
                               "not run these instructions; unset it, or use baseline", wanted);
            }
            *out = (fs_isa)isa;
            return FS_OK;
        }
    }
    return FS_FAIL(FS_EINVAL, "FLATSHARD_CPU=%s is not an instruction set: use baseline, avx2, "
                   "avx512, avx512_bf16 or neon", wanted);
}

// ---- floating-point state -----------------------------------------------------------------------

#if defined(__x86_64__)

/* All exceptions masked, round to nearest, subnormal results and operands kept. */
#define FS_MXCSR 0x1f80u

fs_fp_state
fs_fp_enter(void)
{
    unsigned saved = _mm_getcsr();
    _mm_setcsr(FS_MXCSR);
    return saved;
}

void
fs_fp_leave(fs_fp_state saved)
{
    _mm_setcsr((unsigned)saved);
}

#elif defined(__aarch64__)

/* Trap enables (8-15), flush to zero (19: half, 24), rounding mode (22-23), default NaN (25). */
#define FS_FPCR_CLEAR 0x03c8ff00u

fs_fp_state
fs_fp_enter(void)
{
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    uint64_t ours = saved & ~(uint64_t)FS_FPCR_CLEAR;
    __asm__ volatile("msr fpcr, %0" : : "r"(ours));
    return saved;
}

void
fs_fp_leave(fs_fp_state saved)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(saved));
}

#else

fs_fp_state
fs_fp_enter(void)
{
    return 0;
}

void
fs_fp_leave(fs_fp_state saved)
{
    (void)saved;
}

#endif
