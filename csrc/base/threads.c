/* The pool: one job at a time, whose tasks are claimed from a shared counter.
 *
 * A worker joins a job under the lock, so the caller, which closes the job under the same lock and
 * waits for the joined ones to leave, never returns while somebody may still read its context. A
 * worker that wakes too late finds the job closed and goes back to sleep: the caller does not wait
 * for sleepers, and small jobs cost no switch.
 *
 * Lock order: lock is a leaf; no task runs with it held. */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "arena.h"
#include "cpu.h"

struct fs_pool {
    size_t threads;
    pid_t pid; /* of the process that opened it: in a forked child there are no workers */
    pthread_mutex_t lock;
    pthread_cond_t work; /* a job was opened, or stop */
    pthread_cond_t done; /* the last joined worker left */
    /* Under lock. */
    pthread_t *workers;
    size_t started;
    size_t joined;
    uint64_t job; /* number of the newest job */
    bool open;    /* it takes workers */
    bool stop;
    fs_task task;
    void *ctx;
    size_t n;
    /* Claimed by fetch-add (relaxed: what tasks write is published by lock). */
    _Atomic size_t next;
    _Atomic size_t used;
    _Atomic uint64_t job_seen; /* copy of job for workers that spin; read without lock */
    bool caller_used;          /* by the caller alone */
};

/* A task that calls fs_parallel itself runs that serially. */
static _Thread_local bool inside_task;

/* How often, at most, an idle worker looks for the next job before it sleeps: about 5 us.
 * Operations of a step follow each other within microseconds, and a wake-up costs more than that;
 * but where there are more threads than processors, looking takes time from those who work. So the
 * number is halved when nothing came, and doubled when something did. */
#define FS_POOL_SPINS_MAX 128u

/* Claims and runs tasks until none is left; true if it ran one. */
static bool
run_tasks(fs_pool *pool, fs_task task, void *ctx, size_t n)
{
    bool ran = false;
    inside_task = true;
    for (;;) {
        size_t index = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (index >= n) {
            break;
        }
        task(ctx, index);
        ran = true;
    }
    inside_task = false;
    return ran;
}

/* Looks for a job newer than seen; returns how often to look the next time. */
static unsigned
await_job(fs_pool *pool, uint64_t seen, unsigned spins)
{
    for (unsigned i = 0; i < spins; i++) {
        if (atomic_load_explicit(&pool->job_seen, memory_order_relaxed) != seen) {
            return spins < FS_POOL_SPINS_MAX / 2 ? spins * 2 : FS_POOL_SPINS_MAX;
        }
        fs_cpu_relax();
    }
    return spins > 1 ? spins / 2 : 1;
}

static void *
worker_main(void *opaque)
{
    fs_pool *pool = opaque;
    uint64_t seen = 0;
    bool used = false;
    unsigned spins = FS_POOL_SPINS_MAX;
    (void)fs_fp_enter();
    (void)pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stop && !(pool->open && pool->job != seen)) {
            (void)pthread_cond_wait(&pool->work, &pool->lock);
        }
        if (pool->stop) {
            break;
        }
        seen = pool->job;
        pool->joined++;
        fs_task task = pool->task;
        void *ctx = pool->ctx;
        size_t n = pool->n;
        (void)pthread_mutex_unlock(&pool->lock);

        if (run_tasks(pool, task, ctx, n) && !used) {
            used = true;
            atomic_fetch_add_explicit(&pool->used, 1, memory_order_relaxed);
        }

        (void)pthread_mutex_lock(&pool->lock);
        if (--pool->joined == 0) {
            (void)pthread_cond_signal(&pool->done);
        }
        (void)pthread_mutex_unlock(&pool->lock);
        spins = await_job(pool, seen, spins);
        (void)pthread_mutex_lock(&pool->lock);
    }
    (void)pthread_mutex_unlock(&pool->lock);
    return NULL;
}

fs_status
fs_pool_open(size_t threads, fs_pool **out)
{
    fs_pool *pool;
    if (threads < 1 || threads > 4096) {
        return FS_FAIL(FS_EINVAL, "a pool has 1 to 4096 threads, not %zu", threads);
    }
    FS_TRY(fs_calloc(1, sizeof *pool, &pool));
    fs_status st = fs_calloc(threads, sizeof *pool->workers, &pool->workers);
    if (st != FS_OK) {
        fs_free(pool);
        return st;
    }
    pool->threads = threads;
    pool->pid = getpid();
    (void)pthread_mutex_init(&pool->lock, NULL);
    (void)pthread_cond_init(&pool->work, NULL);
    (void)pthread_cond_init(&pool->done, NULL);
    *out = pool;
    return FS_OK;
}

void
fs_pool_close(fs_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    /* In a forked child the lock may be held by a worker that does not exist here: touch
     * nothing. */
    if (pool->pid == getpid()) {
        (void)pthread_mutex_lock(&pool->lock);
        pool->stop = true;
        (void)pthread_cond_broadcast(&pool->work);
        (void)pthread_mutex_unlock(&pool->lock);
        for (size_t i = 0; i < pool->started; i++) {
            (void)pthread_join(pool->workers[i], NULL);
        }
        (void)pthread_cond_destroy(&pool->done);
        (void)pthread_cond_destroy(&pool->work);
        (void)pthread_mutex_destroy(&pool->lock);
    }
    fs_free(pool->workers);
    fs_free(pool);
}

size_t
fs_pool_threads(const fs_pool *pool)
{
    return pool->threads;
}

size_t
fs_pool_threads_used(const fs_pool *pool)
{
    return atomic_load_explicit(&pool->used, memory_order_relaxed);
}

/* Starts the workers, with every signal blocked: signals belong to the program's own threads. If
 * the system gives fewer threads, those there are do the work: same results, more slowly, and
 * fs_pool_threads_used tells. */
static void
start_workers_locked(fs_pool *pool)
{
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->started + 1 < pool->threads) {
        if (pthread_create(&pool->workers[pool->started], NULL, worker_main, pool) != 0) {
            break;
        }
        pool->started++;
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void
run_serially(size_t n, fs_task task, void *ctx)
{
    for (size_t i = 0; i < n; i++) {
        task(ctx, i);
    }
}

void
fs_parallel(fs_pool *pool, size_t n, fs_task task, void *ctx)
{
    if (pool == NULL || inside_task) {
        run_serially(n, task, ctx);
        return;
    }
    if (n > 0 && !pool->caller_used) {
        pool->caller_used = true;
        atomic_fetch_add_explicit(&pool->used, 1, memory_order_relaxed);
    }
    if (n <= 1 || pool->threads == 1 || pool->pid != getpid()) {
        run_serially(n, task, ctx);
        return;
    }
    (void)pthread_mutex_lock(&pool->lock);
    if (pool->started == 0) {
        start_workers_locked(pool);
    }
    pool->task = task;
    pool->ctx = ctx;
    pool->n = n;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    pool->job++;
    pool->open = true;
    atomic_store_explicit(&pool->job_seen, pool->job, memory_order_relaxed);
    (void)pthread_cond_broadcast(&pool->work);
    (void)pthread_mutex_unlock(&pool->lock);

    (void)run_tasks(pool, task, ctx, n);

    (void)pthread_mutex_lock(&pool->lock);
    pool->open = false;
    while (pool->joined > 0) {
        (void)pthread_cond_wait(&pool->done, &pool->lock);
    }
    (void)pthread_mutex_unlock(&pool->lock);
}
