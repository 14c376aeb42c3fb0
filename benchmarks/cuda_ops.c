/* One operation of the device table on a GPU, checked and timed.
 *
 *     cuda_ops LIBRARY describe                  name, bytes free and bytes in all, a line each
 *     cuda_ops LIBRARY OPERATION NAME=NUMBER...  answers "verify" and "sample" on standard input
 *
 * OPERATION: copy nbytes; step numel; sum numel, sources; gemm m, n, k; attention, attention_grad
 * batch, length, q_heads, kv_heads, head_dim; and those of cuda_rows.c. All take times, the
 * operations of one sample. verify compares with the CPU's table bit by bit, or with fp64 sums;
 * sample answers with seconds of one operation, from when the device is idle until it is idle
 * again. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/math.h"
#include "device/plugin.h"

#include "cuda_ops.h"

#define CHECKED_N ((size_t)1 << 16) /* elements of large arrays that verify looks at */
#define LR 1e-3f

bench b;

void
die(const char *text)
{
    printf("error %s\n", text);
    exit(1);
}

static void
must(fs_status status)
{
    if (status != FS_OK) {
        die(fs_status_message());
    }
}

static void
finish(void)
{
    b.runtime->record(&b.exec, b.done);
    while (!b.runtime->is_done(b.exec.context, b.done)) {
    }
    must(b.runtime->check(b.exec.context));
}

// ---- arrays -------------------------------------------------------------------------------------

void *
host(size_t nbytes)
{
    void *memory = malloc(nbytes == 0 ? 1 : nbytes);
    if (memory == NULL) {
        die("no host memory");
    }
    return memory;
}

void *
room(const char *what, size_t nbytes)
{
    if (b.arrays_n == ARRAYS_MAX) {
        die("too many arrays");
    }
    must(b.runtime->memory_open(b.exec.context, what, nbytes, &b.arrays[b.arrays_n]));
    b.nbytes[b.arrays_n] = nbytes;
    return b.arrays[b.arrays_n++];
}

void *
drawn(const char *what, size_t n, fs_dtype dtype, uint64_t seed, float size)
{
    size_t each = fs_dtype_nbytes(dtype), period = n < 1000003 ? n : 1000003;
    float *x = host(period * sizeof *x);
    unsigned char *bytes = host(period * each);
    unsigned char *device = room(what, n * each);
    for (size_t i = 0; i < period; i++) {
        uint32_t bits = (uint32_t)(fs_mix_u64(seed * 0x9e3779b97f4a7c15u + i) >> 40);
        x[i] = size * ((float)bits / 0x1p23f - 1.0f);
    }
    b.cpu.device->convert(&b.cpu, bytes, dtype, x, FS_F32, period);
    for (size_t at = 0; at < n; at += period) {
        b.runtime->copy(&b.exec, device + at * each, bytes, fs_min_size(period, n - at) * each);
    }
    finish();
    free(bytes);
    free(x);
    return device;
}

void *
upload(const char *what, const void *from, size_t nbytes)
{
    void *device = room(what, nbytes);
    b.runtime->copy(&b.exec, device, from, nbytes);
    finish();
    return device;
}

void
fetch(void *to, const void *device, size_t nbytes)
{
    void *pinned = NULL;
    must(b.runtime->pinned_open(b.exec.context, nbytes, &pinned));
    b.runtime->copy(&b.exec, pinned, device, nbytes);
    finish();
    memcpy(to, pinned, nbytes);
    b.runtime->pinned_close(b.exec.context, pinned);
}

float *
fetch_f32(const void *device, size_t n, fs_dtype dtype)
{
    void *bytes = host(n * fs_dtype_nbytes(dtype));
    float *x = host(n * sizeof *x);
    fetch(bytes, device, n * fs_dtype_nbytes(dtype));
    b.cpu.device->convert(&b.cpu, x, FS_F32, bytes, dtype, n);
    free(bytes);
    return x;
}

void
same(const char *what, const void *got, const void *want, size_t nbytes)
{
    if (memcmp(got, want, nbytes) != 0) {
        die(what);
    }
}

// ---- copy ---------------------------------------------------------------------------------------

static void
run_copy(bench *at)
{
    at->runtime->copy(&at->exec, at->arrays[1], at->arrays[0], at->numel);
}

static void
verify_copy(bench *at)
{
    size_t n = fs_min_size(at->numel, CHECKED_N);
    unsigned char *from = host(n), *to = host(n);
    run_copy(at);
    fetch(from, at->arrays[0], n);
    fetch(to, at->arrays[1], n);
    same("the copy differs", to, from, n);
    free(from);
    free(to);
}

// ---- step ---------------------------------------------------------------------------------------

static void
run_step(bench *at)
{
    at->exec.device->update(&at->exec, &at->update);
}

/* The first elements, on the CPU too: the same bits. */
static void
verify_step(bench *at)
{
    size_t n = fs_min_size(at->numel, CHECKED_N);
    fs_update update = at->update;
    float *grad = fetch_f32(update.grad, n, FS_F32), *master = fetch_f32(update.master, n, FS_F32);
    float *m = fetch_f32(update.moment1, n, FS_F32), *v = fetch_f32(update.moment2, n, FS_F32);
    uint16_t *weight = host(2 * n), *got = host(2 * n);
    update.grad = grad;
    update.master = master;
    update.moment1 = m;
    update.moment2 = v;
    update.weight = weight;
    update.n = n;
    at->cpu.device->update(&at->cpu, &update);
    run_step(at);
    float *found = fetch_f32(at->update.master, n, FS_F32);
    fetch(got, at->update.weight, 2 * n);
    same("masters differ from the CPU's", found, master, n * sizeof *found);
    same("weights differ from the CPU's", got, weight, 2 * n);
    free(found);
    found = fetch_f32(at->update.moment2, n, FS_F32);
    same("moments differ from the CPU's", found, v, n * sizeof *found);
    free(found);
    free(grad);
    free(master);
    free(m);
    free(v);
    free(weight);
    free(got);
}

static void
open_step(size_t numel)
{
    b.numel = numel;
    b.update = (fs_update){
        .hyper = {.rule = FS_RULE_ADAMW, .lr = LR, .decay = 1.0f - LR * 0.1f, .beta1 = 0.9f,
                  .beta2 = 0.999f, .one_minus_beta1 = 0.1f, .one_minus_beta2 = 0.001f,
                  .eps = 1e-8f, .step_size = LR / 0.1f, .inv_sqrt_bc2 = 31.6227766f},
        .grad_scale = 0.5f, .grad_dtype = FS_F32, .weight_dtype = FS_BF16, .moment_dtype = FS_F32,
        .n = numel,
    };
    b.update.grad = drawn("gradients", numel, FS_F32, 1, 1.0f);
    b.update.master = drawn("masters", numel, FS_F32, 2, 1.0f);
    b.update.moment1 = drawn("first moments", numel, FS_F32, 3, 1e-2f);
    b.update.moment2 = room("second moments", numel * sizeof(float));
    b.update.weight = room("weights", numel * 2);
    b.run = run_step;
    b.verify = verify_step;
}

// ---- sum ----------------------------------------------------------------------------------------

static void
run_sum(bench *at)
{
    at->exec.device->sum(&at->exec, &at->sum);
}

static void
verify_sum(bench *at)
{
    size_t n = fs_min_size(at->numel, CHECKED_N);
    void *src[64];
    float *acc = host(n * sizeof *acc);
    for (size_t r = 0; r < at->sources; r++) {
        src[r] = host(2 * n);
        fetch(src[r], at->sources_at[r], 2 * n);
    }
    fs_sum sum = at->sum;
    fs_sums found = {.bad_source = -1};
    sum.src = (const void *const *)src;
    sum.acc = acc;
    sum.n = n;
    sum.found = &found;
    at->cpu.device->sum(&at->cpu, &sum);
    run_sum(at);
    float *got = fetch_f32(at->sum.acc, n, FS_F32);
    same("the sum differs from the CPU's", got, acc, n * sizeof *got);
    if (at->found->finite != 1 || (n == at->numel && at->found->sumsq != found.sumsq)) {
        die("the sum's norm differs from the CPU's");
    }
    for (size_t r = 0; r < at->sources; r++) {
        free(src[r]);
    }
    free(got);
    free(acc);
}

static void
open_sum(size_t numel, size_t sources)
{
    if (sources == 0 || sources > 64 || sources + 1 > ARRAYS_MAX) {
        die("sources: 1 to 11");
    }
    b.numel = numel;
    b.sources = sources;
    for (size_t r = 0; r < sources; r++) {
        b.sources_at[r] = drawn("a rank's gradients", numel, FS_BF16, 10 + r, 1.0f);
    }
    must(b.runtime->pinned_open(b.exec.context, sizeof *b.found, (void **)&b.found));
    must(b.runtime->reserve(b.exec.context, FS_STREAM_COMPUTE,
                            b.runtime->sum_scratch_nbytes(numel)));
    b.sum = (fs_sum){.src = b.sources_at, .src_n = sources, .src_dtype = FS_BF16,
                     .acc = room("sums", numel * sizeof(float)), .acc_dtype = FS_F32, .n = numel,
                     .found = b.found};
    b.run = run_sum;
    b.verify = verify_sum;
}

// ---- gemm ---------------------------------------------------------------------------------------

static void
run_gemm(bench *at)
{
    at->exec.device->gemm(&at->exec, &at->gemm);
}

/* got against want, which was summed in fp64 from the same rounded operands; size: of the terms. */
static void
near(const char *what, double got, double want, double size)
{
    double bound = fabs(want) / 128 + size / 4096; /* bf16 results, and what fp32 sums lose */
    if (!(fabs(got - want) <= bound)) {
        static char text[200];
        (void)snprintf(text, sizeof text, "%s: %g, not %g", what, got, want);
        die(text);
    }
}

static void
verify_gemm(bench *at)
{
    const fs_gemm *g = &at->gemm;
    run_gemm(at);
    for (size_t i = 0; i < 16; i++) {
        size_t row = i * (g->m - 1) / 15, column = (15 - i) * (g->n - 1) / 15;
        float *x = fetch_f32((const uint16_t *)g->a + row * g->lda, g->k, FS_BF16);
        float *y = fetch_f32((const uint16_t *)g->b + column * g->ldb, g->k, FS_BF16);
        float *got = fetch_f32((const uint16_t *)g->c + row * g->ldc + column, 1, FS_BF16);
        double want = 0.0, size = 0.0;
        for (size_t k = 0; k < g->k; k++) {
            want += (double)x[k] * y[k];
            size += fabs((double)x[k] * y[k]);
        }
        near("a product", got[0], want, size);
        free(x);
        free(y);
        free(got);
    }
}

/* As a layer's forward: rows of activations by rows of weights. */
static void
open_gemm(size_t m, size_t n, size_t k)
{
    must(b.runtime->reserve(b.exec.context, FS_STREAM_COMPUTE, b.runtime->gemm_scratch_nbytes()));
    b.gemm = (fs_gemm){.trans_b = true, .m = m, .n = n, .k = k, .dtype = FS_BF16,
                       .c_dtype = FS_BF16, .lda = k, .ldb = k, .ldc = n};
    b.gemm.a = drawn("activations", m * k, FS_BF16, 1, 1.0f);
    b.gemm.b = drawn("weights", n * k, FS_BF16, 2, 1.0f);
    b.gemm.c = room("products", m * n * 2);
    b.run = run_gemm;
    b.verify = verify_gemm;
}

// ---- attention ----------------------------------------------------------------------------------

static void
run_attention(bench *at)
{
    if (at->backward) {
        at->exec.device->model.attention_grad(&at->exec, &at->attention);
    } else {
        at->exec.device->model.attention(&at->exec, &at->attention);
    }
}

/* Some rows of the result, in fp64 from the same rounded q, k and v. */
static void
verify_forward(bench *at)
{
    const fs_attention *a = &at->attention;
    size_t dim = a->padded_dim, group = a->q_heads / a->kv_heads;
    double *score = host(a->length * sizeof *score);
    at->exec.device->model.attention(&at->exec, a);
    for (size_t i = 0; i < 6; i++) {
        size_t head = i * (a->q_heads - 1) / 5, row = i * (a->length - 1) / 5;
        size_t q_at = (head * a->length + row) * dim, k_at = head / group * a->length * dim;
        float *q = fetch_f32((const uint16_t *)a->q + q_at, dim, FS_BF16);
        float *k = fetch_f32((const uint16_t *)a->k + k_at, (row + 1) * dim, FS_BF16);
        float *v = fetch_f32((const uint16_t *)a->v + k_at, (row + 1) * dim, FS_BF16);
        float *got = fetch_f32((const uint16_t *)a->out + (row * a->q_heads + head) * a->head_dim,
                               a->head_dim, FS_BF16);
        double most = -INFINITY, total = 0.0;
        for (size_t j = 0; j <= row; j++) {
            score[j] = 0.0;
            for (size_t d = 0; d < dim; d++) {
                score[j] += (double)q[d] * k[j * dim + d];
            }
            most = fmax(most, score[j]);
        }
        for (size_t j = 0; j <= row; j++) {
            score[j] = exp(score[j] - most);
            total += score[j];
        }
        for (size_t d = 0; d < a->head_dim; d++) {
            double want = 0.0, size = 0.0;
            for (size_t j = 0; j <= row; j++) {
                want += score[j] / total * v[j * dim + d];
                size += score[j] / total * fabs((double)v[j * dim + d]);
            }
            near("attention", got[d], want, 32 * size); /* bf16 weights of the softmax */
        }
        free(q);
        free(k);
        free(v);
        free(got);
    }
    free(score);
}

/* The gradients of a sum that weighs the results by dout: along v, exactly (it is linear in v), the
 * sum over all rows of dv v equals that of dout out. */
static void
verify_backward(bench *at)
{
    const fs_attention *a = &at->attention;
    verify_forward(at);
    run_attention(at);
    size_t keys_n = a->kv_heads * a->length * a->padded_dim, rows_n = a->length * a->q_heads;
    float *v = fetch_f32(a->v, keys_n, FS_BF16), *dv = fetch_f32(a->dv, keys_n, FS_BF16);
    float *out = fetch_f32(a->out, rows_n * a->head_dim, FS_BF16);
    float *dout = fetch_f32(a->dout, rows_n * a->head_dim, FS_BF16);
    double left = 0.0, right = 0.0, size = 0.0;
    for (size_t i = 0; i < keys_n; i++) {
        left += (double)v[i] * dv[i];
        size += fabs((double)v[i] * dv[i]);
    }
    for (size_t i = 0; i < rows_n * a->head_dim; i++) {
        right += (double)out[i] * dout[i];
    }
    near("attention's gradient along v", left, right, size);
    free(v);
    free(dv);
    free(out);
    free(dout);
}

static void
open_attention(size_t batch, size_t length, size_t q_heads, size_t kv_heads, size_t head_dim,
               bool backward)
{
    size_t dim = fs_padded_dim(head_dim), q_n = batch * q_heads * length * dim;
    size_t k_n = batch * kv_heads * length * dim, out_n = batch * length * q_heads * head_dim;
    if (dim != head_dim) {
        die("head_dim: a multiple of 16");
    }
    if (b.exec.device->model.attention == NULL) {
        die("this library has no attention");
    }
    b.backward = backward;
    b.attention = (fs_attention){
        .batch = batch, .length = length, .q_heads = q_heads, .kv_heads = kv_heads,
        .head_dim = head_dim, .padded_dim = dim, .kv_rows = length, .dtype = FS_BF16,
    };
    fs_attention *a = &b.attention;
    a->q = drawn("queries", q_n, FS_BF16, 1, 1.5f / sqrtf((float)head_dim));
    a->k = drawn("keys", k_n, FS_BF16, 2, 1.5f);
    a->v = drawn("values", k_n, FS_BF16, 3, 1.0f);
    a->out = room("results", out_n * 2);
    a->lse = room("sums", batch * q_heads * length * sizeof(float));
    if (backward) {
        a->dout = drawn("gradients", out_n, FS_BF16, 4, 1.0f);
        a->delta = room("deltas", batch * q_heads * length * sizeof(float));
        a->dq = room("gradients of queries", q_n * 2);
        a->dk = room("gradients of keys", k_n * 2);
        a->dv = room("gradients of values", k_n * 2);
    }
    b.run = run_attention;
    b.verify = backward ? verify_backward : verify_forward;
}

// ---- the program --------------------------------------------------------------------------------

size_t
option(int argc, char **argv, const char *name)
{
    size_t length = strlen(name);
    for (int i = 3; i < argc; i++) {
        if (strncmp(argv[i], name, length) == 0 && argv[i][length] == '=') {
            return (size_t)strtoull(argv[i] + length + 1, NULL, 10);
        }
    }
    (void)fprintf(stderr, "no %s=NUMBER\n", name);
    exit(2);
}

static void
describe(void)
{
    char text[256] = "";
    fs_device_memory memory;
    must(b.runtime->describe(0, text, sizeof text));
    must(b.runtime->memory(b.exec.context, &memory));
    printf("%s\n%zu\n%zu\n", text, memory.free, memory.total);
}

static void
open_operation(const char *what, int argc, char **argv)
{
#define OPTION(name) option(argc, argv, #name)
    b.times = OPTION(times);
    if (strcmp(what, "copy") == 0) {
        b.numel = OPTION(nbytes);
        (void)drawn("source", b.numel / 4, FS_F32, 1, 1.0f);
        (void)room("target", b.numel);
        b.run = run_copy;
        b.verify = verify_copy;
    } else if (strcmp(what, "step") == 0) {
        open_step(OPTION(numel));
    } else if (strcmp(what, "sum") == 0) {
        open_sum(OPTION(numel), OPTION(sources));
    } else if (strcmp(what, "gemm") == 0) {
        open_gemm(OPTION(m), OPTION(n), OPTION(k));
    } else if (strcmp(what, "attention") == 0 || strcmp(what, "attention_grad") == 0) {
        open_attention(OPTION(batch), OPTION(length), OPTION(q_heads), OPTION(kv_heads),
                       OPTION(head_dim), strcmp(what, "attention_grad") == 0);
    } else if (!open_rows(what, argc, argv)) {
        (void)fprintf(stderr, "no operation %s\n", what);
        exit(2);
    }
#undef OPTION
}

static double
seconds_now(void)
{
    struct timespec now;
    (void)timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void
answer(const char *command)
{
    if (strcmp(command, "verify\n") == 0) {
        b.verify(&b);
        finish();
        printf("ok\n");
    } else if (strcmp(command, "sample\n") == 0) {
        double started = seconds_now();
        for (size_t i = 0; i < b.times; i++) {
            b.run(&b);
        }
        finish();
        printf("ok %.9f\n", (seconds_now() - started) / (double)b.times);
    } else {
        die("expected verify or sample");
    }
}

int
main(int argc, char **argv)
{
    char command[64];
    int count = 0;
    if (argc < 3) {
        (void)fprintf(stderr, "usage: cuda_ops LIBRARY describe|OPERATION NAME=NUMBER...\n");
        return 2;
    }
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    static const fs_plugin_libraries libraries; /* what the loader finds */
    fs_isa isa;
    fs_status status = fs_isa_choose(&isa);
    status = status == FS_OK ? fs_device_cpu(isa, &b.cpu.device) : status;
    status = status == FS_OK ? fs_plugin_load(argv[1], &libraries, &b.exec.device) : status;
    b.runtime = status == FS_OK ? b.exec.device->runtime : NULL;
    status = status == FS_OK ? b.runtime->count(&count) : status;
    status = status == FS_OK ? b.runtime->context_open(0, &b.exec.context) : status;
    status = status == FS_OK ? b.runtime->event_open(b.exec.context, &b.done) : status;
    if (status != FS_OK) {
        (void)fprintf(stderr, "%s\n", fs_status_message());
        return 1;
    }
    if (strcmp(argv[2], "describe") == 0) {
        describe();
    } else {
        open_operation(argv[2], argc, argv);
        while (fgets(command, sizeof command, stdin) != NULL) {
            answer(command);
        }
    }
    for (size_t i = 0; i < b.arrays_n; i++) {
        b.runtime->memory_close(b.exec.context, b.arrays[i], b.nbytes[i]);
    }
    b.runtime->pinned_close(b.exec.context, b.found);
    b.runtime->event_close(b.exec.context, b.done);
    b.runtime->context_close(b.exec.context);
    return 0;
}
