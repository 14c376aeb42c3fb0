#include "measure.h"

#include <sched.h>
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
fs_gemm_measure(const fs_exec *exec, fs_dtype rounding, double seconds, double *out_flops)
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
    fs_gemm gemm = {.m = m, .n = MEASURE_N, .k = MEASURE_K, .rounding = rounding, .a = a,
                    .lda = MEASURE_K, .b = b, .ldb = MEASURE_N, .c = c, .ldc = MEASURE_N};
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

// ---- devices ------------------------------------------------------------------------------------

enum { DEVICE_SMALLEST = 128, DEVICE_LARGEST = 8192 };

/* Longer than any product here takes; a device that is stuck must not hold us for ever. */
#define PATIENCE_S 60.0

/* Seconds of one product of n x n, waited for. */
static fs_status
time_product(const fs_exec *exec, fs_event *event, const fs_gemm *gemm, double *out_seconds)
{
    const fs_runtime *runtime = exec->device->runtime;
    double before = now_seconds();
    exec->device->gemm(exec, gemm);
    runtime->record(exec, event);
    while (!runtime->is_done(exec->context, event)) {
        if (now_seconds() - before > PATIENCE_S) {
            return FS_FAIL(FS_ESTATE, "the device has not done a product of %zu x %zu in %g s",
                           gemm->m, gemm->n, PATIENCE_S);
        }
        (void)sched_yield();
    }
    *out_seconds = now_seconds() - before;
    return runtime->check(exec->context);
}

/* Products of n x n, for about seconds and once at least: the best rate and the last one's time. */
static fs_status
measure_at(const fs_exec *exec, fs_event *event, fs_dtype dtype, size_t n, double seconds,
           double *best, double *out_took)
{
    const fs_runtime *runtime = exec->device->runtime;
    size_t each = n * n * fs_dtype_nbytes(dtype);
    char *a;
    void *memory;
    FS_TRY(runtime->memory_open(exec->context, "measuring products", 3 * each, &memory));
    a = memory;
    fs_gemm gemm = {.m = n, .n = n, .k = n, .dtype = dtype, .c_dtype = dtype, .a = a, .lda = n,
                    .b = a + each, .ldb = n, .c = a + 2 * each, .ldc = n};
    double flop = 2.0 * (double)n * (double)n * (double)n, end = now_seconds() + seconds;
    fs_status st;
    do {
        st = time_product(exec, event, &gemm, out_took);
        *best = st == FS_OK && flop / *out_took > *best ? flop / *out_took : *best;
    } while (st == FS_OK && now_seconds() < end);
    runtime->memory_close(exec->context, memory, 3 * each);
    return st;
}

fs_status
fs_device_gemm_measure(const fs_exec *exec, fs_dtype dtype, double seconds, double *out_flops)
{
    const fs_runtime *runtime = exec->device->runtime;
    fs_event *event;
    double took = 0.0;
    size_t n = DEVICE_SMALLEST;
    *out_flops = 0.0;
    FS_TRY(runtime->reserve(exec->context, exec->stream, runtime->gemm_scratch_nbytes()));
    FS_TRY(runtime->event_open(exec->context, &event));
    /* The first product of all starts the library; then larger ones, while they are short. */
    fs_status st = measure_at(exec, event, dtype, n, 0.0, out_flops, &took);
    do {
        n = n == DEVICE_LARGEST ? n : 2 * n;
        st = st == FS_OK ? measure_at(exec, event, dtype, n, 0.0, out_flops, &took) : st;
    } while (st == FS_OK && n < DEVICE_LARGEST && took < seconds / 20.0);
    st = st == FS_OK ? measure_at(exec, event, dtype, n, seconds / 2.0, out_flops, &took) : st;
    runtime->event_close(exec->context, event);
    return st;
}
