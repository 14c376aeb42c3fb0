#include "measure.h"

#include <time.h>

#include "../base/arena.h"

/* Large enough that packing operands costs little, small enough that one product is a few
 * milliseconds of a core. */
enum { MEASURE_K = 512, MEASURE_N = 512 };

static double
now_seconds(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

fs_status
fs_gemm_measure(const fs_exec *exec, double seconds, double *out_flops)
{
    fs_status st = FS_OK;
    fs_arena arena = {0};
    float *a, *b, *c;
    double best = 0.0;
    size_t m = FS_GEMM_ROWS * (exec->pool == NULL ? 1 : fs_pool_threads(exec->pool));
    size_t a_nbytes = m * MEASURE_K * sizeof(float);
    size_t b_nbytes = MEASURE_K * MEASURE_N * sizeof(float);
    size_t c_nbytes = m * MEASURE_N * sizeof(float);
    if (!fs_gemm_is_loaded()) {
        return FS_FAIL(FS_ESTATE, "no CBLAS library is loaded");
    }
    FS_TRY(fs_arena_open(&arena, NULL, a_nbytes + b_nbytes + c_nbytes + 3 * FS_ARENA_ALIGN));
    FS_TRY_GOTO(fs_arena_take(&arena, FS_MEM_WORKSPACE, a_nbytes, &a), st, close);
    FS_TRY_GOTO(fs_arena_take(&arena, FS_MEM_WORKSPACE, b_nbytes, &b), st, close);
    FS_TRY_GOTO(fs_arena_take(&arena, FS_MEM_WORKSPACE, c_nbytes, &c), st, close);
    for (size_t i = 0; i < m * MEASURE_K; i++) {
        a[i] = (float)(i % 17) - 8.0f;
    }
    for (size_t i = 0; i < MEASURE_K * MEASURE_N; i++) {
        b[i] = (float)(i % 13) - 6.0f;
    }
    fs_gemm gemm = {.m = m, .n = MEASURE_N, .k = MEASURE_K, .a = a, .lda = MEASURE_K, .b = b,
                    .ldb = MEASURE_N, .c = c, .ldc = MEASURE_N};
    double flop = 2.0 * (double)m * MEASURE_N * MEASURE_K;
    double end = now_seconds() + seconds;
    double before = now_seconds();
    do {
        exec->device->gemm(exec, &gemm);
        double after = now_seconds();
        /* The best product: what the cores can do, not what else the machine did meanwhile. */
        best = flop / (after - before) > best ? flop / (after - before) : best;
        before = after;
    } while (before < end);
    *out_flops = best;
close:
    fs_arena_close(&arena);
    return st;
}
