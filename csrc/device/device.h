/* The one table of whole-array operations.
 *
 * A CPU fills it once per instruction set (each kernel source is compiled for every set, see
 * isa.h), CUDA fills it once. An operation owns its parallelism: it cuts its work on a fixed grid
 * and hands the tasks to exec->pool, so results never depend on the number of threads. Operations
 * cannot fail (arguments are checked by the caller), do not allocate, and do not call libm. On the
 * CPU they are done when they return; on a device they are done when the stream comes to them, and
 * what they find (fs_sums) is to be read after an event: see runtime.h.
 *
 * Element arithmetic is that of base/math.h: separate multiply and add, round to nearest even, no
 * flush to zero except where math.h says so. Given equal inputs every filling of the table gives
 * equal bits for: convert, split, join, sum, update, sumsq. The model's operations promise equal
 * bits for any number of threads of one filling. */
#ifndef FS_DEVICE_DEVICE_H
#define FS_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/cpu.h"
#include "../base/dtype.h"
#include "../base/status.h"
#include "../base/threads.h"
#include "model_ops.h"
#include "runtime.h"

#define FS_DEVICE_MAGIC 0x66736476u /* "fsdv" */
#define FS_DEVICE_ABI 2u

/* Elements of one tile: load, rule and store work on this many fp32 values in L1. Also the grid of
 * fp64 partial sums: one partial per tile; those of a group of FS_GROUP_TILES tiles are added in
 * index order from 0, and then the groups, so that a device adds groups at the same time. */
#define FS_TILE_N 1024
#define FS_GROUP_TILES ((size_t)256)

/* Scratch that a sum, or a sum of squares, of n elements needs on a device: of each tile its
 * partial sum and its largest magnitude. */
static inline size_t
fs_sum_scratch_nbytes(size_t n)
{
    return (n / FS_TILE_N + (n % FS_TILE_N != 0)) * (sizeof(double) + sizeof(uint64_t));
}

/* The most that a device's products need: cuBLAS's workspace on Hopper, which it is given. */
#define FS_GEMM_SCRATCH_NBYTES ((size_t)32 << 20)

typedef struct fs_device fs_device;

/* Where operations run: a table, and a rank's compute threads or its stream of a device. Owner: the
 * world of the rank. */
typedef struct fs_exec {
    const fs_device *device;
    fs_pool *pool;       /* may be NULL: serial */
    fs_context *context; /* of device->runtime; NULL on the CPU */
    fs_stream_id stream; /* of context */
} fs_exec;

// ---- sum over ranks -----------------------------------------------------------------------------

/* What a sum finds of what it wrote; in memory that the device writes and the host reads. */
typedef struct fs_sums {
    double sumsq;  /* fp64 sum of squares: no overflow at 1e30, no loss at 1e-30 */
    double absmax; /* largest magnitude; infinite or NaN where not all is finite */
    uint64_t finite;    /* 1: all of it is */
    int64_t bad_source; /* where it is not: the first source that is not finite, -1: none of them */
} fs_sums;

/* acc = sum over r in rank order of src[r], or acc + that sum; summed in fp32 (fp64 for fp64
 * sources), stored in acc_dtype. A NULL source is a rank without a gradient, and adds nothing (not
 * zero: a lone -0 stays); without any source the sum is 0. The same pass fills *found; a sum that
 * accumulates leaves a bad_source that is there already, of an earlier one. */
typedef struct fs_sum {
    const void *const *src; /* src_n pointers to n elements of src_dtype; entries may be NULL */
    size_t src_n;
    fs_dtype src_dtype;
    void *acc; /* n elements of acc_dtype; not overlapping any source */
    fs_dtype acc_dtype;
    bool accumulate;
    size_t n;
    fs_sums *found; /* out; may be NULL */
} fs_sum;

// ---- optimizer update ---------------------------------------------------------------------------

typedef enum fs_rule {
    FS_RULE_SGD = 0, FS_RULE_ADAM = 1, FS_RULE_ADAMW = 2, FS_RULE_LION = 3, FS_RULE_ADAGRAD = 4,
    FS_RULE_COUNT
} fs_rule;

/* Hyperparameters of one parameter in one step. Each scalar is computed in fp64 on the host from
 * the parameter's own step count and rounded once to fp32 (optim.c). */
typedef struct fs_hyper {
    fs_rule rule;
    float lr;
    float decay; /* SGD, ADAM, ADAGRAD: weight_decay (L2, added to the gradient); ADAMW, LION:
                  * 1 - lr * weight_decay */
    float beta1, beta2;   /* SGD: beta1 is the momentum */
    float one_minus_beta1, one_minus_beta2; /* rounded from fp64: 1.0f - 0.9f != (float)0.1 */
    float eps;
    float step_size;      /* Adam: lr / (1 - beta1^t); ADAGRAD: lr / (1 + (t - 1) lr_decay) */
    float inv_sqrt_bc2;   /* 1 / sqrt(1 - beta2^t) */
    bool nesterov;
    bool first;           /* SGD with momentum: the first step sets the buffer to the gradient */
    uint64_t random_key;  /* of this parameter in this step, for stochastic rounding */
} fs_hyper;

/* One segment of one parameter. The master weight is read and written where there is one, else
 * weight itself (of weight_dtype) is; weight receives the new value rounded to nearest even, or at
 * random (see stochastic). With a remainder weight is bf16 and the two together are the master, as
 * fs_split_f32 has it; where weight is NULL, weight_read holds the old value's half. */
typedef struct fs_update {
    fs_hyper hyper;
    float grad_scale; /* clip / (count * loss scale): multiplied into the gradient on load */
    const void *grad; /* n of grad_dtype */
    fs_dtype grad_dtype;
    float *master;      /* n, or NULL: weight is the master */
    uint16_t *remainder; /* n, or NULL: the lower half of a master whose upper half is weight */
    void *weight; /* n of weight_dtype; NULL: not this rank's to write (then state alone moves) */
    const void *weight_read; /* used when weight and master are NULL: the old weight, read only */
    fs_dtype weight_dtype;
    void *moment1; /* n of moment_dtype; NULL where the rule has none */
    void *moment2;
    void *moment3; /* ADAM, ADAMW: the largest second moment (AMSGrad), or NULL */
    fs_dtype moment_dtype;
    /* Weight and moments of bf16 are rounded up or down at random, in proportion: by
     * hyper.random_key, by which array it is, and by the element of the parameter, where first is
     * that of element 0 here. */
    bool stochastic;
    uint64_t first;
    size_t n;
} fs_update;

// ---- GEMM ---------------------------------------------------------------------------------------

/* C[m,n] = A[m,k] B[k,n] + beta C, row-major, leading dimensions in elements; trans_x says that the
 * operand is stored transposed. beta is 0 (C may hold anything, NaN included) or 1. The CPU takes
 * fp32 alone, and cuts on a fixed grid of FS_GEMM_ROWS rows of C, each tile a single-threaded BLAS
 * call, or, where rounding says bf16 and the processor multiplies that itself, a product of A and B
 * rounded to bf16, summed in fp32. CUDA takes A and B of fp32, bf16 or fp16, and C of the same
 * dtype or fp32; it sums in fp32 and rounds once. */
#define FS_GEMM_ROWS 512
typedef struct fs_gemm {
    bool trans_a, trans_b;
    size_t m, n, k;
    fs_dtype dtype;   /* of a and b; 0 is FS_F32 */
    fs_dtype c_dtype;
    fs_dtype rounding; /* CPU: what a and b may be rounded to; 0, FS_F32: as they are */
    const void *a;
    size_t lda;
    const void *b;
    size_t ldb;
    float beta;
    void *c;
    size_t ldc;
} fs_gemm;

// ---- the table ----------------------------------------------------------------------------------

struct fs_device {
    uint32_t magic, abi, struct_nbytes;
    const char *build_id; /* of the sources; a plugin of another build is refused */
    const char *name;     /* "cpu/avx512", "cuda" */
    const fs_runtime *runtime; /* NULL: the CPU's */

    /* dst = src; ranges must not overlap. The one user of streaming stores: fenced before
     * return. */
    void (*copy)(const fs_exec *exec, void *dst, const void *src, size_t nbytes);
    /* dst[i] = src[i] converted, round to nearest even, NaN kept quiet; fp32, fp64, bf16, fp16. */
    void (*convert)(const fs_exec *exec, void *dst, fs_dtype dst_dtype, const void *src,
                    fs_dtype src_dtype, size_t n);
    /* src as bf16 and remainders (fs_split_f32), fp64 rounded to fp32 first; bf16 may be NULL. */
    void (*split)(const fs_exec *exec, uint16_t *bf16, uint16_t *remainder, const void *src,
                  fs_dtype src_dtype, size_t n);
    /* dst = what was split, converted. */
    void (*join)(const fs_exec *exec, void *dst, fs_dtype dst_dtype, const uint16_t *bf16,
                 const uint16_t *remainder, size_t n);
    void (*sum)(const fs_exec *exec, const fs_sum *sum);
    void (*update)(const fs_exec *exec, const fs_update *update);
    /* What a sum would find of n elements: the same grid and order. bad_source is -1. */
    void (*sumsq)(const fs_exec *exec, const void *x, fs_dtype dtype, size_t n, fs_sums *found);
    /* First element that is not finite, or n. */
    void (*find_nonfinite)(const fs_exec *exec, const void *x, fs_dtype dtype, size_t n,
                           uint64_t *out);
    /* out = (acc op src) element by element for collectives; integers wrap. op: see
     * fs_reduce_op. */
    void (*combine)(const fs_exec *exec, int op, fs_dtype dtype, void *acc, const void *src,
                    size_t n);
    void (*gemm)(const fs_exec *exec, const fs_gemm *gemm);
    /* Products that do not touch each other's C, their tiles in one grid: the same bits as one by
     * one, and work for more threads than the rows of a small one are tiles. */
    void (*gemms)(const fs_exec *exec, const fs_gemm *gemms, size_t n);
    fs_model_ops model;
};

/* op of combine; also the op of the public collectives (mean is sum, then scale). */
typedef enum fs_reduce_op { FS_SUM = 0, FS_MEAN = 1, FS_MAX = 2, FS_MIN = 3 } fs_reduce_op;

/* The CPU's table for isa. FS_EUNSUPPORTED if it was not compiled in or does not run here. */
FS_NODISCARD fs_status
fs_device_cpu(fs_isa isa, const fs_device **out);

/* The CPU's table that fs_isa_choose chooses. */
FS_NODISCARD fs_status
fs_device_choose(const fs_device **out);

/* Loads the CBLAS library that gemm uses (symbols cblas_sgemm or scipy_cblas_sgemm), once per
 * process, and sets it to one thread; a CBLAS that cannot be held to one (not OpenBLAS) is
 * FS_EUNSUPPORTED. Calls of gemm before this are a fault. Thread-safe. path: a shared library; a
 * second call keeps the first library. out_description (may be NULL): library and core name, valid
 * for the process's life. */
FS_NODISCARD fs_status
fs_gemm_load(const char *path, const char **out_description);
bool fs_gemm_is_loaded(void);

#endif
