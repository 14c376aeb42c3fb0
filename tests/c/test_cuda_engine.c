// sanitizers: tsan
// needs: c++
/* The device table's engine, on the stand-in and on real GPUs alike: ranks are threads, each with a
 * device of its own, as many as there are (at most four; one is a world too). One communicator and
 * two, on streams of their own, many rounds without a wait of the host between them. */
#include <sched.h>
#include <string.h>

#include "../cudasim/sim.h"
#include "device/plugin.h"
#include "ranks.h"

#define RANKS_MOST 4
#define N ((size_t)(FS_STAND_IN ? 301 : 1000003)) /* elements of a piece */
#define ROUNDS (FS_STAND_IN ? 4 : 30)

const fs_device *fs_plugin_get(const fs_plugin_host *host);

static const fs_device *table;
static fs_engine_id ids[2]; /* rank 0 writes them, before a meeting */

static void
open_engines(fs_world *world, fs_context *context, int n, fs_engine **out)
{
    static const char *const NAMES[] = {"gather", "reduce"};
    fs_engine_open open = {.rank = fs_world_rank(world),
                           .size = fs_world_size(world),
                           .patience = ask_world,
                           .patience_ctx = world};
    if (open.rank == 0) {
        for (int c = 0; c < n; c++) {
            CHECK_OK(table->runtime->engine->make_id(&ids[c]));
        }
    }
    meet(world);
    for (int c = 0; c < n; c++) {
        open.name = NAMES[c];
        open.id = ids[c];
        CHECK_OK(table->runtime->engine->open(context, &open, &out[c]));
    }
    meet(world);
}

/* A rank's memory: what is gathered, a piece of each rank; what came from each; and a sum. */
typedef struct buffers {
    float *gathered, *received, *sum, *host;
    void *device;
    size_t nbytes;
} buffers;

static void
open_buffers(fs_context *context, int size, buffers *b)
{
    void *host = NULL;
    b->nbytes = ((size_t)size * 2 + 1) * N * sizeof(float);
    CHECK_OK(table->runtime->memory_open(context, "test", b->nbytes, &b->device));
    CHECK_OK(table->runtime->pinned_open(context, b->nbytes, &host));
    b->gathered = b->device;
    b->received = b->gathered + (size_t)size * N;
    b->sum = b->received + (size_t)size * N;
    b->host = host;
}

/* Small integers, exact in every order of sums. */
static float
value_of(int rank, int round, size_t i)
{
    return (float)((size_t)(17 * rank + 5 * round) + i % 1001);
}

static void
finish(const fs_exec *exec, fs_event *event, fs_engine **engines, int n)
{
    table->runtime->record(exec, event);
    while (!table->runtime->is_done(exec->context, event)) {
        for (int c = 0; c < n; c++) {
            CHECK_OK(table->runtime->engine->check(engines[c]));
        }
        sched_yield();
    }
    CHECK_OK(table->runtime->check(exec->context));
}

/* As a step has it: weights are gathered on one stream; on the other each rank doubles what came,
 * sends every peer its part, and sums. Then what was gathered and exchanged is compared. */
static void
run_rounds(fs_world *world, fs_context *context, fs_engine **engines, int n)
{
    const fs_runtime *runtime = table->runtime;
    const fs_engine_ops *ops = runtime->engine;
    size_t size = (size_t)fs_world_size(world), nbytes = N * sizeof(float);
    int rank = fs_world_rank(world);
    fs_exec gather = {.device = table, .context = context, .stream = FS_STREAM_GATHER};
    fs_exec reduce = {.device = table, .context = context, .stream = FS_STREAM_REDUCE};
    fs_engine_piece pieces[RANKS_MOST];
    fs_engine_part sends[RANKS_MOST], receives[RANKS_MOST];
    fs_event *gathered, *reduced;
    buffers b;
    open_buffers(context, (int)size, &b);
    CHECK_OK(runtime->event_open(context, &gathered));
    CHECK_OK(runtime->event_open(context, &reduced));
    for (size_t r = 0; r < size; r++) {
        float *at = b.gathered + r * N;
        pieces[r] = (fs_engine_piece){(int)r, at, at, nbytes};
        sends[r] = (fs_engine_part){(int)r, at, nbytes};
        receives[r] = (fs_engine_part){(int)r, b.received + r * N, nbytes};
    }
    for (int round = 0; round < ROUNDS; round++) {
        float *own = b.host + (size_t)rank * N;
        for (size_t i = 0; i < N; i++) {
            own[i] = value_of(rank, round, i);
        }
        runtime->after(&gather, reduced); /* the last round still reads what it gathered */
        runtime->copy(&gather, b.gathered + (size_t)rank * N, own, nbytes);
        CHECK_OK(ops->gather(engines[0], &gather, pieces, size));
        runtime->record(&gather, gathered);
        runtime->after(&reduce, gathered);
        table->combine(&reduce, FS_SUM, FS_F32, b.gathered, b.gathered, size * N);
        CHECK_OK(ops->alltoall(engines[n - 1], &reduce, sends, size, receives, size));
        CHECK_OK(ops->reduce_scatter(engines[n - 1], &reduce, FS_F32, b.received, N, b.sum));
        runtime->copy(&reduce, b.host + size * N, b.received, (size + 1) * nbytes);
        finish(&reduce, reduced, engines, n);
        for (size_t i = 0; i < size * N; i++) {
            float wanted = 2.0f * value_of(rank, round, i % N);
            CHECK(b.host[size * N + i] == wanted, "round %d, rank %d, element %zu is %g, not %g",
                  round, rank, i, (double)b.host[size * N + i], (double)wanted);
        }
        for (size_t i = 0; i < N; i++) {
            float wanted = 0.0f; /* rank r received its own piece from everybody */
            for (int r = 0; r < (int)size; r++) {
                wanted += 2.0f * value_of(r, round, i);
            }
            CHECK(b.host[2 * size * N + i] == wanted, "round %d, rank %d, sum %zu is %g, not %g",
                  round, rank, i, (double)b.host[2 * size * N + i], (double)wanted);
        }
    }
    runtime->event_close(context, gathered);
    runtime->event_close(context, reduced);
    runtime->pinned_close(context, b.host);
    runtime->memory_close(context, b.device, b.nbytes);
}

/* One communicator for both kinds of work, then two. */
static void
use_engines(fs_world *world, void *ctx)
{
    const fs_engine_ops *ops = table->runtime->engine;
    fs_context *context;
    (void)ctx;
    CHECK_OK(table->runtime->context_open(fs_world_rank(world), &context));
    for (int n = 1; n <= 2; n++) {
        fs_engine *engines[2] = {NULL, NULL};
        open_engines(world, context, n, engines);
        run_rounds(world, context, engines, n);
        meet(world); /* nobody reads what a peer sent any more */
        ops->close(engines[0]);
        if (n == 2) {
            fs_exec reduce = {.device = table, .context = context, .stream = FS_STREAM_REDUCE};
            ops->abort(engines[1]);
            CHECK_STATUS(ops->alltoall(engines[1], &reduce, NULL, 0, NULL, 0), FS_ESTATE);
            CHECK_STATUS(ops->check(engines[1]), FS_ESTATE);
            ops->close(engines[1]);
        }
        meet(world);
    }
    CHECK_OK(table->runtime->check(context));
    table->runtime->context_close(context);
}

int
main(void)
{
    const fs_plugin_host host = {FS_PLUGIN_ABI, sizeof host, fs_status_here, {NULL, NULL}};
    int devices = 0;
    table = fs_plugin_get(&host);
    CHECK(table->runtime->engine != NULL, "the table has no engine");
    CHECK_OK(table->runtime->count(&devices));
    devices = devices < RANKS_MOST ? devices : RANKS_MOST;
    for (int ranks = 1; ranks <= devices; ranks++) {
        for (uint64_t seed = 1; seed <= (FS_STAND_IN ? 5 : 1); seed++) {
            fs_sim_reset(seed, FS_SIM_SHUFFLED, (size_t)1 << 30);
            run_ranks(ranks, use_engines, NULL);
        }
    }
    return 0;
}
