/* A training of a few steps that runs on the CPU's table and on a device's alike: ranks are
 * threads, weights are read from gathered units and go into the gradients. For C tests. */
#ifndef FS_TESTS_SHARDS_PROGRAM_H
#define FS_TESTS_SHARDS_PROGRAM_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/cpu.h"
#include "check.h"
#include "comm/comm.h"
#include "shard/optim.h"
#include "shard/shard.h"

enum { UNITS = 5, PARAMS = 10, RANKS_MAX = 4, STEPS_MAX = 3, SEGS_MAX = 64 };
enum { BAD_PARAM = 6, FROZEN_LATER = 5 };

static const fs_param_def params_of_model[PARAMS] = {
    {.name = "e", .dims_n = 2, .dims = {37, 3}, .unit = 0, .trainable = true}, /* a tie's place */
    {.name = "a", .dims_n = 2, .dims = {5, 7}, .unit = 1, .trainable = true},
    {.name = "b", .dims_n = 1, .dims = {13}, .unit = 1, .trainable = true},
    {.name = "f", .dims_n = 2, .dims = {9, 2}, .unit = 1, .trainable = false},
    {.name = "s", .dims_n = 0, .unit = 1, .trainable = true},
    {.name = "c", .dims_n = 1, .dims = {130}, .unit = 2, .trainable = true},
    {.name = "d", .dims_n = 2, .dims = {64, 2}, .unit = 3, .trainable = true},
    {.name = "g", .dims_n = 1, .dims = {3}, .unit = 3, .trainable = true},
    {.name = "z", .dims_n = 2, .dims = {0, 4}, .unit = 3, .trainable = true}, /* empty */
    {.name = "h", .dims_n = 1, .dims = {1}, .unit = 4, .trainable = true},
};
#define MODEL_N 512 /* room for all parameters */
#define ARRAYS_N 4  /* weight, master, two moments */
#define OUTCOME_N ((size_t)ARRAYS_N * MODEL_N)

typedef struct program {
    const char *name;
    int size;
    fs_policy policy;
    fs_partition partition;
    fs_rule rule;
    int steps, rounds;
    bool brief;    /* weights alone are looked at in the end */
    bool uneven;   /* ranks bring other numbers of micro-batches */
    bool reads;    /* uneven ranks read weights all the same */
    bool shuffled; /* units come in another order on each rank */
    double max_norm;
    int bad_step;  /* the last rank brings a NaN; -1: never */
    int skips_after; /* in the second step the last rank's batch fails after so many units; 0: no */
    bool edits;    /* gradients are dropped, looked at, changed; a parameter is frozen for a step */
    bool keeps;    /* the first micro-batch of two is kept, not reduced */
    int wrong;     /* the last rank gathers 1: another unit; 2: one unit less */
    int fails_at;  /* the last rank fails at this call; 0: never */
    void (*watch)(fs_context *context, int rank);
} program;

typedef struct outcome {
    fs_verdict verdicts[STEPS_MAX];
    double sums[STEPS_MAX][2][PARAMS]; /* of rank 0's cut */
    float values[OUTCOME_N];
    uint64_t checksums[RANKS_MAX][FS_COPY_COUNT * SEGS_MAX];
    bool ranks_differ;
} outcome;

typedef struct rank_args {
    const program *p;
    const fs_device *device; /* NULL: the CPU's */
    fs_job *job;
    int rank, calls;
    fs_shards *shards;
    fs_exec exec;
    fs_sums *found, found_here; /* where the device can write */
    outcome out;
    fs_status status;
    fs_kept why;
} rank_args;

static rank_args ranks[RANKS_MAX];

/* Some float of ordinary size, negative zeros among them. */
static float
noise(int a, int b, int c, size_t e)
{
    uint64_t x = (uint64_t)a * 0x9e3779b97f4a7c15u ^ (uint64_t)b * 0xbf58476d1ce4e5b9u ^
                 (uint64_t)c * 0x94d049bb133111ebu ^ (uint64_t)e * 0x2545f4914f6cdd1du;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    return x % 11 == 0 ? -0.0f : (float)(int64_t)(x % 20011) / 4096.0f - 2.0f;
}

static size_t
numel(int param)
{
    size_t n = 1;
    for (size_t d = 0; d < params_of_model[param].dims_n; d++) {
        n *= params_of_model[param].dims[d];
    }
    return n;
}

/* Does rank bring a gradient of param? Now and then not one rank does. */
static bool
brings(const program *p, int rank, int step, int round, int param)
{
    if (step == 1 && (param == 2 || param == 5)) {
        return false;
    }
    if (p->edits && step == 2 && param == FROZEN_LATER) {
        return false;
    }
    return p->size == 1 ? (step + round + param) % 5 != 0
                        : (rank * 2 + step + round + param) % 4 != 0;
}

/* Counts a call; the last rank fails at the one the program names. */
#define CALL(expression)                                                                    \
    do {                                                                                    \
        if (++args->calls == args->p->fails_at && args->rank == args->p->size - 1) {        \
            fs_job_leave(args->job, args->rank, true, "the test wants it");                 \
            return FS_FAIL(FS_ESTATE, "the test wants it");                                 \
        }                                                                                   \
        FS_TRY(expression);                                                                 \
    } while (0)

/* Stands for a unit's forward or backward. */
static void
read_unit(rank_args *args, int u, const void *weights)
{
    args->exec.device->sumsq(&args->exec, weights, args->p->policy.precision.param,
                             fs_shards_layout(args->shards)->units[u].numel, args->found);
}

/* A gradient in place: noise, and what the gathered weights are now. */
static fs_status
write_in_place(rank_args *args, int step, int round, int param, const unsigned char *weights)
{
    const fs_layout *layout = fs_shards_layout(args->shards);
    const fs_precision *precision = &args->p->policy.precision;
    const fs_param *q = &layout->params[param];
    float grad[MODEL_N];
    unsigned char half[MODEL_N * sizeof(float)];
    void *slot;
    bool add;
    size_t width = fs_dtype_nbytes(precision->reduce);
    CALL(fs_grad_open(args->shards, q->unit, &slot, &add));
    for (size_t e = 0; e < q->numel; e++) {
        grad[e] = noise(args->rank, step * 8 + round, param, e);
    }
    if (add) {
        return fs_grad_put(args->shards, param, grad, FS_F32);
    }
    fs_exec cpu = {0};
    CHECK_OK(fs_device_cpu(FS_ISA_BASELINE, &cpu.device));
    cpu.device->convert(&cpu, half, precision->reduce, grad, FS_F32, q->numel);
    unsigned char *to = (unsigned char *)slot + q->grad_n * width;
    if (args->device != NULL) {
        args->device->runtime->copy(&args->exec, to, half, q->numel * width);
    } else {
        memcpy(to, half, q->numel * width);
    }
    const void *sources[1] = {weights + q->offset_n * fs_dtype_nbytes(precision->param)};
    fs_sum sum = {.src = sources, .src_n = 1, .src_dtype = precision->param, .acc = to,
                  .acc_dtype = precision->reduce, .accumulate = true, .n = q->numel};
    args->exec.device->sum(&args->exec, &sum);
    fs_grad_mark(args->shards, q->unit, param);
    return FS_OK;
}

static fs_status
bring_unit(rank_args *args, int step, int round, int u, const unsigned char *weights)
{
    const fs_unit_layout *unit = &fs_shards_layout(args->shards)->units[u];
    for (int q = unit->first; q < unit->end; q++) {
        if (!params_of_model[q].trainable || !brings(args->p, args->rank, step, round, q)) {
            continue;
        }
        bool bad = step == args->p->bad_step && q == BAD_PARAM && args->rank == args->p->size - 1;
        if (weights != NULL && q % 2 == 1 && !bad) {
            FS_TRY(write_in_place(args, step, round, q, weights));
            continue;
        }
        float grad[MODEL_N];
        for (size_t e = 0; e < numel(q); e++) {
            grad[e] = noise(args->rank, step * 8 + round, q, e);
        }
        if (bad) {
            uint32_t nan = 0x7fc00000;
            memcpy(&grad[numel(q) / 2], &nan, sizeof nan);
        }
        CALL(fs_grad_put(args->shards, q, grad, FS_F32));
        if (q % 3 == 0) { /* in two parts */
            CALL(fs_grad_put(args->shards, q, grad, FS_F32));
        }
    }
    CALL(fs_grad_publish(args->shards, u, args->p->keeps && round == 0));
    return FS_OK;
}

/* Forward and backward over gathered units, the next one on its way. */
static fs_status
run_round(rank_args *args, int step, int round, bool fails)
{
    fs_shards *shards = args->shards;
    const void *weights = NULL, *tied = NULL;
    int done = 0, wrong = args->rank == args->p->size - 1 ? args->p->wrong : 0;
    CALL(fs_unit_gather(shards, 0, &tied));
    read_unit(args, 0, tied);
    for (int u = 1; u < UNITS; u++) {
        int gathered = u == 2 && wrong == 1 ? 3 : u;
        CALL(fs_unit_gather(shards, gathered, &weights));
        read_unit(args, gathered, weights);
        CALL(fs_unit_prefetch(shards, u + 1 < UNITS ? u + 1 : u - 1));
        CALL(fs_unit_release(shards, gathered));
        if (fails && ++done == args->p->skips_after) {
            return fs_unit_release(shards, 0);
        }
    }
    for (int i = 0; i < UNITS; i++) {
        int u = args->p->shuffled ? (UNITS - 1 - i + args->rank * 2) % UNITS : UNITS - 1 - i;
        if (args->p->shuffled || u == 0 || (u == 1 && wrong == 2)) {
            FS_TRY(bring_unit(args, step, round, u, NULL));
            continue;
        }
        CALL(fs_unit_gather(shards, u, &weights));
        read_unit(args, u, weights);
        if (u > 1 && !(u == 2 && wrong == 2)) {
            CALL(fs_unit_prefetch(shards, u - 1));
        }
        FS_TRY(bring_unit(args, step, round, u, weights));
        CALL(fs_unit_release(shards, u));
        if (fails && ++done == args->p->skips_after) {
            return fs_unit_release(shards, 0);
        }
    }
    CALL(fs_unit_release(shards, 0));
    CALL(fs_round_end(shards, 1 + args->rank, args->p->keeps && round == 0));
    return FS_OK;
}

static fs_status
run_uneven_round(rank_args *args, int step, int round)
{
    for (int i = 0; i < UNITS; i++) {
        int u = (UNITS - 1 - i + (args->p->shuffled ? args->rank * 2 : 0)) % UNITS;
        FS_TRY(bring_unit(args, step, round, u, NULL));
    }
    CALL(fs_round_end(args->shards, 1, false));
    return FS_OK;
}

static int
moments_n(const program *p)
{
    return p->rule == FS_RULE_ADAM || p->rule == FS_RULE_ADAMW ? 2 : 1;
}

static fs_status
store_all(rank_args *args)
{
    CALL(fs_store_begin(args->shards));
    for (int q = 0; q < PARAMS; q++) {
        float values[MODEL_N];
        for (size_t e = 0; e < numel(q); e++) {
            values[e] = noise(99, 0, q, e);
        }
        CALL(fs_store(args->shards, q, FS_WEIGHT, 0, numel(q), values, FS_F32));
    }
    CALL(fs_store_end(args->shards));
    return FS_OK;
}

static fs_status
load_all(rank_args *args)
{
    static const fs_array arrays[ARRAYS_N] = {FS_WEIGHT, FS_MASTER, FS_MOMENT1, FS_MOMENT2};
    for (int a = 0; a < (args->p->brief ? 1 : 2 + moments_n(args->p)); a++) {
        float *to = args->out.values + (size_t)a * MODEL_N;
        for (int q = 0; q < PARAMS; to += numel(q), q++) {
            if (params_of_model[q].trainable || a < 2) {
                CALL(fs_load(args->shards, q, arrays[a], 0, numel(q), to, FS_F32));
            }
        }
    }
    CHECK(fs_shards_layout(args->shards)->segs_n <= SEGS_MAX, "too many segments");
    if (!args->p->brief) {
        CALL(fs_shards_checksums(args->shards, args->out.checksums[args->rank]));
    }
    return FS_OK;
}

/* Gradients looked at and changed between the last micro-batch and the step. */
static fs_status
edit(rank_args *args, int step)
{
    fs_shards *shards = args->shards;
    double *sums = args->out.sums[step][0], *largest = args->out.sums[step][1];
    float grad[MODEL_N];
    CALL(fs_grad_sums(shards, sums, largest));
    CALL(fs_load(shards, BAD_PARAM, FS_GRAD, 0, numel(BAD_PARAM), grad, FS_F32));
    /* Every rank has read all parts before one writes its own. */
    CALL(fs_barrier(fs_shards_world(shards)));
    for (size_t e = 0; e < numel(BAD_PARAM); e++) {
        grad[e] = 0.25f - grad[e];
    }
    CALL(fs_store(shards, BAD_PARAM, FS_GRAD, 0, numel(BAD_PARAM), grad, FS_F32));
    CALL(fs_grad_replaced(shards, BAD_PARAM));
    CALL(fs_grad_scale(shards, 1, 0.5));
    CALL(fs_grad_forget(shards, 4));
    return FS_OK;
}

static fs_status
bring_all(rank_args *args, int step, bool fails)
{
    int rounds = args->p->uneven ? (args->rank + step) % 3 : args->p->rounds;
    for (int round = 0; round < (fails ? 1 : rounds); round++) {
        FS_TRY(args->p->uneven && !args->p->reads ? run_uneven_round(args, step, round)
                               : run_round(args, step, round, fails));
    }
    return FS_OK;
}

static fs_status
train(rank_args *args)
{
    const program *p = args->p;
    const fs_group group = {.lr = 0.0625, .momentum = 0.5, .beta1 = 0.75, .beta2 = 0.875,
                            .eps = 1e-4, .weight_decay = 0.01};
    int group_of[PARAMS] = {0};
    int64_t steps[PARAMS] = {0};
    FS_TRY(store_all(args));
    for (int step = 0; step < p->steps; step++) {
        bool fails = step == 1 && p->skips_after > 0 && args->rank == p->size - 1;
        if (p->edits) {
            unsigned char frozen[PARAMS] = {[FROZEN_LATER] = step == 2};
            CALL(fs_shards_freeze(args->shards, frozen));
            FS_TRY(bring_all(args, step, fails));
            CALL(fs_grad_drop(args->shards));
        }
        FS_TRY(bring_all(args, step, fails));
        if (p->edits) {
            FS_TRY(edit(args, step));
        }
        CALL(fs_step_agree(args->shards, p->max_norm, FS_NORM_2, fails,
                           &args->out.verdicts[step]));
        CALL(fs_optimizer_finish(args->shards, p->rule, &group, group_of, steps));
    }
    return load_all(args);
}

// ---- running ------------------------------------------------------------------------------------

/* The ledger holds what the plan says, and what it held before. */
static void
check_plan(const rank_args *args, const size_t before[FS_HOME_COUNT][FS_MEM_CLASS_COUNT])
{
    fs_ledger plan = {0};
    const fs_ledger *ledger = fs_world_ledger(fs_shards_world(args->shards));
    CHECK_OK(fs_shards_plan(fs_shards_layout(args->shards), &args->p->policy, moments_n(args->p),
                            args->rank, args->device != NULL, &plan));
    for (int h = 0; h < FS_HOME_COUNT; h++) {
        for (int c = 0; c < FS_MEM_CLASS_COUNT; c++) {
            CHECK(ledger->nbytes[h][c] == before[h][c] + plan.nbytes[h][c],
                  "%s: home %d, %s: %zu held, %zu planned", args->p->name, h,
                  fs_mem_class_name((fs_mem_class)c), ledger->nbytes[h][c] - before[h][c],
                  (size_t)plan.nbytes[h][c]);
        }
    }
}

static fs_status
open_and_train(rank_args *args, fs_world *world)
{
    fs_unit_def units[UNITS];
    static const char *const names[UNITS] = {"u0", "u1", "u2", "u3", "u4"};
    const fs_ledger *ledger = fs_world_ledger(world);
    size_t before[FS_HOME_COUNT][FS_MEM_CLASS_COUNT];
    fs_layout *layout;
    for (int u = 0; u < UNITS; u++) { /* unit 0 is open from the first place to the last */
        units[u] = (fs_unit_def){names[u], u == 0 ? 0 : UNITS - 1 - u, UNITS - 1 - u};
    }
    CHECK_OK(fs_layout_make(params_of_model, PARAMS, units, UNITS, args->p->size,
                            args->p->partition, args->p->policy.slot_per_unit, &layout));
    for (int h = 0; h < FS_HOME_COUNT; h++) {
        for (int c = 0; c < FS_MEM_CLASS_COUNT; c++) {
            before[h][c] = ledger->nbytes[h][c];
        }
    }
    fs_status st = fs_shards_open(world, layout, &args->p->policy, &args->shards);
    st = st == FS_OK ? fs_shards_open_moments(args->shards, moments_n(args->p)) : st;
    if (st == FS_OK) {
        check_plan(args, (const size_t(*)[FS_MEM_CLASS_COUNT])before);
        st = train(args);
    }
    fs_status_keep(st, &args->why);
    fs_shards_close(args->shards);
    for (int h = 0; h < FS_HOME_COUNT; h++) {
        for (int c = 0; c < FS_MEM_CLASS_COUNT; c++) {
            /* The streams keep their scratch, for the next. */
            bool same = c == FS_MEM_SCRATCH || ledger->nbytes[h][c] == before[h][c];
            CHECK(same, "%s: home %d, %s: %zu bytes left", args->p->name, h,
                  fs_mem_class_name((fs_mem_class)c), ledger->nbytes[h][c] - before[h][c]);
        }
    }
    return st;
}

static void *
run_rank(void *opaque)
{
    rank_args *args = opaque;
    const fs_runtime *runtime = args->device != NULL ? args->device->runtime : NULL;
    const fs_deadlines deadlines = {60.0, 30.0};
    fs_world *world;
    if (runtime != NULL) {
        CHECK_OK(runtime->context_open(args->rank, &args->exec.context));
        args->exec.device = args->device;
        CHECK_OK(runtime->pinned_open(args->exec.context, sizeof(fs_sums), (void **)&args->found));
    } else {
        args->found = &args->found_here;
        CHECK_OK(fs_device_cpu(FS_ISA_BASELINE, &args->exec.device));
    }
    if (args->p->watch != NULL) {
        args->p->watch(args->exec.context, args->rank);
    }
    CHECK_OK(fs_world_open(args->job, args->rank, &args->exec, &deadlines, &world));
    args->status = open_and_train(args, world);
    if (args->status == FS_OK) {
        args->status = fs_barrier(world);
    }
    fs_world_close(world);
    if (runtime != NULL) {
        runtime->pinned_close(args->exec.context, args->found);
        runtime->context_close(args->exec.context);
    }
    return NULL;
}

/* device NULL: on the CPU. statuses: of every rank. out: what all ranks have, where none failed. */
static void
run_program(outcome *out, const program *p, const fs_device *device, fs_status *statuses)
{
    rank_args *args = ranks;
    pthread_t threads[RANKS_MAX];
    fs_job *job;
    memset(out, 0, sizeof *out);
    CHECK_OK(fs_job_threads(p->size, &job));
    for (int r = 0; r < p->size; r++) {
        memset(&args[r], 0, sizeof args[r]);
        args[r].p = p;
        args[r].device = device;
        args[r].job = job;
        args[r].rank = r;
        CHECK(pthread_create(&threads[r], NULL, run_rank, &args[r]) == 0, "rank %d", r);
    }
    for (int r = 0; r < p->size; r++) {
        (void)pthread_join(threads[r], NULL);
        statuses[r] = args[r].status;
    }
    fs_job_close(job);
    memcpy(out->verdicts, args[0].out.verdicts, sizeof out->verdicts);
    memcpy(out->values, args[0].out.values, sizeof out->values);
    memcpy(out->sums, args[0].out.sums, sizeof out->sums);
    for (int r = 0; r < p->size; r++) {
        memcpy(out->checksums[r], args[r].out.checksums[r], sizeof out->checksums[r]);
        out->ranks_differ =
            out->ranks_differ || memcmp(args[r].out.values, out->values, sizeof out->values) != 0;
    }
}

static void
must_run(outcome *out, const program *p, const fs_device *device)
{
    fs_status statuses[RANKS_MAX];
    run_program(out, p, device, statuses);
    for (int r = 0; r < p->size; r++) {
        CHECK(statuses[r] == FS_OK, "%s: rank %d: status %d: %s", p->name, r, (int)statuses[r],
              ranks[r].why.text);
    }
}

#endif
