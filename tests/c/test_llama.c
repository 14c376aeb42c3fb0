// sanitizers: tsan
// flavours: neon
/* The model over shards, without Python and without a BLAS library: every instruction set,
 * sharding and checkpointing give one loss and one model; training descends; the n-th failing
 * allocation is reported and harms nothing; rotary tables are exact far into a text. */
#include "check.h"

#include <math.h>
#include <string.h>

#include "model/parts.h"
#include "models.h"
#include "ranks.h"
#include "shard/optim.h"

enum { STEPS = 3 };

typedef struct run_way {
    fs_isa isa;
    size_t threads;
    int model, keep;
    fs_weights weights;
    bool slot_per_unit, checkpointing, bf16;
    double losses[STEPS]; /* out: of all ranks */
} run_way;

static void
open_shards(fs_world *world, const run_way *how, fs_shards **out)
{
    fs_llama_config config = config_of(how->model);
    fs_llama_defs defs;
    fs_layout *layout;
    CHECK_OK(fs_llama_define(&config, &defs));
    CHECK_OK(fs_layout_make(defs.params, defs.params_n, defs.units, defs.units_n,
                            fs_world_size(world), FS_PARTITION_FLAT, how->slot_per_unit, &layout));
    fs_llama_defs_free(&defs);
    fs_policy policy = {.keep = how->keep,
                        .slot_per_unit = how->slot_per_unit,
                        .weights = how->weights,
                        .pool_units = 1,
                        .precision = {.param = how->bf16 ? FS_BF16 : FS_F32,
                                      .reduce = FS_F32,
                                      .accumulate = FS_F32,
                                      .master = how->bf16,
                                      .moments = FS_F32}};
    CHECK_OK(fs_shards_open(world, layout, &policy, out));
}

/* Logits of the last tokens out of a cache that was filled in pieces, against those of a
 * forward. */
static void
generate(fs_llama *llama, const int32_t *tokens, const float *last)
{
    static const size_t pieces[] = {5, 1, 60, 1};
    int32_t piece[BATCH * LENGTH];
    float got[BATCH * 53];
    size_t at = 0;
    CHECK_OK(fs_llama_cache_begin(llama, BATCH, LENGTH));
    for (size_t p = 0; p < sizeof pieces / sizeof pieces[0]; at += pieces[p], p++) {
        for (size_t b = 0; b < BATCH; b++) {
            memcpy(piece + b * pieces[p], tokens + b * LENGTH + at, pieces[p] * sizeof *piece);
        }
        CHECK_OK(fs_llama_cache_extend(llama, piece, pieces[p], got));
    }
    CHECK(at == LENGTH, "%zu tokens", at);
    for (size_t i = 0; i < BATCH * 53; i++) {
        CHECK(fabsf(got[i] - last[i]) <= 1e-4f, "logit %zu: %g, not %g", i, (double)got[i],
              (double)last[i]);
    }
    CHECK_STATUS(fs_llama_cache_extend(llama, piece, 1, got), FS_EINVAL);
}

static void
train(fs_world *world, run_way *how)
{
    fs_shards *shards;
    fs_llama *llama;
    int32_t tokens[BATCH * LENGTH], targets[BATCH * LENGTH];
    float last[BATCH * 53], all[BATCH * LENGTH * 53];
    fs_llama_config config = config_of(how->model);
    open_shards(world, how, &shards);
    CHECK_OK(fs_llama_open(&config, shards, how->checkpointing, &llama));
    CHECK_OK(fs_shards_open_moments(shards, 1));
    CHECK_OK(fs_llama_init(llama, 5, 0.3));
    fill(tokens, targets, fs_world_rank(world));
    int params_n = fs_shards_layout(shards)->params_n;
    const fs_group group = {.lr = 0.05, .momentum = 0.5};
    int group_of[64] = {0};
    int64_t steps[64] = {0};
    CHECK(params_n <= 64, "%d parameters", params_n);
    for (int step = 0; step < STEPS; step++) {
        fs_loss mine, sum, again;
        fs_verdict verdict;
        CHECK_OK(fs_llama_forward(llama, tokens, targets, BATCH, LENGTH, false, NULL, &again));
        CHECK_OK(
            fs_llama_forward_backward(llama, tokens, targets, BATCH, LENGTH, -1, false, &mine));
        CHECK(mine.sum == again.sum && mine.tokens == again.tokens, "%.17g, %.17g", mine.sum,
              again.sum);
        CHECK_OK(fs_llama_loss_sum(llama, &mine, &sum));
        CHECK_OK(fs_step_agree(shards, 1.0, FS_NORM_2, false, &verdict));
        CHECK(verdict.applied && verdict.count == sum.tokens, "step %d: reason %d", step,
              (int)verdict.reason);
        CHECK_OK(fs_optimizer_finish(shards, FS_RULE_SGD, &group, group_of, steps));
        if (fs_world_rank(world) == 0) {
            how->losses[step] = sum.sum / (double)sum.tokens;
        }
    }
    CHECK_OK(fs_llama_forward(llama, tokens, NULL, BATCH, LENGTH, false, all, NULL));
    CHECK_OK(fs_llama_forward(llama, tokens, NULL, BATCH, LENGTH, true, last, NULL));
    for (int b = 0; b < BATCH; b++) {
        CHECK(memcmp(last + b * 53, all + ((b + 1) * LENGTH - 1) * 53, 53 * sizeof(float)) == 0,
              "the last token's logits of sequence %d differ", b);
    }
    generate(llama, tokens, last);
    fs_llama_close(llama); /* with the cache still open */
    fs_shards_close(shards);
}

/* One rank with a table and threads of its own. */
static void *
rank_thread(void *opaque)
{
    rank_call *call = opaque;
    run_way *how = call->ctx;
    const fs_device *found;
    CHECK_OK(fs_device_cpu(how->isa, &found));
    fs_device device = *found;
    device.gemm = plain_gemm;
    device.gemms = plain_gemms;
    fs_exec exec = {.device = &device};
    CHECK_OK(fs_pool_open(how->threads, &exec.pool));
    fs_world *world;
    CHECK_OK(fs_world_open(call->job, call->rank, &exec, call->deadlines, &world));
    call->body(world, how);
    fs_world_close(world);
    fs_pool_close(exec.pool);
    return NULL;
}

static void
train_body(fs_world *world, void *ctx)
{
    train(world, ctx);
}

static void
run_how(int ranks, run_way *how, void (*body)(fs_world *, void *))
{
    static const fs_deadlines deadlines = {120.0, 60.0};
    rank_call calls[4];
    fs_job *job;
    CHECK_OK(fs_job_threads(ranks, &job));
    for (int r = 0; r < ranks; r++) {
        calls[r] = (rank_call){job, r, &deadlines, body, how, 0};
        CHECK(pthread_create(&calls[r].thread, NULL, rank_thread, &calls[r]) == 0, "no thread");
    }
    for (int r = 0; r < ranks; r++) {
        (void)pthread_join(calls[r].thread, NULL);
    }
    fs_job_close(job);
}

static void
same_losses(const run_way *want, const run_way *got, double tolerance)
{
    for (int step = 0; step < STEPS; step++) {
        CHECK(fabs(got->losses[step] - want->losses[step]) <= tolerance * want->losses[step],
              "model %d, step %d: %.17g, not %.17g", want->model, step, got->losses[step],
              want->losses[step]);
    }
}

static void
test_ways(int model)
{
    run_way want = {.isa = FS_ISA_BASELINE, .threads = 1, .model = model, .keep = 1};
    run_how(2, &want, train_body);
    CHECK(want.losses[STEPS - 1] < want.losses[0], "no descent: %g to %g", want.losses[0],
          want.losses[STEPS - 1]);
    const run_way ways[] = {
        {.threads = 2, .keep = 1, .weights = FS_WEIGHTS_SHARD, .checkpointing = true},
        {.threads = 3, .keep = 2, .weights = FS_WEIGHTS_WHOLE, .slot_per_unit = true},
        {.threads = 1, .keep = 1, .weights = FS_WEIGHTS_SHARED, .checkpointing = true},
    };
    for (size_t w = 0; w < sizeof ways / sizeof ways[0]; w++) {
        run_way got = ways[w];
        got.model = model;
        run_how(2, &got, train_body);
        same_losses(&want, &got, 0.0);
    }
    for (int isa = 1; isa < FS_ISA_COUNT && !UNDER_TSAN; isa++) {
        if (fs_isa_runs_here((fs_isa)isa)) {
            run_way got = {.isa = (fs_isa)isa, .threads = 2, .model = model, .keep = 1};
            run_how(2, &got, train_body);
            same_losses(&want, &got, 1e-5);
        }
    }
    run_way low = {.threads = 1, .model = model, .keep = 1, .bf16 = true};
    run_how(2, &low, train_body);
    same_losses(&want, &low, 0.05);
}

// ---- failing allocations ------------------------------------------------------------------------

/* From opening the model to its first backward, with the nth allocation failing. */
static fs_status
first_calls(fs_shards *shards, const fs_llama_config *config, const int32_t *tokens,
            const int32_t *targets, fs_llama **out)
{
    fs_loss loss;
    FS_TRY(fs_llama_open(config, shards, false, out));
    FS_TRY(fs_llama_init(*out, 5, 0.3));
    FS_TRY(fs_llama_forward(*out, tokens, targets, 1, 5, false, NULL, &loss));
    return fs_llama_forward_backward(*out, tokens, targets, BATCH, LENGTH, -1, false, &loss);
}

static void
allocation_body(fs_world *world, void *ctx)
{
    int32_t tokens[BATCH * LENGTH], targets[BATCH * LENGTH];
    fs_llama_config config = config_of(1);
    fs_shards *shards;
    fill(tokens, targets, 0);
    open_shards(world, ctx, &shards);
    size_t failures = 0;
    fs_status st = FS_ENOMEM;
    for (size_t nth = 1; st != FS_OK; nth++) {
        fs_llama *llama = NULL;
        fs_loss loss;
        (void)fs_alloc_fail_at(nth);
        st = first_calls(shards, &config, tokens, targets, &llama);
        (void)fs_alloc_fail_at(0);
        if (st != FS_OK) {
            CHECK_STATUS(st, FS_ENOMEM);
            failures++;
        }
        if (llama != NULL) { /* the same model goes on where memory is there again */
            CHECK_OK(fs_llama_init(llama, 5, 0.3));
            CHECK_OK(fs_llama_forward(llama, tokens, targets, BATCH, LENGTH, false, NULL, &loss));
            CHECK(loss.tokens > 0 && loss.sum > 0.0, "loss %g", loss.sum);
        }
        fs_llama_close(llama);
    }
    CHECK(failures >= 7, "only %zu allocations", failures);
    fs_shards_close(shards);
    fs_ledger *ledger = fs_world_ledger(world);
    CHECK(ledger->nbytes[FS_HOME_PRIVATE][FS_MEM_ACTIVATIONS] == 0 &&
              ledger->nbytes[FS_HOME_PRIVATE][FS_MEM_WORKSPACE] == 0,
          "memory is charged after everything was closed");
}

// ---- rotary tables ------------------------------------------------------------------------------

/* Against long double, far into a text: a table from frequencies in low precision is off by more
 * than 1 there, from fp32 ones by 1e-4. */
static void
test_rotary_tables(void)
{
    enum { DIM = 64, PAIRS = DIM / 2, POSITIONS = 3001 };
    static float cosines[POSITIONS * PAIRS], sines[POSITIONS * PAIRS];
    fs_llama_config config = config_of(0);
    config.head_dim = DIM;
    fs_rope_fill(&config, POSITIONS, cosines, sines);
    for (size_t i = 0; i < (size_t)POSITIONS * PAIRS; i++) {
        long double frequency = powl(1e4L, -2.0L * (long double)(i % PAIRS) / DIM);
        long double angle = (long double)(i / PAIRS) * frequency;
        CHECK(fabsl((long double)cosines[i] - cosl(angle)) < 1e-7L &&
                  fabsl((long double)sines[i] - sinl(angle)) < 1e-7L,
              "position %zu, pair %zu: %.9g, %.9g", i / PAIRS, i % PAIRS, (double)cosines[i],
              (double)sines[i]);
    }
}

int
main(void)
{
    test_rotary_tables();
    for (int model = 0; model < MODELS; model++) {
        test_ways(model);
    }
    run_way how = {.threads = 1, .model = 1, .keep = 1};
    if (!UNDER_TSAN) {
        run_how(1, &how, allocation_body);
    }
    return 0;
}
