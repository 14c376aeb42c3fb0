/* Rotary positions, and the move between rows of tokens and packed heads. */
#include "model.cuh"

/* Which head of which token a block of work is for, and where its packed row lies. */
struct head_place {
    size_t token, head; /* token of batch * length; head of q, k, v side by side */
    size_t position;
    const void *bias; /* or NULL; from element bias_n on */
    size_t bias_n;
    void *packed; /* q, k or v; from element packed_n on */
    size_t packed_n;
    bool turned; /* v is not */
    float scale;
};

FS_DEVICE_FN head_place
place_head(const fs_heads *op, size_t item)
{
    size_t heads = op->q_heads + 2 * op->kv_heads, d = op->head_dim;
    head_place p;
    p.token = item / heads;
    p.head = item % heads;
    p.position = p.token % op->length;
    size_t b = p.token / op->length, h = p.head;
    if (h < op->q_heads) {
        p.packed = op->q;
        p.packed_n = ((b * op->q_heads + h) * op->length + p.position) * op->padded_dim;
        p.bias = op->q_bias;
        p.bias_n = h * d;
        p.turned = true;
        p.scale = op->q_scale;
        return p;
    }
    h -= op->q_heads;
    p.turned = h < op->kv_heads;
    h = p.turned ? h : h - op->kv_heads;
    p.packed = p.turned ? op->k : op->v;
    p.packed_n = ((b * op->kv_heads + h) * op->kv_rows + p.position) * op->padded_dim;
    p.bias = p.turned ? op->k_bias : op->v_bias;
    p.bias_n = h * d;
    p.scale = 1.0f;
    return p;
}

/* Element i of the head's row of the projections, with its bias. */
FS_DEVICE_FN float
row_at(const fs_heads *op, const head_place *p, size_t row_n, size_t i)
{
    float x = fs_load_f32(op->rows, op->dtype, row_n + i);
    return p->bias == NULL ? x : x + fs_load_f32(p->bias, op->dtype, p->bias_n + i);
}

/* A thread a pair of elements (i, i + d / 2), or two neighbours of v; and the padding. */
static __global__ void
heads_kernel(fs_heads op)
{
    size_t d = op.head_dim, half = d / 2, heads = op.q_heads + 2 * op.kv_heads;
    size_t items = op.batch * op.length * heads;
    for (size_t item = blockIdx.x; item < items; item += gridDim.x) {
        head_place p = place_head(&op, item);
        size_t row_n = (p.token * heads + p.head) * d;
        const float *cosines = op.cosines + p.position * half;
        const float *sines = op.sines + p.position * half;
        for (size_t i = threadIdx.x; i < op.padded_dim; i += blockDim.x) {
            if (i >= d) {
                fs_store_f32(p.packed, op.dtype, p.packed_n + i, 0.0f);
            } else if (!p.turned) {
                fs_store_f32(p.packed, op.dtype, p.packed_n + i, row_at(&op, &p, row_n, i));
            } else if (i < half) {
                float a = row_at(&op, &p, row_n, i), b = row_at(&op, &p, row_n, half + i);
                fs_store_f32(p.packed, op.dtype, p.packed_n + i,
                             (a * cosines[i] - b * sines[i]) * p.scale);
                fs_store_f32(p.packed, op.dtype, p.packed_n + half + i,
                             (b * cosines[i] + a * sines[i]) * p.scale);
            }
        }
    }
}

static __global__ void
heads_grad_kernel(fs_heads op)
{
    size_t d = op.head_dim, half = d / 2, heads = op.q_heads + 2 * op.kv_heads;
    size_t items = op.batch * op.length * heads;
    for (size_t item = blockIdx.x; item < items; item += gridDim.x) {
        head_place p = place_head(&op, item);
        size_t row_n = (p.token * heads + p.head) * d;
        const float *cosines = op.cosines + p.position * half;
        const float *sines = op.sines + p.position * half;
        for (size_t i = threadIdx.x; i < d; i += blockDim.x) {
            float a = fs_load_f32(p.packed, op.dtype, p.packed_n + i);
            if (!p.turned) {
                fs_store_f32(op.rows, op.dtype, row_n + i, a);
            } else if (i < half) {
                float b = fs_load_f32(p.packed, op.dtype, p.packed_n + half + i);
                fs_store_f32(op.rows, op.dtype, row_n + i,
                             (a * cosines[i] + b * sines[i]) * p.scale);
                fs_store_f32(op.rows, op.dtype, row_n + half + i,
                             (b * cosines[i] - a * sines[i]) * p.scale);
            }
        }
    }
}

static fs_status
launch_heads(fs_cuda_stream stream, const fs_heads *op, bool back)
{
    const char *what = back ? "heads_grad" : "heads";
    size_t heads = op->q_heads + 2 * op->kv_heads, tokens = op->batch * op->length;
    size_t kv_tokens = op->batch * op->kv_rows;
    FS_TRY(check_rows(stream, what, op->dtype, tokens, heads * op->padded_dim));
    FS_TRY(check_rows(stream, what, op->dtype, kv_tokens, op->kv_heads * op->padded_dim));
    if (op->head_dim % 2 != 0 || op->padded_dim < op->head_dim || op->kv_rows < op->length) {
        return FS_FAIL(FS_EINVAL,
                       "%s: heads of %zu (even) in rows of %zu, %zu of %zu rows of keys", what,
                       op->head_dim, op->padded_dim, op->length, op->kv_rows);
    }
    if (tokens == 0 || heads == 0) {
        return FS_OK;
    }
    size_t element = fs_dtype_nbytes(op->dtype), rows = tokens * heads * op->head_dim * element;
    size_t q = tokens * op->q_heads * op->padded_dim * element;
    size_t k = kv_tokens * op->kv_heads * op->padded_dim * element;
    size_t table = f32s(op->length * (op->head_dim / 2));
    fs_touched touched = fs_touched().reads(op->cosines, table).reads(op->sines, table);
    if (back) {
        touched.reads(op->q, q).reads(op->k, k).reads(op->v, k).writes(op->rows, rows);
    } else {
        touched.reads(op->rows, rows).writes(op->q, q).writes(op->k, k).writes(op->v, k);
    }
    auto kernel = back ? heads_grad_kernel : heads_kernel;
    FS_LAUNCH(kernel, fs_cuda_blocks(tokens * heads, 1), ROW_THREADS, 0, stream, touched, *op);
    return fs_cuda_launched(what);
}

extern "C" fs_status
fs_cuda_heads(fs_cuda_stream stream, const fs_heads *op)
{
    return launch_heads(stream, op, false);
}

extern "C" fs_status
fs_cuda_heads_grad(fs_cuda_stream stream, const fs_heads *op)
{
    return launch_heads(stream, op, true);
}
