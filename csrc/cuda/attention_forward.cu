/* Attention's forward on tensor cores: softmax over tiles of keys as they come.
 *
 * A block has 64 M queries of a head, a warp 16 M of them: Q K' and P V are products of fragments,
 * scores and output stay in registers. The next tile of K and V comes while one is computed with.
 *
 * Sources: Milakov and Gimelshein 2018 (softmax), Dao et al. 2022 and Dao 2023 (tiles, work of a
 * warp). */
#include "attention_tiles.cuh"

/* What a lane knows of its two rows of each of M fragments. */
template <int M>
struct running_rows {
    float most[M][2]; /* largest score so far */
    float sum[M][2];  /* of 2^((score - most) log2 e), over the lane's own columns */
};

/* Scores of what a query does not see become -infinity. i: the lane's first row; j: its first
 * column. */
template <int M, int N>
FS_DEVICE_FN void
mask_scores(const fs_attention_args &op, float (&scores)[M][N][4], int i, int j)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (!fs_sees(op, i + 16 * m + e / 2 * 8, j + 8 * n + e % 2)) {
                    scores[m][n][e] = -INFINITY;
                }
            }
        }
    }
}

/* Scores become probabilities, up to the row's sum; what came before is scaled to fit. */
template <int M, int N, int D>
FS_DEVICE_FN void
soften(running_rows<M> &run, float (&scores)[M][N][4], float (&out)[M][D][4])
{
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = run.most[m][half];
#pragma unroll
            for (int n = 0; n < N; n++) {
                most = fmaxf(most, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(FS_WHOLE_WARP, most, 1));
            most = fmaxf(most, __shfl_xor_sync(FS_WHOLE_WARP, most, 2));
            /* A row that has seen nothing yet: any finite number will do. */
            float base = most == -INFINITY ? 0.0f : most * FS_LOG2_E;
            float shrink = fs_exp2(run.most[m][half] * FS_LOG2_E - base), sum = 0.0f;
            run.most[m][half] = most;
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    scores[m][n][e] = fs_exp2(scores[m][n][e] * FS_LOG2_E - base);
                    sum += scores[m][n][e];
                }
            }
            run.sum[m][half] = run.sum[m][half] * shrink + sum;
            if (shrink != 1.0f) { /* rare after the first tiles */
#pragma unroll
                for (int d = 0; d < D; d++) {
                    out[m][d][2 * half] *= shrink;
                    out[m][d][2 * half + 1] *= shrink;
                }
            }
        }
    }
}

/* Divides by the sums, and writes their logarithms. i: the warp's first row. */
template <int M, int D>
FS_DEVICE_FN void
finish(const fs_attention_args &op, running_rows<M> &run, float (&out)[M][D][4], float *lse, int i)
{
    int g = lane_of() / 4, t = lane_of() % 4;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = run.sum[m][half];
            sum += __shfl_xor_sync(FS_WHOLE_WARP, sum, 1);
            sum += __shfl_xor_sync(FS_WHOLE_WARP, sum, 2);
            int row = i + 16 * m + 8 * half + g;
            if (t == 0 && row < op.length) {
                lse[row] = run.most[m][half] + fs_log_f32(sum);
            }
            float inverse = 1.0f / sum;
#pragma unroll
            for (int d = 0; d < D; d++) {
                out[m][d][2 * half] *= inverse;
                out[m][d][2 * half + 1] *= inverse;
            }
        }
    }
}

template <fs_dtype E, int DIM, int M, int KEYS>
static __global__ void
__launch_bounds__(TILE_THREADS)
forward_kernel(fs_attention_args op)
{
    constexpr int ROWS = TILE_WARPS * 16 * M, TILE = KEYS * TILE_STRIDE<DIM>;
    uint16_t *q_tile = (uint16_t *)(void *)fs_shared_memory();
    uint16_t *kv_tiles = q_tile + ROWS * TILE_STRIDE<DIM>; /* two times K and V */
    fs_attention_tile at = fs_tile_of_queries(op, ROWS);
    size_t dim = (size_t)op.dim, q_row = fs_query_row(op, at.batch, at.head);
    size_t k_row = fs_key_row(op, at.batch, at.kv_head);
    const uint16_t *k = (const uint16_t *)op.k + k_row * dim;
    const uint16_t *v = (const uint16_t *)op.v + k_row * dim;
    int i0 = at.tile * ROWS, row = warp_of() * 16 * M, i = i0 + row;
    int i_end = fs_least(i + 16 * M, op.length); /* of the warp's rows; may be before i */
    int first = fs_first_key(op, i0) / KEYS * KEYS;
    int end = fs_least(op.past + i0 + ROWS, op.keys);
    load_tile<DIM, ROWS>(q_tile, (const uint16_t *)op.q + (q_row + (size_t)i0) * dim, dim,
                         op.length - i0, op.dim);
    load_keys<DIM, KEYS>(op, kv_tiles, k, v, first);
    float out[M][DIM / 8][4];
    running_rows<M> run;
    set_zero(out);
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        run.most[r / 2][r % 2] = -INFINITY;
        run.sum[r / 2][r % 2] = 0.0f;
    }
    int stage = 0;
    for (int j0 = first; j0 < end; j0 += KEYS, stage ^= 1) {
        const uint16_t *k_tile = kv_tiles + stage * 2 * TILE, *v_tile = k_tile + TILE;
        fs_copy_wait<0>();
        __syncthreads(); /* this tile is there, and nobody reads the one before any more */
        if (j0 + KEYS < end) {
            load_keys<DIM, KEYS>(op, kv_tiles + (stage ^ 1) * 2 * TILE, k, v, j0 + KEYS);
        }
        if (i >= i_end || !fs_any_sees(op, i, i_end, j0, j0 + KEYS)) {
            continue;
        }
        float scores[M][KEYS / 8][4];
        multiply_rows<E, DIM>(scores, q_tile, row, k_tile);
        if (!fs_all_see(op, i, i_end, j0, j0 + KEYS)) {
            mask_scores(op, scores, i + lane_of() / 4, j0 + lane_of() % 4 * 2);
        }
        soften(run, scores, out);
        multiply_columns<E, DIM>(out, scores, v_tile);
    }
    if (i < i_end) {
        finish(op, run, out, op.lse + q_row, i);
        size_t stride = fs_token_stride(op);
        uint16_t *to = (uint16_t *)op.out + fs_token_offset(op, at.batch, at.head);
        to += (size_t)i * stride;
        store_rows<E, DIM>(out, q_tile, row, to, stride, i_end - i, op.head_dim);
    }
}

template <fs_dtype E, int DIM, int M, int KEYS>
static fs_status
launch_forward(fs_cuda_stream stream, const fs_attention_args *op)
{
    constexpr int ROWS = TILE_WARPS * 16 * M;
    size_t shared = (size_t)(ROWS + 4 * KEYS) * TILE_STRIDE<DIM> * sizeof(uint16_t);
    return fs_attention_launch("attention", forward_kernel<E, DIM, M, KEYS>,
                               fs_attention_blocks(op, op->q_heads, ROWS), TILE_THREADS, shared,
                               stream, fs_attention_touched(FS_ATTENTION_FORWARD, op), op);
}

template <fs_dtype E>
static fs_status
choose_forward(fs_cuda_stream stream, const fs_attention_args *op)
{
    return op->dim <= 64 ? launch_forward<E, 64, 2, 64>(stream, op)
                         : launch_forward<E, 128, 2, 32>(stream, op);
}

fs_status
fs_cuda_attention_forward_16(fs_cuda_stream stream, const fs_attention_args *op)
{
    return op->dtype == FS_BF16 ? choose_forward<FS_BF16>(stream, op)
                                : choose_forward<FS_F16>(stream, op);
}
