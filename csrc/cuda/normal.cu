/* Normal numbers for initial weights: see device/normal.h. */
#include "common.cuh"

extern "C" {
#include "../device/normal.h"
#include "model.h"
}

#define NORMAL_THREADS 256u

/* A thread a block of four numbers. */
static __global__ void
normal_kernel(fs_normal op, uint64_t begin, uint64_t blocks)
{
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t b = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; b < blocks; b += stride) {
        uint64_t block = begin + b;
        uint32_t word[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)op.stream,
                            (uint32_t)(op.stream >> 32)};
        uint32_t key0 = (uint32_t)op.seed, key1 = (uint32_t)(op.seed >> 32);
        float z[4];
        for (int round = 0; round < FS_PHILOX_ROUNDS; round++) {
            fs_philox_round(&word[0], &word[1], &word[2], &word[3], key0, key1);
            fs_philox_next(&key0, &key1);
        }
        fs_box_muller(word[0], word[1], &z[0], &z[1]);
        fs_box_muller(word[2], word[3], &z[2], &z[3]);
        for (unsigned i = 0; i < 4; i++) {
            uint64_t index = 4 * block + i;
            if (index >= op.first && index - op.first < op.n) {
                op.out[index - op.first] = op.std * z[i];
            }
        }
    }
}

extern "C" fs_status
fs_cuda_normal(fs_cuda_stream stream, const fs_normal *op)
{
    size_t nbytes, end;
    FS_TRY(fs_cuda_check_stream(stream, "normal"));
    FS_TRY(fs_mul_size(op->n, sizeof(float), &nbytes));
    FS_TRY(fs_add_size((size_t)op->first, op->n, &end));
    if (op->n == 0) {
        return FS_OK;
    }
    uint64_t begin = op->first / 4, blocks = ((uint64_t)end - 1) / 4 - begin + 1;
    FS_LAUNCH(normal_kernel, fs_cuda_blocks((size_t)blocks, NORMAL_THREADS), NORMAL_THREADS, 0,
              stream, fs_touched().writes(op->out, nbytes), *op, begin, blocks);
    return fs_cuda_launched("normal");
}
