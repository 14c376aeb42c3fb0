/* What the model's kernels share: how threads walk over elements, sums over lanes, checks.
 *
 * Activations are loaded as fp32 and rounded once when stored (elements.cuh). Where the CPU sums
 * over lanes (element i of a row in lane i mod FS_LANES, lanes then added in index order in fp64),
 * a thread takes a lane here. */
#ifndef FS_CUDA_MODEL_CUH
#define FS_CUDA_MODEL_CUH

#include "elements.cuh"

extern "C" {
#include "model.h"
}

#define ROW_THREADS 128u
#define ELEMENT_THREADS 256u
/* Terms of a row that its threads make together, in shared memory, before the lanes take them from
 * there. A multiple of FS_LANES. */
#define ROW_TILE_N ((size_t)2048)

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

/* Adds n terms of a tile to the calling thread's lane, if it has one. */
FS_DEVICE_FN float
add_tile(float lane, const float *tile, size_t n)
{
    for (size_t i = threadIdx.x; threadIdx.x < FS_LANES && i < n; i += FS_LANES) {
        lane = lane + tile[i];
    }
    return lane;
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

/* Biases of n elements from at on, of rows of width: 0 where there are none. Only where there are
 * some is the place in the row worth a division. */
FS_DEVICE_FN void
bias_four(float x[FS_FOUR], const void *bias, fs_dtype dtype, size_t width, size_t at, unsigned n)
{
    for (unsigned j = 0; j < n; j++) {
        x[j] = bias == NULL ? 0.0f : fs_load_f32(bias, dtype, (at + j) % width);
    }
}

/* The instance of a kernel template for activations of dtype. In it their dtype is a constant: were
 * it not, each load would end with a branch that waits for it before the next one starts. */
template <typename K>
static inline K
instance_of(fs_dtype dtype, K of_f32, K of_bf16, K of_f16)
{
    return dtype == FS_F32 ? of_f32 : dtype == FS_BF16 ? of_bf16 : of_f16;
}

#define INSTANCE_OF(kernel, dtype) \
    instance_of(dtype, kernel<FS_F32>, kernel<FS_BF16>, kernel<FS_F16>)

static inline size_t
f32s(size_t n)
{
    return n * sizeof(float);
}

/* Before anything starts: activations are fp32, bf16 or fp16, and rows * width * 8 fits, so that
 * what is computed from them does. */
FS_NODISCARD static inline fs_status
check_rows(fs_cuda_stream stream, const char *what, fs_dtype dtype, size_t rows, size_t width)
{
    size_t n, nbytes;
    FS_TRY(fs_cuda_check_stream(stream, what));
    if (dtype != FS_F32 && dtype != FS_BF16 && dtype != FS_F16) {
        return FS_FAIL(FS_ETYPE, "%s: activations are float32, bfloat16 or float16, not %s", what,
                       fs_dtype_name(dtype));
    }
    FS_TRY(fs_mul_size(rows, width, &n));
    return fs_mul_size(n, sizeof(double), &nbytes);
}

#endif
