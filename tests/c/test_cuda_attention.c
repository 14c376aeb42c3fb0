// needs: c++
/* Attention of csrc/cuda, run by the stand-in for CUDA's runtime, against a reference in float64
 * made here: output, lse and gradients, within bounds that follow from the elements' rounding; the
 * same bits in every order of blocks, warps and lanes. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "../cudasim/sim.h"
#include "base/math.h"
#include "check.h"
#include "cuda/attention.h"
#include "cuda/device.h"

typedef struct attention_case {
    size_t batch, length, q_heads, kv_heads, head_dim, window, past;
    fs_dtype dtype;
} attention_case;

static fs_cuda_stream stream;
static uint64_t state;

static double
next_number(void)
{
    state += 0x9e3779b97f4a7c15u;
    return (double)(uint32_t)(fs_mix_u64(state) >> 32) / 0x1p31 - 1.0;
}

// ---- arrays -------------------------------------------------------------------------------------

/* An array of the case: numbers as the device's elements hold them. */
typedef struct array {
    size_t n;
    double *value;    /* what it holds, or what it must hold */
    double *bound;    /* and how far off it may be */
    void *host;       /* elements; those that came back */
    void *device;
    fs_dtype dtype;
} array;

static array
make(size_t n, fs_dtype dtype)
{
    array a = {.n = n, .dtype = dtype};
    a.value = calloc(n + 1, sizeof(double));
    a.bound = calloc(n + 1, sizeof(double));
    a.host = calloc(n + 1, sizeof(double));
    CHECK(a.value != NULL && a.bound != NULL && a.host != NULL, "%zu elements", n);
    CHECK_OK(fs_cuda_memory_open(n * fs_dtype_nbytes(dtype), &a.device));
    return a;
}

static void
drop(array *a)
{
    CHECK_OK(fs_cuda_memory_close(a->device, a->n * fs_dtype_nbytes(a->dtype)));
    free(a->value);
    free(a->bound);
    free(a->host);
}

static double
element_of(const array *a, size_t at)
{
    if (a->dtype == FS_F32) {
        return (double)((float *)a->host)[at];
    }
    uint16_t bits = ((uint16_t *)a->host)[at];
    return (double)(a->dtype == FS_BF16 ? fs_f32_of_bf16(bits) : fs_f32_of_f16(bits));
}

/* Random numbers up to size in rows of columns, the rest of a row zero; rounded, and sent. Rows
 * that have no meaning (keys beyond those there are) hold NaN. */
static void
fill(array *a, size_t row_n, size_t columns, double size, size_t group, size_t rows_of_group)
{
    for (size_t at = 0; at < a->n; at++) {
        bool is_there = at % row_n < columns;
        float x = is_there ? (float)(next_number() * size) : 0.0f;
        if (at / row_n % group >= rows_of_group) {
            x = (float)NAN;
        }
        if (a->dtype == FS_F32) {
            ((float *)a->host)[at] = x;
        } else {
            ((uint16_t *)a->host)[at] =
                a->dtype == FS_BF16 ? fs_bf16_of_f32(x) : fs_f16_of_f32(x);
        }
        a->value[at] = element_of(a, at);
    }
    CHECK_OK(fs_cuda_copy(stream, a->device, a->host, a->n * fs_dtype_nbytes(a->dtype)));
}

static void
fetch(array *a)
{
    CHECK_OK(fs_cuda_copy(stream, a->host, a->device, a->n * fs_dtype_nbytes(a->dtype)));
    CHECK_OK(fs_cuda_stream_wait(stream));
}

/* Returns the largest share of a bound that an error takes. */
static double
compare(const attention_case *c, const char *name, const array *a)
{
    double worst = 0.0;
    for (size_t i = 0; i < a->n; i++) {
        double off = fabs(element_of(a, i) - a->value[i]);
        CHECK(off <= a->bound[i],
              "batch %zu, length %zu, heads %zu/%zu of %zu, window %zu, past %zu, dtype %d: "
              "%s[%zu] is %g, not %g: off by %g, bound %g",
              c->batch, c->length, c->q_heads, c->kv_heads, c->head_dim, c->window, c->past,
              (int)c->dtype, name, i, element_of(a, i), a->value[i], off, a->bound[i]);
        worst = a->bound[i] > 0.0 && off / a->bound[i] > worst ? off / a->bound[i] : worst;
    }
    return worst;
}

// ---- reference ----------------------------------------------------------------------------------

typedef struct problem {
    attention_case c;
    size_t dim, kv_rows, keys;
    array q, k, v, out, lse, dout, delta, dq, dk, dv;
    double unit, slack, tiny; /* an element's rounding; fp32 arithmetic, relative; underflow */
} problem;

static bool
sees(const problem *p, size_t i, size_t j)
{
    size_t at = p->c.past + i;
    return j <= at && (p->c.window == 0 || j + p->c.window > at);
}

/* One query row of one head: probabilities and lse, exactly as softmax is written down. Returns the
 * largest sum of |q k|, by which fp32 scores may be off. */
static double
probabilities_of(const problem *p, const double *q, const double *k, size_t i, double *out,
                 double *out_lse)
{
    double most = -INFINITY, sum = 0.0, sizes = 1.0;
    for (size_t j = 0; j < p->keys; j++) {
        double score = 0.0, size = 0.0;
        for (size_t d = 0; sees(p, i, j) && d < p->dim; d++) {
            score += q[d] * k[j * p->dim + d];
            size += fabs(q[d] * k[j * p->dim + d]);
        }
        out[j] = sees(p, i, j) ? score : -INFINITY;
        most = out[j] > most ? out[j] : most;
        sizes = size > sizes ? size : sizes;
    }
    for (size_t j = 0; j < p->keys; j++) {
        out[j] = exp(out[j] - most);
        sum += out[j];
    }
    for (size_t j = 0; j < p->keys; j++) {
        out[j] /= sum;
    }
    *out_lse = most + log(sum);
    return sizes;
}

/* Fills value and bound of all results for query i of a head. fp32 arithmetic: roundings of n terms
 * have either sign and add up as the root of n, of which 4 deviations are allowed: in a score, of
 * the sum of |q k|; in sums over keys; and a few for exponential, logarithm and rescaling. */
static void
add_reference(problem *p, size_t b, size_t head, size_t i, double *prob)
{
    const attention_case *c = &p->c;
    size_t dim = p->dim, d_n = c->head_dim;
    size_t kv = b * c->kv_heads + head / (c->q_heads / c->kv_heads);
    size_t row = (b * c->q_heads + head) * c->length + i;
    size_t token = ((b * c->length + i) * c->q_heads + head) * d_n;
    const double *q = p->q.value + row * dim, *k = p->k.value + kv * p->kv_rows * dim;
    const double *v = p->v.value + kv * p->kv_rows * dim, *dout = p->dout.value + token;
    double lse, sizes = probabilities_of(p, q, k, i, prob, &lse);
    double slack =
        0x1p-24 * (4.0 * sqrt((double)dim) * sizes + 4.0 * sqrt((double)p->keys) +
                   4.0 * fabs(lse) + 16.0);
    double unit = p->unit, delta = 0.0, delta_size = 0.0;
    p->lse.value[row] = lse;
    p->lse.bound[row] = slack;
    for (size_t d = 0; d < d_n; d++) {
        double sum = 0.0, size = 0.0, terms = 0.0;
        for (size_t j = 0; j < p->keys; j++) {
            if (sees(p, i, j)) {
                sum += prob[j] * v[j * dim + d];
                size += prob[j] * fabs(v[j * dim + d]);
                terms += fabs(v[j * dim + d]);
            }
        }
        p->out.value[token + d] = sum;
        p->out.bound[token + d] =
            (unit + slack) * size + unit * fabs(sum) + p->tiny * (terms + 1.0);
        delta += dout[d] * sum;
        delta_size += fabs(dout[d]) * (fabs(sum) + size);
    }
    if (c->past != 0 || p->kv_rows != c->length) {
        return;
    }
    for (size_t j = 0; j < p->keys; j++) {
        if (!sees(p, i, j)) {
            continue;
        }
        double dp = 0.0, dp_size = 0.0;
        for (size_t d = 0; d < d_n; d++) {
            dp += dout[d] * v[j * dim + d];
            dp_size += fabs(dout[d] * v[j * dim + d]);
        }
        double ds = prob[j] * (dp - delta);
        double ds_bound = unit * fabs(ds) +
                          prob[j] * (unit * delta_size + slack * (dp_size + delta_size)) + p->tiny;
        for (size_t d = 0; d < dim; d++) {
            double key = k[j * dim + d], query = q[d];
            size_t at = (kv * p->kv_rows + j) * dim + d;
            p->dq.value[row * dim + d] += ds * key;
            p->dq.bound[row * dim + d] += (ds_bound + slack * fabs(ds)) * fabs(key);
            p->dk.value[at] += ds * query;
            p->dk.bound[at] += (ds_bound + slack * fabs(ds)) * fabs(query);
            if (d < d_n) {
                p->dv.value[at] += prob[j] * dout[d];
                p->dv.bound[at] += ((unit + slack) * prob[j] + p->tiny) * fabs(dout[d]);
            }
        }
    }
}

/* What rounding the result itself adds. */
static void
add_rounding(const problem *p, array *a)
{
    for (size_t i = 0; i < a->n; i++) {
        a->bound[i] += p->unit * fabs(a->value[i]) + p->tiny;
    }
}

// ---- cases --------------------------------------------------------------------------------------

static void
run(problem *p, bool grad)
{
    const attention_case *c = &p->c;
    fs_attention op = {.batch = c->batch, .length = c->length, .q_heads = c->q_heads,
                       .kv_heads = c->kv_heads, .head_dim = c->head_dim, .padded_dim = p->dim,
                       .window = c->window, .past = c->past, .kv_rows = p->kv_rows,
                       .dtype = c->dtype, .q = p->q.device, .k = p->k.device, .v = p->v.device,
                       .out = p->out.device, .lse = p->lse.device, .dout = p->dout.device,
                       .delta = p->delta.device, .dq = p->dq.device, .dk = p->dk.device,
                       .dv = p->dv.device};
    CHECK_OK(fs_cuda_attention(stream, &op));
    if (grad) {
        CHECK_OK(fs_cuda_attention_grad(stream, &op));
    }
    array *results[] = {&p->out, &p->lse, &p->dq, &p->dk, &p->dv};
    for (size_t i = 0; i < (grad ? 5u : 2u); i++) {
        fetch(results[i]);
    }
}

static void
test_case(attention_case c)
{
    bool grad = c.past == 0;
    size_t dim = fs_padded_dim(c.head_dim), keys = c.past + c.length;
    size_t kv_rows = grad ? keys : keys + 3, heads = c.batch * c.q_heads;
    size_t queries = heads * c.length, kv = c.batch * c.kv_heads * kv_rows;
    problem p = {.c = c, .dim = dim, .kv_rows = kv_rows, .keys = keys};
    p.unit = c.dtype == FS_F32 ? 0x1p-24 : c.dtype == FS_BF16 ? 0x1p-8 : 0x1p-11;
    p.tiny = c.dtype == FS_F16 ? 0x1p-25 : 0x1p-126;
    p.q = make(queries * dim, c.dtype);
    p.k = make(kv * dim, c.dtype);
    p.v = make(kv * dim, c.dtype);
    p.out = make(queries * c.head_dim, c.dtype);
    p.dout = make(queries * c.head_dim, c.dtype);
    p.dq = make(queries * dim, c.dtype);
    p.dk = make(kv * dim, c.dtype);
    p.dv = make(kv * dim, c.dtype);
    p.lse = make(queries, FS_F32);
    p.delta = make(queries, FS_F32);
    fill(&p.q, dim, c.head_dim, 5.0 / sqrt((double)c.head_dim), 1, 1);
    fill(&p.k, dim, c.head_dim, 2.0, kv_rows, keys);
    fill(&p.v, dim, c.head_dim, 1.0, kv_rows, keys);
    fill(&p.dout, c.head_dim, c.head_dim, 1.0, 1, 1);
    run(&p, grad);
    double *prob = calloc(keys, sizeof(double));
    CHECK(prob != NULL, "%zu keys", keys);
    for (size_t row = 0; row < queries; row++) {
        size_t head = row / c.length;
        add_reference(&p, head / c.q_heads, head % c.q_heads, row % c.length, prob);
    }
    free(prob);
    double worst = fmax(compare(&c, "out", &p.out), compare(&c, "lse", &p.lse));
    if (grad) {
        array *grads[] = {&p.dq, &p.dk, &p.dv};
        static const char *const names[] = {"dq", "dk", "dv"};
        for (int i = 0; i < 3; i++) {
            add_rounding(&p, grads[i]);
            worst = fmax(worst, compare(&c, names[i], grads[i]));
        }
    }
    CHECK(c.length < 8 || worst > 0.0, "nothing was rounded: is it what it says?");
    /* Again, in another order: the same bits. */
    array *results[] = {&p.out, &p.lse, &p.dq, &p.dk, &p.dv};
    void *before[5];
    for (size_t i = 0; i < (grad ? 5u : 2u); i++) {
        before[i] = results[i]->host;
        results[i]->host = calloc(results[i]->n + 1, sizeof(double));
        CHECK(results[i]->host != NULL, "%zu elements", results[i]->n);
    }
    run(&p, grad);
    for (size_t i = 0; i < (grad ? 5u : 2u); i++) {
        CHECK(memcmp(before[i], results[i]->host,
                     results[i]->n * fs_dtype_nbytes(results[i]->dtype)) == 0,
              "result %zu has other bits in another order", i);
        free(before[i]);
    }
    array *all[] = {&p.q,   &p.k,  &p.v,  &p.out, &p.dout,
                    &p.lse, &p.dq, &p.dk, &p.dv,  &p.delta};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        drop(all[i]);
    }
}

static void
test_refusals(void)
{
    static _Alignas(16) float x[64];
    fs_attention good = {.batch = 1, .length = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 16,
                         .padded_dim = 16, .kv_rows = 1, .dtype = FS_F32, .q = x, .k = x, .v = x,
                         .out = x, .lse = x, .dout = x, .delta = x, .dq = x, .dk = x, .dv = x};
    fs_attention op = good;
    CHECK_STATUS(fs_cuda_attention(NULL, &op), FS_EINVAL);
    op.q_heads = 3;
    op.kv_heads = 2;
    CHECK_STATUS(fs_cuda_attention(stream, &op), FS_EINVAL);
    op = good;
    op.head_dim = 257;
    op.padded_dim = 272;
    CHECK_STATUS(fs_cuda_attention(stream, &op), FS_EINVAL);
    op = good;
    op.padded_dim = 24;
    CHECK_STATUS(fs_cuda_attention(stream, &op), FS_EINVAL);
    op = good;
    op.past = 1; /* and no room for it */
    CHECK_STATUS(fs_cuda_attention(stream, &op), FS_EINVAL);
    op.kv_rows = 2;
    CHECK_STATUS(fs_cuda_attention_grad(stream, &op), FS_EINVAL); /* not over a cache */
    op = good;
    op.k = x + 1;
    CHECK_STATUS(fs_cuda_attention(stream, &op), FS_EINVAL); /* not aligned */
    op = good;
    op.dv = x + 2;
    CHECK_STATUS(fs_cuda_attention_grad(stream, &op), FS_EINVAL);
    op = good;
    op.dtype = FS_F64;
    CHECK_STATUS(fs_cuda_attention(stream, &op), FS_ETYPE);
    op = good;
    op.batch = SIZE_MAX / 64;
    CHECK_STATUS(fs_cuda_attention(stream, &op), FS_EINVAL);
    op.batch = 0;
    CHECK_OK(fs_cuda_attention(stream, &op));
    CHECK_OK(fs_cuda_attention_grad(stream, &op));
}

int
main(void)
{
    static const attention_case cases[] = {
        /* batch, length, query heads, key heads, head, window, past */
        {1, 1, 1, 1, 8, 0, 0, FS_BF16},       {1, 63, 1, 1, 64, 0, 0, FS_F16},
        {1, 65, 2, 1, 64, 0, 0, FS_BF16},     {2, 33, 4, 2, 72, 0, 0, FS_BF16},
        {1, 130, 1, 1, 128, 0, 0, FS_BF16},   {1, 130, 2, 1, 64, 40, 0, FS_F16},
        {1, 97, 3, 1, 6, 1, 0, FS_F16},       {1, 70, 1, 1, 128, 9, 0, FS_F16},
        {1, 3, 2, 1, 64, 0, 140, FS_BF16},    {2, 1, 2, 2, 128, 50, 129, FS_F16},
        {1, 40, 1, 1, 160, 0, 0, FS_BF16},    {1, 9, 1, 1, 256, 4, 0, FS_F16},
        {1, 1, 1, 1, 8, 0, 0, FS_F32},        {1, 63, 1, 1, 64, 0, 0, FS_F32},
        {2, 65, 2, 1, 72, 0, 0, FS_F32},      {1, 130, 2, 2, 128, 0, 0, FS_F32},
        {1, 130, 3, 1, 7, 40, 0, FS_F32},     {1, 2, 2, 1, 64, 30, 131, FS_F32},
        {1, 20, 1, 1, 256, 0, 0, FS_F32},
    };
    CHECK_OK(fs_cuda_stream_open(&stream));
    test_refusals();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i += ONE_CASE_IN == 1 ? 1 : 3) {
        fs_sim_reset(i + 1, i % 3 == 1 ? FS_SIM_LATE : FS_SIM_SHUFFLED, (size_t)1 << 28);
        state = i;
        test_case(cases[i]);
        CHECK(fs_sim_kernels() == (cases[i].past == 0 ? 8u : 2u), "case %zu: %zu kernels", i,
              fs_sim_kernels());
        CHECK(fs_cuda_memory_held() == 0, "%zu bytes are still held", fs_cuda_memory_held());
    }
    CHECK_OK(fs_cuda_stream_close(stream));
    return 0;
}
