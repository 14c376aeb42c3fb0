// sanitizers: tsan
// needs: c++
/* The model's operations of csrc/cuda, run by the stand-in for CUDA's runtime, against the CPU's:
 * the same bits, but for the payload of NaN; with 16-bit activations, the bits of the CPU's results
 * rounded once. What is right is for tests/model, which compares the CPU's with float64 NumPy. */
#include <string.h>

#include "../cudasim/sim.h"
#include "base/math.h"
#include "check.h"
#include "cuda/device.h"
#include "cuda/model.h"

static fs_cuda_stream stream;
static fs_exec cpu;
static fs_dtype act; /* of activations on the device; on the host they are fp32 */

// ---- arrays on both sides -----------------------------------------------------------------------

/* One array on the host, for the CPU's table, and its twin on the device. */
typedef struct twin {
    const char *name;
    void *host, *device;
    size_t nbytes; /* of host */
    fs_dtype dtype; /* of device, where host is fp32 */
} twin;

#define TWINS_MAX 16
static twin twins[TWINS_MAX];
static size_t twins_n;
static uint64_t state;

static uint32_t
next_u32(void)
{
    state += 0x9e3779b97f4a7c15u;
    return (uint32_t)(fs_mix_u64(state) >> 32);
}

static twin *
make(const char *name, size_t nbytes)
{
    twin *t = &twins[twins_n++];
    CHECK(twins_n <= TWINS_MAX, "%zu arrays", twins_n);
    *t = (twin){.name = name, .host = calloc(nbytes == 0 ? 1 : nbytes, 1), .nbytes = nbytes};
    CHECK(t->host != NULL, "%zu bytes", nbytes);
    return t;
}

/* Bytes of the twin on the device, and what they should be. */
static size_t
device_nbytes(const twin *t)
{
    return t->dtype == FS_F32 ? t->nbytes : t->nbytes / 2;
}

static const void *
rounded(const twin *t, void *halves)
{
    if (t->dtype == FS_F32) {
        return t->host;
    }
    cpu.device->convert(&cpu, halves, t->dtype, t->host, FS_F32, t->nbytes / sizeof(float));
    return halves;
}

/* To the device as it is now. */
static twin *
sent(twin *t)
{
    void *halves = malloc(t->nbytes + 1);
    CHECK(halves != NULL, "%zu bytes", t->nbytes);
    CHECK_OK(fs_cuda_memory_open(device_nbytes(t), &t->device));
    CHECK_OK(fs_cuda_copy(stream, t->device, rounded(t, halves), device_nbytes(t)));
    CHECK_OK(fs_cuda_stream_wait(stream));
    free(halves);
    return t;
}

/* n floats between -size and size. */
static twin *
floats(const char *name, size_t n, float size)
{
    twin *t = make(name, n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        ((float *)t->host)[i] = ((float)next_u32() / 0x1p31f - 1.0f) * size;
    }
    return sent(t);
}

/* An array of activations: the device's in their dtype, the host's the same numbers in fp32. */
static twin *
acts(const char *name, size_t n, float size)
{
    twin *t = make(name, n * sizeof(float));
    t->dtype = act;
    void *halves = malloc(t->nbytes + 1);
    CHECK(halves != NULL, "%zu elements", n);
    for (size_t i = 0; i < n; i++) {
        ((float *)t->host)[i] = ((float)next_u32() / 0x1p31f - 1.0f) * size;
    }
    if (act != FS_F32) {
        cpu.device->convert(&cpu, t->host, FS_F32, rounded(t, halves), act, n);
    }
    free(halves);
    return sent(t);
}

/* The host's result as the device stores and reads it again. */
static void
round_host(twin *t)
{
    size_t n = t->nbytes / sizeof(float);
    void *halves = malloc(t->nbytes + 1);
    CHECK(halves != NULL, "%zu elements", n);
    cpu.device->convert(&cpu, halves, act, t->host, FS_F32, n);
    cpu.device->convert(&cpu, t->host, FS_F32, halves, act, n);
    free(halves);
}

/* n integers below limit; every fifth is ignored where that is asked for. */
static twin *
integers(const char *name, size_t n, size_t limit, bool with_ignored)
{
    twin *t = make(name, n * sizeof(int32_t));
    for (size_t i = 0; i < n; i++) {
        bool ignored = with_ignored && i % 5 == 3;
        ((int32_t *)t->host)[i] = ignored ? FS_TARGET_IGNORED : (int32_t)(next_u32() % limit);
    }
    return sent(t);
}

/* Fetches every twin, compares its bits with the host's, and frees both. */
static void
compare_all(const char *what)
{
    CHECK_OK(fs_cuda_stream_wait(stream));
    for (size_t i = 0; i < twins_n; i++) {
        twin *t = &twins[i];
        size_t nbytes = device_nbytes(t);
        unsigned char *got = malloc(nbytes + 1), *halves = malloc(t->nbytes + 1);
        CHECK(got != NULL && halves != NULL, "%zu bytes", t->nbytes);
        const unsigned char *want = rounded(t, halves);
        CHECK_OK(fs_cuda_copy(stream, got, t->device, nbytes));
        CHECK_OK(fs_cuda_stream_wait(stream));
        for (size_t at = 0; at < nbytes; at++) {
            CHECK(got[at] == want[at], "%s in %s: %s differs at byte %zu of %zu", what,
                  fs_dtype_name(act), t->name, at, nbytes);
        }
        CHECK_OK(fs_cuda_memory_close(t->device, nbytes));
        free(got);
        free(halves);
        free(t->host);
    }
    twins_n = 0;
}

#define H(t) ((t)->host)
#define D(t) ((t)->device)

// ---- operations ---------------------------------------------------------------------------------

static void
test_embed(size_t rows, size_t width, size_t vocab)
{
    for (int d = 0; d < 3; d++) {
        static const fs_dtype dtypes[] = {FS_F32, FS_BF16, FS_F16};
        twin *tokens = integers("tokens", rows, vocab, false);
        twin *table = floats("table", vocab * width, 2.0f), *out = acts("out", rows * width, 1);
        fs_embed op = {.rows = rows, .width = width, .vocab = vocab, .tokens = H(tokens),
                       .scale = 1.7f, .table = H(table), .table_dtype = dtypes[d], .out = H(out)};
        cpu.device->model.embed(&cpu, &op);
        op.dtype = act;
        op.tokens = D(tokens);
        op.table = D(table);
        op.out = D(out);
        CHECK_OK(fs_cuda_embed(stream, &op));
        compare_all("embed");
    }
    for (int add = 0; add < 2; add++) {
        twin *tokens = integers("tokens", rows, vocab, false);
        twin *dy = acts("dy", rows * width, 1), *dtable = floats("dtable", vocab * width, 1);
        twin *first = make("first", (vocab + 1) * sizeof(int32_t));
        twin *sorted = make("sorted", rows * sizeof(int32_t));
        fs_sort_rows(H(tokens), rows, vocab, H(first), H(sorted));
        sent(first);
        sent(sorted);
        fs_embed_grad op = {.rows = rows, .width = width, .vocab = vocab, .scale = 0.3f,
                            .dy = H(dy), .dtable = H(dtable), .add = add == 1,
                            .first = H(first), .sorted = H(sorted)};
        cpu.device->model.embed_grad(&cpu, &op);
        op.dtype = act;
        op.dy = D(dy);
        op.dtable = D(dtable);
        op.first = D(first);
        op.sorted = D(sorted);
        CHECK_OK(fs_cuda_embed_grad(stream, &op));
        compare_all("embed_grad");
    }
}

static void
test_norm(size_t rows, size_t width)
{
    for (int kind = 0; kind < 3; kind++) { /* alone, with a branch, and with a bias too */
        twin *x = acts("x", rows * width, 3), *branch = acts("branch", rows * width, 1);
        twin *bias = acts("bias", width, 1), *sum = acts("sum", rows * width, 1);
        twin *weight = acts("weight", width, 2), *out = acts("out", rows * width, 1);
        twin *rstd = floats("rstd", rows, 1);
        fs_norm op = {.rows = rows, .width = width, .x = H(x), .alpha = 0.22f, .sum = H(sum),
                      .branch = kind > 0 ? H(branch) : NULL, .bias = kind > 1 ? H(bias) : NULL,
                      .weight = H(weight), .eps = 1e-5, .out = H(out), .rstd = H(rstd)};
        cpu.device->model.norm(&cpu, &op);
        if (kind > 0 && act != FS_F32) { /* the norm is that of the sum as stored */
            round_host(sum);
            fs_norm again = op;
            again.x = H(sum);
            again.branch = again.bias = NULL;
            cpu.device->model.norm(&cpu, &again);
        }
        op.dtype = act;
        op.x = D(x);
        op.branch = kind > 0 ? D(branch) : NULL;
        op.bias = kind > 1 ? D(bias) : NULL;
        op.sum = D(sum);
        op.weight = D(weight);
        op.out = D(out);
        op.rstd = D(rstd);
        CHECK_OK(fs_cuda_norm(stream, &op));
        compare_all("norm");
    }
    for (int kind = 0; kind < 4; kind++) { /* add to dx or not, a frozen weight or not */
        twin *x = acts("x", rows * width, 3), *rstd = floats("rstd", rows, 1);
        twin *weight = acts("weight", width, 2), *dy = acts("dy", rows * width, 1);
        twin *dx = acts("dx", rows * width, 1), *dweight = floats("dweight", width, 1);
        twin *partial = make("partial", FS_NORM_CHUNKS * width * sizeof(float));
        sent(partial);
        fs_norm_grad op = {.rows = rows, .width = width, .x = H(x), .rstd = H(rstd),
                           .weight = H(weight), .dy = H(dy), .dx = H(dx), .dx_add = kind % 2 == 1,
                           .dweight = kind < 2 ? H(dweight) : NULL, .dweight_add = kind == 1,
                           .partial = H(partial)};
        cpu.device->model.norm_grad(&cpu, &op);
        op.dtype = act;
        op.x = D(x);
        op.rstd = D(rstd);
        op.weight = D(weight);
        op.dy = D(dy);
        op.dx = D(dx);
        op.dweight = kind < 2 ? D(dweight) : NULL;
        op.partial = D(partial);
        CHECK_OK(fs_cuda_norm_grad(stream, &op));
        compare_all("norm_grad");
    }
}

static void
test_heads(size_t batch, size_t length, size_t q_heads, size_t kv_heads, size_t head_dim)
{
    size_t padded = fs_padded_dim(head_dim), rows = length + 3, half = head_dim / 2;
    for (int kind = 0; kind < 3; kind++) { /* without biases, with them, back */
        size_t width = (q_heads + 2 * kv_heads) * head_dim;
        size_t kv_rows = kind == 2 ? length : rows;
        twin *all = acts("rows", batch * length * width, 1);
        twin *q = acts("q", batch * q_heads * length * padded, 1);
        twin *k = acts("k", batch * kv_heads * kv_rows * padded, 1);
        twin *v = acts("v", batch * kv_heads * kv_rows * padded, 1);
        twin *cosines = floats("cosines", length * half, 1);
        twin *sines = floats("sines", length * half, 1);
        twin *bias = acts("bias", width, 1);
        const float *h_bias = kind == 1 ? H(bias) : NULL;
        const char *d_bias = kind == 1 ? D(bias) : NULL;
        size_t k_bias = kind == 1 ? q_heads * head_dim : 0;
        size_t v_bias = kind == 1 ? (q_heads + kv_heads) * head_dim : 0;
        fs_heads op = {.batch = batch, .length = length, .q_heads = q_heads, .kv_heads = kv_heads,
                       .head_dim = head_dim, .padded_dim = padded, .kv_rows = kv_rows,
                       .cosines = H(cosines), .sines = H(sines), .q_scale = 0.37f, .rows = H(all),
                       .q = H(q), .k = H(k), .v = H(v)};
        fs_heads there = op;
        if (kind == 1) {
            op.q_bias = h_bias;
            op.k_bias = h_bias + k_bias;
            op.v_bias = h_bias + v_bias;
            there.q_bias = d_bias;
            there.k_bias = d_bias + k_bias * fs_dtype_nbytes(act);
            there.v_bias = d_bias + v_bias * fs_dtype_nbytes(act);
        }
        there.dtype = act;
        there.cosines = D(cosines);
        there.sines = D(sines);
        there.rows = D(all);
        there.q = D(q);
        there.k = D(k);
        there.v = D(v);
        if (kind == 2) {
            cpu.device->model.heads_grad(&cpu, &op);
            CHECK_OK(fs_cuda_heads_grad(stream, &there));
        } else {
            cpu.device->model.heads(&cpu, &op);
            CHECK_OK(fs_cuda_heads(stream, &there));
        }
        compare_all(kind == 2 ? "heads_grad" : "heads");
    }
}

static void
test_swiglu(size_t rows, size_t width)
{
    for (int kind = 0; kind < 4; kind++) { /* back or not, biases or not */
        twin *gate = acts("gate", rows * width, 9), *up = acts("up", rows * width, 3);
        twin *out = acts("act", rows * width, 1), *bias = acts("bias", 2 * width, 1);
        bool with = kind > 1;
        fs_swiglu op = {.rows = rows, .width = width, .gate = H(gate), .up = H(up), .act = H(out),
                        .gate_bias = with ? H(bias) : NULL,
                        .up_bias = with ? (float *)H(bias) + width : NULL};
        char *up_bias = (char *)D(bias) + width * fs_dtype_nbytes(act);
        fs_swiglu there = {.rows = rows, .width = width, .dtype = act, .gate = D(gate),
                           .up = D(up), .act = D(out), .gate_bias = with ? D(bias) : NULL,
                           .up_bias = with ? up_bias : NULL};
        if (kind % 2 == 0) {
            cpu.device->model.swiglu(&cpu, &op);
            CHECK_OK(fs_cuda_swiglu(stream, &there));
        } else {
            cpu.device->model.swiglu_grad(&cpu, &op);
            CHECK_OK(fs_cuda_swiglu_grad(stream, &there));
        }
        compare_all("swiglu");
    }
}

static void
test_xent(size_t rows, size_t vocab)
{
    for (int grad = 0; grad < 2; grad++) {
        twin *logits = floats("logits", rows * vocab, 20);
        twin *targets = integers("targets", rows, vocab, true);
        twin *loss = sent(make("loss", rows * sizeof(double)));
        twin *dlogits = act == FS_F32 ? logits : acts("dlogits", rows * vocab, 1);
        fs_xent op = {.rows = rows, .vocab = vocab, .logits = H(logits), .targets = H(targets),
                      .scale = 0.8f, .dlogits = grad == 1 ? H(dlogits) : NULL, .factor = 0.5f,
                      .loss = H(loss)};
        cpu.device->model.xent(&cpu, &op);
        op.logits = D(logits);
        op.dlogits = grad == 1 ? D(dlogits) : NULL;
        op.dtype = act;
        op.targets = D(targets);
        op.loss = D(loss);
        CHECK_OK(fs_cuda_xent(stream, &op));
        compare_all("xent");
    }
}

static void
test_sums_and_scale(size_t rows, size_t width)
{
    for (int add = 0; add < 2; add++) {
        size_t stride = width + 5, n = rows * width;
        twin *x = acts("x", rows * stride, 1), *out = floats("out", width, 1);
        twin *y = acts("y", n, 1), *scaled = acts("scaled", n, 1);
        fs_column_sum op = {.rows = rows, .width = width, .stride = stride, .x = H(x),
                            .out = H(out), .add = add == 1};
        cpu.device->model.column_sum(&cpu, &op);
        fs_scale scale = {.n = n, .out = H(scaled), .x = H(y), .alpha = -1.3f, .add = add == 1};
        cpu.device->model.scale(&cpu, &scale);
        op.dtype = scale.dtype = act;
        op.x = D(x);
        op.out = D(out);
        CHECK_OK(fs_cuda_column_sum(stream, &op));
        scale.out = D(scaled);
        scale.x = D(y);
        CHECK_OK(fs_cuda_scale(stream, &scale));
        compare_all("column_sum and scale");
    }
}

static void
test_refusals(void)
{
    float x[8] = {0};
    fs_norm norm = {.rows = 1, .width = 4, .x = x, .branch = x, .weight = x, .out = x, .rstd = x};
    fs_heads heads = {.batch = 1, .length = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 3,
                      .padded_dim = 16, .kv_rows = 1};
    fs_column_sum sum = {.rows = 1, .width = 5, .stride = 4, .x = x, .out = x};
    fs_embed embed = {.rows = SIZE_MAX / 2, .width = 9, .vocab = 1};
    CHECK_STATUS(fs_cuda_norm(stream, &norm), FS_EINVAL);   /* a sum that is nowhere */
    CHECK_STATUS(fs_cuda_heads(stream, &heads), FS_EINVAL); /* an odd head */
    CHECK_STATUS(fs_cuda_column_sum(stream, &sum), FS_EINVAL);
    CHECK_STATUS(fs_cuda_embed(stream, &embed), FS_EINVAL);
    fs_scale scale = {.n = 1, .out = x, .x = x, .alpha = 1.0f};
    CHECK_STATUS(fs_cuda_scale(NULL, &scale), FS_EINVAL);
    scale.dtype = FS_F64;
    CHECK_STATUS(fs_cuda_scale(stream, &scale), FS_ETYPE);
    embed = (fs_embed){.rows = 1, .width = 1, .vocab = 1, .table_dtype = FS_F64};
    CHECK_STATUS(fs_cuda_embed(stream, &embed), FS_ETYPE);
}

int
main(void)
{
    CHECK_OK(fs_device_cpu(FS_ISA_BASELINE, &cpu.device));
    CHECK_OK(fs_cuda_stream_open(&stream));
    test_refusals();
    static const fs_dtype dtypes[] = {FS_F32, FS_F32, FS_BF16, FS_F16};
    for (uint64_t seed = 1; seed <= 4; seed++) {
        act = dtypes[seed - 1];
        fs_sim_reset(seed, seed == 2 ? FS_SIM_LATE : FS_SIM_SHUFFLED, (size_t)1 << 28);
        state = seed;
        test_embed(37, 19, 11);
        test_embed(1, 1, 300);
        test_norm(35, 67);
        test_norm(300, 16);
        test_norm(1, 5);
        test_norm(2, 4100);
        test_heads(2, 9, 4, 2, 6);
        test_heads(1, 5, 3, 1, 32);
        test_swiglu(13, 29);
        test_swiglu(1, 700);
        test_xent(11, 53);
        test_xent(3, 2500);
        test_sums_and_scale(41, 23);
        CHECK(fs_sim_kernels() > 50, "only %zu kernels ran", fs_sim_kernels());
        CHECK(fs_cuda_memory_held() == 0, "%zu bytes are still held", fs_cuda_memory_held());
    }
    CHECK_OK(fs_cuda_stream_close(stream));
    return 0;
}
