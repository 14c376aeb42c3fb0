/* Opening shards when the nth allocation fails, for n = 1, 2, 3 ... until a run ends clean: no rank
 * is left waiting, every rank fails when one does, and nothing leaks. */
#include "check.h"

#include <pthread.h>

#include "comm/comm.h"
#include "shard/shard.h"

enum { SIZE = 2, PARAMS = 3 };

typedef struct rank_args {
    fs_world *world;
    fs_weights weights;
    fs_layout *layout;
    fs_status status;
} rank_args;

static fs_layout *
make_layout(void)
{
    const fs_param_def params[PARAMS] = {
        {.name = "a", .dims_n = 1, .dims = {70}, .unit = 0, .trainable = true},
        {.name = "b", .dims_n = 2, .dims = {3, 5}, .unit = 0, .trainable = false},
        {.name = "c", .dims_n = 0, .unit = 1, .trainable = true},
    };
    const fs_unit_def units[2] = {{"u0", 1, 1}, {"u1", 0, 0}};
    fs_layout *layout;
    CHECK_OK(fs_layout_make(params, PARAMS, units, 2, SIZE, FS_PARTITION_FLAT, false, &layout));
    return layout;
}

static void *
open_and_close(void *context)
{
    rank_args *args = context;
    const fs_policy policy = {.keep = 1, .weights = args->weights, .pool_units = 1,
                              .precision = {.param = FS_BF16, .reduce = FS_F32,
                                            .accumulate = FS_F32, .master = true,
                                            .moments = FS_F32}};
    fs_shards *shards = NULL;
    args->status = fs_shards_open(args->world, args->layout, &policy, &shards);
    if (args->status == FS_OK) {
        args->status = fs_shards_open_moments(shards, 2);
    }
    fs_shards_close(shards);
    return NULL;
}

static void *
open_world(void *context)
{
    static const fs_deadlines deadlines = {20.0, 20.0};
    static fs_exec exec;
    void **given = context;
    CHECK_OK(fs_device_cpu(FS_ISA_BASELINE, &exec.device));
    CHECK_OK(fs_world_open(given[0], *(int *)given[1], &exec, &deadlines, given[2]));
    return NULL;
}

/* Runs body for every rank, each in a thread. */
static void
run_ranks(void *(*body)(void *), void *args, size_t stride)
{
    pthread_t threads[SIZE];
    for (int r = 0; r < SIZE; r++) {
        CHECK(pthread_create(&threads[r], NULL, body, (char *)args + (size_t)r * stride) == 0,
              "rank %d", r);
    }
    for (int r = 0; r < SIZE; r++) {
        CHECK(pthread_join(threads[r], NULL) == 0, "rank %d", r);
    }
}

/* One attempt in which allocation n fails; true when it was never reached. */
static bool
attempt(size_t n, fs_weights weights)
{
    fs_job *job;
    rank_args args[SIZE] = {0};
    int ranks[SIZE];
    void *opens[SIZE][3];
    CHECK_OK(fs_job_threads(SIZE, &job));
    for (int r = 0; r < SIZE; r++) {
        ranks[r] = r;
        args[r].weights = weights;
        args[r].layout = make_layout();
        opens[r][0] = job;
        opens[r][1] = &ranks[r];
        opens[r][2] = &args[r].world;
    }
    run_ranks(open_world, opens, sizeof opens[0]);
    (void)fs_alloc_fail_at(n);
    run_ranks(open_and_close, args, sizeof args[0]);
    size_t made = fs_alloc_fail_at(0);
    /* A rank that has no room even to meet tells the others through the job. */
    bool some_enomem = false;
    for (int r = 0; r < SIZE; r++) {
        fs_status status = args[r].status;
        CHECK((status == FS_OK) == (made < n), "rank %d, allocation %zu of %zu: status %d", r, n,
              made, (int)status);
        CHECK(status == FS_OK || status == FS_ENOMEM || status == FS_ABORTED, "rank %d: status %d",
              r, (int)status);
        some_enomem = some_enomem || status == FS_ENOMEM;
    }
    CHECK(some_enomem == (made >= n), "allocation %zu of %zu", n, made);
    for (int r = 0; r < SIZE; r++) {
        fs_world_close(args[r].world);
    }
    fs_job_close(job);
    return made < n;
}

int
main(void)
{
    for (int weights = FS_WEIGHTS_SHARED; weights <= FS_WEIGHTS_SHARD; weights++) {
        size_t n = 1;
        while (!attempt(n, (fs_weights)weights)) {
            n++;
        }
        CHECK(n > 20, "only %zu allocations were failed", n);
    }
    return 0;
}
