/* Rows of the model: embedding, norm, rotary heads, SwiGLU, cross-entropy, sums over rows.
 *
 * Where the CPU sums over lanes (element i of a row in lane i mod FS_LANES, lanes then added in
 * index order in fp64), a thread takes a lane here. */
#include "common.cuh"

extern "C" {
#include "model.h"
}

#define ROW_THREADS 128u
#define ELEMENT_THREADS 256u

/* First element of this thread and the stride to its next. */
FS_DEVICE_FN size_t
first_element(void)
{
    return (size_t)blockIdx.x * blockDim.x + threadIdx.x;
}

FS_DEVICE_FN size_t
element_stride(void)
{
    return (size_t)gridDim.x * blockDim.x;
}

FS_DEVICE_FN double
sum_lanes(const float *lanes)
{
    double sum = 0.0;
    for (unsigned l = 0; l < FS_LANES; l++) {
        sum = sum + (double)lanes[l];
    }
    return sum;
}

static size_t
f32s(size_t n)
{
    return n * sizeof(float);
}

/* rows * width * 8 must fit, so that what is computed from them does. */
static fs_status
check_rows(fs_cuda_stream stream, const char *what, size_t rows, size_t width)
{
    size_t n, nbytes;
    FS_TRY(fs_cuda_check_stream(stream, what));
    FS_TRY(fs_mul_size(rows, width, &n));
    return fs_mul_size(n, sizeof(double), &nbytes);
}

// ---- embedding ----------------------------------------------------------------------------------

static __global__ void
embed_kernel(fs_embed op)
{
    size_t n = op.rows * op.width;
    for (size_t at = first_element(); at < n; at += element_stride()) {
        size_t row = at / op.width, column = at % op.width;
        size_t from = (size_t)op.tokens[row] * op.width + column;
        float value = op.table_dtype == FS_BF16 ? fs_f32_of_bf16(((const uint16_t *)op.table)[from])
                      : op.table_dtype == FS_F16 ? fs_f32_of_f16(((const uint16_t *)op.table)[from])
                                                 : ((const float *)op.table)[from];
        op.out[at] = op.scale * value;
    }
}

extern "C" fs_status
fs_cuda_embed(fs_cuda_stream stream, const fs_embed *op)
{
    FS_TRY(check_rows(stream, "embed", op->rows, op->width));
    FS_TRY(check_rows(stream, "embed", op->vocab, op->width));
    FS_TRY(fs_cuda_check_float(op->table_dtype, "embed", "of the table"));
    if (op->table_dtype == FS_F64) {
        return FS_FAIL(FS_ETYPE, "embed: a table of float64");
    }
    if (op->rows == 0) {
        return FS_OK;
    }
    FS_LAUNCH(embed_kernel, fs_cuda_blocks(op->rows * op->width, ELEMENT_THREADS), ELEMENT_THREADS,
              0, stream,
              fs_touched()
                  .reads(op->tokens, op->rows * sizeof(int32_t))
                  .reads(op->table, op->vocab * op->width * fs_dtype_nbytes(op->table_dtype))
                  .writes(op->out, f32s(op->rows * op->width)),
              *op);
    return fs_cuda_launched("embed");
}

/* How many rows each id has, in first[id + 1]. */
static __global__ void
count_kernel(fs_embed_grad op)
{
    for (size_t r = first_element(); r < op.rows; r += element_stride()) {
        (void)atomicAdd(&op.first[op.tokens[r] + 1], 1);
    }
}

/* One thread: from counts to where each id begins. */
static __global__ void
begin_kernel(fs_embed_grad op)
{
    for (size_t id = 0; id < op.vocab; id++) {
        op.first[id + 1] += op.first[id];
    }
}

/* A row's place among those of its id: after those that come before it. No thread waits for
 * another, and the order does not depend on who is first. */
static __global__ void
place_kernel(fs_embed_grad op)
{
    for (size_t r = first_element(); r < op.rows; r += element_stride()) {
        int32_t token = op.tokens[r], before = 0;
        for (size_t other = 0; other < r; other++) {
            before += op.tokens[other] == token ? 1 : 0;
        }
        op.sorted[op.first[token] + before] = (int32_t)r;
    }
}

static __global__ void
embed_grad_kernel(fs_embed_grad op)
{
    size_t n = op.vocab * op.width;
    for (size_t at = first_element(); at < n; at += element_stride()) {
        size_t id = at / op.width, column = at % op.width;
        float sum = op.add ? op.dtable[at] : 0.0f;
        for (int32_t s = op.first[id]; s < op.first[id + 1]; s++) {
            sum = sum + op.scale * op.dy[(size_t)op.sorted[s] * op.width + column];
        }
        op.dtable[at] = sum;
    }
}

extern "C" fs_status
fs_cuda_embed_grad(fs_cuda_stream stream, const fs_embed_grad *op)
{
    FS_TRY(check_rows(stream, "embed_grad", op->rows, op->width));
    FS_TRY(check_rows(stream, "embed_grad", op->vocab, op->width));
    if (op->rows > INT32_MAX) {
        return FS_FAIL(FS_EINVAL, "embed_grad: %zu rows, at most %d", op->rows, INT32_MAX);
    }
    if (op->vocab == 0) {
        return FS_OK;
    }
    size_t tokens = op->rows * sizeof(int32_t), first = (op->vocab + 1) * sizeof(int32_t);
    FS_CUDA_TRY(cudaMemsetAsync(op->first, 0, first, (cudaStream_t)stream));
    if (op->rows > 0) {
        unsigned blocks = fs_cuda_blocks(op->rows, ELEMENT_THREADS);
        FS_LAUNCH(count_kernel, blocks, ELEMENT_THREADS, 0, stream,
                  fs_touched().reads(op->tokens, tokens).writes(op->first, first), *op);
        FS_TRY(fs_cuda_launched("embed_grad"));
        FS_LAUNCH(begin_kernel, 1, 1, 0, stream, fs_touched().writes(op->first, first), *op);
        FS_TRY(fs_cuda_launched("embed_grad"));
        FS_LAUNCH(place_kernel, blocks, ELEMENT_THREADS, 0, stream,
                  fs_touched()
                      .reads(op->tokens, tokens)
                      .reads(op->first, first)
                      .writes(op->sorted, tokens),
                  *op);
        FS_TRY(fs_cuda_launched("embed_grad"));
    }
    FS_LAUNCH(embed_grad_kernel, fs_cuda_blocks(op->vocab * op->width, ELEMENT_THREADS),
              ELEMENT_THREADS, 0, stream,
              fs_touched()
                  .reads(op->first, first)
                  .reads(op->sorted, tokens)
                  .reads(op->dy, f32s(op->rows * op->width))
                  .writes(op->dtable, f32s(op->vocab * op->width)),
              *op);
    return fs_cuda_launched("embed_grad");
}

// ---- residual and RMSNorm -----------------------------------------------------------------------

/* A block a row. */
static __global__ void
norm_kernel(fs_norm op)
{
    float *lanes = (float *)(void *)fs_shared_memory();
    size_t width = op.width;
    for (size_t r = blockIdx.x; r < op.rows; r += gridDim.x) {
        const float *in = op.x + r * width;
        if (op.branch != NULL) {
            const float *branch = op.branch + r * width;
            float *sum = op.sum + r * width;
            for (size_t i = threadIdx.x; i < width; i += blockDim.x) {
                float extra = op.bias != NULL ? branch[i] + op.bias[i] : branch[i];
                sum[i] = in[i] + op.alpha * extra;
            }
            in = sum;
        }
        __syncthreads();
        if (threadIdx.x < FS_LANES) {
            float lane = 0.0f;
            for (size_t i = threadIdx.x; i < width; i += FS_LANES) {
                lane = lane + in[i] * in[i];
            }
            lanes[threadIdx.x] = lane;
        }
        __syncthreads();
        double squares = sum_lanes(lanes);
        float rstd = (float)(1.0 / sqrt(squares / (double)width + op.eps));
        if (threadIdx.x == 0) {
            op.rstd[r] = rstd;
        }
        float *out = op.out + r * width;
        for (size_t i = threadIdx.x; i < width; i += blockDim.x) {
            out[i] = in[i] * rstd * op.weight[i];
        }
        __syncthreads();
    }
}

extern "C" fs_status
fs_cuda_norm(fs_cuda_stream stream, const fs_norm *op)
{
    FS_TRY(check_rows(stream, "norm", op->rows, op->width));
    if (op->rows == 0 || op->width == 0) {
        return FS_OK;
    }
    if (op->branch != NULL && op->sum == NULL) {
        return FS_FAIL(FS_EINVAL, "norm: a branch, and nowhere to put the sum");
    }
    size_t nbytes = f32s(op->rows * op->width);
    fs_touched touched = fs_touched()
                             .reads(op->x, nbytes)
                             .reads(op->weight, f32s(op->width))
                             .writes(op->out, nbytes)
                             .writes(op->rstd, f32s(op->rows));
    if (op->branch != NULL) {
        touched.reads(op->branch, nbytes).writes(op->sum, nbytes);
    }
    FS_LAUNCH(norm_kernel, fs_cuda_blocks(op->rows, 1), ROW_THREADS, f32s(FS_LANES), stream,
              touched, *op);
    return fs_cuda_launched("norm");
}

/* A block a chunk of rows: its share of dweight goes to its line of partial. */
static __global__ void
norm_grad_kernel(fs_norm_grad op, size_t chunk)
{
    float *lanes = (float *)(void *)fs_shared_memory();
    size_t width = op.width, begin = blockIdx.x * chunk;
    size_t end = op.rows - begin < chunk ? op.rows : begin + chunk;
    float *partial = op.dweight == NULL ? NULL : op.partial + blockIdx.x * width;
    if (partial != NULL) {
        for (size_t i = threadIdx.x; i < width; i += blockDim.x) {
            partial[i] = 0.0f;
        }
    }
    for (size_t r = begin; r < end; r++) {
        const float *x = op.x + r * width;
        float *dy = op.dy + r * width;
        float *dx = op.dx + r * width;
        float rstd = op.rstd[r];
        if (threadIdx.x < FS_LANES) {
            float lane = 0.0f;
            for (size_t i = threadIdx.x; i < width; i += FS_LANES) {
                lane = lane + dy[i] * op.weight[i] * x[i];
            }
            lanes[threadIdx.x] = lane;
        }
        __syncthreads();
        /* With n = x * rstd: dx = rstd * (dn - n * mean(dn * n)). */
        double mean = sum_lanes(lanes) * (double)rstd / (double)width;
        float back = (float)(mean * (double)rstd * (double)rstd);
        for (size_t i = threadIdx.x; i < width; i += blockDim.x) {
            if (partial != NULL) {
                partial[i] = partial[i] + dy[i] * (x[i] * rstd);
            }
            float here = rstd * (dy[i] * op.weight[i]) - x[i] * back;
            dx[i] = op.dx_add ? dx[i] + here : here;
            dy[i] = x[i] * rstd * op.weight[i];
        }
        __syncthreads();
    }
}

static __global__ void
norm_grad_weight_kernel(fs_norm_grad op, size_t chunks)
{
    for (size_t i = first_element(); i < op.width; i += element_stride()) {
        double sum = 0.0;
        for (size_t c = 0; c < chunks; c++) {
            sum = sum + (double)op.partial[c * op.width + i];
        }
        op.dweight[i] = op.dweight_add ? op.dweight[i] + (float)sum : (float)sum;
    }
}

extern "C" fs_status
fs_cuda_norm_grad(fs_cuda_stream stream, const fs_norm_grad *op)
{
    FS_TRY(check_rows(stream, "norm_grad", op->rows, op->width));
    if (op->width == 0) {
        return FS_OK;
    }
    size_t nbytes = f32s(op->rows * op->width), chunk = fs_norm_chunk_rows(op->rows);
    size_t chunks = op->rows / chunk + (op->rows % chunk != 0);
    size_t partial = op->dweight == NULL ? 0 : f32s(chunks * op->width);
    if (chunks > 0) {
        FS_LAUNCH(norm_grad_kernel, (unsigned)chunks, ROW_THREADS, f32s(FS_LANES), stream,
                  fs_touched()
                      .reads(op->x, nbytes)
                      .reads(op->rstd, f32s(op->rows))
                      .reads(op->weight, f32s(op->width))
                      .writes(op->dy, nbytes)
                      .writes(op->dx, nbytes)
                      .writes(op->partial, partial),
                  *op, chunk);
        FS_TRY(fs_cuda_launched("norm_grad"));
    }
    if (op->dweight != NULL) {
        FS_LAUNCH(norm_grad_weight_kernel, fs_cuda_blocks(op->width, ELEMENT_THREADS),
                  ELEMENT_THREADS, 0, stream,
                  fs_touched().reads(op->partial, partial).writes(op->dweight, f32s(op->width)),
                  *op, chunks);
        FS_TRY(fs_cuda_launched("norm_grad"));
    }
    return FS_OK;
}

// ---- heads --------------------------------------------------------------------------------------

/* Which head of which token a block of work is for, and where its packed row lies. */
struct head_place {
    size_t token, head; /* token of batch * length; head of q, k, v side by side */
    size_t position;
    const float *bias;
    float *packed;
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
        p.packed = op->q + ((b * op->q_heads + h) * op->length + p.position) * op->padded_dim;
        p.bias = op->q_bias == NULL ? NULL : op->q_bias + h * d;
        p.turned = true;
        p.scale = op->q_scale;
        return p;
    }
    h -= op->q_heads;
    p.turned = h < op->kv_heads;
    h = p.turned ? h : h - op->kv_heads;
    float *base = p.turned ? op->k : op->v;
    const float *bias = p.turned ? op->k_bias : op->v_bias;
    p.packed = base + ((b * op->kv_heads + h) * op->kv_rows + p.position) * op->padded_dim;
    p.bias = bias == NULL ? NULL : bias + h * d;
    p.scale = 1.0f;
    return p;
}

/* A thread a pair of elements (i, i + d / 2), or two neighbours of v; and the padding. */
static __global__ void
heads_kernel(fs_heads op)
{
    size_t d = op.head_dim, half = d / 2, heads = op.q_heads + 2 * op.kv_heads;
    size_t items = op.batch * op.length * heads;
    for (size_t item = blockIdx.x; item < items; item += gridDim.x) {
        head_place p = place_head(&op, item);
        const float *row = op.rows + (p.token * heads + p.head) * d;
        const float *cosines = op.cosines + p.position * half;
        const float *sines = op.sines + p.position * half;
        for (size_t i = threadIdx.x; i < op.padded_dim; i += blockDim.x) {
            if (i >= d) {
                p.packed[i] = 0.0f;
            } else if (!p.turned) {
                p.packed[i] = p.bias == NULL ? row[i] : row[i] + p.bias[i];
            } else if (i < half) {
                float a = p.bias == NULL ? row[i] : row[i] + p.bias[i];
                float b = p.bias == NULL ? row[half + i] : row[half + i] + p.bias[half + i];
                p.packed[i] = (a * cosines[i] - b * sines[i]) * p.scale;
                p.packed[half + i] = (b * cosines[i] + a * sines[i]) * p.scale;
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
        float *row = op.rows + (p.token * heads + p.head) * d;
        const float *cosines = op.cosines + p.position * half;
        const float *sines = op.sines + p.position * half;
        for (size_t i = threadIdx.x; i < d; i += blockDim.x) {
            if (!p.turned) {
                row[i] = p.packed[i];
            } else if (i < half) {
                float a = p.packed[i], b = p.packed[half + i];
                row[i] = (a * cosines[i] + b * sines[i]) * p.scale;
                row[half + i] = (b * cosines[i] - a * sines[i]) * p.scale;
            }
        }
    }
}

static fs_status
launch_heads(fs_cuda_stream stream, const fs_heads *op, bool back)
{
    const char *what = back ? "heads_grad" : "heads";
    size_t heads = op->q_heads + 2 * op->kv_heads, tokens = op->batch * op->length;
    FS_TRY(check_rows(stream, what, tokens, heads * op->padded_dim));
    FS_TRY(check_rows(stream, what, op->batch * op->kv_rows, op->kv_heads * op->padded_dim));
    if (op->head_dim % 2 != 0 || op->padded_dim < op->head_dim || op->kv_rows < op->length) {
        return FS_FAIL(FS_EINVAL,
                       "%s: heads of %zu (even) in rows of %zu, %zu of %zu rows of keys", what,
                       op->head_dim, op->padded_dim, op->length, op->kv_rows);
    }
    if (tokens == 0 || heads == 0) {
        return FS_OK;
    }
    size_t rows = f32s(tokens * heads * op->head_dim);
    size_t q = f32s(tokens * op->q_heads * op->padded_dim);
    size_t k = f32s(op->batch * op->kv_rows * op->kv_heads * op->padded_dim);
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

// ---- SwiGLU -------------------------------------------------------------------------------------

static __global__ void
swiglu_kernel(fs_swiglu op)
{
    size_t n = op.rows * op.width;
    for (size_t at = first_element(); at < n; at += element_stride()) {
        size_t i = at % op.width;
        float g = op.gate[at] + (op.gate_bias == NULL ? 0.0f : op.gate_bias[i]);
        float u = op.up[at] + (op.up_bias == NULL ? 0.0f : op.up_bias[i]);
        op.act[at] = g / (1.0f + fs_exp_f32(-g)) * u;
    }
}

static __global__ void
swiglu_grad_kernel(fs_swiglu op)
{
    size_t n = op.rows * op.width;
    for (size_t at = first_element(); at < n; at += element_stride()) {
        size_t i = at % op.width;
        float g = op.gate[at] + (op.gate_bias == NULL ? 0.0f : op.gate_bias[i]);
        float u = op.up[at] + (op.up_bias == NULL ? 0.0f : op.up_bias[i]);
        float d = op.act[at];
        float s = 1.0f / (1.0f + fs_exp_f32(-g));
        float silu = g * s;
        op.gate[at] = d * u * (s + silu * (1.0f - s));
        op.up[at] = d * silu;
        op.act[at] = silu * u;
    }
}

static fs_status
launch_swiglu(fs_cuda_stream stream, const fs_swiglu *op, bool back)
{
    const char *what = back ? "swiglu_grad" : "swiglu";
    FS_TRY(check_rows(stream, what, op->rows, op->width));
    size_t n = op->rows * op->width;
    if (n == 0) {
        return FS_OK;
    }
    fs_touched touched = fs_touched().writes(op->act, f32s(n));
    if (back) {
        touched.writes(op->gate, f32s(n)).writes(op->up, f32s(n));
    } else {
        touched.reads(op->gate, f32s(n)).reads(op->up, f32s(n));
    }
    auto kernel = back ? swiglu_grad_kernel : swiglu_kernel;
    FS_LAUNCH(kernel, fs_cuda_blocks(n, ELEMENT_THREADS), ELEMENT_THREADS, 0, stream, touched, *op);
    return fs_cuda_launched(what);
}

extern "C" fs_status
fs_cuda_swiglu(fs_cuda_stream stream, const fs_swiglu *op)
{
    return launch_swiglu(stream, op, false);
}

extern "C" fs_status
fs_cuda_swiglu_grad(fs_cuda_stream stream, const fs_swiglu *op)
{
    return launch_swiglu(stream, op, true);
}

// ---- cross-entropy ------------------------------------------------------------------------------

/* A block a row: the largest logit, exponentials tile by tile, then the gradient. */
static __global__ void
xent_kernel(fs_xent op)
{
    float *most_of = (float *)(void *)fs_shared_memory(); /* ROW_THREADS */
    float *lanes = most_of + ROW_THREADS;                 /* FS_LANES */
    for (size_t row = blockIdx.x; row < op.rows; row += gridDim.x) {
        float *logits = op.logits + row * op.vocab;
        int32_t target = op.targets[row];
        if (target == FS_TARGET_IGNORED) {
            for (size_t i = threadIdx.x; op.grad && i < op.vocab; i += blockDim.x) {
                logits[i] = 0.0f;
            }
            if (threadIdx.x == 0) {
                op.loss[row] = 0.0;
            }
            continue;
        }
        float most = logits[0] * op.scale;
        for (size_t i = threadIdx.x; i < op.vocab; i += blockDim.x) {
            float value = logits[i] * op.scale;
            most = value > most ? value : most;
        }
        most_of[threadIdx.x] = most;
        float wanted = logits[target] * op.scale;
        __syncthreads();
        for (unsigned half = ROW_THREADS / 2; half > 0; half /= 2) {
            if (threadIdx.x < half && most_of[threadIdx.x + half] > most_of[threadIdx.x]) {
                most_of[threadIdx.x] = most_of[threadIdx.x + half];
            }
            __syncthreads();
        }
        most = most_of[0];
        double sum = 0.0;
        for (size_t at = 0; at < op.vocab; at += FS_XENT_TILE_N) {
            float *tile = logits + at;
            size_t n = op.vocab - at < FS_XENT_TILE_N ? op.vocab - at : FS_XENT_TILE_N;
            for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
                tile[i] = fs_exp_f32(tile[i] * op.scale - most);
            }
            __syncthreads();
            if (threadIdx.x < FS_LANES) {
                float lane = 0.0f;
                for (size_t i = threadIdx.x; i < n; i += FS_LANES) {
                    lane = lane + tile[i];
                }
                lanes[threadIdx.x] = lane;
            }
            __syncthreads();
            sum = sum + sum_lanes(lanes);
        }
        float factor = (float)((double)op.scale / sum);
        for (size_t i = threadIdx.x; op.grad && i < op.vocab; i += blockDim.x) {
            float value = logits[i] * factor;
            logits[i] = i == (size_t)target ? value - op.scale : value;
        }
        if (threadIdx.x == 0) {
            op.loss[row] = fs_log_f64(sum) + ((double)most - (double)wanted);
        }
        __syncthreads();
    }
}

extern "C" fs_status
fs_cuda_xent(fs_cuda_stream stream, const fs_xent *op)
{
    FS_TRY(check_rows(stream, "xent", op->rows, op->vocab));
    if (op->rows == 0) {
        return FS_OK;
    }
    FS_LAUNCH(xent_kernel, fs_cuda_blocks(op->rows, 1), ROW_THREADS, f32s(ROW_THREADS + FS_LANES),
              stream,
              fs_touched()
                  .reads(op->targets, op->rows * sizeof(int32_t))
                  .writes(op->logits, f32s(op->rows * op->vocab))
                  .writes(op->loss, op->rows * sizeof(double)),
              *op);
    return fs_cuda_launched("xent");
}

// ---- sums over rows, scaling --------------------------------------------------------------------

static __global__ void
column_sum_kernel(fs_column_sum op)
{
    for (size_t i = first_element(); i < op.width; i += element_stride()) {
        double sum = 0.0;
        for (size_t r = 0; r < op.rows; r++) {
            sum = sum + (double)op.x[r * op.stride + i];
        }
        op.out[i] = op.add ? op.out[i] + (float)sum : (float)sum;
    }
}

extern "C" fs_status
fs_cuda_column_sum(fs_cuda_stream stream, const fs_column_sum *op)
{
    FS_TRY(check_rows(stream, "column_sum", op->rows, op->stride));
    if (op->width > op->stride) {
        return FS_FAIL(FS_EINVAL, "column_sum: %zu columns of rows of %zu", op->width, op->stride);
    }
    if (op->width == 0) {
        return FS_OK;
    }
    size_t read = op->rows == 0 ? 0 : f32s((op->rows - 1) * op->stride + op->width);
    FS_LAUNCH(column_sum_kernel, fs_cuda_blocks(op->width, ELEMENT_THREADS), ELEMENT_THREADS, 0,
              stream, fs_touched().reads(op->x, read).writes(op->out, f32s(op->width)), *op);
    return fs_cuda_launched("column_sum");
}

static __global__ void
scale_kernel(float *out, const float *x, float alpha, bool add, size_t n)
{
    for (size_t i = first_element(); i < n; i += element_stride()) {
        float here = alpha * x[i];
        out[i] = add ? out[i] + here : here;
    }
}

extern "C" fs_status
fs_cuda_scale(fs_cuda_stream stream, float *out, const float *x, float alpha, bool add, size_t n)
{
    FS_TRY(check_rows(stream, "scale", n, 1));
    if (n == 0) {
        return FS_OK;
    }
    FS_LAUNCH(scale_kernel, fs_cuda_blocks(n, ELEMENT_THREADS), ELEMENT_THREADS, 0, stream,
              fs_touched().reads(x, f32s(n)).writes(out, f32s(n)), out, x, alpha, add, n);
    return fs_cuda_launched("scale");
}
