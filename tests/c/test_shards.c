// sanitizers: tsan
// flavours: threads
/* The gradient protocol and the step with ranks that are threads: sums are exact, every policy
 * gives the same bits, ranks skip units, bring different numbers of micro-batches, freeze and thaw
 * parameters, and are delayed at random. */
#include "check.h"

#include <pthread.h>
#include <string.h>

#include "comm/comm.h"
#include "shard/optim.h"
#include "shard/shard.h"

enum { UNITS = 6, STEPS = 6, RANKS_MAX = 5 };

static const size_t unit_n[UNITS] = {200, 65, 1, 130, 70, 0};

typedef struct rank_args {
    fs_job *job;
    int rank, size;
    fs_policy policy;
    fs_partition partition;
    float *out; /* all weights after the last step, end to end */
} rank_args;

static fs_exec
baseline(void)
{
    fs_exec exec = {0};
    CHECK_OK(fs_device_cpu(FS_ISA_BASELINE, &exec.device));
    return exec;
}

static bool
is_frozen(int step, int unit)
{
    return (step % 3 == 2 && unit == 3) || (step == 4 && unit == 0);
}

/* Whether rank brings unit in a round of a step: everybody most of the time, and never nobody, but
 * for those that are frozen. */
static bool
comes(int rank, int step, int round, int unit)
{
    return !is_frozen(step, unit) && ((rank + step + round + unit) % 3 != 0 || rank == 0);
}

static int
rounds_of(int rank, int step)
{
    return (rank + step) % 3; /* some steps bring none on some ranks */
}

static fs_layout *
make_layout(int size, fs_partition partition, bool slot_per_unit)
{
    fs_param_def params[UNITS] = {0};
    fs_unit_def units[UNITS];
    static const char *const names[UNITS] = {"u0", "u1", "u2", "u3", "u4", "u5"};
    for (int u = 0; u < UNITS; u++) {
        params[u] = (fs_param_def){.name = names[u], .dims_n = 1, .dims = {unit_n[u]}, .unit = u,
                                   .trainable = true};
        /* unit 0 is a tie: open from the first place to the last */
        units[u] = (fs_unit_def){names[u], u == 0 ? 0 : UNITS - 1 - u, UNITS - 1 - u};
    }
    fs_layout *layout;
    CHECK_OK(fs_layout_make(params, UNITS, units, UNITS, size, partition, slot_per_unit, &layout));
    return layout;
}

/* One rank's gradients of a round: integers, in an order that differs between ranks. */
static void
bring_round(fs_shards *shards, const rank_args *args, int step, int round)
{
    float grad[256] = {0};
    for (int i = 0; i < UNITS; i++) {
        int u = (UNITS - 1 - i + args->rank * 2) % UNITS;
        if (!comes(args->rank, step, round, u)) {
            fs_status st = is_frozen(step, u) ? fs_grad_put(shards, u, grad, FS_F32) : FS_EINVAL;
            CHECK(st == FS_EINVAL, "a frozen unit took a gradient");
            continue;
        }
        for (size_t e = 0; e < unit_n[u]; e++) {
            grad[e] = (float)((args->rank + 1) * (u + 1) + (int)(e % 5) - round);
        }
        CHECK_OK(fs_grad_put(shards, u, grad, FS_F32));
        CHECK_OK(fs_grad_publish(shards, u, false));
    }
    CHECK_OK(fs_round_end(shards, 1, false));
}

static void *
run_rank(void *context)
{
    rank_args *args = context;
    fs_exec exec = baseline();
    fs_deadlines deadlines = {30.0, 30.0};
    fs_world *world;
    fs_shards *shards;
    CHECK_OK(fs_world_open(args->job, args->rank, &exec, &deadlines, &world));
    fs_layout *layout = make_layout(args->size, args->partition, args->policy.slot_per_unit);
    CHECK_OK(fs_shards_open(world, layout, &args->policy, &shards));
    CHECK_OK(fs_shards_open_moments(shards, 1));
    const fs_group group = {.lr = 0.125, .momentum = 0.5};
    int group_of[UNITS] = {0};
    int64_t steps[UNITS] = {0};
    for (int step = 0; step < STEPS; step++) {
        unsigned char frozen[UNITS];
        for (int u = 0; u < UNITS; u++) {
            frozen[u] = is_frozen(step, u);
        }
        CHECK_OK(fs_shards_freeze(shards, frozen));
        for (int round = 0; round < rounds_of(args->rank, step); round++) {
            bring_round(shards, args, step, round);
        }
        fs_verdict verdict;
        CHECK_OK(fs_step_agree(shards, 0.0, FS_NORM_2, false, &verdict));
        int64_t count = 0;
        for (int r = 0; r < args->size; r++) {
            count += rounds_of(r, step);
        }
        CHECK(verdict.count == count, "step %d: %lld of %lld", step, (long long)verdict.count,
              (long long)count);
        CHECK_OK(fs_optimizer_finish(shards, FS_RULE_SGD, &group, group_of, steps));
        const void *weights;
        for (int u = 0; u < UNITS;
             u++) { /* forward of the next step: gathers while others may lag */
            CHECK_OK(fs_unit_gather(shards, u, &weights));
            CHECK_OK(fs_unit_release(shards, u));
        }
    }
    size_t at = 0;
    for (int u = 0; u < UNITS; at += unit_n[u], u++) {
        CHECK_OK(fs_load(shards, u, FS_WEIGHT, 0, unit_n[u], args->out + at, FS_F32));
    }
    CHECK_OK(fs_barrier(world));
    fs_shards_close(shards);
    fs_world_close(world);
    return NULL;
}

static void
run_world(int size, const fs_policy *policy, fs_partition partition, float *out)
{
    fs_job *job;
    pthread_t threads[RANKS_MAX];
    rank_args args[RANKS_MAX];
    static float outs[RANKS_MAX][512];
    CHECK_OK(fs_job_threads(size, &job));
    for (int r = 0; r < size; r++) {
        args[r] = (rank_args){job, r, size, *policy, partition, outs[r]};
        CHECK(pthread_create(&threads[r], NULL, run_rank, &args[r]) == 0, "rank %d", r);
    }
    for (int r = 0; r < size; r++) {
        CHECK(pthread_join(threads[r], NULL) == 0, "rank %d", r);
        CHECK(memcmp(outs[r], outs[0], sizeof outs[r]) == 0, "rank %d differs", r);
    }
    fs_job_close(job);
    memcpy(out, outs[0], sizeof outs[0]);
}

/* The same steps without shards. Integer sums and powers of two: exact until the division. */
static void
reference(int size, float *out)
{
    float w[512] = {0}, m[512] = {0};
    int moved[UNITS] = {0};
    for (int step = 0; step < STEPS; step++) {
        int count = 0;
        for (int r = 0; r < size; r++) {
            count += rounds_of(r, step);
        }
        size_t at = 0;
        for (int u = 0; u < UNITS; at += unit_n[u], u++) {
            bool had = false;
            for (size_t e = 0; e < unit_n[u]; e++) {
                float sum = 0.0f;
                for (int r = 0; r < size; r++) {
                    for (int round = 0; round < rounds_of(r, step); round++) {
                        if (comes(r, step, round, u)) {
                            sum += (float)((r + 1) * (u + 1) + (int)(e % 5) - round);
                            had = true;
                        }
                    }
                }
                if (had) {
                    float g = sum * (float)(1.0 / (double)count);
                    m[at + e] = moved[u] == 0 ? g : 0.5f * m[at + e] + g;
                    w[at + e] = w[at + e] - 0.125f * m[at + e];
                }
            }
            moved[u] += had;
        }
    }
    memcpy(out, w, sizeof w);
}

int
main(void)
{
    const fs_precision precision = {.param = FS_F32, .reduce = FS_F32, .accumulate = FS_F32,
                                    .moments = FS_F32};
    static float got[512], want[512];
    for (int size = 1; size <= RANKS_MAX; size += size < 3 ? 1 : 2) {
        fs_policy policies[] = {
            {size, true, FS_WEIGHTS_SHARED, 1, precision, {0}, false},
            {1, true, FS_WEIGHTS_WHOLE, 1, precision, {0}, false},
            {1, false, FS_WEIGHTS_SHARED, 1, precision, {0}, false},
            {1, false, FS_WEIGHTS_SHARD, 1, precision, {0}, false},
            {size, true, FS_WEIGHTS_WHOLE, 1, precision, {0}, false},
            {1, false, FS_WEIGHTS_SHARD, 0, precision, {0}, false},
        };
        reference(size, want);
        for (size_t p = 0; p < sizeof policies / sizeof policies[0]; p++) {
            for (int partition = 0; partition < 2; partition++) {
                fs_wait_set_delay((uint32_t)(p + 1), p % 2 ? 200 : 0);
                memset(got, 0, sizeof got);
                run_world(size, &policies[p], (fs_partition)partition, got);
                for (size_t e = 0; e < 466; e++) {
                    CHECK(got[e] == want[e],
                          "size %d policy %zu partition %d element %zu: %g, not %g", size, p,
                          partition, e, (double)got[e], (double)want[e]);
                }
            }
        }
    }
    fs_wait_set_delay(0, 0);
    return 0;
}
