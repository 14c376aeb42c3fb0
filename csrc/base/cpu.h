/* What this processor can do, and the floating-point state our kernels rely on. */
#ifndef FS_BASE_CPU_H
#define FS_BASE_CPU_H

#include <stdint.h>

#include "status.h"

typedef enum fs_isa {
    FS_ISA_BASELINE = 0,
    FS_ISA_AVX2,
    FS_ISA_AVX512,
    FS_ISA_AVX512_BF16, /* the kernels of AVX512, and products of bf16 by the processor */
    FS_ISA_NEON,
    FS_ISA_COUNT
} fs_isa;

/* "baseline", "avx2", "avx512", "avx512_bf16", "neon". */
const char *fs_isa_name(fs_isa isa);

/* True if this processor and system run kernels of isa (decided by features, never by vendor). */
int fs_isa_runs_here(fs_isa isa);

/* The best instruction set that runs here, or the one FLATSHARD_CPU names. FS_EINVAL if that name
 * is unknown, FS_EUNSUPPORTED if this processor lacks it. */
FS_NODISCARD fs_status
fs_isa_choose(fs_isa *out);

/* Processors this process may use: the affinity mask, capped by the cgroup's CPU quota; >= 1. */
unsigned fs_cpu_count(void);

/* The cap alone: processors that the quotas allow of the control groups listed in the file groups
 * (/proc/self/cgroup) and of those above them, in the hierarchy at mount; rounded up; 0: no
 * quota. */
unsigned fs_cpu_quota(const char *groups, const char *mount);

/* For loops that look at memory until another thread writes it: gives the processor's units to the
 * other thread of its core for a moment. */
static inline void
fs_cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Saved floating-point control word (MXCSR, FPCR). */
typedef uint64_t fs_fp_state;

/* Sets round-to-nearest with subnormals kept (another library may have turned them off for this
 * thread) and returns the state to restore. Every entry from Python and every pool worker does. */
fs_fp_state fs_fp_enter(void);
void fs_fp_leave(fs_fp_state saved);

#endif
