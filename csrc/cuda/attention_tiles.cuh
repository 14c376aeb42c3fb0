/* Tiles of 16-bit rows in shared memory, and products of them on tensor cores.
 *
 * A warp owns 16 * M rows of what it computes; fragments lie as tensor_core.cuh says. A row of a
 * tile is cut into pieces of 8 elements, and piece c of row r lies at place c ^ (r mod 8): the
 * eight rows that one load of a fragment takes at once then lie in different banks. */
#ifndef FS_CUDA_ATTENTION_TILES_CUH
#define FS_CUDA_ATTENTION_TILES_CUH

#include "attention_parts.cuh"
#include "tensor_core.cuh"

#define TILE_WARPS 4
#define TILE_THREADS (TILE_WARPS * 32)

/* Elements of a tile's row for heads of DIM: whole groups of eight pieces. */
template <int DIM>
constexpr int TILE_STRIDE = (DIM + 63) / 64 * 64;

template <int DIM>
FS_DEVICE_FN int
tile_at(int row, int piece)
{
    return row * TILE_STRIDE<DIM> + (piece ^ (row & 7)) * 8;
}

/* Begins to copy a tile of ROWS rows, of which rows are there, the rest zero; columns (whole
 * pieces) of a row are there, the rest zero. Rows are aligned to 16 bytes. */
template <int DIM, int ROWS>
FS_DEVICE_FN void
load_tile(uint16_t *tile, const uint16_t *from, size_t stride, int rows, int columns)
{
    constexpr int PIECES = DIM / 8, STEP = TILE_THREADS / PIECES; /* rows at once */
    static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "a thread has one column of pieces");
    int first = (int)threadIdx.x / PIECES, piece = (int)threadIdx.x % PIECES;
    size_t offset = (size_t)first * stride + (size_t)piece * 8;
    uint16_t *target = tile + tile_at<DIM>(first, piece);
    rows = piece * 8 < columns ? rows : 0;
#pragma unroll
    for (int row = 0; row < ROWS; row += STEP) {
        bool is_there = first + row < rows;
        fs_copy_16(target + row * TILE_STRIDE<DIM>, from + (is_there ? offset : 0), is_there);
        offset += (size_t)STEP * stride;
    }
}

/* The same for rows of tokens, which any number of columns may leave unaligned: then the tile is
 * there at once for the calling thread. */
template <int DIM, int ROWS>
FS_DEVICE_FN void
load_token_tile(const fs_attention_args &op, uint16_t *tile, const uint16_t *from, int rows)
{
    size_t stride = fs_token_stride(op);
    if (op.head_dim % 8 == 0) {
        load_tile<DIM, ROWS>(tile, from, stride, rows, op.head_dim);
        return;
    }
#pragma unroll 1
    for (int at = (int)threadIdx.x; at < ROWS * DIM; at += TILE_THREADS) {
        int row = at / DIM, column = at % DIM;
        bool is_there = row < rows && column < op.head_dim;
        tile[tile_at<DIM>(row, column / 8) + column % 8] =
            is_there ? from[(size_t)row * stride + (size_t)column] : (uint16_t)0;
    }
}

/* The same for a tile of K and one of V behind it, keys from j0 on, as one group. */
template <int DIM, int KEYS>
FS_DEVICE_FN void
load_keys(const fs_attention_args &op, uint16_t *tiles, const uint16_t *k, const uint16_t *v,
          int j0)
{
    size_t offset = (size_t)j0 * (size_t)op.dim;
    size_t stride = (size_t)op.dim;
    load_tile<DIM, KEYS>(tiles, k + offset, stride, op.keys - j0, op.dim);
    load_tile<DIM, KEYS>(tiles + KEYS * TILE_STRIDE<DIM>, v + offset, stride, op.keys - j0,
                         op.dim);
    fs_copy_group();
}

// ---- fragments ----------------------------------------------------------------------------------

FS_DEVICE_FN int
lane_of(void)
{
    return (int)(threadIdx.x % FS_WARP);
}

FS_DEVICE_FN int
warp_of(void)
{
    return (int)(threadIdx.x / FS_WARP);
}

template <fs_dtype E>
FS_DEVICE_FN void
multiply(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    if constexpr (E == FS_BF16) {
        fs_mma_bf16(c, a, b);
    } else {
        fs_mma_f16(c, a, b);
    }
}

template <fs_dtype E>
FS_DEVICE_FN uint32_t
pair_of(float low, float high)
{
    if constexpr (E == FS_BF16) {
        return fs_pair_bf16(low, high);
    } else {
        return fs_pair_f16(low, high);
    }
}

/* A: rows [row, row + 16), columns [16 k, 16 k + 16). */
template <int DIM>
FS_DEVICE_FN void
load_left(uint32_t a[4], const uint16_t *tile, int row, int k)
{
    int lane = lane_of();
    fs_ldmatrix(a, tile + tile_at<DIM>(row + lane % 16, 2 * k + lane / 16));
}

/* B of the product with the tile turned: two neighbouring fragments, whose columns are the rows
 * [row, row + 16) of the tile, and whose rows its columns [16 k, 16 k + 16). */
template <int DIM>
FS_DEVICE_FN void
load_turned(uint32_t b[4], const uint16_t *tile, int row, int k)
{
    int lane = lane_of();
    fs_ldmatrix(b, tile + tile_at<DIM>(row + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
}

/* B of the product with the tile: two neighbouring fragments, of rows [row, row + 16) and columns
 * [16 n, 16 n + 16) of the tile. */
template <int DIM>
FS_DEVICE_FN void
load_right(uint32_t b[4], const uint16_t *tile, int row, int n)
{
    int lane = lane_of();
    fs_ldmatrix_turned(b, tile + tile_at<DIM>(row + lane % 16, 2 * n + lane / 16));
}

// ---- products -----------------------------------------------------------------------------------

/* c = rows [row, row + 16 M) of left, times all 8 N rows of right, turned. */
template <fs_dtype E, int DIM, int M, int N>
FS_DEVICE_FN void
multiply_rows(float (&c)[M][N][4], const uint16_t *left, int row, const uint16_t *right)
{
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        c[i / (N * 4)][i / 4 % N][i % 4] = 0.0f;
    }
#pragma unroll 4 /* all of them would keep more addresses than there are registers */
    for (int k = 0; k < DIM / 16; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            load_left<DIM>(a[m], left, row + 16 * m, k);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            load_turned<DIM>(b, right, 8 * n, k);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply<E>(c[m][n], a[m], b);
                multiply<E>(c[m][n + 1], a[m], b + 2);
            }
        }
    }
}

/* c += p, rounded to E, times all 8 N rows of right. What the accumulator of a product holds in a
 * lane is what it must hold of the left operand of the next. */
template <fs_dtype E, int DIM, int M, int N>
FS_DEVICE_FN void
multiply_columns(float (&c)[M][DIM / 8][4], const float (&p)[M][N][4], const uint16_t *right)
{
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *from = p[m][2 * k + i / 2] + i % 2 * 2;
                a[m][i] = pair_of<E>(from[0], from[1]);
            }
        }
#pragma unroll
        for (int n = 0; n < DIM / 16; n++) {
            uint32_t b[4];
            load_right<DIM>(b, right, 16 * k, n);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply<E>(c[m][2 * n], a[m], b);
                multiply<E>(c[m][2 * n + 1], a[m], b + 2);
            }
        }
    }
}

template <int A, int B>
FS_DEVICE_FN void
set_zero(float (&c)[A][B][4])
{
#pragma unroll
    for (int i = 0; i < A * B * 4; i++) {
        c[i / (B * 4)][i / 4 % B][i % 4] = 0.0f;
    }
}

// ---- storing ------------------------------------------------------------------------------------

/* Writes the warp's 16 M rows to global memory, of which rows are there and columns count, by way
 * of its own rows [row, row + 16 M) of a tile that nobody reads any more. to: its first row. */
template <fs_dtype E, int DIM, int M>
FS_DEVICE_FN void
store_rows(const float (&c)[M][DIM / 8][4], uint16_t *tile, int row, uint16_t *to, size_t stride,
           int rows, int columns)
{
    int lane = lane_of(), g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < DIM / 8; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int at = tile_at<DIM>(row + 16 * m + 8 * half + g, n) + 2 * t;
                uint32_t pair = pair_of<E>(c[m][n][2 * half], c[m][n][2 * half + 1]);
                ((uint1 *)(void *)(tile + at))->x = pair;
            }
        }
    }
    __syncwarp();
    bool is_whole = columns % 8 == 0 && stride % 8 == 0;
    for (int at = lane; at < 16 * M * (DIM / 8); at += 32) {
        int r = at / (DIM / 8), piece = at % (DIM / 8);
        if (r >= rows || piece * 8 >= columns) {
            continue;
        }
        const uint16_t *from = tile + tile_at<DIM>(row + r, piece);
        uint16_t *target = to + (size_t)r * stride + (size_t)piece * 8;
        if (is_whole) {
            *(uint4 *)(void *)target = *(const uint4 *)(const void *)from;
            continue;
        }
        for (int i = 0; i < fs_least(8, columns - piece * 8); i++) {
            target[i] = from[i];
        }
    }
}

#endif
