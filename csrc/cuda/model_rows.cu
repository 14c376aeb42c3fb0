/* Rows of the model: embedding, residual and norm. */
#include "model.cuh"

// ---- embedding ----------------------------------------------------------------------------------

/* A block a row. */
static __global__ void
embed_kernel(fs_embed op)
{
    size_t first = FS_FOUR * threadIdx.x, stride = FS_FOUR * blockDim.x;
    for (size_t row = blockIdx.x; row < op.rows; row += gridDim.x) {
        size_t from = (size_t)op.tokens[row] * op.width;
        for (size_t i = first; i < op.width; i += stride) {
            unsigned n = fs_four_of(op.width, i);
            float x[FS_FOUR];
            fs_load_four(x, op.table, op.table_dtype, from + i, n);
            for (unsigned j = 0; j < n; j++) {
                x[j] = op.scale * x[j];
            }
            fs_store_four(op.out, op.dtype, row * op.width + i, x, n);
        }
    }
}

extern "C" fs_status
fs_cuda_embed(fs_cuda_stream stream, const fs_embed *op)
{
    FS_TRY(check_rows(stream, "embed", op->dtype, op->rows, op->width));
    FS_TRY(check_rows(stream, "embed", op->table_dtype, op->vocab, op->width));
    if (op->rows == 0) {
        return FS_OK;
    }
    FS_LAUNCH(embed_kernel, fs_cuda_blocks(op->rows, 1), ELEMENT_THREADS, 0, stream,
              fs_touched()
                  .reads(op->tokens, op->rows * sizeof(int32_t))
                  .reads(op->table, op->vocab * op->width * fs_dtype_nbytes(op->table_dtype))
                  .writes(op->out, op->rows * op->width * fs_dtype_nbytes(op->dtype)),
              *op);
    return fs_cuda_launched("embed");
}

/* A block an id. */
static __global__ void
embed_grad_kernel(fs_embed_grad op)
{
    for (size_t id = blockIdx.x; id < op.vocab; id += gridDim.x) {
        int32_t begin = op.first[id], end = op.first[id + 1];
        float *row = op.dtable + id * op.width;
        /* Most ids did not occur, mostly: nothing to add. */
        for (size_t i = threadIdx.x; (begin < end || !op.add) && i < op.width; i += blockDim.x) {
            float sum = op.add ? row[i] : 0.0f;
            for (int32_t s = begin; s < end; s++) {
                size_t from = (size_t)op.sorted[s] * op.width + i;
                sum = sum + op.scale * fs_load_f32(op.dy, op.dtype, from);
            }
            row[i] = sum;
        }
    }
}

extern "C" fs_status
fs_cuda_embed_grad(fs_cuda_stream stream, const fs_embed_grad *op)
{
    FS_TRY(check_rows(stream, "embed_grad", op->dtype, op->rows, op->width));
    FS_TRY(check_rows(stream, "embed_grad", op->dtype, op->vocab, op->width));
    if (op->vocab == 0 || op->width == 0) {
        return FS_OK;
    }
    FS_LAUNCH(embed_grad_kernel, fs_cuda_blocks(op->vocab, 1), ELEMENT_THREADS, 0, stream,
              fs_touched()
                  .reads(op->first, (op->vocab + 1) * sizeof(int32_t))
                  .reads(op->sorted, op->rows * sizeof(int32_t))
                  .reads(op->dy, op->rows * op->width * fs_dtype_nbytes(op->dtype))
                  .writes(op->dtable, f32s(op->vocab * op->width)),
              *op);
    return fs_cuda_launched("embed_grad");
}

// ---- residual and RMSNorm -----------------------------------------------------------------------

/* A row's sum over lanes: all threads put a tile's terms where tile points, then call this. */
FS_DEVICE_FN void
take_tile(float *lane, const float *tile, size_t n)
{
    __syncthreads();
    *lane = add_tile(*lane, tile, n);
    __syncthreads();
}

/* The sum of all lanes, for every thread. */
FS_DEVICE_FN double
share_lanes(float *lanes, float lane)
{
    if (threadIdx.x < FS_LANES) {
        lanes[threadIdx.x] = lane;
    }
    __syncthreads();
    return sum_lanes(lanes);
}

/* sum = x + alpha * (branch + bias) for n elements from i on of the row that begins at row. */
FS_DEVICE_FN void
add_branch(const fs_norm *op, size_t row, size_t i, unsigned n)
{
    float x[FS_FOUR], extra[FS_FOUR], bias[FS_FOUR];
    fs_load_four(x, op->x, op->dtype, row + i, n);
    fs_load_four(extra, op->branch, op->dtype, row + i, n);
    if (op->bias != NULL) {
        fs_load_four(bias, op->bias, op->dtype, i, n);
    }
    for (unsigned j = 0; j < n; j++) {
        extra[j] = op->bias != NULL ? extra[j] + bias[j] : extra[j];
        x[j] = x[j] + op->alpha * extra[j];
    }
    fs_store_four(op->sum, op->dtype, row + i, x, n);
}

/* A block a row. */
template <fs_dtype E>
static __global__ void
norm_kernel(fs_norm op)
{
    op.dtype = E;
    float *tile = (float *)(void *)fs_shared_memory(); /* ROW_TILE_N */
    float *lanes = tile + ROW_TILE_N;                  /* FS_LANES */
    size_t width = op.width, first = FS_FOUR * threadIdx.x, stride = FS_FOUR * blockDim.x;
    const void *in = op.branch != NULL ? op.sum : op.x;
    for (size_t r = blockIdx.x; r < op.rows; r += gridDim.x) {
        size_t row = r * width;
        float lane = 0.0f;
        for (size_t at = 0; at < width; at += ROW_TILE_N) {
            size_t n = width - at < ROW_TILE_N ? width - at : ROW_TILE_N;
            for (size_t i = at + first; i < at + n; i += stride) {
                unsigned four = fs_four_of(at + n, i);
                float x[FS_FOUR];
                if (op.branch != NULL) {
                    add_branch(&op, row, i, four);
                }
                fs_load_four(x, in, op.dtype, row + i, four);
                for (unsigned j = 0; j < four; j++) {
                    tile[i - at + j] = x[j] * x[j];
                }
            }
            take_tile(&lane, tile, n);
        }
        double squares = share_lanes(lanes, lane);
        float rstd = (float)(1.0 / sqrt(squares / (double)width + op.eps));
        if (threadIdx.x == 0) {
            op.rstd[r] = rstd;
        }
        for (size_t i = first; i < width; i += stride) {
            unsigned four = fs_four_of(width, i);
            float x[FS_FOUR], weight[FS_FOUR];
            fs_load_four(x, in, op.dtype, row + i, four);
            fs_load_four(weight, op.weight, op.dtype, i, four);
            for (unsigned j = 0; j < four; j++) {
                x[j] = x[j] * rstd * weight[j];
            }
            fs_store_four(op.out, op.dtype, row + i, x, four);
        }
        __syncthreads();
    }
}

extern "C" fs_status
fs_cuda_norm(fs_cuda_stream stream, const fs_norm *op)
{
    FS_TRY(check_rows(stream, "norm", op->dtype, op->rows, op->width));
    if (op->rows == 0 || op->width == 0) {
        return FS_OK;
    }
    if (op->branch != NULL && op->sum == NULL) {
        return FS_FAIL(FS_EINVAL, "norm: a branch, and nowhere to put the sum");
    }
    size_t element = fs_dtype_nbytes(op->dtype), nbytes = op->rows * op->width * element;
    fs_touched touched = fs_touched()
                             .reads(op->x, nbytes)
                             .reads(op->weight, op->width * element)
                             .writes(op->out, nbytes)
                             .writes(op->rstd, f32s(op->rows));
    if (op->branch != NULL) {
        touched.reads(op->branch, nbytes).writes(op->sum, nbytes);
    }
    auto kernel = INSTANCE_OF(norm_kernel, op->dtype);
    FS_LAUNCH(kernel, fs_cuda_blocks(op->rows, 1), ROW_THREADS, f32s(ROW_TILE_N + FS_LANES),
              stream, touched, *op);
    return fs_cuda_launched("norm");
}

/* A thread a column of a chunk of rows: the chunk's share of dweight goes to its line of partial.
 * Before norm_grad_kernel, which puts something else where dy is. */
template <fs_dtype E>
static __global__ void
norm_grad_partial_kernel(fs_norm_grad op, size_t chunk, size_t chunks)
{
    op.dtype = E;
    size_t width = op.width;
    for (size_t item = first_element(); item < chunks * width; item += element_stride()) {
        size_t begin = item / width * chunk, i = item % width;
        size_t end = op.rows - begin < chunk ? op.rows : begin + chunk;
        float sum = 0.0f;
#pragma unroll 4
        for (size_t r = begin; r < end; r++) {
            float x = fs_load_f32(op.x, op.dtype, r * width + i);
            sum = sum + fs_load_f32(op.dy, op.dtype, r * width + i) * (x * op.rstd[r]);
        }
        op.partial[item] = sum;
    }
}

/* A block a row. */
template <fs_dtype E>
static __global__ void
norm_grad_kernel(fs_norm_grad op)
{
    op.dtype = E;
    float *tile = (float *)(void *)fs_shared_memory(); /* ROW_TILE_N */
    float *lanes = tile + ROW_TILE_N;                  /* FS_LANES */
    size_t width = op.width, first = FS_FOUR * threadIdx.x, stride = FS_FOUR * blockDim.x;
    for (size_t r = blockIdx.x; r < op.rows; r += gridDim.x) {
        size_t row = r * width;
        float rstd = op.rstd[r], lane = 0.0f;
        for (size_t at = 0; at < width; at += ROW_TILE_N) {
            size_t n = width - at < ROW_TILE_N ? width - at : ROW_TILE_N;
            for (size_t i = at + first; i < at + n; i += stride) {
                unsigned four = fs_four_of(at + n, i);
                float x[FS_FOUR], dy[FS_FOUR], weight[FS_FOUR];
                fs_load_four(x, op.x, op.dtype, row + i, four);
                fs_load_four(dy, op.dy, op.dtype, row + i, four);
                fs_load_four(weight, op.weight, op.dtype, i, four);
                for (unsigned j = 0; j < four; j++) {
                    tile[i - at + j] = dy[j] * weight[j] * x[j];
                }
            }
            take_tile(&lane, tile, n);
        }
        /* With n = x * rstd: dx = rstd * (dn - n * mean(dn * n)). */
        double mean = share_lanes(lanes, lane) * (double)rstd / (double)width;
        float back = (float)(mean * (double)rstd * (double)rstd);
        for (size_t i = first; i < width; i += stride) {
            unsigned four = fs_four_of(width, i);
            float x[FS_FOUR], dy[FS_FOUR], weight[FS_FOUR], dx[FS_FOUR];
            fs_load_four(x, op.x, op.dtype, row + i, four);
            fs_load_four(dy, op.dy, op.dtype, row + i, four);
            fs_load_four(weight, op.weight, op.dtype, i, four);
            if (op.dx_add) {
                fs_load_four(dx, op.dx, op.dtype, row + i, four);
            }
            for (unsigned j = 0; j < four; j++) {
                float here = rstd * (dy[j] * weight[j]) - x[j] * back;
                dx[j] = op.dx_add ? dx[j] + here : here;
                dy[j] = x[j] * rstd * weight[j];
            }
            fs_store_four(op.dx, op.dtype, row + i, dx, four);
            fs_store_four(op.dy, op.dtype, row + i, dy, four);
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
    FS_TRY(check_rows(stream, "norm_grad", op->dtype, op->rows, op->width));
    if (op->width == 0) {
        return FS_OK;
    }
    size_t element = fs_dtype_nbytes(op->dtype), nbytes = op->rows * op->width * element;
    size_t chunk = fs_norm_chunk_rows(op->rows);
    size_t chunks = op->rows / chunk + (op->rows % chunk != 0);
    size_t partial = op->dweight == NULL ? 0 : f32s(chunks * op->width);
    if (partial > 0) {
        auto kernel = INSTANCE_OF(norm_grad_partial_kernel, op->dtype);
        FS_LAUNCH(kernel, fs_cuda_blocks(chunks * op->width, ELEMENT_THREADS), ELEMENT_THREADS, 0,
                  stream,
                  fs_touched()
                      .reads(op->x, nbytes)
                      .reads(op->rstd, f32s(op->rows))
                      .reads(op->dy, nbytes)
                      .writes(op->partial, partial),
                  *op, chunk, chunks);
        FS_TRY(fs_cuda_launched("norm_grad"));
    }
    if (op->rows > 0) {
        auto kernel = INSTANCE_OF(norm_grad_kernel, op->dtype);
        FS_LAUNCH(kernel, fs_cuda_blocks(op->rows, 1), ROW_THREADS,
                  f32s(ROW_TILE_N + FS_LANES), stream,
                  fs_touched()
                      .reads(op->x, nbytes)
                      .reads(op->rstd, f32s(op->rows))
                      .reads(op->weight, op->width * element)
                      .writes(op->dy, nbytes)
                      .writes(op->dx, nbytes),
                  *op);
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
