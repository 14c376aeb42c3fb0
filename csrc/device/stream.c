/* Reads and writes arrays and does nothing with them: what memory allows an operation that touches
 * as many. Benchmarks divide by it. Plain stores. There are two ways, since neither is the faster
 * for every set of arrays: lines in turn, or tiles in turn with the next ones asked for. */
#include "cpu_ops.h"

#include <stdatomic.h>

#include "../base/checked.h"

/* Elements per task: 32 tiles, as in grid.inc. */
#define FS_STREAM_TASK_N ((size_t)32 * FS_TILE_N)
/* Two cache lines of an array, then two of the next. */
#define FS_STREAM_LINES_N ((size_t)32)

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

/* Elements [at, at + n) of every array, both even: two of 2 bytes are one word. */
static inline __attribute__((always_inline)) uint32_t
touch(const fs_stream *s, size_t at, size_t n)
{
    uint32_t mixed = 0;
    for (size_t a = 0; a < s->arrays_n; a++) {
        uint32_t *restrict x = s->arrays[a] + (at >> s->half[a]);
        size_t words = n >> s->half[a];
        if (a < s->read_n) {
            for (size_t i = 0; i < words; i++) {
                mixed ^= x[i];
            }
        } else if (a < s->read_n + s->update_n) {
            for (size_t i = 0; i < words; i++) {
                x[i] ^= s->mask;
            }
        } else {
            for (size_t i = 0; i < words; i++) {
                x[i] = s->mask;
            }
        }
    }
    return mixed;
}

static void
stream_task(void *opaque, size_t index)
{
    stream_ctx *ctx = opaque;
    const fs_stream *s = ctx->stream;
    size_t begin = index * FS_STREAM_TASK_N;
    size_t end = fs_min_size(s->n, begin + FS_STREAM_TASK_N);
    uint32_t mixed = 0;
    size_t at = begin;
    for (; s->tiles && at < end; at += FS_TILE_N) {
        size_t n = fs_min_size(end - at, FS_TILE_N);
        for (size_t a = 0; a < s->read_n + s->update_n; a++) {
            size_t next = at + n;
            ask_for(s->arrays[a] + (next >> s->half[a]),
                    fs_min_size(s->n - next, FS_TILE_N) >> s->half[a]);
        }
        mixed ^= touch(s, at, n);
    }
    for (; at + FS_STREAM_LINES_N <= end; at += FS_STREAM_LINES_N) {
        mixed ^= touch(s, at, FS_STREAM_LINES_N);
    }
    if (at < end) {
        mixed ^= touch(s, at, end - at);
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
