/* Worlds of threads: the fence carries payloads, compares, and ends for everyone alike; regions,
 * splits, idle hooks, deadlines, leaving, reports. */
// sanitizers: tsan
// flavours: threads
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#include "ranks.h"

static const fs_what barrier = {FS_OP_BARRIER, -1, -1, 0, 0};

// ---- the fence ----------------------------------------------------------------------------------

#define FENCES 2000

static void
payload_body(fs_world *world, void *ctx)
{
    (void)ctx;
    fs_payload mine = {{0}}, all[8];
    int size = fs_world_size(world), rank = fs_world_rank(world);
    for (uint64_t k = 0; k < FENCES; k++) {
        mine.u[0] = k * 100 + (uint64_t)rank;
        mine.u[7] = ~mine.u[0];
        CHECK_OK(fs_meet(world, &barrier, &mine, all, 0));
        for (int r = 0; r < size; r++) {
            CHECK(all[r].u[0] == k * 100 + (uint64_t)r && all[r].u[7] == ~all[r].u[0],
                  "fence %llu: rank %d sees %llu of rank %d", (unsigned long long)k, rank,
                  (unsigned long long)all[r].u[0], r);
        }
    }
}

/* Plain memory written before a fence is seen after it. */
static void
memory_body(fs_world *world, void *ctx)
{
    uint64_t *shared = ctx;
    int size = fs_world_size(world), rank = fs_world_rank(world);
    for (uint64_t k = 1; k < 500; k++) {
        shared[rank * 16] = k;
        CHECK_OK(fs_barrier(world));
        for (int r = 0; r < size; r++) {
            CHECK(shared[r * 16] == k, "stale");
        }
        CHECK_OK(fs_barrier(world));
    }
}

static void
delayed_body(fs_world *world, void *ctx)
{
    memory_body(world, ctx);
}

static void
test_fence(void)
{
    static uint64_t shared[8 * 16];
    for (int n = 1; n <= 5; n++) {
        run_ranks(n, payload_body, NULL);
        run_ranks(n, memory_body, shared);
    }
    fs_wait_set_delay(7, 200);
    run_ranks(3, delayed_body, shared);
    fs_wait_set_delay(0, 0);
}

// ---- mismatch -----------------------------------------------------------------------------------

static void
mismatch_body(fs_world *world, void *ctx)
{
    (void)ctx;
    fs_world_note_line(world, "train.py", 10 + fs_world_rank(world));
    fs_what what = {FS_OP_ALL_REDUCE, FS_F32, FS_SUM, 32, 0};
    CHECK_OK(fs_meet(world, &what, NULL, NULL, 0));
    if (fs_world_rank(world) == 1) {
        what.nbytes = 64;
    }
    CHECK_STATUS(fs_meet(world, &what, NULL, NULL, 0), FS_ABORTED);
    fs_cause cause = fs_job_cause(fs_world_job(world));
    CHECK(cause.kind == FS_CAUSE_MISMATCH && cause.rank == 1, "kind %d, rank %d", (int)cause.kind,
          cause.rank);
    char report[4096];
    fs_job_report(fs_world_job(world), report, sizeof report);
    CHECK(strstr(report, "all_reduce of 8 elements of float32 (sum), at train.py:10") != NULL &&
              strstr(report, "all_reduce of 16 elements of float32 (sum), at train.py:11") != NULL,
          "%s", report);
    /* The job stays poisoned. */
    CHECK_STATUS(fs_barrier(world), FS_ABORTED);
    CHECK_STATUS(fs_world_usable(world), FS_ABORTED);
}

// ---- log ----------------------------------------------------------------------------------------

/* Ranks read each other's logs while these are written: entries are whole. */
static void
log_body(fs_world *world, void *ctx)
{
    (void)ctx;
    static const char *const units[] = {"", "layers.0", "layers.1"};
    enum { N = 6000 };
    int rank = fs_world_rank(world), size = fs_world_size(world), unit[3];
    for (int u = 0; u < 3; u++) {
        unit[u] = u == 0 ? 0 : fs_log_unit(world, units[u]);
    }
    CHECK(fs_log_unit(world, "layers.0") == unit[1] && unit[1] != unit[2], "names are kept once");
    fs_log_entry *entries;
    CHECK_OK(fs_calloc(FS_LOG_EVENTS, sizeof *entries, &entries));
    uint64_t lost, seen = 0;
    for (int i = 0; i < N; i++) {
        fs_log_begin(world, FS_OP_REDUCE, unit[i % 3], 0);
        fs_log_add(world, (uint64_t)(100 * (i % 3)));
        fs_log_begin(world, FS_OP_GATHER, unit[1], 7); /* inside */
        fs_log_end(world);
        fs_log_end(world);
        if (i % 500 != 0) {
            continue;
        }
        size_t n = fs_log_read_events(world, (rank + 1) % size, entries, FS_LOG_EVENTS, &lost);
        for (size_t k = 0; k < n; k++) {
            const fs_log_entry *e = &entries[k];
            uint64_t wanted = e->op == FS_OP_GATHER           ? 7
                              : strcmp(e->unit, "") == 0         ? 0
                              : strcmp(e->unit, "layers.0") == 0 ? 100
                                                                 : 200;
            bool ours = e->op == FS_OP_GATHER || e->op == FS_OP_REDUCE;
            CHECK(!ours || e->nbytes == wanted, "%d of %s: %llu bytes", (int)e->op, e->unit,
                  (unsigned long long)e->nbytes);
        }
        CHECK(lost + n >= seen, "events go back");
        seen = lost + n;
    }
    CHECK_OK(fs_barrier(world));
    size_t n = fs_log_read_totals(world, (rank + 1) % size, entries, FS_LOG_EVENTS);
    uint64_t count = 0, nbytes = 0;
    for (size_t k = 0; k < n; k++) {
        count += entries[k].op == FS_OP_REDUCE ? entries[k].count : 0;
        nbytes += entries[k].op == FS_OP_REDUCE ? entries[k].nbytes : 0;
    }
    CHECK(count == N && nbytes == N / 3 * 300, "%llu operations, %llu bytes",
          (unsigned long long)count, (unsigned long long)nbytes);
    fs_free(entries);
    CHECK_OK(fs_barrier(world));
}

// ---- deadline, leaving, interrupt ---------------------------------------------------------------

static void
late_body(fs_world *world, void *ctx)
{
    (void)ctx;
    fs_world_note_line(world, "late.py", 5);
    fs_world_note_unit(world, "layers.3", 7);
    CHECK_OK(fs_barrier(world));
    if (fs_world_rank(world) == 2) {
        usleep(700000);
    }
    CHECK_STATUS(fs_barrier(world), FS_ABORTED);
    fs_cause cause = fs_job_cause(fs_world_job(world));
    CHECK(cause.kind == FS_CAUSE_TIMEOUT && cause.rank == 2, "kind %d, rank %d", (int)cause.kind,
          cause.rank);
    char report[4096];
    fs_job_report(fs_world_job(world), report, sizeof report);
    CHECK(strstr(report, "rank 2 did not come within 0.3 s") != NULL &&
              strstr(report, "rank 2: has not come; last in barrier, unit layers.3, step 7, at "
                             "late.py:5") != NULL &&
              strstr(report, "rank 0: in barrier") != NULL,
          "%s", report);
    bool event = fs_world_next_event(world, report, sizeof report);
    CHECK(event == (fs_world_rank(world) != 2), "rank %d: event %d", fs_world_rank(world), event);
    CHECK(!event || strstr(report, "still waiting after 0.1 s") != NULL, "%s", report);
}

static void
leaver_body(fs_world *world, void *ctx)
{
    const char *reason = ctx;
    CHECK_OK(fs_barrier(world));
    if (fs_world_rank(world) == 1) {
        if (reason != NULL) {
            fs_job_leave(fs_world_job(world), 1, true, reason);
        }
        return;
    }
    CHECK_STATUS(fs_barrier(world), FS_ABORTED);
    fs_cause cause = fs_job_cause(fs_world_job(world));
    CHECK(cause.kind == FS_CAUSE_LEFT && cause.rank == 1, "kind %d, rank %d", (int)cause.kind,
          cause.rank);
    CHECK(strstr(fs_status_message(), reason != NULL ? reason : "closed its world") != NULL, "%s",
          fs_status_message());
}

static bool
is_true(void *ctx)
{
    return atomic_load((atomic_bool *)ctx);
}

static bool
never(void *ctx)
{
    (void)ctx;
    return false;
}

static void
interrupted_body(fs_world *world, void *ctx)
{
    if (fs_world_rank(world) == 0) {
        fs_world_set_interrupted(world, is_true, ctx);
        CHECK_STATUS(fs_wait(world, never, NULL, 0), FS_ABORTED);
    } else {
        usleep(50000);
        atomic_store((atomic_bool *)ctx, true);
        CHECK_STATUS(fs_barrier(world), FS_ABORTED);
    }
    fs_cause cause = fs_job_cause(fs_world_job(world));
    CHECK(cause.kind == FS_CAUSE_INTERRUPTED && cause.rank == 0, "kind %d", (int)cause.kind);
}

/* Remembered, not obeyed: the wait ends when its condition holds. */
static void
nosig_body(fs_world *world, void *ctx)
{
    (void)ctx;
    static atomic_bool yes = true;
    fs_world_set_interrupted(world, is_true, &yes);
    if (fs_world_rank(world) == 1) {
        usleep(150000);
    }
    CHECK_OK(fs_meet(world, &barrier, NULL, NULL, FS_NOSIG));
}

/* Sleeps, once: its rank is still on its way out of a fence when the next one fails. */
static fs_status
slow_once(void *ctx)
{
    bool *slept = ctx;
    if (!*slept) {
        *slept = true;
        usleep(500000);
    }
    return FS_OK;
}

/* Finished is final: rank 0 goes through the fence and gives up on the next one, all before rank 1
 * has seen that the first is over. */
static void
overtaken_body(fs_world *world, void *ctx)
{
    bool slept = false;
    (void)ctx;
    if (fs_world_rank(world) == 1) {
        CHECK_OK(fs_world_add_idle(world, slow_once, &slept));
        CHECK_OK(fs_barrier(world));
        CHECK(slept, "it did not wait");
    } else {
        static const fs_deadlines soon = {0.1, 10.0};
        usleep(100000);
        CHECK_OK(fs_barrier(world));
        fs_world_set_deadlines(world, &soon);
    }
    CHECK_STATUS(fs_barrier(world), FS_ABORTED);
    CHECK(fs_job_cause(fs_world_job(world)).kind == FS_CAUSE_TIMEOUT, "%s", fs_status_message());
}

static void
test_endings(void)
{
    run_ranks(2, overtaken_body, NULL);
    static const fs_deadlines soon = {0.3, 0.1};
    run_ranks(2, mismatch_body, NULL);
    run_ranks(3, log_body, NULL);
    run_ranks(1, log_body, NULL);
    run_ranks_within(3, &soon, late_body, NULL);
    run_ranks(3, leaver_body, "ValueError: the reason");
    run_ranks(2, leaver_body, NULL);
    atomic_bool stop = false;
    run_ranks(2, interrupted_body, &stop);
    run_ranks(2, nosig_body, NULL);
}

// ---- idle hooks ---------------------------------------------------------------------------------

typedef struct counters {
    _Atomic int published[2], reduced[2];
} counters;

typedef struct hook_ctx {
    fs_world *world;
    counters *shared;
    int waits_for;
} hook_ctx;

/* Reduces what everyone has published, in any wait: two ranks that wait for each other's reduction
 * would be dead without it. */
static fs_status
reduce_ready(void *opaque)
{
    hook_ctx *ctx = opaque;
    int me = fs_world_rank(ctx->world);
    int ready = atomic_load(&ctx->shared->published[0]);
    int other = atomic_load(&ctx->shared->published[1]);
    ready = other < ready ? other : ready;
    while (atomic_load(&ctx->shared->reduced[me]) < ready) {
        atomic_fetch_add(&ctx->shared->reduced[me], 1);
        fs_bell(ctx->world);
    }
    return FS_OK;
}

static bool
reduced_by_all(void *opaque)
{
    hook_ctx *ctx = opaque;
    return atomic_load(&ctx->shared->reduced[0]) >= ctx->waits_for &&
           atomic_load(&ctx->shared->reduced[1]) >= ctx->waits_for;
}

static void
hook_body(fs_world *world, void *shared)
{
    hook_ctx ctx = {world, shared, 0};
    CHECK_OK(fs_world_add_idle(world, reduce_ready, &ctx));
    for (int i = 1; i <= 300; i++) {
        atomic_fetch_add(&ctx.shared->published[fs_world_rank(world)], 1);
        fs_bell(world);
        ctx.waits_for = i - 1;
        CHECK_OK(fs_wait(world, reduced_by_all, &ctx, 0));
    }
    CHECK_OK(fs_barrier(world));
    ctx.waits_for = 300;
    CHECK_OK(fs_wait(world, reduced_by_all, &ctx, 0));
    fs_world_remove_idle(world, reduce_ready, &ctx);
    CHECK_OK(fs_barrier(world));
}

static fs_status
failing_hook(void *ctx)
{
    (void)ctx;
    return FS_FAIL(FS_EINTERNAL, "the hook failed");
}

static void
failing_hook_body(fs_world *world, void *ctx)
{
    (void)ctx;
    if (fs_world_rank(world) == 0) {
        CHECK_OK(fs_world_add_idle(world, failing_hook, NULL));
        usleep(1000);
        CHECK_STATUS(fs_wait(world, never, NULL, 0), FS_EINTERNAL);
    } else {
        CHECK_STATUS(fs_barrier(world), FS_ABORTED);
        CHECK(fs_job_cause(fs_world_job(world)).kind == FS_CAUSE_ERROR, "%s", fs_status_message());
    }
}

// ---- regions ------------------------------------------------------------------------------------

static void
region_body(fs_world *world, void *ctx)
{
    (void)ctx;
    int size = fs_world_size(world), rank = fs_world_rank(world);
    for (size_t round = 0; round < 3; round++) {
        fs_region *region;
        CHECK_OK(fs_region_open(world, "test", 5000, &region));
        CHECK(fs_region_stride(region) >= 5000, "%zu", fs_region_stride(region));
        unsigned char *mine = fs_region_block(region, rank);
        for (size_t i = 0; i < 5000; i++) {
            CHECK(mine[i] == 0, "not zero");
        }
        memset(mine, rank + 1, 5000);
        CHECK_OK(fs_barrier(world));
        for (int r = 0; r < size; r++) {
            CHECK(fs_region_block(region, r)[4999] == r + 1, "rank %d", r);
        }
        CHECK_OK(fs_barrier(world));
        fs_region_retain(region); /* a view that outlives close */
        fs_region_close(region);
        CHECK(mine[17] == rank + 1, "gone");
        fs_region_close(region);
    }
    /* What cannot fit is refused on all ranks, before any of it is taken; the world goes on. */
    fs_region *huge;
    CHECK_STATUS(fs_region_open(world, "huge", (size_t)1 << 46, &huge), FS_EBUDGET);
    CHECK(strstr(fs_status_message(), "'huge' needs") != NULL, "%s", fs_status_message());
    CHECK_STATUS(fs_region_open(world, "wraps", SIZE_MAX - 4096, &huge), FS_EINVAL);
    CHECK_OK(fs_barrier(world));
}

/* One rank's allocation fails: every rank fails, at every place it can. */
static void
allocation_body(fs_world *world, void *ctx)
{
    _Atomic int *failures = ctx;
    fs_region *region = NULL;
    fs_status st = fs_region_open(world, "test", 4096, &region);
    if (st == FS_OK) {
        fs_region_close(region);
    } else {
        atomic_fetch_add(failures, 1);
    }
}

// ---- split --------------------------------------------------------------------------------------

static void
split_body(fs_world *world, void *ctx)
{
    (void)ctx;
    int rank = fs_world_rank(world);
    fs_world *part;
    CHECK_OK(fs_world_split(world, rank % 2, -rank, &part));
    CHECK(fs_world_size(part) == (rank % 2 == 0 ? 3 : 2), "%d", fs_world_size(part));
    CHECK(fs_world_rank(part) == (rank % 2 == 0 ? 2 - rank / 2 : 1 - rank / 2), "%d",
          fs_world_rank(part));
    for (int i = 0; i < 100; i++) {
        fs_payload mine = {{0}}, all[3];
        mine.i[0] = rank;
        CHECK_OK(fs_meet(part, &barrier, &mine, all, 0));
        for (int r = 0; r < fs_world_size(part); r++) {
            CHECK(all[r].i[0] % 2 == rank % 2, "a stranger");
            CHECK(r == 0 || all[r].i[0] < all[r - 1].i[0], "order");
        }
    }
    fs_world *none;
    CHECK_OK(fs_world_split(world, rank == 4 ? 0 : -1, 0, &none));
    CHECK((none != NULL) == (rank == 4), "color");
    fs_world_close(none);
    fs_world_close(part);
    CHECK_OK(fs_barrier(world));
}

/* A failure in one part ends the others too: rank 0 waits for rank 1 in a part that the failed
 * rank 3 is not in. */
static void
poison_body(fs_world *world, void *ctx)
{
    (void)ctx;
    int rank = fs_world_rank(world);
    fs_world *part;
    CHECK_OK(fs_world_split(world, rank / 2, 0, &part));
    if (rank == 3) {
        fs_job_leave(fs_world_job(world), 3, true, "broke");
    } else if (rank == 0 || rank == 2) {
        CHECK_STATUS(fs_barrier(part), FS_ABORTED);
        CHECK(strstr(fs_status_message(), "rank 3 failed: broke") != NULL, "%s",
              fs_status_message());
    } else {
        usleep(300000);
        CHECK_STATUS(fs_barrier(part), FS_ABORTED);
    }
    fs_world_close(part);
}

// ---- counted faults -----------------------------------------------------------------------------

static void
counted_body(fs_world *world, void *ctx)
{
    _Atomic int *ended = ctx;
    fs_region *region = NULL;
    fs_status st = fs_region_open(world, "test", 4096, &region);
    for (int i = 0; i < 3 && st == FS_OK; i++) {
        st = fs_barrier(world);
    }
    fs_region_close(region);
    CHECK(st == FS_OK || st == FS_ABORTED, "%s", fs_status_message());
    if (st == FS_OK) {
        atomic_fetch_add(ended, 1);
    }
}

static void *
tolerant_main(void *opaque)
{
    rank_call *call = opaque;
    fs_world *world;
    if (fs_world_open(call->job, call->rank, serial_exec(), call->deadlines, &world) == FS_OK) {
        call->body(world, call->ctx);
        fs_world_close(world);
    } else {
        fs_job_leave(call->job, call->rank, true, "could not open");
    }
    return NULL;
}

static void
run_tolerant(int n, void (*body)(fs_world *, void *), void *ctx)
{
    static const fs_deadlines deadlines = {20.0, 10.0};
    rank_call calls[8];
    fs_job *job;
    CHECK_OK(fs_job_threads(n, &job));
    for (int r = 0; r < n; r++) {
        calls[r] = (rank_call){job, r, &deadlines, body, ctx, 0};
        CHECK(pthread_create(&calls[r].thread, NULL, tolerant_main, &calls[r]) == 0, "no thread");
    }
    for (int r = 0; r < n; r++) {
        (void)pthread_join(calls[r].thread, NULL);
    }
    fs_job_close(job);
}

/* An interrupt at the n-th wait, n = 1, 2, 3, ... until a run is clean: every rank always ends. */
static void
test_counted_waits(void)
{
    for (size_t nth = 1;; nth++) {
        _Atomic int ended = 0;
        (void)fs_wait_fault_at(nth, 3);
        run_tolerant(3, counted_body, &ended);
        size_t waits = fs_wait_fault_at(0, 0);
        if (waits < nth) {
            CHECK(atomic_load(&ended) == 3, "%d ended", atomic_load(&ended));
            CHECK(nth > 10, "only %zu waits", nth);
            return;
        }
    }
}

/* The same with the n-th allocation. */
static void
test_counted_allocations(void)
{
    for (size_t nth = 1; nth < 1000; nth++) {
        _Atomic int failures = 0;
        static const fs_deadlines deadlines = {20.0, 10.0};
        fs_job *job;
        CHECK_OK(fs_job_threads(2, &job));
        rank_call calls[2];
        (void)fs_alloc_fail_at(nth);
        for (int r = 0; r < 2; r++) {
            calls[r] = (rank_call){job, r, &deadlines, allocation_body, &failures, 0};
            CHECK(pthread_create(&calls[r].thread, NULL, tolerant_main, &calls[r]) == 0,
                  "no thread");
        }
        for (int r = 0; r < 2; r++) {
            (void)pthread_join(calls[r].thread, NULL);
        }
        size_t made = fs_alloc_fail_at(0);
        fs_job_close(job);
        if (made < nth) {
            CHECK(atomic_load(&failures) == 0, "failed without a reason");
            CHECK(nth > 10, "only %zu allocations", nth);
            return;
        }
        CHECK(atomic_load(&failures) == 2 || atomic_load(&failures) == 0, "one of two failed");
    }
}

#ifdef FS_THREADS_ONLY
static void
test_refusal(void)
{
    const fs_join join = {.rank = 0, .size = 2, .name = "x", .data_fd = -1, .lock_fd = -1};
    fs_job *job;
    int data_fd, lock_fd;
    CHECK_STATUS(fs_job_join(&join, &job), FS_EUNSUPPORTED);
    CHECK(strstr(fs_status_message(), "local_world") != NULL, "%s", fs_status_message());
    CHECK_STATUS(fs_job_create(2, &job, &data_fd, &lock_fd), FS_EUNSUPPORTED);
}
#endif

int
main(void)
{
#ifdef FS_THREADS_ONLY
    test_refusal();
#endif
    test_fence();
    test_endings();
    static counters shared;
    run_ranks(2, hook_body, &shared);
    run_ranks(2, failing_hook_body, NULL);
    run_ranks(3, region_body, NULL);
    run_ranks(5, split_body, NULL);
    run_ranks(4, poison_body, NULL);
    test_counted_waits();
    test_counted_allocations();
    return 0;
}
