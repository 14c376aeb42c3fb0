/* Storage formats on the device: elements in and out as fp32 or fp64, four at a time.
 *
 * A thread takes four neighbouring elements, which are one load where the array is aligned for it.
 * The dtype is the same for a whole grid: a branch on it costs next to nothing beside memory. */
#ifndef FS_CUDA_ELEMENTS_CUH
#define FS_CUDA_ELEMENTS_CUH

#include "common.cuh"

#define FS_FOUR 4u

FS_DEVICE_FN bool
fs_is_aligned(const void *at, size_t to)
{
    return ((uintptr_t)at & (to - 1)) == 0;
}

/* One element at index at. */
FS_DEVICE_FN float
fs_load_f32(const void *array, fs_dtype dtype, size_t at)
{
    switch (dtype) {
    case FS_F32:
        return ((const float *)array)[at];
    case FS_BF16:
        return fs_f32_of_bf16(((const uint16_t *)array)[at]);
    case FS_F16:
        return fs_f32_of_f16(((const uint16_t *)array)[at]);
    default:
        return (float)((const double *)array)[at];
    }
}

FS_DEVICE_FN double
fs_load_f64(const void *array, fs_dtype dtype, size_t at)
{
    return dtype == FS_F64 ? ((const double *)array)[at] : (double)fs_load_f32(array, dtype, at);
}

FS_DEVICE_FN void
fs_store_f32(void *array, fs_dtype dtype, size_t at, float x)
{
    switch (dtype) {
    case FS_F32:
        ((float *)array)[at] = x;
        break;
    case FS_BF16:
        ((uint16_t *)array)[at] = fs_bf16_of_f32(x);
        break;
    case FS_F16:
        ((uint16_t *)array)[at] = fs_f16_of_f32(x);
        break;
    default:
        ((double *)array)[at] = (double)x;
        break;
    }
}

/* Rounded once, also to 16 bits. */
FS_DEVICE_FN void
fs_store_f64(void *array, fs_dtype dtype, size_t at, double x)
{
    if (dtype == FS_F64) {
        ((double *)array)[at] = x;
    } else if (dtype == FS_F32) {
        ((float *)array)[at] = (float)x;
    } else {
        fs_store_f32(array, dtype, at, fs_f32_odd_of_f64(x));
    }
}

/* Elements [at, at + n) with n <= 4; entries of x beyond n are not written. */
FS_DEVICE_FN void
fs_load_four(float x[FS_FOUR], const void *array, fs_dtype dtype, size_t at, unsigned n)
{
    if (n == FS_FOUR && dtype == FS_F32 && fs_is_aligned((const float *)array + at, 16)) {
        float4 four = *(const float4 *)((const float *)array + at);
        x[0] = four.x;
        x[1] = four.y;
        x[2] = four.z;
        x[3] = four.w;
        return;
    }
    if (n == FS_FOUR && (dtype == FS_BF16 || dtype == FS_F16) &&
        fs_is_aligned((const uint16_t *)array + at, 8)) {
        ushort4 four = *(const ushort4 *)((const uint16_t *)array + at);
        x[0] = dtype == FS_BF16 ? fs_f32_of_bf16(four.x) : fs_f32_of_f16(four.x);
        x[1] = dtype == FS_BF16 ? fs_f32_of_bf16(four.y) : fs_f32_of_f16(four.y);
        x[2] = dtype == FS_BF16 ? fs_f32_of_bf16(four.z) : fs_f32_of_f16(four.z);
        x[3] = dtype == FS_BF16 ? fs_f32_of_bf16(four.w) : fs_f32_of_f16(four.w);
        return;
    }
    for (unsigned i = 0; i < n; i++) {
        x[i] = fs_load_f32(array, dtype, at + i);
    }
}

/* Sixteen-bit elements as they are. */
FS_DEVICE_FN void
fs_load_halves(uint16_t x[FS_FOUR], const uint16_t *array, size_t at, unsigned n)
{
    if (n == FS_FOUR && fs_is_aligned(array + at, 8)) {
        ushort4 four = *(const ushort4 *)(array + at);
        x[0] = four.x;
        x[1] = four.y;
        x[2] = four.z;
        x[3] = four.w;
        return;
    }
    for (unsigned i = 0; i < n; i++) {
        x[i] = array[at + i];
    }
}

FS_DEVICE_FN void
fs_store_halves(uint16_t *array, size_t at, const uint16_t x[FS_FOUR], unsigned n)
{
    if (n == FS_FOUR && fs_is_aligned(array + at, 8)) {
        *(ushort4 *)(array + at) = make_ushort4(x[0], x[1], x[2], x[3]);
        return;
    }
    for (unsigned i = 0; i < n; i++) {
        array[at + i] = x[i];
    }
}

FS_DEVICE_FN void
fs_store_four(void *array, fs_dtype dtype, size_t at, const float x[FS_FOUR], unsigned n)
{
    if (n == FS_FOUR && dtype == FS_F32 && fs_is_aligned((float *)array + at, 16)) {
        *(float4 *)((float *)array + at) = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
    if (dtype == FS_BF16 || dtype == FS_F16) {
        uint16_t halves[FS_FOUR];
        for (unsigned i = 0; i < n; i++) {
            halves[i] = dtype == FS_BF16 ? fs_bf16_of_f32(x[i]) : fs_f16_of_f32(x[i]);
        }
        fs_store_halves((uint16_t *)array, at, halves, n);
        return;
    }
    for (unsigned i = 0; i < n; i++) {
        fs_store_f32(array, dtype, at + i, x[i]);
    }
}

/* How many of four elements from at on there are. */
FS_DEVICE_FN unsigned
fs_four_of(size_t n, size_t at)
{
    return n - at < FS_FOUR ? (unsigned)(n - at) : FS_FOUR;
}

/* First group of four of this thread, and the stride to its next: in elements. */
FS_DEVICE_FN size_t
fs_first_four(void)
{
    return FS_FOUR * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
}

FS_DEVICE_FN size_t
fs_stride_fours(void)
{
    return FS_FOUR * (size_t)gridDim.x * blockDim.x;
}

#endif
