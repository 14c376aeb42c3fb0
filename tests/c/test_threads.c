// sanitizers: tsan
// flavours: threads neon
/* The pool: every task once, whatever the number of threads; lazy, quiet in a forked child, with
 * our floating-point state in every thread. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/threads.h"
#include "check.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#elif defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#endif

#define TASKS_MAX 3000

typedef struct ctx {
    _Atomic int runs[TASKS_MAX];
    int plain[TASKS_MAX]; /* written without atomics: the sanitizer sees a missing fence */
    size_t salt;
} ctx;

static void
count_task(void *opaque, size_t index)
{
    ctx *c = opaque;
    atomic_fetch_add_explicit(&c->runs[index], 1, memory_order_relaxed);
    c->plain[index] = (int)(index + c->salt);
}

static void
test_every_task_once(void)
{
    static ctx c;
    for (size_t threads = 1; threads <= 4; threads++) {
        fs_pool *pool;
        CHECK_OK(fs_pool_open(threads, &pool));
        CHECK(fs_pool_threads(pool) == threads, "%zu", fs_pool_threads(pool));
        for (size_t round = 0; round < 300; round++) {
            size_t n = round % 7 == 0 ? TASKS_MAX : round % 5;
            memset(&c, 0, sizeof c);
            c.salt = round;
            fs_parallel(pool, n, count_task, &c);
            for (size_t i = 0; i < TASKS_MAX; i++) {
                int runs = atomic_load(&c.runs[i]);
                CHECK(runs == (i < n), "task %zu of %zu ran %d times", i, n, runs);
                CHECK(i >= n || c.plain[i] == (int)(i + round), "task %zu wrote nothing", i);
            }
        }
        fs_pool_close(pool);
    }
    fs_parallel(NULL, 5, count_task, &c);
    fs_pool_close(NULL);
}

// ---- how many threads ---------------------------------------------------------------------------

/* Every task waits until as many threads as the pool has are inside one: only tests may do this. */
typedef struct crowd {
    _Atomic size_t inside;
    size_t expected;
    uint64_t fp[8];
    int interrupt_blocked[8];
} crowd;

static void
crowd_task(void *opaque, size_t index)
{
    crowd *c = opaque;
    sigset_t mask;
    (void)pthread_sigmask(SIG_SETMASK, NULL, &mask);
    c->interrupt_blocked[index] = sigismember(&mask, SIGINT);
    fs_fp_state now = fs_fp_enter();
    fs_fp_leave(now);
    c->fp[index] = now;
    atomic_fetch_add(&c->inside, 1);
    while (atomic_load(&c->inside) < c->expected) {
    }
}

static void
test_all_threads_work(void)
{
    for (size_t threads = 2; threads <= 4; threads++) {
        fs_pool *pool;
        crowd c = {.expected = threads};
        CHECK_OK(fs_pool_open(threads, &pool));
        CHECK(fs_pool_threads_used(pool) == 0, "%zu", fs_pool_threads_used(pool));
        fs_parallel(pool, threads, crowd_task, &c);
        CHECK(fs_pool_threads_used(pool) == threads, "%zu of %zu", fs_pool_threads_used(pool),
              threads);
        int unblocked = 0;
        for (size_t i = 0; i < threads; i++) {
            unblocked += c.interrupt_blocked[i] == 0;
        }
        CHECK(unblocked == 1, "%d threads take signals, only the caller should", unblocked);
        fs_pool_close(pool);
    }
}

#if defined(__x86_64__) || defined(__aarch64__)

/* Turns flushing of subnormals on, as another library might have. */
static void
spoil_fp_state(void)
{
#if defined(__x86_64__)
    unsigned spoilt = 0x1f80u | 0x8040u;
    __asm__ volatile("ldmxcsr %0" : : "m"(spoilt));
#else
    uint64_t spoilt = (uint64_t)1 << 24;
    __asm__ volatile("msr fpcr, %0" : : "r"(spoilt));
#endif
}

static void
test_fp_state(void)
{
    volatile float tiny = 0x1p-130f;
    fs_fp_state saved = fs_fp_enter();
    spoil_fp_state();
    CHECK(tiny * 0.5f == 0.0f, "flushing could not be turned on");
    fs_fp_state spoilt = fs_fp_enter();
    CHECK(tiny * 0.5f == 0x1p-131f, "subnormals are lost after fs_fp_enter");

    /* Workers are started by a thread that flushes, and must not. */
    fs_fp_leave(spoilt);
    CHECK(tiny * 0.5f == 0.0f, "fs_fp_leave did not restore");
    fs_pool *pool;
    crowd c = {.expected = 3};
    CHECK_OK(fs_pool_open(3, &pool));
    fs_parallel(pool, 3, crowd_task, &c);
    fs_pool_close(pool);
    fs_fp_leave(saved);
    int flushing = 0;
    for (size_t i = 0; i < 3; i++) {
        /* The caller kept its own state: a call of the library sets it before. */
        flushing += c.fp[i] == spoilt;
    }
    CHECK(flushing == 1, "%d threads flush subnormals, only the caller should", flushing);
}

#endif

// ---- nesting, forks -----------------------------------------------------------------------------

typedef struct nest {
    fs_pool *pool;
    ctx *inner;
} nest;

static void
inner_task(void *opaque, size_t index)
{
    ctx *c = opaque;
    atomic_fetch_add(&c->runs[index], 1);
}

static void
nest_task(void *opaque, size_t index)
{
    nest *n = opaque;
    (void)index;
    fs_parallel(n->pool, 10, inner_task, n->inner);
}

static void
test_nested(void)
{
    static ctx c;
    nest n = {.inner = &c};
    CHECK_OK(fs_pool_open(3, &n.pool));
    fs_parallel(n.pool, 20, nest_task, &n);
    for (size_t i = 0; i < 10; i++) {
        CHECK(atomic_load(&c.runs[i]) == 20, "%d", atomic_load(&c.runs[i]));
    }
    fs_pool_close(n.pool);
}

#ifndef UNDER_TSAN

static void
test_forked_child_is_serial(void)
{
    static ctx c;
    fs_pool *pool;
    CHECK_OK(fs_pool_open(3, &pool));
    fs_parallel(pool, 1000, count_task, &c);
    pid_t child = fork();
    if (child == 0) {
        /* The workers do not exist here: a wait for one would never end. */
        (void)alarm(20);
        memset(&c, 0, sizeof c);
        fs_parallel(pool, 1000, count_task, &c);
        int all = 1;
        for (size_t i = 0; i < 1000; i++) {
            all = all && atomic_load(&c.runs[i]) == 1;
        }
        fs_pool_close(pool);
        _exit(all ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "fork or wait failed");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with status %d", status);
    fs_parallel(pool, 1000, count_task, &c);
    fs_pool_close(pool);
}

#endif

int
main(void)
{
    fs_pool *pool;
    CHECK_STATUS(fs_pool_open(0, &pool), FS_EINVAL);
    CHECK(fs_cpu_count() >= 1, "%u", fs_cpu_count());
    test_every_task_once();
    test_all_threads_work();
#if defined(__x86_64__) || defined(__aarch64__)
    test_fp_state();
#endif
    test_nested();
#ifndef UNDER_TSAN
    test_forked_child_is_serial();
#endif
    return 0;
}
