/* Attention by plain multiply-add in fp32, for fp32 elements and for 16-bit heads above 128: tiles
 * of 64 x 64, of which each of 16 x 16 threads has 4 x 4 in registers.
 *
 * Operands pass through shared memory in slices, so that any head fits into 34 KB. The kernels
 * are those of attention_forward.cu and attention_backward.cu, and so are their sources. */
#include "attention_parts.cuh"
#include "elements.cuh"

#define SIDE 64
#define THREADS 256
#define LEADING (SIDE + 4) /* floats between rows of shared memory: aligned to 16 bytes */
#define SLICE 32           /* columns of both operands that are there at once */
#define WHOLE_WARP 0xffffffffu

#define TILE_FLOATS (SIDE * LEADING)
#define SHARED_NBYTES (2 * TILE_FLOATS * sizeof(float))

/* Rows of global memory: the tile's first element is at; rows and columns are there, the rest of a
 * tile is zero. */
struct operand {
    const void *array;
    size_t at, stride;
    int rows, columns;
};

FS_DEVICE_FN int
row_of(void)
{
    return (int)threadIdx.x / 16 * 4;
}

FS_DEVICE_FN int
column_of(void)
{
    return (int)threadIdx.x % 16 * 4;
}

template <fs_dtype E>
FS_DEVICE_FN float
load_element(const operand &from, int row, int column)
{
    bool is_there = row < from.rows && column < from.columns;
    size_t at = from.at + (size_t)row * from.stride + (size_t)column;
    return is_there ? fs_load_f32(from.array, E, at) : 0.0f;
}

/* c += a * b of one step for the thread's 4 x 4. */
FS_DEVICE_FN void
add_step(float (&c)[4][4], const float *a, const float *b)
{
    float4 left = *(const float4 *)(a + row_of()), right = *(const float4 *)(b + column_of());
    const float rows[4] = {left.x, left.y, left.z, left.w};
    const float columns[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        c[i / 4][i % 4] += rows[i / 4] * columns[i % 4];
    }
}

/* c = left times right turned, over dim columns. slices: a tile's floats. */
template <fs_dtype E>
FS_DEVICE_FN void
multiply_rows(float (&c)[4][4], const operand &left, const operand &right, int dim, float *slices)
{
    float *left_slice = slices, *right_slice = slices + SLICE * LEADING;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        c[i / 4][i % 4] = 0.0f;
    }
    /* A warp takes 4 rows of 8 neighbours: whole sectors of global memory, 32 banks. */
    int t = (int)threadIdx.x, k_of = t % 128 / 4, first = t / 128 * 4 + t % 4;
    for (int k0 = 0; k0 < dim; k0 += SLICE) {
        __syncthreads();
        for (int row = first; row < SIDE; row += 8) {
            left_slice[k_of * LEADING + row] = load_element<E>(left, row, k0 + k_of);
            right_slice[k_of * LEADING + row] = load_element<E>(right, row, k0 + k_of);
        }
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < SLICE; k++) {
            add_step(c, left_slice + k * LEADING, right_slice + k * LEADING);
        }
    }
}

/* c[n] += p times columns [64 n, 64 n + 64) of right. p: turned, a tile's floats, as slice. */
template <fs_dtype E, int N>
FS_DEVICE_FN void
multiply_columns(float (&c)[N][4][4], const float *p, const operand &right, float *slice)
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        __syncthreads();
        for (int at = (int)threadIdx.x; at < SIDE * SIDE; at += THREADS) {
            int row = at / SIDE, column = at % SIDE;
            slice[row * LEADING + column] = load_element<E>(right, row, n * SIDE + column);
        }
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < SIDE; k++) {
            add_step(c[n], p + k * LEADING, slice + k * LEADING);
        }
    }
}

template <int N>
FS_DEVICE_FN void
set_zero(float (&c)[N][4][4])
{
#pragma unroll
    for (int i = 0; i < N * 16; i++) {
        c[i / 16][i / 4 % 4][i % 4] = 0.0f;
    }
}

/* The thread's 4 x 4 into a tile: a row's columns beside each other, or a column's rows. */
FS_DEVICE_FN void
keep(float *tile, const float (&x)[4][4], bool turned)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float *to = turned ? tile + (column_of() + i) * LEADING + row_of()
                           : tile + (row_of() + i) * LEADING + column_of();
        *(float4 *)to = turned ? make_float4(x[0][i], x[1][i], x[2][i], x[3][i])
                               : make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
    }
}

template <fs_dtype E, int N>
FS_DEVICE_FN void
store(const float (&c)[N][4][4], void *array, size_t at, size_t stride, int rows, int columns)
{
#pragma unroll
    for (int i = 0; i < N * 16; i++) {
        int row = row_of() + i / 4 % 4, column = i / 16 * SIDE + column_of() + i % 4;
        if (row < rows && column < columns) {
            fs_store_f32(array, E, at + (size_t)row * stride + (size_t)column,
                         c[i / 16][i / 4 % 4][i % 4]);
        }
    }
}

/* Rows of a head from row on, of which there are length: packed, or of tokens. */
FS_DEVICE_FN operand
packed(const fs_attention_args &op, const void *array, size_t head_row, int row, int length)
{
    size_t dim = (size_t)op.dim;
    operand rows = {array, (head_row + (size_t)row) * dim, dim, length - row, op.dim};
    return rows;
}

FS_DEVICE_FN operand
tokens(const fs_attention_args &op, const void *array, size_t token, int row)
{
    size_t stride = fs_token_stride(op);
    operand rows = {array, token + (size_t)row * stride, stride, op.length - row, op.head_dim};
    return rows;
}

// ---- forward ------------------------------------------------------------------------------------

/* Over the 16 threads that share a row. */
FS_DEVICE_FN float
most_of_row(float x)
{
    for (int other = 8; other > 0; other /= 2) {
        x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, other));
    }
    return x;
}

FS_DEVICE_FN float
sum_of_row(float x)
{
    for (int other = 8; other > 0; other /= 2) {
        x += __shfl_xor_sync(WHOLE_WARP, x, other);
    }
    return x;
}

/* Scores of one row, four of each thread, become probabilities up to the row's sum; what came
 * before is scaled to fit. */
template <int N>
FS_DEVICE_FN void
soften_row(float (&scores)[4], float (&out)[N][4][4], int row, float *most, float *sum)
{
    float here = *most;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        here = fmaxf(here, scores[c]);
    }
    here = most_of_row(here);
    float base = here == -INFINITY ? 0.0f : here; /* nothing seen yet: any finite number */
    float shrink = fs_exp_f32(*most - base), total = 0.0f;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        scores[c] = fs_exp_f32(scores[c] - base);
        total += scores[c];
    }
    *most = here;
    *sum = *sum * shrink + sum_of_row(total);
#pragma unroll
    for (int i = 0; i < N * 4; i++) {
        out[i / 4][row][i % 4] *= shrink;
    }
}

template <fs_dtype E, int N>
static __global__ void
__launch_bounds__(THREADS)
plain_forward_kernel(fs_attention_args op)
{
    float *p = (float *)(void *)fs_shared_memory(), *slices = p + TILE_FLOATS;
    fs_attention_tile at = fs_tile_of_queries(op, SIDE);
    size_t q_row = fs_query_row(op, at.batch, at.head);
    size_t k_row = fs_key_row(op, at.batch, at.kv_head);
    int i0 = at.tile * SIDE, end = fs_least(op.past + i0 + SIDE, op.keys);
    float out[N][4][4], most[4], sum[4];
    set_zero(out);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        most[r] = -INFINITY;
        sum[r] = 0.0f;
    }
    for (int j0 = fs_first_key(op, i0) / SIDE * SIDE; j0 < end; j0 += SIDE) {
        float scores[4][4];
        multiply_rows<E>(scores, packed(op, op.q, q_row, i0, op.length),
                         packed(op, op.k, k_row, j0, op.keys), op.dim, slices);
#pragma unroll
        for (int r = 0; r < 4; r++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                bool sees = fs_sees(op, i0 + row_of() + r, j0 + column_of() + c);
                scores[r][c] = sees ? scores[r][c] : -INFINITY;
            }
            soften_row(scores[r], out, r, &most[r], &sum[r]);
        }
        keep(p, scores, true);
        multiply_columns<E>(out, p, packed(op, op.v, k_row, j0, op.keys), slices);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int i = i0 + row_of() + r;
        float inverse = 1.0f / sum[r];
#pragma unroll
        for (int n = 0; n < N * 4; n++) {
            out[n / 4][r][n % 4] *= inverse;
        }
        if (i < op.length && column_of() == 0) {
            op.lse[q_row + (size_t)i] = most[r] + fs_log_f32(sum[r]);
        }
    }
    operand to = tokens(op, op.out, fs_token_offset(op, at.batch, at.head), i0);
    store<E>(out, op.out, to.at, to.stride, to.rows, to.columns);
}

// ---- gradient -----------------------------------------------------------------------------------

/* p = e^(s - lse) where it is seen, and ds = p * (dp - delta) in the place of dp; rows are queries
 * from i0 on, columns keys from j0 on, head_row that of the query head. */
FS_DEVICE_FN void
derive(const fs_attention_args &op, float (&p)[4][4], float (&dp)[4][4], size_t head_row, int i0,
       int j0)
{
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int i = i0 + row_of() + r;
        bool is_there = i < op.length;
        float lse = is_there ? op.lse[head_row + (size_t)i] : 0.0f;
        float delta = is_there ? op.delta[head_row + (size_t)i] : 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            bool sees = is_there && fs_sees(op, i, j0 + column_of() + c);
            p[r][c] = sees ? fs_exp_f32(p[r][c] - lse) : 0.0f;
            dp[r][c] = p[r][c] * (dp[r][c] - delta);
        }
    }
}

template <fs_dtype E, int N>
static __global__ void
__launch_bounds__(THREADS)
plain_grad_keys_kernel(fs_attention_args op)
{
    float *kept = (float *)(void *)fs_shared_memory(), *slices = kept + TILE_FLOATS;
    fs_attention_tile at = fs_tile_of_keys(op, SIDE);
    size_t k_row = fs_key_row(op, at.batch, at.kv_head);
    int j0 = at.tile * SIDE, end = fs_end_query(op, fs_least(j0 + SIDE, op.length) - 1);
    operand k = packed(op, op.k, k_row, j0, op.length), v = packed(op, op.v, k_row, j0, op.length);
    float dk[N][4][4], dv[N][4][4];
    set_zero(dk);
    set_zero(dv);
    for (int head = at.head; head < at.head + op.group; head++) {
        size_t q_row = fs_query_row(op, at.batch, head);
        size_t token = fs_token_offset(op, at.batch, head);
        for (int i0 = j0; i0 < end; i0 += SIDE) {
            operand q = packed(op, op.q, q_row, i0, op.length);
            operand dout = tokens(op, op.dout, token, i0);
            float p[4][4], ds[4][4];
            multiply_rows<E>(p, q, k, op.dim, slices);
            multiply_rows<E>(ds, dout, v, op.dim, slices);
            derive(op, p, ds, q_row, i0, j0);
            keep(kept, p, false);
            multiply_columns<E>(dv, kept, dout, slices);
            __syncthreads();
            keep(kept, ds, false);
            multiply_columns<E>(dk, kept, q, slices);
        }
    }
    store<E>(dk, op.dk, k.at, k.stride, k.rows, k.columns);
    store<E>(dv, op.dv, k.at, k.stride, k.rows, k.columns);
}

template <fs_dtype E, int N>
static __global__ void
__launch_bounds__(THREADS)
plain_grad_queries_kernel(fs_attention_args op)
{
    float *kept = (float *)(void *)fs_shared_memory(), *slices = kept + TILE_FLOATS;
    fs_attention_tile at = fs_tile_of_queries(op, SIDE);
    size_t q_row = fs_query_row(op, at.batch, at.head);
    size_t k_row = fs_key_row(op, at.batch, at.kv_head);
    int i0 = at.tile * SIDE, end = fs_least(i0 + SIDE, op.keys);
    operand q = packed(op, op.q, q_row, i0, op.length);
    operand dout = tokens(op, op.dout, fs_token_offset(op, at.batch, at.head), i0);
    float dq[N][4][4];
    set_zero(dq);
    for (int j0 = fs_first_key(op, i0) / SIDE * SIDE; j0 < end; j0 += SIDE) {
        operand k = packed(op, op.k, k_row, j0, op.length);
        float p[4][4], ds[4][4];
        multiply_rows<E>(p, q, k, op.dim, slices);
        multiply_rows<E>(ds, dout, packed(op, op.v, k_row, j0, op.length), op.dim, slices);
        derive(op, p, ds, q_row, i0, j0);
        keep(kept, ds, true);
        multiply_columns<E>(dq, kept, k, slices);
    }
    store<E>(dq, op.dq, q.at, q.stride, q.rows, q.columns);
}

// ---- launches -----------------------------------------------------------------------------------

template <fs_dtype E, int N>
static fs_status
launch(fs_cuda_stream stream, fs_attention_pass pass, const fs_attention_args *op)
{
    bool by_keys = pass == FS_ATTENTION_GRAD_KEYS;
    auto kernel = pass == FS_ATTENTION_FORWARD ? plain_forward_kernel<E, N>
                  : by_keys                    ? plain_grad_keys_kernel<E, N>
                                               : plain_grad_queries_kernel<E, N>;
    return fs_attention_launch(pass == FS_ATTENTION_FORWARD ? "attention" : "attention_grad",
                               kernel,
                               fs_attention_blocks(op, by_keys ? op->kv_heads : op->q_heads, SIDE),
                               THREADS, SHARED_NBYTES, stream, fs_attention_touched(pass, op), op);
}

fs_status
fs_cuda_attention_plain(fs_cuda_stream stream, fs_attention_pass pass, const fs_attention_args *op)
{
    if (op->dtype == FS_BF16) {
        return launch<FS_BF16, 4>(stream, pass, op);
    }
    if (op->dtype == FS_F16) {
        return launch<FS_F16, 4>(stream, pass, op);
    }
    return op->dim <= 64    ? launch<FS_F32, 1>(stream, pass, op)
           : op->dim <= 128 ? launch<FS_F32, 2>(stream, pass, op)
                            : launch<FS_F32, 4>(stream, pass, op);
}
