/* Rotary positions, and the move between rows of tokens and packed heads. */
#include <climits>

#include "model.cuh"

/* Where a head of a token has its packed row; head of q, k, v side by side. */
struct head_place {
    const void *bias; /* or NULL; from element bias_n on */
    size_t bias_n;
    void *packed; /* q, k or v; from element packed_n on */
    size_t packed_n;
    bool turned; /* v is not */
    float scale;
};

FS_DEVICE_FN head_place
place_head(const fs_heads *op, size_t batch, size_t position, size_t head)
{
    head_place p;
    if (head < op->q_heads) {
        p.packed = op->q;
        p.packed_n = ((batch * op->q_heads + head) * op->length + position) * op->padded_dim;
        p.bias = op->q_bias;
        p.bias_n = head * op->head_dim;
        p.turned = true;
        p.scale = op->q_scale;
        return p;
    }
    head -= op->q_heads;
    p.turned = head < op->kv_heads;
    head = p.turned ? head : head - op->kv_heads;
    p.packed = p.turned ? op->k : op->v;
    p.packed_n = ((batch * op->kv_heads + head) * op->kv_rows + position) * op->padded_dim;
    p.bias = p.turned ? op->k_bias : op->v_bias;
    p.bias_n = head * op->head_dim;
    p.scale = 1.0f;
    return p;
}

/* Four elements of the head's row of the projections from i on, with their biases. */
FS_DEVICE_FN void
load_row(float x[FS_FOUR], const fs_heads *op, const head_place *p, size_t row_n, size_t i,
         unsigned n)
{
    fs_load_four(x, op->rows, op->dtype, row_n + i, n);
    if (p->bias != NULL) {
        float bias[FS_FOUR];
        fs_load_four(bias, p->bias, op->dtype, p->bias_n + i, n);
        for (unsigned j = 0; j < n; j++) {
            x[j] = x[j] + bias[j];
        }
    }
}

/* A block a token, a thread four pairs of elements (i, i + d / 2) of a head, as v has them too; who
 * has a head's last writes its padding. Numbers within a token have 32 bits: dividing by longer
 * ones would cost more than memory does. */
template <fs_dtype E>
static __global__ void
heads_kernel(fs_heads op)
{
    op.dtype = E;
    unsigned heads = (unsigned)(op.q_heads + 2 * op.kv_heads), half = (unsigned)op.head_dim / 2;
    unsigned fours = (half + FS_FOUR - 1) / FS_FOUR;
    size_t tokens = op.batch * op.length;
    for (size_t token = blockIdx.x; token < tokens; token += gridDim.x) {
        size_t batch = token / op.length, position = token % op.length;
        for (unsigned at = threadIdx.x; at < heads * fours; at += blockDim.x) {
            unsigned head = at / fours, i = at % fours * FS_FOUR, n = fs_four_of(half, i);
            head_place p = place_head(&op, batch, position, head);
            size_t row_n = (token * heads + head) * op.head_dim;
            float a[FS_FOUR], b[FS_FOUR], cosines[FS_FOUR], sines[FS_FOUR];
            load_row(a, &op, &p, row_n, i, n);
            load_row(b, &op, &p, row_n, half + i, n);
            if (p.turned) {
                fs_load_four(cosines, op.cosines, FS_F32, position * half + i, n);
                fs_load_four(sines, op.sines, FS_F32, position * half + i, n);
                for (unsigned j = 0; j < n; j++) {
                    float low = a[j], high = b[j];
                    a[j] = (low * cosines[j] - high * sines[j]) * p.scale;
                    b[j] = (high * cosines[j] + low * sines[j]) * p.scale;
                }
            }
            fs_store_four(p.packed, op.dtype, p.packed_n + i, a, n);
            fs_store_four(p.packed, op.dtype, p.packed_n + half + i, b, n);
            for (size_t j = op.head_dim; i + n == half && j < op.padded_dim; j++) {
                fs_store_f32(p.packed, op.dtype, p.packed_n + j, 0.0f);
            }
        }
    }
}

template <fs_dtype E>
static __global__ void
heads_grad_kernel(fs_heads op)
{
    op.dtype = E;
    unsigned heads = (unsigned)(op.q_heads + 2 * op.kv_heads), half = (unsigned)op.head_dim / 2;
    unsigned fours = (half + FS_FOUR - 1) / FS_FOUR;
    size_t tokens = op.batch * op.length;
    for (size_t token = blockIdx.x; token < tokens; token += gridDim.x) {
        size_t batch = token / op.length, position = token % op.length;
        for (unsigned at = threadIdx.x; at < heads * fours; at += blockDim.x) {
            unsigned head = at / fours, i = at % fours * FS_FOUR, n = fs_four_of(half, i);
            head_place p = place_head(&op, batch, position, head);
            size_t row_n = (token * heads + head) * op.head_dim;
            float a[FS_FOUR], b[FS_FOUR], cosines[FS_FOUR], sines[FS_FOUR];
            fs_load_four(a, p.packed, op.dtype, p.packed_n + i, n);
            fs_load_four(b, p.packed, op.dtype, p.packed_n + half + i, n);
            if (p.turned) {
                fs_load_four(cosines, op.cosines, FS_F32, position * half + i, n);
                fs_load_four(sines, op.sines, FS_F32, position * half + i, n);
                for (unsigned j = 0; j < n; j++) {
                    float low = a[j], high = b[j];
                    a[j] = (low * cosines[j] + high * sines[j]) * p.scale;
                    b[j] = (high * cosines[j] - low * sines[j]) * p.scale;
                }
            }
            fs_store_four(op.rows, op.dtype, row_n + i, a, n);
            fs_store_four(op.rows, op.dtype, row_n + half + i, b, n);
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
    if (tokens == 0 || heads == 0 || op->head_dim == 0) {
        return FS_OK;
    }
    if (heads * op->padded_dim > INT_MAX) {
        return FS_FAIL(FS_EINVAL, "%s: %zu heads of %zu: at most %d elements a token", what, heads,
                       op->padded_dim, INT_MAX);
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
    auto kernel = back ? INSTANCE_OF(heads_grad_kernel, op->dtype)
                       : INSTANCE_OF(heads_kernel, op->dtype);
    FS_LAUNCH(kernel, fs_cuda_blocks(tokens, 1), ELEMENT_THREADS, 0, stream, touched, *op);
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
