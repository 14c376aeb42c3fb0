/* A rank's compute threads.
 *
 * Work is a fixed grid of tasks whose shape never depends on the number of threads: results cannot
 * either. The calling thread takes part. A task cannot fail and must not wait for another task.
 * Workers start at the first call that has more than one task, never at open: importing and opening
 * start no thread. In a forked child a pool runs serially. */
#ifndef FS_BASE_THREADS_H
#define FS_BASE_THREADS_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

typedef struct fs_pool fs_pool;

/* threads >= 1 counts the calling thread. */
FS_NODISCARD fs_status
fs_pool_open(size_t threads, fs_pool **out);

/* Joins the workers (never while a task runs). NULL is fine. */
void fs_pool_close(fs_pool *pool);

size_t fs_pool_threads(const fs_pool *pool);

/* How many different threads have run at least one task since open: tests assert on it. */
size_t fs_pool_threads_used(const fs_pool *pool);

typedef void (*fs_task)(void *ctx, size_t index);

/* Runs task(ctx, i) for i in [0, n) and returns when all are done; their writes are visible to the
 * caller. One caller at a time per pool. pool NULL runs serially. */
void fs_parallel(fs_pool *pool, size_t n, fs_task task, void *ctx);

#endif
