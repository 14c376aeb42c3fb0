/* The only wait. Everything that blocks a rank because of another rank comes through fs_wait, so
 * abort, death, deadline and Ctrl-C are looked at in one place.
 *
 * Sleep and bell. A waiter reads bell, adds itself to sleepers, tests its condition once more, and
 * sleeps if bell has not changed. A rank that made a condition true reads sleepers by an atomic
 * read-modify-write. Both touch sleepers that way, so one comes first: either the waker sees a
 * sleeper and rings, or the sleeper sees what the waker wrote before. */
#define _GNU_SOURCE
#include "shared.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef FS_THREADS_ONLY
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "../base/checked.h"
#include "../base/cpu.h"

int64_t
fs_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// ---- sleep and wake -----------------------------------------------------------------------------

#ifndef FS_THREADS_ONLY

/* True if a signal ended it early. */
static bool
sleep_slice(fs_world *world, uint32_t bell, long slice_ns)
{
    struct timespec slice = {0, slice_ns};
    int op = world->job->threads ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
    long rc = syscall(SYS_futex, &world->page->bell, op, bell, &slice, NULL, 0);
    return rc < 0 && errno == EINTR;
}

static void
ring(fs_world *world)
{
    atomic_fetch_add(&world->page->bell, 1);
    int op = world->job->threads ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE;
    (void)syscall(SYS_futex, &world->page->bell, op, INT32_MAX, NULL, NULL, 0);
}

#else

static bool
sleep_slice(fs_world *world, uint32_t bell, long slice_ns)
{
    fs_world_page *page = world->page;
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += slice_ns;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    (void)pthread_mutex_lock(&page->lock);
    if (atomic_load(&page->bell) == bell) {
        (void)pthread_cond_timedwait(&page->moved, &page->lock, &until);
    }
    (void)pthread_mutex_unlock(&page->lock);
    return false;
}

static void
ring(fs_world *world)
{
    fs_world_page *page = world->page;
    (void)pthread_mutex_lock(&page->lock);
    atomic_fetch_add(&page->bell, 1);
    (void)pthread_cond_broadcast(&page->moved);
    (void)pthread_mutex_unlock(&page->lock);
}

#endif

void
fs_bell(fs_world *world)
{
    if (!world->closed && atomic_fetch_add(&world->page->sleepers, 0) > 0) {
        ring(world);
    }
}

// ---- injected delay and faults ------------------------------------------------------------------

static _Atomic uint64_t delay; /* seed << 32 | max_us */
static _Atomic uint64_t delay_calls;
static _Atomic size_t waits, fault_at;
static _Atomic int fault_what;

void
fs_wait_set_delay(uint32_t seed, uint32_t max_us)
{
    atomic_store(&delay_calls, 0);
    atomic_store(&delay, (uint64_t)seed << 32 | max_us);
}

size_t
fs_wait_fault_at(size_t nth, int what)
{
    size_t made = atomic_exchange(&waits, 0);
    atomic_store(&fault_what, what);
    atomic_store(&fault_at, nth);
    return made;
}

static void
injected_delay(uint64_t setting)
{
    /* splitmix64 of seed and call number. */
    uint64_t x = (setting >> 32) + atomic_fetch_add(&delay_calls, 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    uint64_t us = (x ^ (x >> 31)) % ((setting & 0xffffffffu) + 1);
    struct timespec pause = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    (void)nanosleep(&pause, NULL);
}

/* True when this wait must fail as if interrupted. */
static bool
injected_fault(void)
{
    size_t nth = atomic_fetch_add(&waits, 1) + 1;
    size_t target = nth;
    if (!atomic_compare_exchange_strong(&fault_at, &target, 0)) {
        return false;
    }
    switch (atomic_load(&fault_what)) {
    case 1:
        (void)kill(getpid(), SIGKILL);
        break;
    case 2:
        (void)kill(getpid(), SIGSTOP);
        break;
    default:
        return true;
    }
    return false;
}

// ---- ending a wait ------------------------------------------------------------------------------

static void
say_over(const fs_world *world)
{
    for (size_t i = 0; i < world->over_hooks_n; i++) {
        world->over_hooks[i].over(world->over_hooks[i].ctx);
    }
}

fs_status
fs_world_aborted(const fs_world *world)
{
    char text[FS_REPORT_NBYTES];
    fs_job_report(world->job, text, sizeof text);
    say_over(world);
    return FS_FAIL(FS_ABORTED, "%s", text);
}

/* How long late ranks get to say where they are. A launcher may kill the survivors of a death
 * within a tenth of a second; whoever answers at all does it within microseconds. */
#define FS_LOCATE_LOST_NS 30000000
#define FS_LOCATE_LATE_NS 500000000

/* said: stands before the report; NULL: nothing does. */
static void
abort_saying(fs_world *world, fs_cause_kind kind, int culprit, double seconds, const char *said)
{
    fs_job *job = world->job;
    int reporter = world->ranks[world->rank];
    if (atomic_load(&job->page->abort) != 0) {
        return; /* our slot may hold the report that won */
    }
    fs_cause cause = {kind, culprit, 0};
    if (culprit >= 0 && !job->threads) {
        cause.pid = atomic_load(&job->page->slot[culprit].pid);
    }
    if (kind != FS_CAUSE_MISMATCH && kind != FS_CAUSE_INTERRUPTED) {
        fs_world_locate(world,
                        kind == FS_CAUSE_TIMEOUT ? FS_LOCATE_LATE_NS : FS_LOCATE_LOST_NS);
    }
    if (atomic_load(&job->page->abort) != 0) {
        return;
    }
    char *report = job->page->slot[reporter].report;
    size_t said_n = said != NULL ? fs_min_size(strlen(said), FS_REPORT_NBYTES / 2) : 0;
    if (said_n > 0) {
        memcpy(report, said, said_n);
        report[said_n++] = '\n';
    }
    fs_report_format(job, world, cause, seconds, report + said_n, FS_REPORT_NBYTES - said_n);
    (void)fs_job_abort(job, reporter, kind, culprit);
    ring(world);
}

void
fs_world_abort(fs_world *world, fs_cause_kind kind, int culprit, double seconds)
{
    abort_saying(world, kind, culprit, seconds, NULL);
}

fs_status
fs_world_fail(fs_world *world, fs_cause_kind kind, fs_status status)
{
    fs_kept kept;
    fs_status_keep(status, &kept);
    FS_TRY(fs_world_usable(world));
    abort_saying(world, kind, world->ranks[world->rank], 0, kept.text);
    say_over(world);
    return fs_status_tell(&kept, "");
}

bool
fs_world_has_come(const fs_world *world, int rank)
{
    const fs_rec *rec = &world->page->member[rank].rec[world->fences & 1];
    return atomic_load(&rec->fence) == world->fences + 1;
}

/* The rank that keeps the others waiting: the first that has not come to our fence, else the first
 * that waits for nothing. -1 if everybody waits. */
static int
find_late(const fs_world *world)
{
    bool in_fence = fs_world_has_come(world, world->rank);
    for (int r = 0; r < world->size; r++) {
        int job_rank = world->ranks[r];
        if (in_fence ? !fs_world_has_come(world, r)
                     : r != world->rank &&
                           atomic_load(&world->job->page->slot[job_rank].note.waiting) == 0) {
            return job_rank;
        }
    }
    return -1;
}

/* Death anywhere in the job, or a clean end of a rank that we wait for, ends it. */
static void
look_for_lost(fs_world *world, bool leavers)
{
    fs_cause_kind kind;
    int lost = fs_job_lost(world->job, &kind);
    if (lost >= 0) {
        fs_world_abort(world, kind, lost, 0);
        return;
    }
    bool in_fence = fs_world_has_come(world, world->rank);
    for (int r = 0; leavers && r < world->size; r++) {
        int job_rank = world->ranks[r];
        if (r != world->rank && !(in_fence && fs_world_has_come(world, r)) &&
            (atomic_load(&world->page->member[r].closed) != 0 ||
             atomic_load(&world->job->page->slot[job_rank].left) != FS_HERE)) {
            fs_world_abort(world, FS_CAUSE_LEFT, job_rank, 0);
            return;
        }
    }
}

// ---- the wait -----------------------------------------------------------------------------------

#define FS_SPIN_CHECKS 32       /* tests of the condition between two looks at the clock */
#define FS_INTERRUPT_SLICES 5   /* slices between two questions about Ctrl-C */
#define FS_NOBELL_SLICES 100    /* parts of a slice where nobody rings */
#define FS_LEAVER_PATIENCE_S 5.0
#define FS_LOOKS_APART_NS 2000000000
#define FS_SPIN_LEAST_NS 500

/* Adaptive: a spin that was in vain halves the next one, one that would have sufficed doubles
 * it. */
static bool
spin(fs_world *world, fs_condition condition, void *ctx)
{
    int64_t budget = world->spin_ns;
    if (budget <= 0) {
        return condition(ctx);
    }
    int64_t end = fs_now_ns() + budget;
    do {
        for (int i = 0; i < FS_SPIN_CHECKS; i++) {
            if (condition(ctx)) {
                if (world->spin_ns < world->spin_max_ns) {
                    world->spin_ns += world->spin_ns / 4;
                }
                return true;
            }
            fs_cpu_relax();
        }
    } while (fs_now_ns() < end);
    world->spin_ns = budget / 2 > FS_SPIN_LEAST_NS ? budget / 2 : FS_SPIN_LEAST_NS;
    return false;
}

static fs_status
run_hooks(fs_world *world)
{
    if (world->in_hooks) {
        return FS_OK;
    }
    world->in_hooks = true;
    fs_status st = FS_OK;
    for (size_t i = 0; i < world->hooks_n && st == FS_OK; i++) {
        st = world->hooks[i].idle(world->hooks[i].ctx);
    }
    world->in_hooks = false;
    return st;
}

/* Of one fs_wait. */
typedef struct wait_state {
    int64_t start, look_at, report_at, end;
    unsigned slices;
} wait_state;

/* Abort, liveness, deadline, Ctrl-C: the wait's end for a reason that is not its condition. */
static fs_status
look_around(fs_world *world, wait_state *state, unsigned flags, bool signalled)
{
    fs_job *job = world->job;
    int64_t now = fs_now_ns();
    double waited = (double)(now - state->start) * 1e-9;
    if (now >= state->look_at && atomic_load(&job->page->abort) == 0) {
        state->look_at = now + FS_WAIT_SLICE_NS;
        /* A device that works may need nobody: only one that seems stuck waits for who has left. */
        look_for_lost(world, !(flags & FS_NOBELL) || waited > FS_LEAVER_PATIENCE_S);
    }
    if (now >= state->end && atomic_load(&job->page->abort) == 0) {
        fs_world_abort(world, FS_CAUSE_TIMEOUT, find_late(world), waited);
    }
    bool events = false;
    if (now >= state->report_at) {
        state->report_at = INT64_MAX;
        char text[FS_REPORT_NBYTES];
        fs_report_format(job, world, (fs_cause){FS_CAUSE_NONE, -1, 0}, waited, text, sizeof text);
        fs_world_queue_event(world, text);
        events = true;
    }
    if (!(flags & FS_NOSIG) && world->interrupted != NULL &&
        (signalled || events || state->slices % FS_INTERRUPT_SLICES == 0) &&
        world->interrupted(world->interrupted_ctx)) {
        fs_world_abort(world, FS_CAUSE_INTERRUPTED, world->ranks[world->rank], 0);
        return fs_world_aborted(world);
    }
    return atomic_load(&job->page->abort) != 0 ? fs_world_aborted(world) : FS_OK;
}

static int64_t
deadline_after(int64_t start, double seconds)
{
    return seconds < 1e9 ? start + (int64_t)(seconds * 1e9) : INT64_MAX;
}

/* The slow path: sleep, and look around. */
static fs_status
wait_asleep(fs_world *world, fs_condition condition, void *ctx, unsigned flags)
{
    fs_world_page *page = world->page;
    wait_state state = {.start = fs_now_ns()};
    state.look_at = state.start + FS_WAIT_SLICE_NS;
    state.report_at = deadline_after(state.start, world->deadlines.report_after_s);
    state.end = deadline_after(state.start, world->deadlines.timeout_s);
    long slice_ns = flags & FS_NOBELL ? FS_WAIT_SLICE_NS / FS_NOBELL_SLICES : FS_WAIT_SLICE_NS;
    unsigned slept = 0;
    for (;;) {
        uint32_t bell = atomic_load(&page->bell);
        atomic_fetch_add(&page->sleepers, 1);
        bool done = condition(ctx);
        bool signalled = false;
        if (!done) {
            /* Our own ready work first: a peer may need it to get anywhere. */
            fs_status st = run_hooks(world);
            if (st != FS_OK) {
                atomic_fetch_sub(&page->sleepers, 1);
                fs_world_abort(world, FS_CAUSE_ERROR, world->ranks[world->rank], 0);
                return st;
            }
            done = condition(ctx);
        }
        if (!done) {
            signalled = sleep_slice(world, bell, slice_ns);
            state.slices += !(flags & FS_NOBELL) || ++slept % FS_NOBELL_SLICES == 0;
        }
        atomic_fetch_sub(&page->sleepers, 1);
        /* The condition before everything else: what is there is there, whoever has died since. */
        if (done || condition(ctx)) {
            if (fs_now_ns() - state.start < world->spin_max_ns) {
                world->spin_ns = world->spin_ns * 2 < world->spin_max_ns ? world->spin_ns * 2
                                                                        : world->spin_max_ns;
            }
            return FS_OK;
        }
        fs_status st = look_around(world, &state, flags, signalled);
        if (st != FS_OK) {
            return condition(ctx) ? FS_OK : st;
        }
    }
}

static fs_status
wait_for(fs_world *world, fs_condition condition, void *ctx, unsigned flags)
{
    fs_status st = run_hooks(world);
    if (st != FS_OK) {
        fs_world_abort(world, FS_CAUSE_ERROR, world->ranks[world->rank], 0);
        return st;
    }
    if (spin(world, condition, ctx)) {
        return FS_OK;
    }
    fs_note *note = &world->job->page->slot[world->ranks[world->rank]].note;
    atomic_store(&note->waiting, 1);
    st = wait_asleep(world, condition, ctx, flags);
    atomic_store(&note->waiting, 0);
    return st;
}

fs_status
fs_wait(fs_world *world, fs_condition condition, void *ctx, unsigned flags)
{
    if (world->closed) {
        return FS_FAIL(FS_ESTATE, "the world is closed");
    }
    uint64_t setting = atomic_load_explicit(&delay, memory_order_relaxed);
    if (setting != 0) {
        injected_delay(setting);
    }
    if (injected_fault()) {
        fs_world_abort(world, FS_CAUSE_INTERRUPTED, world->ranks[world->rank], 0);
        return condition(ctx) ? FS_OK : fs_world_aborted(world);
    }
    if (condition(ctx)) {
        return FS_OK;
    }
    fs_log_wait wait;
    fs_log_wait_begin(world, &wait);
    fs_status st = wait_for(world, condition, ctx, flags);
    fs_log_wait_end(world, &wait);
    return st;
}

fs_status
fs_world_look(fs_world *world, fs_looks *looks)
{
    int64_t now = fs_now_ns();
    if (now - looks->last_ns > FS_LOOKS_APART_NS) {
        looks->began_ns = now;
    }
    looks->last_ns = now;
    if (now < world->look_at) {
        return FS_OK;
    }
    world->look_at = now + FS_WAIT_SLICE_NS;
    FS_TRY(fs_world_usable(world));
    wait_state state = {.start = looks->began_ns, .look_at = now, .report_at = INT64_MAX,
                        .end = deadline_after(looks->began_ns, world->deadlines.timeout_s)};
    return look_around(world, &state, FS_NOBELL, false); /* who left gave its part before */
}

fs_status
fs_world_pause(fs_world *world)
{
    FS_TRY(fs_world_usable(world));
    int64_t now = fs_now_ns();
    if (world->interrupted == NULL || now < world->pause_at) {
        return FS_OK;
    }
    world->pause_at = now + (int64_t)FS_INTERRUPT_SLICES * FS_WAIT_SLICE_NS;
    if (world->interrupted(world->interrupted_ctx)) {
        return FS_FAIL(FS_ESTATE, "rank %d was interrupted", world->ranks[world->rank]);
    }
    return FS_OK;
}
