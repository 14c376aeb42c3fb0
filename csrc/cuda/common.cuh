/* What every CUDA source starts with: the tables and the element arithmetic of the CPU, which are
 * C, and how a kernel is started, which is not.
 *
 * A source of this folder is CUDA C++ in the subset that a plain C++ compiler takes too, but for
 * the launch: so the same source runs on machines without a GPU, against a runtime that stands in
 * for CUDA's. Two things differ between the two, and both stand here: how a kernel starts
 * (FS_LAUNCH) and where a block's shared memory lies (fs_shared_memory). */
#ifndef FS_CUDA_COMMON_CUH
#define FS_CUDA_COMMON_CUH

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" {
#include "../base/checked.h"
#include "../base/math.h"
#include "../device/device.h"
#include "../device/rules.h"
#include "kernels.h"
}

#define FS_DEVICE_FN static __device__ __forceinline__

/* Ranges of device memory that a kernel reads and writes: what is known before it runs. A GPU has
 * no use for them; the stand-in checks with them that the order of operations is no accident. */
struct fs_touched {
#ifndef __CUDACC__
    fs_sim_ranges ranges;
#endif
    fs_touched &
    reads(const void *at, size_t nbytes)
    {
#ifndef __CUDACC__
        ranges.add(at, nbytes, false);
#else
        (void)at;
        (void)nbytes;
#endif
        return *this;
    }
    fs_touched &
    writes(const void *at, size_t nbytes)
    {
#ifndef __CUDACC__
        ranges.add(at, nbytes, true);
#else
        (void)at;
        (void)nbytes;
#endif
        return *this;
    }
};

/* kernel<<<grid, block, shared_nbytes, stream>>>(arguments...). */
#ifdef __CUDACC__
#define FS_LAUNCH(kernel, grid, block, shared_nbytes, stream, touched, ...)               \
    ((void)(touched), kernel<<<(grid), (block), (shared_nbytes), (cudaStream_t)(stream)>>>( \
                          __VA_ARGS__))
#else
#define FS_LAUNCH(kernel, grid, block, shared_nbytes, stream, touched, ...)                    \
    fs_sim_launch(#kernel, (grid), (block), (shared_nbytes), (cudaStream_t)(stream),           \
                  (touched).ranges, kernel, __VA_ARGS__)
#endif

/* The block's dynamic shared memory, aligned to 16 bytes. */
FS_DEVICE_FN unsigned char *
fs_shared_memory(void)
{
#ifdef __CUDACC__
    extern __shared__ __align__(16) unsigned char fs_shared_bytes[];
    return fs_shared_bytes;
#else
    return fs_sim_shared_memory();
#endif
}

/* What a launch left behind: FS_OK, or the runtime's error as a status. */
FS_NODISCARD fs_status
fs_cuda_launched(const char *what);

/* code as a status; what: the call, for the message. Out of memory is FS_ENOMEM, all else
 * FS_ESTATE. */
FS_NODISCARD fs_status
fs_cuda_check(cudaError_t code, const char *what);

#define FS_CUDA_TRY(call) FS_TRY(fs_cuda_check((call), #call))

/* Blocks of a grid that walks over items in strides: enough to fill any device, no more than
 * there is work for. */
static inline unsigned
fs_cuda_blocks(size_t items, size_t each)
{
    size_t blocks = items / each + (items % each != 0);
    return (unsigned)(blocks < FS_CUDA_BLOCKS_MAX ? blocks : FS_CUDA_BLOCKS_MAX);
}

#endif
