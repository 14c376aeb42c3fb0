/* Products that are rounded to bf16: exact on small integers, whatever the shape and transposition,
 * and nothing touched beyond the operands (arrays are as small as they can be: the address
 * sanitizer looks on). */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "device/device.h"

/* Integers of at most 16 have 8 significant bits, and sums of 600 products of them 24. */
static float *
integers(size_t n, unsigned seed)
{
    float *x = malloc(n * sizeof *x + (n == 0));
    CHECK(x != NULL, "no memory");
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)((int)(seed >> 27) - 16);
    }
    return x;
}

static void
check_shape(const fs_exec *exec, bool trans_a, bool trans_b, size_t m, size_t n, size_t k)
{
    float *a = integers(m * k, 1), *b = integers(n * k, 2), *c = integers(m * n, 3);
    float *before = integers(m * n, 3);
    fs_gemm gemm = {.trans_a = trans_a, .trans_b = trans_b, .m = m, .n = n, .k = k,
                    .rounding = FS_BF16, .a = a, .lda = trans_a ? m : k, .b = b,
                    .ldb = trans_b ? k : n, .c = c, .ldc = n};
    for (int add = 0; add < 2; add++) {
        for (size_t i = 0; i < m * n; i++) {
            c[i] = add ? before[i] : NAN;
        }
        gemm.beta = (float)add;
        exec->device->gemm(exec, &gemm);
        for (size_t i = 0; i < m; i++) {
            for (size_t j = 0; j < n; j++) {
                float want = add ? before[i * n + j] : 0.0f;
                for (size_t t = 0; t < k; t++) {
                    want += a[trans_a ? t * m + i : i * k + t] * b[trans_b ? j * k + t : t * n + j];
                }
                CHECK(c[i * n + j] == want, "%zu x %zu x %zu: [%zu, %zu] is %g, not %g", m, n, k, i,
                      j, (double)c[i * n + j], (double)want);
            }
        }
    }
    free(a);
    free(b);
    free(c);
    free(before);
}

int
main(void)
{
    /* Around a vector, the block of 12 rows, strips of 32 columns, blocks of 64, of 256 terms. */
    static const size_t shapes[][3] = {{1, 1, 1},     {3, 5, 7},     {12, 32, 64}, {13, 33, 65},
                                       {11, 31, 255}, {25, 65, 257}, {2, 97, 513}, {513, 17, 3},
                                       {1, 130, 600}, {40, 50, 0},   {0, 5, 3},    {5, 0, 3}};
    fs_exec exec = {0};
    if (!fs_isa_runs_here(FS_ISA_AVX512_BF16)) {
        return 0; /* every other table multiplies by the library, which rounds nothing */
    }
    CHECK_OK(fs_device_cpu(FS_ISA_AVX512_BF16, &exec.device));
    CHECK_OK(fs_pool_open(2, &exec.pool));
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        for (int way = 0; way < 4; way++) {
            check_shape(&exec, way & 1, way & 2, shapes[s][0], shapes[s][1], shapes[s][2]);
        }
    }
    fs_pool_close(exec.pool);
    return 0;
}
