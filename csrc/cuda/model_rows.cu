/* Rows of the model: embedding, residual and norm. */
#include "model.cuh"

// ---- embedding ----------------------------------------------------------------------------------

static __global__ void
embed_kernel(fs_embed op)
{
    size_t n = op.rows * op.width;
    for (size_t at = first_element(); at < n; at += element_stride()) {
        size_t row = at / op.width, column = at % op.width;
        size_t from = (size_t)op.tokens[row] * op.width + column;
        fs_store_f32(op.out, op.dtype, at,
                     op.scale * fs_load_f32(op.table, op.table_dtype, from));
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
    FS_LAUNCH(embed_kernel, fs_cuda_blocks(op->rows * op->width, ELEMENT_THREADS), ELEMENT_THREADS,
              0, stream,
              fs_touched()
                  .reads(op->tokens, op->rows * sizeof(int32_t))
                  .reads(op->table, op->vocab * op->width * fs_dtype_nbytes(op->table_dtype))
                  .writes(op->out, op->rows * op->width * fs_dtype_nbytes(op->dtype)),
              *op);
    return fs_cuda_launched("embed");
}

static __global__ void
embed_grad_kernel(fs_embed_grad op)
{
    size_t n = op.vocab * op.width;
    for (size_t at = first_element(); at < n; at += element_stride()) {
        size_t id = at / op.width, column = at % op.width;
        float sum = op.add ? op.dtable[at] : 0.0f;
        for (int32_t s = op.first[id]; s < op.first[id + 1]; s++) {
            size_t from = (size_t)op.sorted[s] * op.width + column;
            sum = sum + op.scale * fs_load_f32(op.dy, op.dtype, from);
        }
        op.dtable[at] = sum;
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
    FS_LAUNCH(embed_grad_kernel, fs_cuda_blocks(op->vocab * op->width, ELEMENT_THREADS),
              ELEMENT_THREADS, 0, stream,
              fs_touched()
                  .reads(op->first, (op->vocab + 1) * sizeof(int32_t))
                  .reads(op->sorted, op->rows * sizeof(int32_t))
                  .reads(op->dy, op->rows * op->width * fs_dtype_nbytes(op->dtype))
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
        size_t row = r * width;
        const void *in = op.x;
        if (op.branch != NULL) {
            for (size_t i = threadIdx.x; i < width; i += blockDim.x) {
                float extra = fs_load_f32(op.branch, op.dtype, row + i);
                extra = op.bias != NULL ? extra + fs_load_f32(op.bias, op.dtype, i) : extra;
                fs_store_f32(op.sum, op.dtype, row + i,
                             fs_load_f32(op.x, op.dtype, row + i) + op.alpha * extra);
            }
            in = op.sum;
        }
        __syncthreads();
        if (threadIdx.x < FS_LANES) {
            float lane = 0.0f;
            for (size_t i = threadIdx.x; i < width; i += FS_LANES) {
                float x = fs_load_f32(in, op.dtype, row + i);
                lane = lane + x * x;
            }
            lanes[threadIdx.x] = lane;
        }
        __syncthreads();
        double squares = sum_lanes(lanes);
        float rstd = (float)(1.0 / sqrt(squares / (double)width + op.eps));
        if (threadIdx.x == 0) {
            op.rstd[r] = rstd;
        }
        for (size_t i = threadIdx.x; i < width; i += blockDim.x) {
            fs_store_f32(op.out, op.dtype, row + i,
                         fs_load_f32(in, op.dtype, row + i) * rstd *
                             fs_load_f32(op.weight, op.dtype, i));
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
        size_t row = r * width;
        float rstd = op.rstd[r];
        if (threadIdx.x < FS_LANES) {
            float lane = 0.0f;
            for (size_t i = threadIdx.x; i < width; i += FS_LANES) {
                lane = lane + fs_load_f32(op.dy, op.dtype, row + i) *
                                  fs_load_f32(op.weight, op.dtype, i) *
                                  fs_load_f32(op.x, op.dtype, row + i);
            }
            lanes[threadIdx.x] = lane;
        }
        __syncthreads();
        /* With n = x * rstd: dx = rstd * (dn - n * mean(dn * n)). */
        double mean = sum_lanes(lanes) * (double)rstd / (double)width;
        float back = (float)(mean * (double)rstd * (double)rstd);
        for (size_t i = threadIdx.x; i < width; i += blockDim.x) {
            float x = fs_load_f32(op.x, op.dtype, row + i);
            float dy = fs_load_f32(op.dy, op.dtype, row + i);
            float weight = fs_load_f32(op.weight, op.dtype, i);
            if (partial != NULL) {
                partial[i] = partial[i] + dy * (x * rstd);
            }
            float here = rstd * (dy * weight) - x * back;
            here = op.dx_add ? fs_load_f32(op.dx, op.dtype, row + i) + here : here;
            fs_store_f32(op.dx, op.dtype, row + i, here);
            fs_store_f32(op.dy, op.dtype, row + i, x * rstd * weight);
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
    if (chunks > 0) {
        FS_LAUNCH(norm_grad_kernel, (unsigned)chunks, ROW_THREADS, f32s(FS_LANES), stream,
                  fs_touched()
                      .reads(op->x, nbytes)
                      .reads(op->rstd, f32s(op->rows))
                      .reads(op->weight, op->width * element)
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
