/* Kernels of tests: each instruction of csrc/cuda/tensor_core.cuh alone, by one warp, on arrays in
 * device memory. They compile with nvcc too. */
#ifndef FS_CUDASIM_INSTRUCTIONS_H
#define FS_CUDASIM_INSTRUCTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* c (16, 8) += a (16, 16) * b (16, 8), row-major; a and b are fp16 or bf16. The fragments are
 * gathered element by element, as the header says. */
fs_status fs_try_mma(fs_cuda_stream stream, bool bf16, float *c, const uint16_t *a,
                     const uint16_t *b);

/* out[lane][m] = the register that lane gets of matrix m; in: 4 matrices (8, 8). */
fs_status fs_try_ldmatrix(fs_cuda_stream stream, bool turned, uint32_t *out, const uint16_t *in);

/* Three groups of copies, lane by lane: out (3, 32, 4) of in (3, 32, 4); the second group's odd
 * lanes have no source. */
fs_status fs_try_copies(fs_cuda_stream stream, uint32_t *out, const uint32_t *in);

/* Lane by lane: pairs of (x, y) in both formats, 2^x, and x of the lane with another number. */
fs_status fs_try_lanes(fs_cuda_stream stream, uint32_t *bf16, uint32_t *f16, float *power,
                       float *other, int lanes, const float *x, const float *y);

/* Kernels that must end the program: a lane that stays away from its warp (0), waits elsewhere (1),
 * names others (2), has ended (3); a copy that nobody waits for (4); a fragment's row beyond shared
 * memory (5); more shared memory than was asked for (6). */
#define FS_TRY_FAULTS 7
fs_status fs_try_fault(fs_cuda_stream stream, int fault);

#ifdef __cplusplus
}
#endif

#endif
