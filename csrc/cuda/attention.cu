/* Attention: checks, the choice among kernels, and what the gradient needs first. */
#include "attention_parts.cuh"
#include "elements.cuh"

extern "C" {
#include "attention.h"
}

// ---- checks -------------------------------------------------------------------------------------

static fs_status
check_aligned(const char *what, const void *const *arrays, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if ((uintptr_t)arrays[i] % 16 != 0) {
            return FS_FAIL(FS_EINVAL, "%s: an array at %p, which is not aligned to 16 bytes", what,
                           arrays[i]);
        }
    }
    return FS_OK;
}

static fs_status
check_sizes(const char *what, const fs_attention *op)
{
    if (op->kv_heads == 0 || op->q_heads % op->kv_heads != 0 || op->q_heads > INT_MAX) {
        return FS_FAIL(FS_EINVAL, "%s: %zu query heads for %zu key heads", what, op->q_heads,
                       op->kv_heads);
    }
    if (op->head_dim == 0 || op->head_dim > FS_HEAD_DIM_MAX ||
        op->padded_dim != fs_padded_dim(op->head_dim)) {
        return FS_FAIL(FS_EINVAL,
                       "%s: heads of %zu in rows of %zu; at most %d, in rows of a multiple of %d",
                       what, op->head_dim, op->padded_dim, FS_HEAD_DIM_MAX, FS_LANES);
    }
    if (op->length > INT_MAX / 2 || op->past > INT_MAX / 2 ||
        op->kv_rows < op->past + op->length) {
        return FS_FAIL(FS_EINVAL, "%s: %zu queries after %zu keys, of which %zu have room", what,
                       op->length, op->past, op->kv_rows);
    }
    size_t heads, rows, nbytes;
    FS_TRY(fs_mul_size(op->batch, op->q_heads, &heads));
    FS_TRY(fs_mul_size(heads, op->kv_rows, &rows));
    FS_TRY(fs_mul_size(rows, op->padded_dim * sizeof(float), &nbytes));
    return FS_OK;
}

static fs_status
check_attention(fs_cuda_stream stream, const char *what, const fs_attention *op)
{
    FS_TRY(fs_cuda_check_stream(stream, what));
    if (op->dtype != FS_F32 && op->dtype != FS_BF16 && op->dtype != FS_F16) {
        return FS_FAIL(FS_ETYPE, "%s: elements of %s, not of float32, bfloat16 or float16", what,
                       fs_dtype_name(op->dtype));
    }
    FS_TRY(check_sizes(what, op));
    const void *const arrays[] = {op->q, op->k, op->v, op->out};
    return check_aligned(what, arrays, 4);
}

static fs_attention_args
args_of(const fs_attention *op)
{
    fs_attention_args args = {};
    args.length = (int)op->length;
    args.keys = (int)(op->past + op->length);
    args.past = (int)op->past;
    args.window = op->window == 0 || op->window > INT_MAX ? INT_MAX : (int)op->window;
    args.head_dim = (int)op->head_dim;
    args.dim = (int)op->padded_dim;
    args.q_heads = (int)op->q_heads;
    args.kv_heads = (int)op->kv_heads;
    args.group = (int)(op->q_heads / op->kv_heads);
    args.batch = op->batch;
    args.kv_rows = op->kv_rows;
    args.dtype = op->dtype;
    args.q = op->q;
    args.k = op->k;
    args.v = op->v;
    args.out = op->out;
    args.lse = op->lse;
    args.dout = op->dout;
    args.delta = op->delta;
    args.dq = op->dq;
    args.dk = op->dk;
    args.dv = op->dv;
    return args;
}

/* Do the kernels on tensor cores take it? */
static bool
is_for_tensor_cores(const fs_attention *op)
{
    return op->dtype != FS_F32 && op->padded_dim <= 128;
}

// ---- forward ------------------------------------------------------------------------------------

extern "C" fs_status
fs_cuda_attention(fs_cuda_stream stream, const fs_attention *op)
{
    FS_TRY(check_attention(stream, "attention", op));
    if (op->batch == 0 || op->length == 0) {
        return FS_OK;
    }
    fs_attention_args args = args_of(op);
    return is_for_tensor_cores(op)
               ? fs_cuda_attention_forward_16(stream, &args)
               : fs_cuda_attention_plain(stream, FS_ATTENTION_FORWARD, &args);
}

// ---- gradient -----------------------------------------------------------------------------------

#define DELTA_THREADS 256
#define DELTA_LANES 8u /* for a row: neighbours in a warp */

/* delta = sum over d of dO * O: what dS subtracts (Dao et al. 2022). */
static __global__ void
__launch_bounds__(DELTA_THREADS)
delta_kernel(fs_attention_args op)
{
    size_t rows = op.batch * (size_t)op.length * (size_t)op.q_heads;
    size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / DELTA_LANES;
    size_t head_dim = (size_t)op.head_dim;
    unsigned lane = threadIdx.x % DELTA_LANES;
    bool is_there = row < rows;
    float sum = 0.0f;
    for (size_t d = lane * FS_FOUR; is_there && d < head_dim; d += DELTA_LANES * FS_FOUR) {
        float dout[FS_FOUR] = {}, out[FS_FOUR] = {};
        unsigned n = fs_four_of(head_dim, d);
        fs_load_four(dout, op.dout, op.dtype, row * head_dim + d, n);
        fs_load_four(out, op.out, op.dtype, row * head_dim + d, n);
        for (unsigned e = 0; e < FS_FOUR; e++) {
            sum += dout[e] * out[e];
        }
    }
    for (int other = (int)DELTA_LANES / 2; other > 0; other /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, other);
    }
    if (is_there && lane == 0) {
        size_t token = row / (size_t)op.q_heads, head = row % (size_t)op.q_heads;
        size_t batch = token / (size_t)op.length, i = token % (size_t)op.length;
        op.delta[(batch * (size_t)op.q_heads + head) * (size_t)op.length + i] = sum;
    }
}

static fs_status
launch_delta(fs_cuda_stream stream, const fs_attention_args *op)
{
    size_t rows = op->batch * (size_t)op->length * (size_t)op->q_heads;
    size_t row_nbytes = (size_t)op->head_dim * fs_dtype_nbytes(op->dtype);
    size_t each = DELTA_THREADS / DELTA_LANES, blocks = rows / each + (rows % each != 0);
    if (blocks > INT_MAX) {
        return FS_FAIL(FS_EINVAL, "attention_grad: %zu rows of heads are too many", rows);
    }
    FS_LAUNCH(delta_kernel, (unsigned)blocks, DELTA_THREADS, 0, stream,
              fs_touched()
                  .reads(op->dout, rows * row_nbytes)
                  .reads(op->out, rows * row_nbytes)
                  .writes(op->delta, rows * sizeof(float)),
              *op);
    return fs_cuda_launched("attention_grad");
}

extern "C" fs_status
fs_cuda_attention_grad(fs_cuda_stream stream, const fs_attention *op)
{
    const char *what = "attention_grad";
    FS_TRY(check_attention(stream, what, op));
    const void *const arrays[] = {op->dout, op->dq, op->dk, op->dv};
    FS_TRY(check_aligned(what, arrays, 4));
    if (op->past != 0 || op->kv_rows != op->length) {
        return FS_FAIL(FS_EINVAL, "%s: %zu cached keys, %zu rows of keys for %zu queries", what,
                       op->past, op->kv_rows, op->length);
    }
    if (op->batch == 0 || op->length == 0) {
        return FS_OK;
    }
    fs_attention_args args = args_of(op);
    FS_TRY(launch_delta(stream, &args));
    if (is_for_tensor_cores(op)) {
        FS_TRY(fs_cuda_attention_keys_16(stream, &args));
        return fs_cuda_attention_queries_16(stream, &args);
    }
    FS_TRY(fs_cuda_attention_plain(stream, FS_ATTENTION_GRAD_KEYS, &args));
    return fs_cuda_attention_plain(stream, FS_ATTENTION_GRAD_QUERIES, &args);
}
