/* Attention's gradient on tensor cores, in two kernels that both make the probabilities again.
 *
 * One goes over tiles of keys: dV = P' dO and dK = dS' Q of a tile stay in registers while the
 * queries that see it, of all query heads that read the key head, pass by. What it computes lies
 * turned (S' = K Q'): a row of its fragments is a key, so that P' and dS' are left operands as they
 * come. The other goes over tiles of queries and computes dQ = dS K. So nobody adds to what another
 * block wrote, at the price of two of seven products computed twice: dQ by float atomics would have
 * other bits in every run, and dQ as one part per tile of keys would grow with length squared.
 *
 * Source: Dao et al. 2022, algorithm 4. */
#include "attention_tiles.cuh"

// ---- dK and dV ----------------------------------------------------------------------------------

/* Queries that pass a tile of keys, tile by tile: those of the group's first head, then the next
 * head's. */
struct passing_queries {
    int begin, end, tiles, steps; /* begin: a multiple of the tile; steps: for all heads */
};

FS_DEVICE_FN passing_queries
queries_of_keys(const fs_attention_args &op, int j0, int j1, int tile)
{
    passing_queries pass;
    pass.begin = j0 / tile * tile;
    pass.end = fs_end_query(op, j1 - 1);
    pass.tiles = (pass.end - pass.begin + tile - 1) / tile;
    pass.steps = pass.tiles * op.group;
    return pass;
}

/* Which query head a step is for, counted from the group's first, and its first query. */
struct passing_step {
    int head, query;
};

FS_DEVICE_FN passing_step
step_of(const passing_queries &pass, int step, int tile)
{
    passing_step at;
    at.head = step / pass.tiles;
    at.query = pass.begin + step % pass.tiles * tile;
    return at;
}

/* Begins to copy a step's tile of Q and one of dO behind it, as one group. row and token: where
 * the group's first head has its rows, and its elements in the rows of tokens. */
template <int DIM, int QUERIES>
FS_DEVICE_FN void
load_step(const fs_attention_args &op, uint16_t *tiles, size_t row, size_t token, passing_step at)
{
    size_t dim = (size_t)op.dim, query = (size_t)at.query;
    size_t q_row = row + (size_t)at.head * (size_t)op.length + query;
    size_t dout = token + (size_t)at.head * (size_t)op.head_dim + query * fs_token_stride(op);
    load_tile<DIM, QUERIES>(tiles, (const uint16_t *)op.q + q_row * dim, dim,
                            op.length - at.query, op.dim);
    load_token_tile<DIM, QUERIES>(op, tiles + QUERIES * TILE_STRIDE<DIM>,
                                  (const uint16_t *)op.dout + dout, op.length - at.query);
    fs_copy_group();
}

/* lse (in powers of two) or delta of a query of a tile, by threads [0, N) and [N, 2 N). Beyond the
 * last query both are such that nothing comes of it. */
template <int N>
FS_DEVICE_FN float
load_statistic(const fs_attention_args &op, size_t row, passing_step step)
{
    int at = step.query + (int)threadIdx.x % N;
    bool is_lse = (int)threadIdx.x < N;
    if (at >= op.length || (int)threadIdx.x >= 2 * N) {
        return is_lse ? INFINITY : 0.0f;
    }
    size_t from = row + (size_t)step.head * (size_t)op.length + (size_t)at;
    return is_lse ? op.lse[from] * FS_LOG2_E : op.delta[from];
}

template <int N>
FS_DEVICE_FN void
store_statistic(float *statistics, float value)
{
    if ((int)threadIdx.x < 2 * N) {
        statistics[threadIdx.x] = value;
    }
}

/* p = 2^(s log2 e - lse) where it is seen, turned: rows are keys from j on, columns queries from
 * i on. */
template <int M, int N>
FS_DEVICE_FN void
soften_turned(const fs_attention_args &op, float (&p)[M][N][4], const float *lse, bool is_cut,
              int j, int i)
{
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int column = 8 * n + lane_of() % 4 * 2 + e;
            float base = lse[column];
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float x = fs_exp2(p[m][n][2 * half + e] * FS_LOG2_E - base);
                    int row = 16 * m + 8 * half + lane_of() / 4;
                    p[m][n][2 * half + e] = !is_cut || fs_sees(op, i + column, j + row) ? x : 0.0f;
                }
            }
        }
    }
}

/* ds = p * (dp - delta), turned: in the place of dp. */
template <int M, int N>
FS_DEVICE_FN void
derive_turned(float (&dp)[M][N][4], const float (&p)[M][N][4], const float *delta)
{
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float base = delta[8 * n + lane_of() % 4 * 2 + e];
#pragma unroll
            for (int m = 0; m < M; m++) {
                dp[m][n][e] = p[m][n][e] * (dp[m][n][e] - base);
                dp[m][n][2 + e] = p[m][n][2 + e] * (dp[m][n][2 + e] - base);
            }
        }
    }
}

template <fs_dtype E, int DIM, int M, int QUERIES>
static __global__ void
__launch_bounds__(TILE_THREADS)
grad_keys_kernel(fs_attention_args op)
{
    constexpr int ROWS = TILE_WARPS * 16 * M, TILE = QUERIES * TILE_STRIDE<DIM>;
    static_assert(2 * QUERIES <= TILE_THREADS, "a thread takes one statistic at most");
    uint16_t *k_tile = (uint16_t *)(void *)fs_shared_memory();
    uint16_t *v_tile = k_tile + ROWS * TILE_STRIDE<DIM>;
    uint16_t *tiles = v_tile + ROWS * TILE_STRIDE<DIM>;            /* two times Q and dO */
    float *statistics = (float *)(void *)(tiles + 4 * TILE);       /* two times lse and delta */
    fs_attention_tile at = fs_tile_of_keys(op, ROWS);
    size_t dim = (size_t)op.dim, q_row = fs_query_row(op, at.batch, at.head);
    int j0 = at.tile * ROWS, row = warp_of() * 16 * M, j = j0 + row;
    int j_end = fs_least(j + 16 * M, op.length); /* of the warp's rows; may be before j */
    size_t k_row = fs_key_row(op, at.batch, at.kv_head) + (size_t)j0;
    size_t token = fs_token_offset(op, at.batch, at.head);
    passing_queries pass = queries_of_keys(op, j0, fs_least(j0 + ROWS, op.length), QUERIES);
    passing_step next = step_of(pass, 0, QUERIES);
    load_tile<DIM, ROWS>(k_tile, (const uint16_t *)op.k + k_row * dim, dim, op.length - j0,
                         op.dim);
    load_tile<DIM, ROWS>(v_tile, (const uint16_t *)op.v + k_row * dim, dim, op.length - j0,
                         op.dim);
    load_step<DIM, QUERIES>(op, tiles, q_row, token, next);
    store_statistic<QUERIES>(statistics, load_statistic<QUERIES>(op, q_row, next));
    float dk[M][DIM / 8][4], dv[M][DIM / 8][4];
    set_zero(dk);
    set_zero(dv);
    for (int step = 0; step < pass.steps; step++) {
        int stage = step % 2, other = stage ^ 1;
        const uint16_t *q_tile = tiles + stage * 2 * TILE, *dout_tile = q_tile + TILE;
        const float *lse = statistics + stage * 2 * QUERIES, *delta = lse + QUERIES;
        bool has_next = step + 1 < pass.steps;
        float statistic = 0.0f;
        int i = next.query, i_end = fs_least(i + QUERIES, op.length);
        fs_copy_wait<0>();
        __syncthreads(); /* this tile is there, and nobody reads the one before any more */
        if (has_next) {
            next = step_of(pass, step + 1, QUERIES);
            load_step<DIM, QUERIES>(op, tiles + other * 2 * TILE, q_row, token, next);
            statistic = load_statistic<QUERIES>(op, q_row, next);
        }
        if (j < j_end && fs_any_sees(op, i, i_end, j, j_end)) {
            float p[M][QUERIES / 8][4], ds[M][QUERIES / 8][4];
            multiply_rows<E, DIM>(p, k_tile, row, q_tile);
            soften_turned(op, p, lse, !fs_all_see(op, i, i_end, j, j_end), j, i);
            multiply_columns<E, DIM>(dv, p, dout_tile);
            multiply_rows<E, DIM>(ds, v_tile, row, dout_tile);
            derive_turned(ds, p, delta);
            multiply_columns<E, DIM>(dk, ds, q_tile);
        }
        if (has_next) {
            store_statistic<QUERIES>(statistics + other * 2 * QUERIES, statistic);
        }
    }
    if (j < j_end) {
        size_t offset = (k_row + (size_t)row) * dim;
        store_rows<E, DIM>(dk, k_tile, row, (uint16_t *)op.dk + offset, dim, j_end - j, op.dim);
        store_rows<E, DIM>(dv, v_tile, row, (uint16_t *)op.dv + offset, dim, j_end - j, op.dim);
    }
}

template <fs_dtype E, int DIM, int M, int QUERIES>
static fs_status
launch_keys(fs_cuda_stream stream, const fs_attention_args *op)
{
    constexpr int ROWS = TILE_WARPS * 16 * M;
    size_t shared = (size_t)(2 * ROWS + 4 * QUERIES) * TILE_STRIDE<DIM> * sizeof(uint16_t) +
                    4 * QUERIES * sizeof(float);
    return fs_attention_launch("attention_grad", grad_keys_kernel<E, DIM, M, QUERIES>,
                               fs_attention_blocks(op, op->kv_heads, ROWS), TILE_THREADS, shared,
                               stream, fs_attention_touched(FS_ATTENTION_GRAD_KEYS, op), op);
}

template <fs_dtype E>
static fs_status
choose_keys(fs_cuda_stream stream, const fs_attention_args *op)
{
    return op->dim <= 64 ? launch_keys<E, 64, 1, 64>(stream, op)
                         : launch_keys<E, 128, 1, 64>(stream, op);
}

fs_status
fs_cuda_attention_keys_16(fs_cuda_stream stream, const fs_attention_args *op)
{
    return op->dtype == FS_BF16 ? choose_keys<FS_BF16>(stream, op)
                                : choose_keys<FS_F16>(stream, op);
}

// ---- dQ -----------------------------------------------------------------------------------------

/* What a lane needs of its two rows of each of M fragments. */
template <int M>
struct row_statistics {
    float lse[M][2]; /* in powers of two */
    float delta[M][2];
};

/* Beyond the last query both are such that nothing comes of it. */
template <int M>
FS_DEVICE_FN row_statistics<M>
load_row_statistics(const fs_attention_args &op, size_t row, int queries)
{
    row_statistics<M> all;
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        int at = r * 8 + lane_of() / 4;
        bool is_there = at < queries;
        all.lse[r / 2][r % 2] = is_there ? op.lse[row + (size_t)at] * FS_LOG2_E : INFINITY;
        all.delta[r / 2][r % 2] = is_there ? op.delta[row + (size_t)at] : 0.0f;
    }
    return all;
}

/* ds = p * (dp - delta), in the place of the scores s. i: the warp's first row; j: first column. */
template <int M, int N>
FS_DEVICE_FN void
derive(const fs_attention_args &op, float (&s)[M][N][4], const float (&dp)[M][N][4],
       const row_statistics<M> &rows, bool is_cut, int i, int j)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int row = 16 * m + e / 2 * 8 + lane_of() / 4;
                int column = 8 * n + lane_of() % 4 * 2 + e % 2;
                float p = fs_exp2(s[m][n][e] * FS_LOG2_E - rows.lse[m][e / 2]);
                p = !is_cut || fs_sees(op, i + row, j + column) ? p : 0.0f;
                s[m][n][e] = p * (dp[m][n][e] - rows.delta[m][e / 2]);
            }
        }
    }
}

template <fs_dtype E, int DIM, int M, int KEYS>
static __global__ void
__launch_bounds__(TILE_THREADS)
grad_queries_kernel(fs_attention_args op)
{
    constexpr int ROWS = TILE_WARPS * 16 * M, TILE = KEYS * TILE_STRIDE<DIM>;
    uint16_t *q_tile = (uint16_t *)(void *)fs_shared_memory();
    uint16_t *dout_tile = q_tile + ROWS * TILE_STRIDE<DIM>;
    uint16_t *kv_tiles = dout_tile + ROWS * TILE_STRIDE<DIM>; /* two times K and V */
    fs_attention_tile at = fs_tile_of_queries(op, ROWS);
    int i0 = at.tile * ROWS, row = warp_of() * 16 * M, i = i0 + row;
    int i_end = fs_least(i + 16 * M, op.length); /* of the warp's rows; may be before i */
    size_t dim = (size_t)op.dim, q_row = fs_query_row(op, at.batch, at.head) + (size_t)i0;
    size_t k_row = fs_key_row(op, at.batch, at.kv_head);
    const uint16_t *k = (const uint16_t *)op.k + k_row * dim;
    const uint16_t *v = (const uint16_t *)op.v + k_row * dim;
    int first = fs_first_key(op, i0) / KEYS * KEYS, end = fs_least(i0 + ROWS, op.keys);
    load_tile<DIM, ROWS>(q_tile, (const uint16_t *)op.q + q_row * dim, dim, op.length - i0,
                         op.dim);
    size_t token = fs_token_offset(op, at.batch, at.head) + (size_t)i0 * fs_token_stride(op);
    load_token_tile<DIM, ROWS>(op, dout_tile, (const uint16_t *)op.dout + token, op.length - i0);
    load_keys<DIM, KEYS>(op, kv_tiles, k, v, first);
    row_statistics<M> rows = load_row_statistics<M>(op, q_row + (size_t)row, op.length - i);
    float dq[M][DIM / 8][4];
    set_zero(dq);
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
        float s[M][KEYS / 8][4], dp[M][KEYS / 8][4];
        multiply_rows<E, DIM>(s, q_tile, row, k_tile);
        multiply_rows<E, DIM>(dp, dout_tile, row, v_tile);
        derive(op, s, dp, rows, !fs_all_see(op, i, i_end, j0, j0 + KEYS), i, j0);
        multiply_columns<E, DIM>(dq, s, k_tile);
    }
    if (i < i_end) {
        uint16_t *to = (uint16_t *)op.dq + (q_row + (size_t)row) * dim;
        store_rows<E, DIM>(dq, q_tile, row, to, dim, i_end - i, op.dim);
    }
}

template <fs_dtype E, int DIM, int M, int KEYS>
static fs_status
launch_queries(fs_cuda_stream stream, const fs_attention_args *op)
{
    constexpr int ROWS = TILE_WARPS * 16 * M;
    size_t shared = (size_t)(2 * ROWS + 4 * KEYS) * TILE_STRIDE<DIM> * sizeof(uint16_t);
    return fs_attention_launch("attention_grad", grad_queries_kernel<E, DIM, M, KEYS>,
                               fs_attention_blocks(op, op->q_heads, ROWS), TILE_THREADS, shared,
                               stream, fs_attention_touched(FS_ATTENTION_GRAD_QUERIES, op), op);
}

template <fs_dtype E>
static fs_status
choose_queries(fs_cuda_stream stream, const fs_attention_args *op)
{
    return op->dim <= 64 ? launch_queries<E, 64, 2, 32>(stream, op)
                         : launch_queries<E, 128, 1, 64>(stream, op);
}

fs_status
fs_cuda_attention_queries_16(fs_cuda_stream stream, const fs_attention_args *op)
{
    return op->dtype == FS_BF16 ? choose_queries<FS_BF16>(stream, op)
                                : choose_queries<FS_F16>(stream, op);
}
