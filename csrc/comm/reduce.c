/* A reduction over ranks, in rank order whoever does it: sums in fp32 (fp64 for fp64, wrapping for
 * integers), a mean divided before the one rounding to a 16-bit dtype. */
#include "shared.h"

#include <string.h>

#include "../base/checked.h"

static void
divide_f32(float *x, size_t n, float by)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = x[i] / by;
    }
}

static void
divide_f64(double *x, size_t n, double by)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = x[i] / by;
    }
}

/* Sum or mean of a float dtype whose accumulator is the output itself, or scratch (16 bits). */
static void
sum_floats(fs_world *world, fs_dtype dtype, fs_reduce_op op, const void *const *src, size_t n,
           void *out)
{
    const fs_exec *exec = &world->host;
    bool narrow = dtype == FS_BF16 || dtype == FS_F16;
    fs_sum sum = {
        .src = src,
        .src_n = (size_t)world->size,
        .src_dtype = dtype,
        .acc = narrow ? (void *)world->scratch : out,
        .acc_dtype = narrow ? FS_F32 : dtype,
        .n = n,
    };
    exec->device->sum(exec, &sum);
    if (op == FS_MEAN && sum.acc_dtype == FS_F64) {
        divide_f64(sum.acc, n, (double)world->size);
    } else if (op == FS_MEAN) {
        divide_f32(sum.acc, n, (float)world->size);
    }
    if (narrow) {
        exec->device->convert(exec, out, dtype, world->scratch, FS_F32, n);
    }
}

void
fs_reduce_pieces(fs_world *world, fs_dtype dtype, fs_reduce_op op, const void *const *src, size_t n,
                 void *out)
{
    size_t each = fs_dtype_nbytes(dtype);
    if (n == 0) {
        return;
    }
    if (!fs_dtype_is_float(dtype) || op == FS_MAX || op == FS_MIN) {
        memcpy(out, src[0], n * each);
        for (int r = 1; r < world->size; r++) {
            world->host.device->combine(&world->host, (int)op, dtype, out, src[r], n);
        }
        return;
    }
    /* Parts that fit the scratch, and stay in the cache until they are divided and rounded. */
    const void **part = world->sources;
    for (size_t begin = 0; begin < n; begin += FS_SCRATCH_N) {
        for (int r = 0; r < world->size; r++) {
            part[r] = (const unsigned char *)src[r] + begin * each;
        }
        sum_floats(world, dtype, op, part, fs_min_size(n - begin, FS_SCRATCH_N),
                   (unsigned char *)out + begin * each);
    }
}
