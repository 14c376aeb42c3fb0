/* What the kernels of attention share: the operation as they take it, which keys a query sees,
 * which tile a block is for, and where heads lie. */
#ifndef FS_CUDA_ATTENTION_PARTS_CUH
#define FS_CUDA_ATTENTION_PARTS_CUH

#include <climits>

#include "common.cuh"

extern "C" {
#include "../device/model_ops.h"
}

#define FS_LOG2_E 1.44269504f

/* fs_attention in the kernels' terms: what is inside a head is counted in int. */
struct fs_attention_args {
    int length, keys, past; /* queries; keys, of which past come before the first query */
    int window;             /* INT_MAX: none */
    int head_dim, dim;      /* dim: of a packed row */
    int q_heads, kv_heads, group;
    size_t batch, kv_rows;
    fs_dtype dtype;
    const void *q, *k, *v;
    void *out;
    float *lse;
    const void *dout;
    float *delta;
    void *dq, *dk, *dv;
};

/* Each starts one kernel over all tiles; which: forward or one of the two of the gradient. */
enum fs_attention_pass { FS_ATTENTION_FORWARD, FS_ATTENTION_GRAD_KEYS, FS_ATTENTION_GRAD_QUERIES };

/* 16-bit elements, dim up to 128: on tensor cores. */
FS_NODISCARD fs_status
fs_cuda_attention_forward_16(fs_cuda_stream stream, const fs_attention_args *op);

/* dk and dv; then dq. */
FS_NODISCARD fs_status
fs_cuda_attention_keys_16(fs_cuda_stream stream, const fs_attention_args *op);

FS_NODISCARD fs_status
fs_cuda_attention_queries_16(fs_cuda_stream stream, const fs_attention_args *op);

/* Any element and dim up to 256: plain arithmetic. */
FS_NODISCARD fs_status
fs_cuda_attention_plain(fs_cuda_stream stream, fs_attention_pass pass,
                        const fs_attention_args *op);

// ---- ranges that a kernel touches ---------------------------------------------------------------

static inline fs_touched
fs_attention_touched(fs_attention_pass pass, const fs_attention_args *op)
{
    size_t queries = op->batch * (size_t)op->q_heads * (size_t)op->length;
    size_t each = (size_t)op->dim * fs_dtype_nbytes(op->dtype);
    size_t row = (size_t)op->head_dim * fs_dtype_nbytes(op->dtype);
    size_t keys = op->batch * (size_t)op->kv_heads * op->kv_rows * each;
    fs_touched touched = fs_touched().reads(op->q, queries * each);
    touched.reads(op->k, keys).reads(op->v, keys);
    if (pass == FS_ATTENTION_FORWARD) {
        touched.writes(op->out, queries * row);
        return touched.writes(op->lse, queries * sizeof(float));
    }
    touched.reads(op->dout, queries * row).reads(op->lse, queries * sizeof(float));
    touched.reads(op->delta, queries * sizeof(float));
    if (pass == FS_ATTENTION_GRAD_QUERIES) {
        return touched.writes(op->dq, queries * each);
    }
    return touched.writes(op->dk, keys).writes(op->dv, keys);
}

// ---- which keys, which queries ------------------------------------------------------------------

FS_DEVICE_FN int
fs_least(int a, int b)
{
    return a < b ? a : b;
}

FS_DEVICE_FN int
fs_most(int a, int b)
{
    return a > b ? a : b;
}

/* Does query i see key j? */
FS_DEVICE_FN bool
fs_sees(const fs_attention_args &op, int i, int j)
{
    int at = op.past + i;
    return j <= at && j > at - op.window;
}

/* Does any query of [i0, i1) see any key of [j0, j1)? */
FS_DEVICE_FN bool
fs_any_sees(const fs_attention_args &op, int i0, int i1, int j0, int j1)
{
    return j0 <= op.past + i1 - 1 && j1 - 1 > op.past + i0 - op.window;
}

/* Does every query of [i0, i1) see every key of [j0, j1)? */
FS_DEVICE_FN bool
fs_all_see(const fs_attention_args &op, int i0, int i1, int j0, int j1)
{
    return j1 - 1 <= op.past + i0 && j0 > op.past + i1 - 1 - op.window;
}

/* First key that query i sees. */
FS_DEVICE_FN int
fs_first_key(const fs_attention_args &op, int i)
{
    return fs_most(op.past + i + 1 - op.window, 0);
}

/* One past the last query that sees key j. */
FS_DEVICE_FN int
fs_end_query(const fs_attention_args &op, int j)
{
    return op.window >= op.length - j ? op.length : j + op.window;
}

// ---- where things lie ---------------------------------------------------------------------------

/* The tile a block is for: blocks of one head follow each other. */
struct fs_attention_tile {
    int tile, tiles, head, kv_head;
    size_t batch;
};

/* Tiles of queries; those that see most keys start first. */
FS_DEVICE_FN fs_attention_tile
fs_tile_of_queries(const fs_attention_args &op, int rows)
{
    fs_attention_tile at;
    at.tiles = (op.length + rows - 1) / rows;
    unsigned head = blockIdx.x / (unsigned)at.tiles;
    at.tile = at.tiles - 1 - (int)(blockIdx.x % (unsigned)at.tiles);
    at.head = (int)(head % (unsigned)op.q_heads);
    at.kv_head = at.head / op.group;
    at.batch = head / (unsigned)op.q_heads;
    return at;
}

/* Tiles of keys; those that most queries see come first by themselves. head is the first of the
 * query heads that read the key head. */
FS_DEVICE_FN fs_attention_tile
fs_tile_of_keys(const fs_attention_args &op, int rows)
{
    fs_attention_tile at;
    at.tiles = (op.length + rows - 1) / rows;
    unsigned head = blockIdx.x / (unsigned)at.tiles;
    at.tile = (int)(blockIdx.x % (unsigned)at.tiles);
    at.kv_head = (int)(head % (unsigned)op.kv_heads);
    at.head = at.kv_head * op.group;
    at.batch = head / (unsigned)op.kv_heads;
    return at;
}

/* Row of a query head's first query among all (batch, q_heads, length), and of a key head's first
 * key among (batch, kv_heads, kv_rows). */
FS_DEVICE_FN size_t
fs_query_row(const fs_attention_args &op, size_t batch, int head)
{
    return (batch * (size_t)op.q_heads + (size_t)head) * (size_t)op.length;
}

FS_DEVICE_FN size_t
fs_key_row(const fs_attention_args &op, size_t batch, int kv_head)
{
    return (batch * (size_t)op.kv_heads + (size_t)kv_head) * op.kv_rows;
}

/* Elements between the rows of two tokens of out and dout, and where a head's first row begins. */
FS_DEVICE_FN size_t
fs_token_stride(const fs_attention_args &op)
{
    return (size_t)op.q_heads * (size_t)op.head_dim;
}

FS_DEVICE_FN size_t
fs_token_offset(const fs_attention_args &op, size_t batch, int head)
{
    return batch * (size_t)op.length * fs_token_stride(op) + (size_t)head * (size_t)op.head_dim;
}

/* Blocks of tiles of so many rows over all heads. */
static inline size_t
fs_attention_blocks(const fs_attention_args *op, int heads, int rows)
{
    size_t tiles = ((size_t)op->length + (size_t)rows - 1) / (size_t)rows;
    return op->batch * (size_t)heads * tiles;
}

/* Starts kernel (of fs_attention_args) with more shared memory than 48 KB if it needs it. */
template <typename K>
static fs_status
fs_attention_launch(const char *what, K kernel, size_t blocks, int threads, size_t shared_nbytes,
                    fs_cuda_stream stream, const fs_touched &touched, const fs_attention_args *op)
{
    if (blocks > INT_MAX) {
        return FS_FAIL(FS_EINVAL, "%s: %zu tiles, at most %d", what, blocks, INT_MAX);
    }
    if (shared_nbytes > (size_t)48 * 1024) {
        FS_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         (int)shared_nbytes));
    }
    FS_LAUNCH(kernel, (unsigned)blocks, (unsigned)threads, shared_nbytes, stream, touched, *op);
    return fs_cuda_launched(what);
}

#endif
