/* Stands in for CUDA's header of this name where there is no GPU: the part of the language and of
 * the runtime that csrc/cuda uses, with the same names, for a plain C++ compiler.
 *
 * Kernels run block by block on one worker thread per device, the threads of a block as fibers in a
 * shuffled order; streams are queues that the worker serves in a shuffled order, as far as events
 * allow. See sim.h for what is checked on the way. */
#ifndef FS_CUDASIM_CUDA_RUNTIME_H
#define FS_CUDASIM_CUDA_RUNTIME_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

// ---- language -----------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

/* Words of memory that may hold anything, as a GPU's vector accesses see it. */
struct __attribute__((may_alias, aligned(4))) uint1 {
    unsigned x;
};

struct __attribute__((may_alias, aligned(16))) uint4 {
    unsigned x, y, z, w;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(8) ushort4 {
    unsigned short x, y, z, w;
};

static inline float4
make_float4(float x, float y, float z, float w)
{
    return float4{x, y, z, w};
}

static inline ushort4
make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w)
{
    return ushort4{x, y, z, w};
}

/* Where the running fiber is. */
struct fs_sim_place {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
};

const fs_sim_place &fs_sim_here();

#define threadIdx (fs_sim_here().thread)
#define blockIdx (fs_sim_here().block)
#define blockDim (fs_sim_here().block_dim)
#define gridDim (fs_sim_here().grid_dim)

/* All threads of the block come to the same call, none has ended: anything else ends the
 * program. */
void fs_sim_barrier(const char *file, int line);
#define __syncthreads() fs_sim_barrier(__FILE__, __LINE__)

unsigned char *fs_sim_shared_memory();

/* What lanes of a warp do together: each shows some bytes, and goes on when all that mask names are
 * there. Returns what each of them showed, by lane, until the caller's next meeting of any kind.
 * That one of them has ended, waits elsewhere or names others ends the program. */
#define FS_SIM_SHOWN_MAX 32
struct alignas(16) fs_sim_shown {
    unsigned char bytes[FS_SIM_SHOWN_MAX];
};
unsigned fs_sim_lane();
const fs_sim_shown *fs_sim_warp_show(unsigned mask, const void *bytes, size_t nbytes,
                                     const char *file, int line);

static inline void
__syncwarp(unsigned mask = 0xffffffffu, const char *file = __builtin_FILE(),
           int line = __builtin_LINE())
{
    (void)fs_sim_warp_show(mask, NULL, 0, file, line);
}

template <typename T>
static inline T
__shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    const fs_sim_shown *seen = fs_sim_warp_show(mask, &value, sizeof value, file, line);
    unsigned mine = fs_sim_lane(), other = mine ^ static_cast<unsigned>(lanes);
    unsigned part = static_cast<unsigned>(width);
    T result;
    std::memcpy(&result, seen[other / part == mine / part ? other : mine].bytes, sizeof result);
    return result;
}

/* Ends the program unless nbytes at this address are the block's shared memory, and aligned. */
void fs_sim_check_shared(const void *at, size_t nbytes, size_t alignment);

/* cp.async: copies nbytes and sets zeros bytes behind them to zero, for the calling thread when it
 * waits until at most pending groups that it committed are not over, for others when they
 * synchronize with it. */
void fs_sim_copy_async(void *dst, const void *src, size_t nbytes, size_t zeros);
void fs_sim_copies_commit();
void fs_sim_copies_wait(size_t pending);

static inline unsigned long long
atomicMin(unsigned long long *at, unsigned long long value)
{
    unsigned long long old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (value < old && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
    }
    return old;
}

static inline int
atomicAdd(int *at, int value)
{
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

// ---- runtime ------------------------------------------------------------------------------------

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNotReady = 600,
};

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4,
};

enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
};

struct cudaDeviceProp {
    char name[256];
};

#define CUDART_VERSION 13000
enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1,
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

typedef struct fs_sim_stream *cudaStream_t;
typedef struct fs_sim_event *cudaEvent_t;

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaMemGetInfo(size_t *available, size_t *total);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *result);
cudaError_t cudaGetLastError();
const char *cudaGetErrorString(cudaError_t code);

cudaError_t cudaMalloc(void **out, size_t nbytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaMallocHost(void **out, size_t nbytes);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t nbytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *dst, int byte, size_t nbytes, cudaStream_t stream);
cudaError_t cudaMemset2DAsync(void *dst, size_t pitch, int byte, size_t width, size_t height,
                              cudaStream_t stream);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

// ---- launch -------------------------------------------------------------------------------------

struct fs_sim_range {
    uintptr_t begin, end;
    bool is_write;
};

/* What an operation reads and writes. */
struct fs_sim_ranges {
    std::vector<fs_sim_range> list;
    void
    add(const void *at, size_t nbytes, bool is_write)
    {
        if (nbytes > 0) {
            uintptr_t begin = reinterpret_cast<uintptr_t>(at);
            list.push_back(fs_sim_range{begin, begin + nbytes, is_write});
        }
    }
};

void fs_sim_enqueue_kernel(const char *name, const void *kernel, dim3 grid, dim3 block,
                           size_t shared_nbytes, cudaStream_t stream, const fs_sim_ranges &ranges,
                           std::function<void()> thread);

/* An operation of a library beside the runtime, as cuBLAS is: run is called when its turn comes.
 * What it touches must be device memory, or pinned. */
void fs_sim_enqueue_call(const char *name, cudaStream_t stream, const fs_sim_ranges &ranges,
                         std::function<void()> run);

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value);

template <typename... P>
cudaError_t
cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}

/* Arguments are copied at the call, as a launch does. */
template <typename... P, typename... A>
void
fs_sim_launch(const char *name, dim3 grid, dim3 block, size_t shared_nbytes, cudaStream_t stream,
              const fs_sim_ranges &ranges, void (*kernel)(P...), A &&...arguments)
{
    std::tuple<P...> kept(std::forward<A>(arguments)...);
    fs_sim_enqueue_kernel(name, reinterpret_cast<const void *>(kernel), grid, block, shared_nbytes,
                          stream, ranges, [kernel, kept] { std::apply(kernel, kept); });
}

#endif
