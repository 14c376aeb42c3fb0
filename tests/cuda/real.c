/* Stands for tests/cudasim where a real GPU runs: what tests ask of the stand-in, as far as a GPU
 * can answer. Kernels are counted at their launch, to which the linker leads (--wrap). */
#include <stddef.h>
#include <stdint.h>

#include "../cudasim/sim.h"

typedef struct fs_dim3 {
    unsigned x, y, z;
} fs_dim3;

static size_t kernels;

/* What the compiler's launches call: the first since CUDA 13, the second before. */
int __real___cudaLaunchKernel(void *kernel, fs_dim3 grid, fs_dim3 block, void **arguments,
                              size_t shared_nbytes, void *stream);
int __wrap___cudaLaunchKernel(void *kernel, fs_dim3 grid, fs_dim3 block, void **arguments,
                              size_t shared_nbytes, void *stream);
int __real_cudaLaunchKernel(const void *kernel, fs_dim3 grid, fs_dim3 block, void **arguments,
                            size_t shared_nbytes, void *stream);
int __wrap_cudaLaunchKernel(const void *kernel, fs_dim3 grid, fs_dim3 block, void **arguments,
                            size_t shared_nbytes, void *stream);

#pragma weak __real___cudaLaunchKernel

int
__wrap___cudaLaunchKernel(void *kernel, fs_dim3 grid, fs_dim3 block, void **arguments,
                          size_t shared_nbytes, void *stream)
{
    __atomic_fetch_add(&kernels, 1, __ATOMIC_RELAXED);
    return __real___cudaLaunchKernel(kernel, grid, block, arguments, shared_nbytes, stream);
}

int
__wrap_cudaLaunchKernel(const void *kernel, fs_dim3 grid, fs_dim3 block, void **arguments,
                        size_t shared_nbytes, void *stream)
{
    __atomic_fetch_add(&kernels, 1, __ATOMIC_RELAXED);
    return __real_cudaLaunchKernel(kernel, grid, block, arguments, shared_nbytes, stream);
}

size_t
fs_sim_kernels(void)
{
    return __atomic_load_n(&kernels, __ATOMIC_RELAXED);
}

/* Nothing can be planted in a GPU, and it watches over nothing (see FS_STAND_IN). */
void
fs_sim_tolerate_races(bool tolerate)
{
    (void)tolerate;
}

size_t
fs_sim_races(void)
{
    return 0;
}

void
fs_sim_set_cublas_version(int major)
{
    (void)major;
}

size_t
fs_sim_cublas_handles(void)
{
    return 0;
}

/* A GPU has one order, its own, and the memory it has. */
void
fs_sim_reset(uint64_t seed, fs_sim_order order, size_t device_nbytes)
{
    (void)seed;
    (void)order;
    (void)device_nbytes;
    __atomic_store_n(&kernels, 0, __ATOMIC_RELAXED);
}
