/* Runs the blocks of a grid, the threads of each as fibers in a shuffled order. */
#ifndef FS_CUDASIM_BLOCK_H
#define FS_CUDASIM_BLOCK_H

#include <cstddef>
#include <functional>
#include <random>

#include "cuda_runtime.h"

/* Says on stderr what is wrong with the code under test, and ends the program. */
[[noreturn]] void sim_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Returns how many threads ran. name: of the kernel, for messages; shared_max: how much shared
 * memory it may have. */
size_t run_grid(const char *name, dim3 grid, dim3 block, size_t shared_nbytes, size_t shared_max,
                const std::function<void()> &thread, std::mt19937_64 &random);

#endif
