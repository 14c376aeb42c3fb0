/* Chooses among the tables of the CPU. */
#include "cpu_ops.h"

#include "../base/status.h"

fs_status
fs_device_cpu(fs_isa isa, const fs_device **out)
{
    static const fs_device *const tables[FS_ISA_COUNT] = {
        [FS_ISA_BASELINE] = &fs_device__baseline,
#if defined(__x86_64__)
        [FS_ISA_AVX2] = &fs_device__avx2,
        [FS_ISA_AVX512] = &fs_device__avx512,
        [FS_ISA_AVX512_BF16] = &fs_device__avx512_bf16,
#endif
#if defined(__aarch64__)
        [FS_ISA_NEON] = &fs_device__neon,
#endif
    };
    if ((int)isa < 0 || isa >= FS_ISA_COUNT) {
        return FS_FAIL(FS_EINVAL, "no instruction set has number %d", (int)isa);
    }
    if (tables[isa] == NULL) {
        return FS_FAIL(FS_EUNSUPPORTED, "%s kernels are not part of a build for this architecture",
                       fs_isa_name(isa));
    }
    if (!fs_isa_runs_here(isa)) {
        return FS_FAIL(FS_EUNSUPPORTED, "this processor or system does not run %s instructions",
                       fs_isa_name(isa));
    }
    *out = tables[isa];
    return FS_OK;
}

fs_status
fs_device_choose(const fs_device **out)
{
    fs_isa isa;
    FS_TRY(fs_isa_choose(&isa));
    return fs_device_cpu(isa, out);
}
