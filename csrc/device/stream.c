/* Reads and writes arrays and does nothing with them: what memory allows an operation that touches as
 * many. Benchmarks divide by it. Plain stores, and tiles ahead asked for, as in the kernels. */
#include "cpu_ops.h"

#include <stdatomic.h>

#include "../base/checked.h"

/* Elements per task: 32 tiles, as in grid.inc. */
#define FS_STREAM_TASK_N ((size_t)32 * FS_TILE_N)

typedef struct stream_ctx {
    const fs_stream *stream;
    _Atomic uint32_t mixed; /* so that no compiler leaves the reads out */
} stream_ctx;

static void
ask_for(const uint32_t *x, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __builtin_prefetch(x + i, 0, 3);
    }
}

static uint32_t
read_tile(const uint32_t *restrict x, size_t n)
{
    uint32_t mixed = 0;
    for (size_t i = 0; i < n; i++) {
        mixed ^= x[i];
    }
    return mixed;
}

/* Not memset, which streams past the caches for some sizes on some machines. */
static void
write_tile(uint32_t *restrict x, uint32_t mask, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = mask;
    }
}

static void
update_tile(uint32_t *restrict x, uint32_t mask, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x[i] ^= mask;
    }
}

static void
stream_task(void *opaque, size_t index)
{
    stream_ctx *ctx = opaque;
    const fs_stream *s = ctx->stream;
    size_t begin = index * FS_STREAM_TASK_N;
    size_t end = fs_min_size(s->n, begin + FS_STREAM_TASK_N);
    uint32_t mixed = 0;
    for (size_t at = begin; at < end; at += FS_TILE_N) {
        size_t n = fs_min_size(end - at, FS_TILE_N);
        size_t next = at + n, ahead = fs_min_size(s->n - next, FS_TILE_N);
        for (size_t i = 0; i < s->arrays_n; i++) {
            uint32_t *x = s->arrays[i];
            if (i < s->read_n) {
                ask_for(x + next, ahead);
                mixed ^= read_tile(x + at, n);
            } else if (i < s->read_n + s->update_n) {
                ask_for(x + next, ahead);
                update_tile(x + at, s->mask, n);
            } else {
                write_tile(x + at, s->mask, n);
            }
        }
    }
    atomic_fetch_xor_explicit(&ctx->mixed, mixed, memory_order_relaxed);
}

uint32_t
fs_cpu_stream(const fs_exec *exec, const fs_stream *stream)
{
    stream_ctx ctx = {.stream = stream};
    size_t tasks = stream->n / FS_STREAM_TASK_N + (stream->n % FS_STREAM_TASK_N != 0);
    fs_parallel(exec->pool, tasks, stream_task, &ctx);
    return atomic_load_explicit(&ctx.mixed, memory_order_relaxed);
}
