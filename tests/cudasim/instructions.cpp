#include "instructions.h"

#include "cuda/common.cuh"
#include "cuda/tensor_core.cuh"

static __global__ void
mma_kernel(bool bf16, float *c, const uint16_t *a, const uint16_t *b)
{
    unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t left[4], right[2];
    float sum[4];
    for (unsigned i = 0; i < 4; i++) {
        unsigned row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
        left[i] = a[row * 16 + column] | (uint32_t)a[row * 16 + column + 1] << 16;
        sum[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    }
    for (unsigned i = 0; i < 2; i++) {
        unsigned row = 2 * t + i * 8;
        right[i] = b[row * 8 + g] | (uint32_t)b[(row + 1) * 8 + g] << 16;
    }
    if (bf16) {
        fs_mma_bf16(sum, left, right);
    } else {
        fs_mma_f16(sum, left, right);
    }
    for (unsigned i = 0; i < 4; i++) {
        c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
    }
}

fs_status
fs_try_mma(fs_cuda_stream stream, bool bf16, float *c, const uint16_t *a, const uint16_t *b)
{
    FS_LAUNCH(mma_kernel, 1, FS_WARP, 0, stream,
              fs_touched().writes(c, 512).reads(a, 512).reads(b, 256), bf16, c, a, b);
    return fs_cuda_launched("mma");
}

static __global__ void
ldmatrix_kernel(bool turned, uint32_t *out, const uint16_t *in)
{
    uint16_t *rows = (uint16_t *)(void *)fs_shared_memory() + 8;
    for (unsigned i = threadIdx.x; i < 256; i += FS_WARP) {
        rows[i] = in[i];
    }
    __syncwarp();
    uint32_t x[4];
    if (turned) {
        fs_ldmatrix_turned(x, rows + threadIdx.x * 8);
    } else {
        fs_ldmatrix(x, rows + threadIdx.x * 8);
    }
    for (unsigned m = 0; m < 4; m++) {
        out[threadIdx.x * 4 + m] = x[m];
    }
}

fs_status
fs_try_ldmatrix(fs_cuda_stream stream, bool turned, uint32_t *out, const uint16_t *in)
{
    FS_LAUNCH(ldmatrix_kernel, 1, FS_WARP, 528, stream,
              fs_touched().writes(out, 512).reads(in, 512), turned, out, in);
    return fs_cuda_launched("ldmatrix");
}

static __global__ void
copies_kernel(uint32_t *out, const uint32_t *in)
{
    uint32_t *shared = (uint32_t *)(void *)fs_shared_memory();
    const unsigned each = FS_WARP * 4;
    for (unsigned group = 0; group < 3; group++) {
        unsigned at = group * each + threadIdx.x * 4;
        fs_copy_16(shared + at, in + at, group != 1 || threadIdx.x % 2 == 0);
        fs_copy_group();
    }
    fs_copy_wait<1>(); /* the first two are there */
    __syncthreads();
    for (unsigned i = threadIdx.x; i < 2 * each; i += FS_WARP) {
        out[i] = shared[i];
    }
    fs_copy_wait<0>();
    __syncthreads();
    for (unsigned i = threadIdx.x; i < each; i += FS_WARP) {
        out[2 * each + i] = shared[2 * each + i];
    }
}

fs_status
fs_try_copies(fs_cuda_stream stream, uint32_t *out, const uint32_t *in)
{
    FS_LAUNCH(copies_kernel, 1, FS_WARP, 1536, stream,
              fs_touched().writes(out, 1536).reads(in, 1536), out, in);
    return fs_cuda_launched("copies");
}

static __global__ void
lanes_kernel(uint32_t *bf16, uint32_t *f16, float *power, float *other, int lanes, const float *x,
             const float *y)
{
    unsigned at = threadIdx.x;
    bf16[at] = fs_pair_bf16(x[at], y[at]);
    f16[at] = fs_pair_f16(x[at], y[at]);
    power[at] = fs_exp2(x[at]);
    other[at] = __shfl_xor_sync(FS_WHOLE_WARP, x[at], lanes);
}

fs_status
fs_try_lanes(fs_cuda_stream stream, uint32_t *bf16, uint32_t *f16, float *power, float *other,
             int lanes, const float *x, const float *y)
{
    FS_LAUNCH(lanes_kernel, 1, FS_WARP, 0, stream,
              fs_touched()
                  .reads(x, 128)
                  .reads(y, 128)
                  .writes(bf16, 128)
                  .writes(f16, 128)
                  .writes(power, 128)
                  .writes(other, 128),
              bf16, f16, power, other, lanes, x, y);
    return fs_cuda_launched("lanes");
}

static __global__ void
fault_kernel(int fault, const void *nothing)
{
    unsigned char *shared = fs_shared_memory();
    bool odd = threadIdx.x == 13;
    uint32_t x[4];
    switch (fault) {
    case 0:
        if (!odd) {
            __syncwarp();
        }
        __syncthreads();
        break;
    case 1:
        if (odd) {
            __syncwarp();
        } else {
            __syncwarp();
        }
        break;
    case 2:
        __syncwarp(odd ? 0x0000ffffu : FS_WHOLE_WARP);
        break;
    case 3:
        if (!odd) {
            __syncwarp();
        }
        break;
    case 4:
        fs_copy_16(shared + 16 * threadIdx.x, nothing, false);
        fs_copy_group();
        break;
    default:
        fs_ldmatrix(x, shared + 16 * threadIdx.x + 16);
        break;
    }
}

fs_status
fs_try_fault(fs_cuda_stream stream, int fault)
{
    size_t shared_nbytes = fault == 6 ? 60000 : 512;
    FS_LAUNCH(fault_kernel, 1, FS_WARP, shared_nbytes, stream, fs_touched(), fault,
              (const void *)NULL);
    return fs_cuda_launched("fault");
}
