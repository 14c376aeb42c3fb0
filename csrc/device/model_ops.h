/* The model's operations of the device table: everything in a Llama that is not a GEMM.
 *
 * Activations, their gradients, norm weights and biases are arrays of an operation's dtype,
 * row-major; a row is one token of (batch, length). The CPU takes fp32 alone; CUDA takes fp32, bf16
 * and fp16, computes in fp32 and rounds once, when it stores. dtype 0 is fp32. Weight gradients are
 * fp32, and so are statistics, or better. "Packed" is (batch, heads, length, padded_dim): one
 * head's rows lie together, their tail up to padded_dim (a multiple of 16) is zero. Each operation
 * cuts its work on a grid fixed by the sizes alone and adds partial sums in index order: its bits
 * do not depend on the number of threads. Only attention uses fused multiply-add where the
 * instruction set has it; the others give equal bits on all of them.
 *
 * "add" fields: false writes the gradient (it may hold anything before), true adds to it. A NULL
 * gradient of a parameter means frozen: it is not computed. Scratch is the caller's and may
 * hold anything. See model/forward.c and model/backward.c for how the operations compose. */
#ifndef FS_DEVICE_MODEL_OPS_H
#define FS_DEVICE_MODEL_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/dtype.h"

struct fs_exec;

/* Head sizes that attention takes; rows of q and k handled together. */
#define FS_HEAD_DIM_MAX 256
#define FS_ATTENTION_TILE 64
#define FS_LANES 16

/* head_dim rounded up to whole vectors, and length to whole tiles. */
static inline size_t
fs_padded_dim(size_t head_dim)
{
    return (head_dim + FS_LANES - 1) / FS_LANES * FS_LANES;
}

static inline size_t
fs_padded_length(size_t length)
{
    return (length + FS_ATTENTION_TILE - 1) / FS_ATTENTION_TILE * FS_ATTENTION_TILE;
}

/* out[row] = scale * table[tokens[row]]. Ids are below vocab. */
typedef struct fs_embed {
    size_t rows, width, vocab;
    const int32_t *tokens; /* (rows) */
    float scale;
    const void *table; /* (vocab, width) of table_dtype: FS_F32, FS_BF16 or FS_F16 */
    fs_dtype table_dtype;
    fs_dtype dtype; /* of out */
    void *out;      /* (rows, width) */
} fs_embed;

/* dtable[id] (+)= scale * sum of dy over the rows whose token is id, in row order. */
typedef struct fs_embed_grad {
    size_t rows, width, vocab;
    float scale;
    fs_dtype dtype; /* of dy */
    const void *dy; /* (rows, width) */
    float *dtable;  /* (vocab, width) */
    bool add;
    const int32_t *first;  /* (vocab + 1): where an id's rows begin in sorted */
    const int32_t *sorted; /* (rows): rows by id, then by index; see fs_sort_rows */
} fs_embed_grad;

/* Stable counting sort of rows by id, on the host: first has vocab + 1 entries, sorted rows. */
static inline void
fs_sort_rows(const int32_t *tokens, size_t rows, size_t vocab, int32_t *first, int32_t *sorted)
{
    for (size_t id = 0; id <= vocab; id++) {
        first[id] = 0;
    }
    for (size_t r = 0; r < rows; r++) {
        first[tokens[r] + 1]++;
    }
    for (size_t id = 0; id < vocab; id++) {
        first[id + 1] += first[id];
    }
    /* Placing moves first[id] to the end of its rows, which is where id + 1 begins: shift back. */
    for (size_t r = 0; r < rows; r++) {
        sorted[first[tokens[r]]++] = (int32_t)r;
    }
    for (size_t id = vocab; id > 0; id--) {
        first[id] = first[id - 1];
    }
    first[0] = 0;
}

/* Residual and RMSNorm in one pass: sum = x + alpha * (branch + bias), then
 * out = sum / sqrt(mean(sum^2) + eps) * weight. Without a branch sum is x and is not written. */
typedef struct fs_norm {
    size_t rows, width;
    fs_dtype dtype;
    const void *x;      /* (rows, width) */
    const void *branch; /* (rows, width) or NULL */
    const void *bias;   /* (width) or NULL */
    float alpha;
    void *sum;          /* (rows, width); may be x; may be NULL without a branch */
    const void *weight; /* (width) */
    double eps;
    void *out;          /* (rows, width); may be branch */
    float *rstd;        /* (rows): 1 / sqrt(mean + eps); of the sum as stored */
} fs_norm;

/* Rows whose share of dweight is summed together: at most this many chunks, whatever rows is. */
#define FS_NORM_CHUNKS 64
#define FS_NORM_CHUNK_ROWS_MIN 16

/* Rows of one chunk: fixed by the number of rows. */
static inline size_t
fs_norm_chunk_rows(size_t rows)
{
    size_t chunk = rows / FS_NORM_CHUNKS + (rows % FS_NORM_CHUNKS != 0);
    return chunk > FS_NORM_CHUNK_ROWS_MIN ? chunk : FS_NORM_CHUNK_ROWS_MIN;
}

/* Backward of out = x * rstd * weight. dy holds the gradient of out on entry and out itself, made
 * again for the weight gradients of the following GEMMs, on return. */
typedef struct fs_norm_grad {
    size_t rows, width;
    fs_dtype dtype;
    const void *x;
    const float *rstd;
    const void *weight;
    void *dy;          /* (rows, width) in and out, see above */
    void *dx;          /* (rows, width) */
    bool dx_add;
    float *dweight;    /* (width) or NULL */
    bool dweight_add;
    float *partial;    /* scratch (FS_NORM_CHUNKS, width) */
} fs_norm_grad;

/* Between the rows of the projections and packed heads. rows is (batch * length, (q_heads + 2 *
 * kv_heads) * head_dim): q, k, v of one token side by side. A key head of k and v has kv_rows
 * rows, length unless they are a cache. */
typedef struct fs_heads {
    size_t batch, length, q_heads, kv_heads, head_dim, padded_dim, kv_rows;
    fs_dtype dtype;
    const float *cosines, *sines; /* (length, head_dim / 2) */
    const void *q_bias, *k_bias, *v_bias; /* or NULL; not used by heads_grad */
    float q_scale;       /* softmax scale, folded into q */
    void *rows;
    void *q, *k, *v;     /* packed */
} fs_heads;

/* Causal softmax attention over packed q, k, v (q carries the scale): token i sees tokens j <=
 * i, and only j > i - window where window > 0. Query head h reads key head h / (q_heads /
 * kv_heads). Where keys are cached, past of them come before the first query, and a key head has
 * kv_rows rows; else past is 0 and kv_rows is length. Gradients are for the latter only. What is
 * marked as the CPU's scratch is not used, and may be NULL, on a device. */
typedef struct fs_attention {
    size_t batch, length, q_heads, kv_heads, head_dim, padded_dim, window, past, kv_rows;
    fs_dtype dtype;
    const void *q, *k, *v;
    void *out;        /* (batch * length, q_heads * head_dim): the grad reads it */
    float *lse;       /* (batch, q_heads, length) log of the sum of exponentials: likewise */
    float *k_turned;  /* CPU's scratch (batch, kv_heads, padded_dim, padded past + length) */
    /* What follows is used by attention_grad alone. */
    float *v_turned;    /* CPU's scratch like k_turned */
    const void *dout;   /* like out */
    float *dout_packed; /* CPU's scratch (batch, q_heads, length, padded_dim) */
    float *delta;       /* scratch (batch, q_heads, length) */
    void *dq, *dk, *dv; /* packed; padding is zero */
} fs_attention;

/* act = silu(gate + gate_bias) * (up + up_bias). */
typedef struct fs_swiglu {
    size_t rows, width;
    fs_dtype dtype;
    const void *gate_bias, *up_bias; /* (width) or NULL */
    void *gate, *up; /* (rows, width): read; swiglu_grad replaces them by their gradients */
    void *act;       /* (rows, width); swiglu_grad: the gradient on entry, act itself on return */
} fs_swiglu;

/* Cross-entropy of rows of logits, and factor times the gradient of their sum. A target of -100 is
 * ignored: loss 0, gradient 0. logits are multiplied by scale first (1 / logits_scaling). */
typedef struct fs_xent {
    size_t rows, vocab;
    float *logits;          /* (rows, vocab): holds nothing of use afterwards */
    const int32_t *targets; /* (rows), -100 or an id below vocab */
    float scale;
    void *dlogits;          /* (rows, vocab) out, or NULL: no gradient; logits itself where fp32 */
    fs_dtype dtype;         /* of dlogits */
    float factor;           /* a power of two: the loss scale */
    double *loss;           /* (rows) out: nats */
} fs_xent;

#define FS_TARGET_IGNORED (-100)

/* Elements of a row whose exponentials are summed in fp32 before the fp64 sum takes them. */
#define FS_XENT_TILE_N ((size_t)1024)

/* out[c] (+)= sum over rows of x[r, c]: gradients of biases. */
typedef struct fs_column_sum {
    size_t rows, width, stride; /* of x, elements */
    fs_dtype dtype; /* of x */
    const void *x;
    float *out;
    bool add;
} fs_column_sum;

/* out[i] = alpha * x[i] + (add ? out[i] : 0). */
typedef struct fs_scale {
    size_t n;
    fs_dtype dtype;
    void *out;
    const void *x; /* may be out */
    float alpha;
    bool add;
} fs_scale;

/* out[i] = std * z[first + i], z standard normal: a pure function of (seed, stream, index). */
typedef struct fs_normal {
    uint64_t seed;
    uint64_t stream;
    uint64_t first;
    size_t n;
    float std;
    float *out;
} fs_normal;

typedef struct fs_model_ops {
    void (*embed)(const struct fs_exec *exec, const fs_embed *op);
    void (*embed_grad)(const struct fs_exec *exec, const fs_embed_grad *op);
    void (*norm)(const struct fs_exec *exec, const fs_norm *op);
    void (*norm_grad)(const struct fs_exec *exec, const fs_norm_grad *op);
    void (*heads)(const struct fs_exec *exec, const fs_heads *op);
    void (*heads_grad)(const struct fs_exec *exec, const fs_heads *op);
    void (*attention)(const struct fs_exec *exec, const fs_attention *op);
    void (*attention_grad)(const struct fs_exec *exec, const fs_attention *op);
    void (*swiglu)(const struct fs_exec *exec, const fs_swiglu *op);
    void (*swiglu_grad)(const struct fs_exec *exec, const fs_swiglu *op);
    void (*xent)(const struct fs_exec *exec, const fs_xent *op);
    void (*column_sum)(const struct fs_exec *exec, const fs_column_sum *op);
    void (*scale)(const struct fs_exec *exec, const fs_scale *op);
    void (*normal)(const struct fs_exec *exec, const fs_normal *op);
} fs_model_ops;

#endif
