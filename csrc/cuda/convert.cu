/* Conversion between formats, split masters, and the combination of two arrays. */
#include "elements.cuh"

#define CONVERT_THREADS 256u
#define CONVERT_EACH ((size_t)CONVERT_THREADS * FS_FOUR)

// ---- convert ------------------------------------------------------------------------------------

static __global__ void
convert_kernel(void *dst, fs_dtype dst_dtype, const void *src, fs_dtype src_dtype, size_t n)
{
    for (size_t at = fs_first_four(); at < n; at += fs_stride_fours()) {
        unsigned here = fs_four_of(n, at);
        if (src_dtype == FS_F64) {
            for (unsigned i = 0; i < here; i++) {
                fs_store_f64(dst, dst_dtype, at + i, ((const double *)src)[at + i]);
            }
        } else {
            float x[FS_FOUR];
            fs_load_four(x, src, src_dtype, at, here);
            fs_store_four(dst, dst_dtype, at, x, here);
        }
    }
}

extern "C" fs_status
fs_cuda_convert(fs_cuda_stream stream, void *dst, fs_dtype dst_dtype, const void *src,
                fs_dtype src_dtype, size_t n)
{
    size_t dst_nbytes, src_nbytes;
    FS_TRY(fs_cuda_check_stream(stream, "convert"));
    FS_TRY(fs_cuda_check_float(dst_dtype, "convert", "to"));
    FS_TRY(fs_cuda_check_float(src_dtype, "convert", "from"));
    FS_TRY(fs_mul_size(n, fs_dtype_nbytes(dst_dtype), &dst_nbytes));
    FS_TRY(fs_mul_size(n, fs_dtype_nbytes(src_dtype), &src_nbytes));
    if (n == 0) {
        return FS_OK;
    }
    if (dst_dtype == src_dtype) {
        /* Any of the two may be pinned host memory. */
        return fs_cuda_check(cudaMemcpyAsync(dst, src, src_nbytes, cudaMemcpyDefault,
                                             (cudaStream_t)stream),
                             "convert");
    }
    FS_LAUNCH(convert_kernel, fs_cuda_blocks(n, CONVERT_EACH), CONVERT_THREADS, 0, stream,
              fs_touched().reads(src, src_nbytes).writes(dst, dst_nbytes), dst, dst_dtype, src,
              src_dtype, n);
    return fs_cuda_launched("convert");
}

// ---- split masters ------------------------------------------------------------------------------

static __global__ void
split_kernel(uint16_t *bf16, uint16_t *remainder, const void *src, fs_dtype src_dtype, size_t n)
{
    for (size_t at = fs_first_four(); at < n; at += fs_stride_fours()) {
        unsigned here = fs_four_of(n, at);
        float x[FS_FOUR];
        uint16_t upper[FS_FOUR], lower[FS_FOUR];
        fs_load_four(x, src, src_dtype, at, here);
        for (unsigned i = 0; i < here; i++) {
            upper[i] = fs_split_f32(x[i], &lower[i]);
        }
        fs_store_halves(remainder, at, lower, here);
        if (bf16 != NULL) {
            fs_store_halves(bf16, at, upper, here);
        }
    }
}

extern "C" fs_status
fs_cuda_split(fs_cuda_stream stream, uint16_t *bf16, uint16_t *remainder, const void *src,
              fs_dtype src_dtype, size_t n)
{
    size_t nbytes;
    FS_TRY(fs_cuda_check_stream(stream, "split"));
    FS_TRY(fs_cuda_check_float(src_dtype, "split", "from"));
    FS_TRY(fs_mul_size(n, fs_dtype_nbytes(src_dtype), &nbytes));
    if (n == 0) {
        return FS_OK;
    }
    FS_LAUNCH(split_kernel, fs_cuda_blocks(n, CONVERT_EACH), CONVERT_THREADS, 0, stream,
              fs_touched()
                  .reads(src, nbytes)
                  .writes(remainder, 2 * n)
                  .writes(bf16, bf16 == NULL ? 0 : 2 * n),
              bf16, remainder, src, src_dtype, n);
    return fs_cuda_launched("split");
}

static __global__ void
join_kernel(void *dst, fs_dtype dst_dtype, const uint16_t *bf16, const uint16_t *remainder,
            size_t n)
{
    for (size_t at = fs_first_four(); at < n; at += fs_stride_fours()) {
        unsigned here = fs_four_of(n, at);
        float x[FS_FOUR];
        uint16_t upper[FS_FOUR], lower[FS_FOUR];
        fs_load_halves(upper, bf16, at, here);
        fs_load_halves(lower, remainder, at, here);
        for (unsigned i = 0; i < here; i++) {
            x[i] = fs_join_f32(upper[i], lower[i]);
        }
        fs_store_four(dst, dst_dtype, at, x, here);
    }
}

extern "C" fs_status
fs_cuda_join(fs_cuda_stream stream, void *dst, fs_dtype dst_dtype, const uint16_t *bf16,
             const uint16_t *remainder, size_t n)
{
    size_t nbytes;
    FS_TRY(fs_cuda_check_stream(stream, "join"));
    FS_TRY(fs_cuda_check_float(dst_dtype, "join", "to"));
    FS_TRY(fs_mul_size(n, fs_dtype_nbytes(dst_dtype), &nbytes));
    if (n == 0) {
        return FS_OK;
    }
    FS_LAUNCH(join_kernel, fs_cuda_blocks(n, CONVERT_EACH), CONVERT_THREADS, 0, stream,
              fs_touched().reads(bf16, 2 * n).reads(remainder, 2 * n).writes(dst, nbytes), dst,
              dst_dtype, bf16, remainder, n);
    return fs_cuda_launched("join");
}

// ---- combine ------------------------------------------------------------------------------------

/* W: the arithmetic of the sum, so that integers wrap; T itself for floats. */
template <typename T, typename W>
FS_DEVICE_FN T
combine_two(int op, T a, T b)
{
    if (op == FS_MAX) {
        return a > b || a != a ? a : b;
    }
    if (op == FS_MIN) {
        return a < b || a != a ? a : b;
    }
    return (T)((W)a + (W)b);
}

template <typename T, typename W>
static __global__ void
combine_kernel(int op, T *acc, const T *src, size_t n)
{
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x; at < n; at += stride) {
        acc[at] = combine_two<T, W>(op, acc[at], src[at]);
    }
}

static __global__ void
combine_halves_kernel(int op, fs_dtype dtype, void *acc, const void *src, size_t n)
{
    for (size_t at = fs_first_four(); at < n; at += fs_stride_fours()) {
        unsigned here = fs_four_of(n, at);
        float a[FS_FOUR], b[FS_FOUR];
        fs_load_four(a, acc, dtype, at, here);
        fs_load_four(b, src, dtype, at, here);
        for (unsigned i = 0; i < here; i++) {
            a[i] = combine_two<float, float>(op, a[i], b[i]);
        }
        fs_store_four(acc, dtype, at, a, here);
    }
}

/* Named first: the comma of template arguments would end a macro's argument. */
extern "C" fs_status
fs_cuda_combine(fs_cuda_stream stream, int op, fs_dtype dtype, void *acc, const void *src, size_t n)
{
    size_t nbytes;
    FS_TRY(fs_cuda_check_stream(stream, "combine"));
    if (op != FS_SUM && op != FS_MEAN && op != FS_MAX && op != FS_MIN) {
        return FS_FAIL(FS_EINVAL, "combine: no operation has number %d", op);
    }
    if ((int)dtype < 0 || dtype >= FS_DTYPE_COUNT) {
        return FS_FAIL(FS_ETYPE, "combine: no dtype has number %d", (int)dtype);
    }
    FS_TRY(fs_mul_size(n, fs_dtype_nbytes(dtype), &nbytes));
    if (n == 0) {
        return FS_OK;
    }
    fs_touched touched = fs_touched().reads(src, nbytes).reads(acc, nbytes).writes(acc, nbytes);
    unsigned blocks = fs_cuda_blocks(n, CONVERT_EACH);
    switch (dtype) {
    case FS_F32: {
        auto kernel = combine_kernel<float, float>;
        FS_LAUNCH(kernel, blocks, CONVERT_THREADS, 0, stream, touched, op, (float *)acc,
                  (const float *)src, n);
        break;
    }
    case FS_F64: {
        auto kernel = combine_kernel<double, double>;
        FS_LAUNCH(kernel, blocks, CONVERT_THREADS, 0, stream, touched, op, (double *)acc,
                  (const double *)src, n);
        break;
    }
    case FS_I32: {
        auto kernel = combine_kernel<int32_t, uint32_t>;
        FS_LAUNCH(kernel, blocks, CONVERT_THREADS, 0, stream, touched, op, (int32_t *)acc,
                  (const int32_t *)src, n);
        break;
    }
    case FS_I64: {
        auto kernel = combine_kernel<int64_t, uint64_t>;
        FS_LAUNCH(kernel, blocks, CONVERT_THREADS, 0, stream, touched, op, (int64_t *)acc,
                  (const int64_t *)src, n);
        break;
    }
    case FS_U8: {
        auto kernel = combine_kernel<uint8_t, uint8_t>;
        FS_LAUNCH(kernel, blocks, CONVERT_THREADS, 0, stream, touched, op, (uint8_t *)acc,
                  (const uint8_t *)src, n);
        break;
    }
    default:
        FS_LAUNCH(combine_halves_kernel, blocks, CONVERT_THREADS, 0, stream, touched, op, dtype,
                  acc, src, n);
        break;
    }
    return fs_cuda_launched("combine");
}
