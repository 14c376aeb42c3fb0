// sanitizers: tsan
// needs: c++
/* The CUDA library's device table, run by the stand-in for CUDA's runtime: the golden bits of the
 * CPU's tables, under shuffled orders of blocks, threads and streams. Operations are staged: arrays
 * to the device, the operation, arrays back. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/context.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "device/plugin.h"
#include "../cudasim/sim.h"
#include "kernel_cases.h"

const fs_device *fs_plugin_get(const fs_plugin_host *host);

static fs_exec gpu;
static fs_cuda_stream stream; /* gpu's */

/* Device memory with what host holds. NULL stays NULL. */
static void *
put(const void *host, size_t nbytes)
{
    void *memory = NULL;
    if (host != NULL) {
        CHECK_OK(fs_cuda_memory_open(nbytes, &memory));
        CHECK_OK(fs_cuda_copy(stream, memory, host, nbytes));
    }
    return memory;
}

/* Back to the host, if there, and gone. */
static void
take(void *host, void *memory, size_t nbytes)
{
    if (host != NULL) {
        CHECK_OK(fs_cuda_copy(stream, host, memory, nbytes));
    }
    CHECK_OK(fs_cuda_stream_wait(stream));
    CHECK_OK(fs_cuda_memory_close(memory, nbytes));
}

static void
staged_copy(const fs_exec *exec, void *dst, const void *src, size_t nbytes)
{
    (void)exec;
    void *in = put(src, nbytes), *out = NULL;
    CHECK_OK(fs_cuda_memory_open(nbytes, &out));
    gpu.device->copy(&gpu, out, in, nbytes);
    take(dst, out, nbytes);
    take(NULL, in, nbytes);
}

static void
staged_convert(const fs_exec *exec, void *dst, fs_dtype dst_dtype, const void *src,
               fs_dtype src_dtype, size_t n)
{
    (void)exec;
    size_t dst_nbytes = n * fs_dtype_nbytes(dst_dtype), src_nbytes = n * fs_dtype_nbytes(src_dtype);
    void *in = put(src, src_nbytes), *out = NULL;
    CHECK_OK(fs_cuda_memory_open(dst_nbytes, &out));
    gpu.device->convert(&gpu, out, dst_dtype, in, src_dtype, n);
    take(dst, out, dst_nbytes);
    take(NULL, in, src_nbytes);
}

static void
staged_split(const fs_exec *exec, uint16_t *bf16, uint16_t *remainder, const void *src,
             fs_dtype src_dtype, size_t n)
{
    (void)exec;
    void *in = put(src, n * fs_dtype_nbytes(src_dtype));
    void *upper = put(bf16, n * 2), *lower = put(remainder, n * 2);
    gpu.device->split(&gpu, upper, lower, in, src_dtype, n);
    take(bf16, upper, n * 2);
    take(remainder, lower, n * 2);
    take(NULL, in, n * fs_dtype_nbytes(src_dtype));
}

static void
staged_join(const fs_exec *exec, void *dst, fs_dtype dst_dtype, const uint16_t *bf16,
            const uint16_t *remainder, size_t n)
{
    (void)exec;
    size_t nbytes = n * fs_dtype_nbytes(dst_dtype);
    void *upper = put(bf16, n * 2), *lower = put(remainder, n * 2), *out = put(dst, nbytes);
    gpu.device->join(&gpu, out, dst_dtype, upper, lower, n);
    take(dst, out, nbytes);
    take(NULL, upper, n * 2);
    take(NULL, lower, n * 2);
}

/* Runs a sum, or a sum of squares: sum->acc is NULL, and there is one source. */
static fs_sums
staged_sums(const fs_sum *sum)
{
    fs_sums result;
    void *src[8], *found = NULL;
    size_t n = sum->n;
    size_t src_nbytes = n * fs_dtype_nbytes(sum->src_dtype);
    size_t acc_nbytes = n * fs_dtype_nbytes(sum->acc_dtype);
    CHECK(sum->src_n <= 8, "%zu sources", sum->src_n);
    for (size_t r = 0; r < sum->src_n; r++) {
        src[r] = put(sum->src[r], src_nbytes);
    }
    found = put(sum->found, sizeof result);
    if (sum->acc == NULL) {
        gpu.device->sumsq(&gpu, src[0], sum->src_dtype, n, found);
    } else {
        fs_sum there = *sum;
        there.src = (const void *const *)src;
        there.acc = put(sum->acc, acc_nbytes);
        there.found = found;
        gpu.device->sum(&gpu, &there);
        take(sum->acc, there.acc, acc_nbytes);
    }
    for (size_t r = 0; r < sum->src_n; r++) {
        take(NULL, src[r], sum->src[r] == NULL ? 0 : src_nbytes);
    }
    take(&result, found, sizeof result);
    return result;
}

static void
staged_sum(const fs_exec *exec, const fs_sum *sum)
{
    (void)exec;
    *sum->found = staged_sums(sum);
}

static void
staged_sumsq(const fs_exec *exec, const void *x, fs_dtype dtype, size_t n, fs_sums *out)
{
    (void)exec;
    fs_sum sum = {.src = &x, .src_n = 1, .src_dtype = dtype, .acc_dtype = FS_F32, .n = n,
                  .found = out};
    *out = staged_sums(&sum);
}

static void
staged_find_nonfinite(const fs_exec *exec, const void *x, fs_dtype dtype, size_t n, uint64_t *out)
{
    (void)exec;
    void *found = NULL, *in = put(x, n * fs_dtype_nbytes(dtype));
    CHECK_OK(fs_cuda_memory_open(sizeof *out, &found));
    gpu.device->find_nonfinite(&gpu, in, dtype, n, found);
    take(NULL, in, n * fs_dtype_nbytes(dtype));
    take(out, found, sizeof *out);
}

static void
staged_update(const fs_exec *exec, const fs_update *update)
{
    (void)exec;
    size_t n = update->n, moments = n * fs_dtype_nbytes(update->moment_dtype);
    size_t weights = n * fs_dtype_nbytes(update->weight_dtype);
    fs_update u = *update;
    u.grad = put(u.grad, n * fs_dtype_nbytes(u.grad_dtype));
    u.master = put(u.master, n * 4);
    u.remainder = put(u.remainder, n * 2);
    u.weight = put(u.weight, weights);
    u.weight_read = put(u.weight_read, weights);
    u.moment1 = put(u.moment1, moments);
    u.moment2 = put(u.moment2, moments);
    u.moment3 = put(u.moment3, moments);
    gpu.device->update(&gpu, &u);
    take(update->master, u.master, u.master == NULL ? 0 : n * 4);
    take(update->remainder, u.remainder, u.remainder == NULL ? 0 : n * 2);
    take(update->weight, u.weight, u.weight == NULL ? 0 : weights);
    take(update->moment1, u.moment1, u.moment1 == NULL ? 0 : moments);
    take(update->moment2, u.moment2, u.moment2 == NULL ? 0 : moments);
    take(update->moment3, u.moment3, u.moment3 == NULL ? 0 : moments);
    take(NULL, (void *)(uintptr_t)u.weight_read, u.weight_read == NULL ? 0 : weights);
    take(NULL, (void *)(uintptr_t)u.grad, n * fs_dtype_nbytes(u.grad_dtype));
}

static void
staged_combine(const fs_exec *exec, int op, fs_dtype dtype, void *acc, const void *src, size_t n)
{
    (void)exec;
    size_t nbytes = n * fs_dtype_nbytes(dtype);
    void *a = put(acc, nbytes), *b = put(src, nbytes);
    gpu.device->combine(&gpu, op, dtype, a, b, n);
    take(acc, a, nbytes);
    take(NULL, b, nbytes);
}

static const fs_device staged = {
    .magic = FS_DEVICE_MAGIC,
    .abi = FS_DEVICE_ABI,
    .struct_nbytes = sizeof(fs_device),
    .name = "cuda, staged",
    .copy = staged_copy,
    .convert = staged_convert,
    .split = staged_split,
    .join = staged_join,
    .sum = staged_sum,
    .update = staged_update,
    .sumsq = staged_sumsq,
    .find_nonfinite = staged_find_nonfinite,
    .combine = staged_combine,
};

// ---- refusals -----------------------------------------------------------------------------------

static void
test_refusals(void)
{
    float x[4] = {0};
    fs_sums result;
    fs_sum many = {.src_n = FS_CUDA_SOURCES_MAX + 1, .src_dtype = FS_F32, .acc_dtype = FS_F32};
    fs_update u = {.hyper = {.rule = FS_RULE_ADAMW}, .grad = x, .weight = x, .n = 4};
    fs_update split = {.hyper = {.rule = FS_RULE_SGD}, .grad = x, .weight = x, .n = 4,
                       .remainder = (uint16_t *)(void *)x};
    CHECK_STATUS(fs_cuda_convert(NULL, x, FS_F32, x, FS_BF16, 1), FS_EINVAL);
    CHECK_STATUS(fs_cuda_convert(stream, x, FS_I32, x, FS_F32, 1), FS_ETYPE);
    CHECK_STATUS(fs_cuda_convert(stream, x, FS_F32, x, FS_F64, SIZE_MAX / 4), FS_EINVAL);
    CHECK_STATUS(fs_cuda_combine(stream, 9, FS_F32, x, x, 1), FS_EINVAL);
    CHECK_STATUS(fs_cuda_sum(stream, &many, NULL, 0), FS_EUNSUPPORTED);
    CHECK_STATUS(fs_cuda_sumsq(stream, x, FS_F32, 1025, &result, x, 16), FS_EINVAL);
    CHECK_STATUS(fs_cuda_update(stream, &u), FS_EINVAL); /* no moments */
    u.hyper.rule = FS_RULE_COUNT;
    CHECK_STATUS(fs_cuda_update(stream, &u), FS_EINVAL);
    CHECK_STATUS(fs_cuda_update(stream, &split), FS_EINVAL); /* fp32 weights */
    CHECK(fs_sim_kernels() == 0, "%zu kernels ran after refusals", fs_sim_kernels());
}

/* More tiles than a group has, and more elements than one block looks for a bad source in: the
 * CPU's sums to the bit, and the first source that is not finite, whoever finds it. */
static void
test_groups(void)
{
    enum { SOURCES = 3 };
    size_t n = (FS_GROUP_TILES + 3) * FS_TILE_N + 7, nbytes = n * sizeof(float);
    const fs_device *cpu;
    float *src[SOURCES], *acc = malloc(nbytes);
    CHECK_OK(fs_device_choose(&cpu));
    for (size_t r = 0; r < SOURCES; r++) {
        src[r] = malloc(nbytes);
        CHECK(src[r] != NULL && acc != NULL, "no memory");
        for (size_t i = 0; i < n; i++) {
            src[r][i] = (float)((i * 2654435761u + r * 40503u) % 20011) / 10007.0f - 1.0f;
        }
    }
    for (int bad = 0; bad < 2; bad++) {
        fs_exec host = {.device = cpu};
        fs_sums of_cpu = {.bad_source = -1}, of_gpu = {.bad_source = -1};
        fs_sum sum = {.src = (const void *const *)src, .src_n = SOURCES, .src_dtype = FS_F32,
                      .acc = acc, .acc_dtype = FS_F32, .n = n, .found = &of_cpu};
        if (bad) {
            src[1][n - 1] = INFINITY;
            src[2][0] = NAN;
        }
        cpu->sum(&host, &sum);
        sum.found = &of_gpu;
        of_gpu = staged_sums(&sum);
        CHECK(bad || memcmp(&of_gpu.absmax, &of_cpu.absmax, sizeof(double)) == 0, "%g, not %g",
              of_gpu.absmax, of_cpu.absmax);
        CHECK(bad || memcmp(&of_gpu.sumsq, &of_cpu.sumsq, sizeof(double)) == 0, "%a, not %a",
              of_gpu.sumsq, of_cpu.sumsq);
        CHECK(of_gpu.finite == (bad ? 0 : 1) && of_gpu.finite == of_cpu.finite, "finite: %d",
              (int)of_gpu.finite);
        CHECK(of_gpu.bad_source == (bad ? 1 : -1) && of_gpu.bad_source == of_cpu.bad_source,
              "bad source %d", (int)of_gpu.bad_source);
    }
    for (size_t r = 0; r < SOURCES; r++) {
        free(src[r]);
    }
    free(acc);
}

/* Sanitizers make fibers slow: one order is enough for what they look for. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SEEDS 1
#else
#define SEEDS 3
#endif

int
main(void)
{
    const fs_plugin_host host = {FS_PLUGIN_ABI, sizeof host, fs_status_here, {NULL, NULL}};
    gpu.device = fs_plugin_get(&host);
    const fs_runtime *runtime = gpu.device->runtime;
    CHECK_OK(runtime->context_open(0, &gpu.context));
    stream = fs_cuda_exec_stream(&gpu);
    test_refusals();
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        fs_exec exec = {.device = &staged};
        fs_sim_reset(seed, seed == 2 ? FS_SIM_LATE : FS_SIM_SHUFFLED, (size_t)1 << 30);
        size_t scratch_nbytes = runtime->sum_scratch_nbytes((size_t)1 << 20);
        CHECK_OK(runtime->reserve(gpu.context, gpu.stream, scratch_nbytes));
        size_t held = fs_cuda_memory_held();
        check_table(&exec);
        CHECK_OK(runtime->check(gpu.context));
        CHECK(fs_sim_kernels() > 500, "only %zu kernels ran", fs_sim_kernels());
        CHECK(fs_cuda_memory_held() == held, "%zu bytes are still held", fs_cuda_memory_held());
    }
    test_groups();
    runtime->context_close(gpu.context);
    CHECK(fs_cuda_memory_held() == 0, "%zu bytes are still held", fs_cuda_memory_held());
    return 0;
}
