// sanitizers: tsan
// flavours: neon
/* The device table: equal golden bits on every instruction set and for any number of threads, and
 * no access beyond an array (arrays are as small as their elements: the address sanitizer looks
 * on). This file runs where there is no Python too. */
#include <math.h>

#include "kernel_cases.h"

static void
test_exp_and_log(void)
{
    double worst_exp = 0.0, worst_log = 0.0;
    for (int i = 0; i < 400000; i++) {
        float x = -87.3f + 176.0f * (float)i / 400000.0f;
        double right = exp((double)x);
        double unit = ldexp(1.0, ilogb(right) - 23);
        worst_exp = fmax(worst_exp, fabs((double)fs_exp_f32(x) - right) / unit);
        float y = fs_f32_of_bits(0x00800000u + (uint32_t)i * 5300u);
        right = log((double)y);
        unit = right == 0.0 ? 0x1p-149 : ldexp(1.0, ilogb(right) - 23);
        worst_log = fmax(worst_log, fabs((double)fs_log_f32(y) - right) / unit);
    }
    CHECK(worst_exp <= 2.0, "exp is %.2f ulp off", worst_exp);
    CHECK(worst_log <= 2.0, "log is %.2f ulp off", worst_log);
    float nan = fs_f32_of_bits(0x7fc00000u), infinity = fs_f32_of_bits(0x7f800000u);
    CHECK(fs_exp_f32(0.0f) == 1.0f && fs_exp_f32(-infinity) == 0.0f, "exp at 0 or -inf");
    CHECK(fs_exp_f32(infinity) == infinity && fs_exp_f32(nan) != fs_exp_f32(nan), "exp inf, nan");
    CHECK(fs_log_f32(1.0f) == 0.0f && fs_log_f32(0.0f) == -infinity, "log at 1 or 0");
    CHECK(fs_log_f32(infinity) == infinity && fs_log_f32(-1.0f) != fs_log_f32(-1.0f),
          "log inf, -1");
}

int
main(void)
{
    int tables = 0;
    test_exp_and_log();
    for (int isa = 0; isa < FS_ISA_COUNT; isa++) {
        const fs_device *device;
        /* avx512_bf16 has the kernels of avx512: test_gemm has the rest. */
        if (isa == FS_ISA_AVX512_BF16 || fs_device_cpu((fs_isa)isa, &device) != FS_OK) {
            continue;
        }
        CHECK(device->magic == FS_DEVICE_MAGIC && device->struct_nbytes == sizeof *device, "table");
        tables++;
        for (size_t threads = UNDER_TSAN ? 3 : 1; threads <= 3; threads += 2) {
            fs_exec exec = {.device = device};
            CHECK_OK(fs_pool_open(threads, &exec.pool));
            check_table(&exec);
            fs_pool_close(exec.pool);
        }
    }
    CHECK(tables >= 1, "no table runs here");
    return 0;
}
