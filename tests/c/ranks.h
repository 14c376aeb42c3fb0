/* Ranks that are threads, for C tests: runs a function on each, every one with its own world. */
#ifndef FS_TESTS_RANKS_H
#define FS_TESTS_RANKS_H

#include <pthread.h>
#include <string.h>

#include "base/cpu.h"
#include "check.h"
#include "comm/comm.h"

/* Waits until every rank has come. */
static inline void
meet(fs_world *world)
{
    fs_what what = {FS_OP_BARRIER, -1, -1, 0, 0};
    CHECK_OK(fs_meet(world, &what, NULL, NULL, 0));
}

/* Patience of an engine (device/engine.h): peers that left end the wait. */
static inline fs_status
ask_world(void *ctx)
{
    return fs_world_usable(ctx);
}

typedef struct rank_call {
    fs_job *job;
    int rank;
    const fs_deadlines *deadlines;
    void (*body)(fs_world *world, void *ctx);
    void *ctx;
    pthread_t thread;
} rank_call;

static const fs_exec *
serial_exec(void)
{
    static fs_exec exec;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    (void)pthread_mutex_lock(&lock);
    if (exec.device == NULL) {
        fs_isa isa;
        CHECK_OK(fs_isa_choose(&isa));
        CHECK_OK(fs_device_cpu(isa, &exec.device));
    }
    (void)pthread_mutex_unlock(&lock);
    return &exec;
}

static void *
rank_main(void *opaque)
{
    rank_call *call = opaque;
    fs_world *world;
    CHECK_OK(fs_world_open(call->job, call->rank, serial_exec(), call->deadlines, &world));
    call->body(world, call->ctx);
    fs_world_close(world);
    return NULL;
}

/* Runs body(world, ctx) on n ranks, and returns when all have ended. */
static inline void
run_ranks_within(int n, const fs_deadlines *deadlines, void (*body)(fs_world *, void *), void *ctx)
{
    rank_call calls[FS_RANKS_MAX];
    fs_job *job;
    CHECK_OK(fs_job_threads(n, &job));
    for (int r = 0; r < n; r++) {
        calls[r] = (rank_call){job, r, deadlines, body, ctx, 0};
        CHECK(pthread_create(&calls[r].thread, NULL, rank_main, &calls[r]) == 0, "no thread");
    }
    for (int r = 0; r < n; r++) {
        (void)pthread_join(calls[r].thread, NULL);
    }
    fs_job_close(job);
}

static inline void
run_ranks(int n, void (*body)(fs_world *, void *), void *ctx)
{
    static const fs_deadlines deadlines = {60.0, 30.0};
    run_ranks_within(n, &deadlines, body, ctx);
}

#endif
