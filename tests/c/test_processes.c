/* Worlds of processes: ranks find each other, share memory, and see each other die, at every
 * wait. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/arena.h"
#include "ranks.h"

static const fs_deadlines deadlines = {20.0, 10.0};
static char folder[64];

typedef struct process_call {
    int size;
    const char *name;
    int data_fd, lock_fd;
    double timeout_s;
    int rank;
    void *ctx;
} process_call;

/* The body of a rank: returns its exit status. */
typedef int (*rank_body)(fs_world *world, void *ctx);

static fs_status
join_as(const process_call *call, fs_job **out)
{
    const fs_join join = {.rank = call->rank,
                          .size = call->size,
                          .name = call->name,
                          .folder = folder,
                          .data_fd = call->data_fd,
                          .lock_fd = call->lock_fd,
                          .timeout_s = call->timeout_s};
    return fs_job_join(&join, out);
}

static int
run_rank(const process_call *call, rank_body body)
{
    fs_job *job;
    fs_world *world;
    fs_status st = join_as(call, &job);
    if (st != FS_OK) {
        return 100 + (int)st;
    }
    st = fs_world_open(job, call->rank, serial_exec(), &deadlines, &world);
    if (st != FS_OK) {
        fs_job_leave(job, call->rank, true, "could not open");
        fs_job_close(job);
        return 100 + (int)st;
    }
    int code = body(world, call->ctx);
    fs_world_close(world);
    fs_job_close(job);
    return code;
}

static void
start_ranks(const process_call *call, rank_body body, pid_t *pids)
{
    for (int r = 0; r < call->size; r++) {
        process_call mine = *call;
        mine.rank = r;
        pids[r] = fork();
        CHECK(pids[r] >= 0, "fork");
        if (pids[r] == 0) {
            (void)alarm(60);
            _exit(run_rank(&mine, body));
        }
    }
}

/* Exit status of a rank, or -signal. */
static int
end_of(pid_t pid)
{
    int status;
    while (waitpid(pid, &status, 0) < 0) {
        CHECK(errno == EINTR, "waitpid");
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void
run_processes(const process_call *call, rank_body body)
{
    pid_t pids[8];
    start_ranks(call, body, pids);
    for (int r = 0; r < call->size; r++) {
        int end = end_of(pids[r]);
        CHECK(end == 0, "rank %d of %d ended with %d", r, call->size, end);
    }
}

// ---- they share ---------------------------------------------------------------------------------

static int
sharing_body(fs_world *world, void *ctx)
{
    (void)ctx;
    int size = fs_world_size(world), rank = fs_world_rank(world);
    CHECK(!fs_world_is_threads(world), "threads");
    for (size_t round = 0; round < 3; round++) {
        fs_region *region;
        CHECK_OK(fs_region_open(world, "test", 300000, &region));
        unsigned char *mine = fs_region_block(region, rank);
        for (size_t i = 0; i < 300000; i++) {
            CHECK(mine[i] == 0, "not zero");
        }
        memset(mine, rank + 1, 300000);
        CHECK_OK(fs_barrier(world));
        for (int r = 0; r < size; r++) {
            CHECK(fs_region_block(region, r)[299999] == r + 1, "rank %d", r);
        }
        /* Operands in world memory are read where they are; a private one on one rank makes all
         * copy. */
        for (int private_rank = -1; private_rank < 2; private_rank++) {
            float x[1000], sum[1000], *in = rank == private_rank ? x : (float *)(void *)mine;
            for (int i = 0; i < 1000; i++) {
                in[i] = (float)(i + rank);
            }
            size_t counts[8] = {1000};
            CHECK_OK(fs_reduce_scatter(world, FS_F32, FS_SUM, in, counts, sum));
            for (int i = 0; rank == 0 && i < 1000; i++) {
                CHECK(sum[i] == (float)(i * size + size * (size - 1) / 2), "%d: %g", i,
                      (double)sum[i]);
            }
            CHECK_OK(fs_barrier(world));
        }
        fs_region_close(region);
    }
    fs_region *huge;
    CHECK_STATUS(fs_region_open(world, "huge", (size_t)1 << 45, &huge), FS_EBUDGET);
    fs_world *part;
    CHECK_OK(fs_world_split(world, rank % 2, 0, &part));
    for (int i = 0; i < 50; i++) {
        CHECK_OK(fs_barrier(part));
    }
    fs_world_close(part);
    CHECK_OK(fs_barrier(world));
    return 0;
}

/* One rank's limit on file sizes, which memory files have to keep too, is found before it kills. */
static int
limited_body(fs_world *world, void *ctx)
{
    (void)ctx;
    if (fs_world_rank(world) == 1) {
        const struct rlimit limit = {8 << 20, 8 << 20};
        CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
    }
    fs_region *region;
    CHECK_STATUS(fs_region_open(world, "large", 16 << 20, &region), FS_EBUDGET);
    CHECK(strstr(fs_status_message(), "of rank 1, 8.0 MiB (RLIMIT_FSIZE") != NULL, "%s",
          fs_status_message());
    CHECK_OK(fs_region_open(world, "small", 1 << 20, &region));
    fs_region_close(region);
    return 0;
}

static void
test_sharing(void)
{
    for (int size = 1; size <= 4; size++) {
        process_call call = {size, "sharing", -1, -1, 20.0, 0, NULL};
        run_processes(&call, sharing_body);
        run_processes(&call, sharing_body); /* the same name again: the first left nothing behind */

        fs_job *job;
        CHECK_OK(fs_job_create(size, &job, &call.data_fd, &call.lock_fd));
        run_processes(&call, sharing_body);
        fs_job_close(job);
    }
    process_call call = {2, "limited", -1, -1, 20.0, 0, NULL};
    run_processes(&call, limited_body);
    CHECK(access(folder, F_OK) < 0, "%s was made although nobody needed it", folder);
}

/* A rank in another network namespace does not see the abstract socket, but the one in the
 * folder. */
static int
namespace_body(fs_world *world, void *ctx)
{
    (void)ctx;
    return fs_barrier(world) == FS_OK ? 0 : 1;
}

static void
test_folder(void)
{
    process_call call = {2, "folder", -1, -1, 20.0, 0, NULL};
    pid_t pids[2];
    for (int r = 0; r < 2; r++) {
        call.rank = r;
        pids[r] = fork();
        if (pids[r] == 0) {
            (void)alarm(60);
            if (r == 1 && unshare(CLONE_NEWNET) < 0) {
                (void)fprintf(stderr, "  network namespaces: not permitted here, not tested\n");
            }
            _exit(run_rank(&call, namespace_body));
        }
    }
    CHECK(end_of(pids[0]) == 0 && end_of(pids[1]) == 0, "folder");
    CHECK(access(folder, F_OK) < 0, "%s stays behind", folder);
}

// ---- they cannot join ---------------------------------------------------------------------------

static void
test_refusals(void)
{
    /* Nobody comes: both sides end in time, and rank 0 says who is missing. */
    process_call call = {3, "nobody", -1, -1, 0.3, 0, NULL};
    fs_job *job;
    CHECK_STATUS(join_as(&call, &job), FS_ABORTED);
    CHECK(strstr(fs_status_message(), "rank(s) 1, 2 of 3 did not come within 0.3 s") != NULL, "%s",
          fs_status_message());
    call.rank = 2;
    CHECK_STATUS(join_as(&call, &job), FS_ABORTED);
    CHECK(strstr(fs_status_message(), "could not reach rank 0") != NULL, "%s", fs_status_message());

    /* Two ideas of the size; the same rank twice; descriptors that are no job. */
    call = (process_call){2, "sizes", -1, -1, 10.0, 0, NULL};
    pid_t zero = fork();
    if (zero == 0) {
        _exit(run_rank(&call, namespace_body));
    }
    process_call other = {3, "sizes", -1, -1, 10.0, 1, NULL};
    CHECK_STATUS(join_as(&other, &job), FS_EINVAL);
    CHECK(strstr(fs_status_message(), "rank 0 was told that the world has 2") != NULL, "%s",
          fs_status_message());
    call.rank = 1;
    pid_t one = fork();
    if (one == 0) {
        _exit(run_rank(&call, namespace_body));
    }
    CHECK(end_of(zero) == 0 && end_of(one) == 0, "a stranger disturbed the job");

    fs_job *made;
    process_call twice = {2, "twice", -1, -1, 5.0, 1, NULL};
    CHECK_OK(fs_job_create(2, &made, &twice.data_fd, &twice.lock_fd));
    pid_t first = fork();
    if (first == 0) {
        (void)join_as(&twice, &job);
        (void)pause();
        _exit(0);
    }
    (void)usleep(200000);
    pid_t second = fork();
    if (second == 0) {
        _exit(run_rank(&twice, namespace_body));
    }
    CHECK(end_of(second) == 100 + FS_ESTATE, "two processes are rank 1");
    (void)kill(first, SIGKILL);
    (void)end_of(first);
    fs_job_close(made);

    process_call wrong = {2, "wrong", dup(0), dup(0), 5.0, 0, NULL};
    CHECK_STATUS(join_as(&wrong, &job), FS_ESTATE);
}

// ---- they die -----------------------------------------------------------------------------------

typedef struct death {
    int culprit;
    size_t nth;
    int what;
} death;

/* Some of everything that waits. The survivor: 0 if all went well, 2 if it saw the death. */
static int
mortal(fs_world *world)
{
    fs_region *region = NULL;
    fs_world *part = NULL;
    float x[2000] = {0};
    size_t counts[2] = {1000, 1000};
    fs_status st = fs_region_open(world, "test", 4096, &region);
    for (int i = 0; i < 2 && st == FS_OK; i++) {
        st = fs_all_reduce(world, FS_F32, FS_SUM, x, x, 2000);
    }
    if (st == FS_OK) {
        st = fs_reduce_scatter(world, FS_F32, FS_SUM, x, counts, (float[1000]){0});
    }
    if (st == FS_OK) {
        st = fs_world_split(world, 0, 0, &part);
    }
    if (st == FS_OK) {
        st = fs_barrier(part);
    }
    if (st == FS_OK) {
        st = fs_barrier(world);
    }
    fs_region_close(region);
    fs_world_close(part);
    fs_cause cause = fs_job_cause(fs_world_job(world));
    if (st == FS_OK) {
        return 0;
    }
    return st == FS_ABORTED && cause.kind == FS_CAUSE_DIED ? 2 : 3;
}

static int
mortal_rank(const process_call *call)
{
    const death *d = call->ctx;
    fs_job *job;
    fs_world *world;
    if (join_as(call, &job) != FS_OK) {
        return 4;
    }
    if (call->rank == d->culprit) {
        (void)fs_wait_fault_at(d->nth, d->what);
    }
    fs_status st = fs_world_open(job, call->rank, serial_exec(), &deadlines, &world);
    if (st != FS_OK) {
        int seen = fs_job_cause(job).kind == FS_CAUSE_DIED ? 2 : 5;
        fs_job_close(job);
        return seen;
    }
    int code = mortal(world);
    fs_world_close(world);
    fs_job_close(job);
    return code;
}

/* Rank culprit is killed at its n-th wait, n = 1, 2, 3, ... until a run is clean. */
static void
test_death_at_every_wait(int culprit)
{
    size_t seen = 0;
    for (size_t nth = 1;; nth++) {
        death d = {culprit, nth, 1};
        process_call call = {2, "death", -1, -1, 20.0, 0, &d};
        fs_job *job;
        CHECK_OK(fs_job_create(2, &job, &call.data_fd, &call.lock_fd));
        pid_t pids[2];
        for (int r = 0; r < 2; r++) {
            call.rank = r;
            pids[r] = fork();
            if (pids[r] == 0) {
                (void)alarm(30);
                _exit(mortal_rank(&call));
            }
        }
        int end = end_of(pids[culprit]), survivor = end_of(pids[1 - culprit]);
        fs_job_close(job);
        if (end == 0) {
            CHECK(survivor == 0, "a clean run: %d", survivor);
            CHECK(seen > 10, "only %zu deaths", seen);
            return;
        }
        CHECK(end == -SIGKILL, "rank %d ended with %d", culprit, end);
        /* At the very last fence the death may come after everyone was through. */
        CHECK(survivor == 2 || survivor == 0, "wait %zu: the survivor ended with %d", nth,
              survivor);
        seen += survivor == 2;
    }
}

static int
stopped_body(fs_world *world, void *ctx)
{
    (void)ctx;
    static const fs_deadlines soon = {0.5, 10.0};
    CHECK_OK(fs_barrier(world));
    if (fs_world_rank(world) == 1) {
        (void)kill(getpid(), SIGSTOP);
        return 0;
    }
    fs_world_set_deadlines(world, &soon);
    CHECK_STATUS(fs_barrier(world), FS_ABORTED);
    CHECK(fs_job_cause(fs_world_job(world)).kind == FS_CAUSE_TIMEOUT, "%s", fs_status_message());
    CHECK(strstr(fs_status_message(), "stopped (SIGSTOP)") != NULL, "%s", fs_status_message());
    return 7;
}

static void
test_stopped(void)
{
    process_call call = {2, "stopped", -1, -1, 20.0, 0, NULL};
    pid_t pids[2];
    start_ranks(&call, stopped_body, pids);
    CHECK(end_of(pids[0]) == 7, "rank 0");
    (void)kill(pids[1], SIGCONT);
    CHECK(end_of(pids[1]) == 0, "rank 1");
}

/* A forked child may not use the world, and its end means nothing; while it holds the
 * descriptors, its parent's death is still seen. */
static int
forking_body(fs_world *world, void *ctx)
{
    (void)ctx;
    CHECK_OK(fs_barrier(world));
    pid_t child = fork();
    if (child == 0) {
        CHECK_STATUS(fs_barrier(world), FS_ESTATE);
        fs_world_close(world);
        _exit(9);
    }
    CHECK(end_of(child) == 9, "child");
    CHECK_OK(fs_barrier(world));
    if (fs_world_rank(world) == 1) {
        if (fork() == 0) {
            (void)usleep(1500000);
            _exit(0);
        }
        (void)kill(getpid(), SIGKILL);
    }
    CHECK_STATUS(fs_barrier(world), FS_ABORTED);
    CHECK(fs_job_cause(fs_world_job(world)).kind == FS_CAUSE_DIED, "%s", fs_status_message());
    return 0;
}

static void
test_fork(void)
{
    process_call call = {2, "fork", -1, -1, 20.0, 0, NULL};
    pid_t pids[2];
    start_ranks(&call, forking_body, pids);
    CHECK(end_of(pids[1]) == -SIGKILL, "rank 1");
    CHECK(end_of(pids[0]) == 0, "rank 0");
}

int
main(void)
{
    (void)snprintf(folder, sizeof folder, "/tmp/flatshard-test-%d", (int)getpid());
    test_sharing();
    test_folder();
    test_refusals();
    test_death_at_every_wait(0);
    test_death_at_every_wait(1);
    test_stopped();
    test_fork();
    return 0;
}
