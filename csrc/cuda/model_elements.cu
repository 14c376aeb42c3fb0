/* Elements of the model's rows: SwiGLU, cross-entropy, sums over rows, scaling. */
#include "model.cuh"

// ---- SwiGLU -------------------------------------------------------------------------------------

template <fs_dtype E>
static __global__ void
swiglu_kernel(fs_swiglu op)
{
    op.dtype = E;
    size_t n = op.rows * op.width;
    for (size_t at = fs_first_four(); at < n; at += fs_stride_fours()) {
        unsigned four = fs_four_of(n, at);
        float gate[FS_FOUR], up[FS_FOUR], gate_bias[FS_FOUR], up_bias[FS_FOUR], act[FS_FOUR];
        fs_load_four(gate, op.gate, op.dtype, at, four);
        fs_load_four(up, op.up, op.dtype, at, four);
        bias_four(gate_bias, op.gate_bias, op.dtype, op.width, at, four);
        bias_four(up_bias, op.up_bias, op.dtype, op.width, at, four);
        for (unsigned j = 0; j < four; j++) {
            float g = gate[j] + gate_bias[j], u = up[j] + up_bias[j];
            act[j] = g / (1.0f + fs_exp_f32(-g)) * u;
        }
        fs_store_four(op.act, op.dtype, at, act, four);
    }
}

template <fs_dtype E>
static __global__ void
swiglu_grad_kernel(fs_swiglu op)
{
    op.dtype = E;
    size_t n = op.rows * op.width;
    for (size_t at = fs_first_four(); at < n; at += fs_stride_fours()) {
        unsigned four = fs_four_of(n, at);
        float gate[FS_FOUR], up[FS_FOUR], gate_bias[FS_FOUR], up_bias[FS_FOUR], act[FS_FOUR];
        fs_load_four(gate, op.gate, op.dtype, at, four);
        fs_load_four(up, op.up, op.dtype, at, four);
        fs_load_four(act, op.act, op.dtype, at, four);
        bias_four(gate_bias, op.gate_bias, op.dtype, op.width, at, four);
        bias_four(up_bias, op.up_bias, op.dtype, op.width, at, four);
        for (unsigned j = 0; j < four; j++) {
            float g = gate[j] + gate_bias[j], u = up[j] + up_bias[j], d = act[j];
            float s = 1.0f / (1.0f + fs_exp_f32(-g));
            float silu = g * s;
            gate[j] = d * u * (s + silu * (1.0f - s));
            up[j] = d * silu;
            act[j] = silu * u;
        }
        fs_store_four(op.gate, op.dtype, at, gate, four);
        fs_store_four(op.up, op.dtype, at, up, four);
        fs_store_four(op.act, op.dtype, at, act, four);
    }
}

static fs_status
launch_swiglu(fs_cuda_stream stream, const fs_swiglu *op, bool back)
{
    const char *what = back ? "swiglu_grad" : "swiglu";
    FS_TRY(check_rows(stream, what, op->dtype, op->rows, op->width));
    size_t n = op->rows * op->width;
    if (n == 0) {
        return FS_OK;
    }
    size_t nbytes = n * fs_dtype_nbytes(op->dtype);
    fs_touched touched = fs_touched().writes(op->act, nbytes);
    if (back) {
        touched.writes(op->gate, nbytes).writes(op->up, nbytes);
    } else {
        touched.reads(op->gate, nbytes).reads(op->up, nbytes);
    }
    auto kernel = back ? INSTANCE_OF(swiglu_grad_kernel, op->dtype)
                       : INSTANCE_OF(swiglu_kernel, op->dtype);
    FS_LAUNCH(kernel, fs_cuda_blocks(n, FS_FOUR * ELEMENT_THREADS), ELEMENT_THREADS, 0, stream,
              touched, *op);
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
    float *tile = lanes + FS_LANES;                       /* FS_XENT_TILE_N */
    for (size_t row = blockIdx.x; row < op.rows; row += gridDim.x) {
        float *logits = op.logits + row * op.vocab;
        int32_t target = op.targets[row];
        if (target == FS_TARGET_IGNORED) {
            for (size_t i = threadIdx.x; op.dlogits != NULL && i < op.vocab; i += blockDim.x) {
                fs_store_f32(op.dlogits, op.dtype, row * op.vocab + i, 0.0f);
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
            size_t n = op.vocab - at < FS_XENT_TILE_N ? op.vocab - at : FS_XENT_TILE_N;
            for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
                tile[i] = fs_exp_f32(logits[at + i] * op.scale - most);
                logits[at + i] = tile[i];
            }
            __syncthreads();
            if (threadIdx.x < FS_LANES) {
                lanes[threadIdx.x] = add_tile(0.0f, tile, n);
            }
            __syncthreads();
            sum = sum + sum_lanes(lanes);
        }
        float share = (float)((double)op.scale / sum);
        for (size_t i = threadIdx.x; op.dlogits != NULL && i < op.vocab; i += blockDim.x) {
            float value = logits[i] * share;
            value = i == (size_t)target ? value - op.scale : value;
            fs_store_f32(op.dlogits, op.dtype, row * op.vocab + i, value * op.factor);
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
    FS_TRY(check_rows(stream, "xent", op->dtype, op->rows, op->vocab));
    if (op->rows == 0) {
        return FS_OK;
    }
    size_t n = op->rows * op->vocab;
    fs_touched touched = fs_touched()
                             .reads(op->targets, op->rows * sizeof(int32_t))
                             .writes(op->logits, f32s(n))
                             .writes(op->loss, op->rows * sizeof(double));
    if (op->dlogits != NULL) {
        touched.writes(op->dlogits, n * fs_dtype_nbytes(op->dtype));
    }
    FS_LAUNCH(xent_kernel, fs_cuda_blocks(op->rows, 1), ROW_THREADS,
              f32s(ROW_THREADS + FS_LANES + FS_XENT_TILE_N), stream, touched, *op);
    return fs_cuda_launched("xent");
}

// ---- sums over rows, scaling --------------------------------------------------------------------

#define SUM_COLUMNS 32u /* of a block */
#define SUM_ROWS 64u    /* that all its threads load before a thread a column adds them in order */

template <fs_dtype E>
static __global__ void
column_sum_kernel(fs_column_sum op)
{
    op.dtype = E;
    float *tile = (float *)(void *)fs_shared_memory(); /* SUM_ROWS x SUM_COLUMNS */
    unsigned column = threadIdx.x % SUM_COLUMNS, first = threadIdx.x / SUM_COLUMNS;
    constexpr unsigned STEP = ELEMENT_THREADS / SUM_COLUMNS;
    for (size_t begin = (size_t)blockIdx.x * SUM_COLUMNS; begin < op.width;
         begin += (size_t)gridDim.x * SUM_COLUMNS) {
        size_t i = begin + column;
        double sum = 0.0;
        for (size_t r = 0; r < op.rows; r += SUM_ROWS) {
            unsigned rows = op.rows - r < SUM_ROWS ? (unsigned)(op.rows - r) : SUM_ROWS;
            float x[SUM_ROWS / STEP]; /* all on their way at once */
#pragma unroll
            for (unsigned k = 0; k < SUM_ROWS / STEP; k++) {
                unsigned row = k * STEP + first;
                bool is_there = row < rows && i < op.width;
                x[k] = is_there ? fs_load_f32(op.x, op.dtype, (r + row) * op.stride + i) : 0.0f;
            }
#pragma unroll
            for (unsigned k = 0; k < SUM_ROWS / STEP; k++) {
                tile[(k * STEP + first) * SUM_COLUMNS + column] = x[k];
            }
            __syncthreads();
            for (unsigned row = 0; first == 0 && i < op.width && row < rows; row++) {
                sum = sum + (double)tile[row * SUM_COLUMNS + column];
            }
            __syncthreads();
        }
        if (first == 0 && i < op.width) {
            op.out[i] = op.add ? op.out[i] + (float)sum : (float)sum;
        }
    }
}

extern "C" fs_status
fs_cuda_column_sum(fs_cuda_stream stream, const fs_column_sum *op)
{
    FS_TRY(check_rows(stream, "column_sum", op->dtype, op->rows, op->stride));
    if (op->width > op->stride) {
        return FS_FAIL(FS_EINVAL, "column_sum: %zu columns of rows of %zu", op->width, op->stride);
    }
    if (op->width == 0) {
        return FS_OK;
    }
    size_t read = op->rows == 0 ? 0 : (op->rows - 1) * op->stride + op->width;
    auto kernel = INSTANCE_OF(column_sum_kernel, op->dtype);
    FS_LAUNCH(kernel, fs_cuda_blocks(op->width, SUM_COLUMNS), ELEMENT_THREADS,
              f32s(SUM_ROWS * SUM_COLUMNS), stream,
              fs_touched()
                  .reads(op->x, read * fs_dtype_nbytes(op->dtype))
                  .writes(op->out, f32s(op->width)),
              *op);
    return fs_cuda_launched("column_sum");
}

static __global__ void
scale_kernel(fs_scale op)
{
    for (size_t i = first_element(); i < op.n; i += element_stride()) {
        float here = op.alpha * fs_load_f32(op.x, op.dtype, i);
        here = op.add ? fs_load_f32(op.out, op.dtype, i) + here : here;
        fs_store_f32(op.out, op.dtype, i, here);
    }
}

extern "C" fs_status
fs_cuda_scale(fs_cuda_stream stream, const fs_scale *op)
{
    FS_TRY(check_rows(stream, "scale", op->dtype, op->n, 1));
    if (op->n == 0) {
        return FS_OK;
    }
    size_t nbytes = op->n * fs_dtype_nbytes(op->dtype);
    FS_LAUNCH(scale_kernel, fs_cuda_blocks(op->n, ELEMENT_THREADS), ELEMENT_THREADS, 0, stream,
              fs_touched().reads(op->x, nbytes).writes(op->out, nbytes), *op);
    return fs_cuda_launched("scale");
}
