/* The program of shards_program.h on a GPU's table over the stand-in: the library with hooks of a
 * test, precisions, the comparison with another run, and what tests of single waits count. */
#ifndef FS_TESTS_DEVICE_PROGRAM_H
#define FS_TESTS_DEVICE_PROGRAM_H

#include <string.h>

#include "../cudasim/sim.h"
#include "check.h"
#include "device/plugin.h"
#include "shards_program.h"

#define DEVICE_NBYTES ((size_t)8 << 20)

static fs_runtime runtime; /* the library's, with hooks of this test */
static fs_device device;

static const fs_precision fp32 = {.param = FS_F32, .reduce = FS_F32, .accumulate = FS_F32,
                                  .moments = FS_F32};
static const fs_precision bf16 = {.param = FS_BF16, .reduce = FS_BF16, .accumulate = FS_F32,
                                  .master = FS_MASTERS_SEPARATE, .moments = FS_F32};
static const fs_precision split = {.param = FS_BF16, .reduce = FS_F32, .accumulate = FS_F32,
                                   .master = FS_MASTERS_SPLIT, .moments = FS_F32};
static const fs_precision pure = {.param = FS_BF16, .reduce = FS_BF16, .accumulate = FS_BF16,
                                  .moments = FS_BF16, .stochastic = true, .seed = 7};
static const fs_precision half = {.param = FS_F16, .reduce = FS_F16, .accumulate = FS_F32,
                                  .master = FS_MASTERS_SEPARATE, .moments = FS_BF16};

const fs_device *fs_plugin_get(const fs_plugin_host *host);

static void
open_library(void)
{
    const fs_plugin_host host = {FS_PLUGIN_ABI, sizeof host, fs_status_here, {NULL, NULL}};
    device = *fs_plugin_get(&host);
    runtime = *device.runtime;
    device.runtime = &runtime;
}

static void
check_same(const program *p, const outcome *got, const outcome *want)
{
    for (int s = 0; s < p->steps; s++) {
        const fs_verdict *a = &got->verdicts[s], *b = &want->verdicts[s];
        CHECK(a->applied == b->applied && a->reason == b->reason &&
                  (a->reason == FS_SKIP_RANK || /* of half a batch */
                   memcmp(&a->norm, &b->norm, sizeof a->norm) == 0) &&
                  a->clip == b->clip &&
                  a->bad_param == b->bad_param && a->bad_rank == b->bad_rank &&
                  a->count == b->count,
              "%s, step %d: applied %d reason %d norm %.17g bad %d %d, not %d %d %.17g %d %d",
              p->name, s, a->applied, (int)a->reason, a->norm, a->bad_param, a->bad_rank,
              b->applied, (int)b->reason, b->norm, b->bad_param, b->bad_rank);
    }
    CHECK(memcmp(got->sums, want->sums, sizeof got->sums) == 0, "%s: sums differ", p->name);
    CHECK(!got->ranks_differ, "%s: ranks differ", p->name);
    for (size_t i = 0; i < OUTCOME_N; i++) {
        CHECK(memcmp(&got->values[i], &want->values[i], sizeof(float)) == 0,
              "%s: value %zu (of array %zu) is %.9g, not %.9g", p->name, i, i / MODEL_N,
              (double)got->values[i], (double)want->values[i]);
    }
    CHECK(memcmp(got->checksums, want->checksums, sizeof got->checksums) == 0,
          "%s: checksums differ", p->name);
}

// ---- single waits -------------------------------------------------------------------------------

static fs_context *_Atomic watched; /* of rank 0; other ranks ask whether it is theirs */
static size_t waits_made, wait_left_out;
static void (*real_after)(const fs_exec *, fs_event *);

static void
watch(fs_context *context, int rank)
{
    if (rank == 0) {
        watched = context;
    }
}

#endif
