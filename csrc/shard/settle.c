/* The end of a step's gradients: every rank's contributions are in and summed, or forgotten. */
#include "shards_internal.h"

#include <string.h>

void
fs_grad_reset(fs_shards *shards)
{
    memset(shards->had, 0, (size_t)shards->layout->params_n);
    memset(shards->sumsq, 0, shards->layout->segs_n * sizeof *shards->sumsq);
    memset(shards->absmax, 0, shards->layout->segs_n * sizeof *shards->absmax);
    for (int p = 0; p < shards->layout->params_n; p++) {
        shards->factor[p] = 1.0;
    }
    shards->rounds = 0;
    shards->count = 0;
    shards->has_count = shards->has_plain = false;
    shards->bad_param = shards->bad_rank = -1;
    shards->finished = shards->skips = false;
    shards->settled = shards->skipping = shards->agreed = false;
    shards->gather_hash = 0;
}

/* What ranks say of themselves when they settle. A rank that skips does not know at which fence the
 * others are: its words lie beside those of a loss, which it adds nothing to. */
enum { SETTLE_ROUNDS = 2, SETTLE_SKIPS = 3, SETTLE_GATHERS = 4, SETTLE_GATHERED = 5 };

static fs_status
meet_settled(fs_shards *shards, bool skips)
{
    const fs_what what = {.op = skips ? FS_OP_SKIP : FS_OP_SETTLE, .dtype = -1, .root = -1};
    fs_payload payload = {{0}};
    payload.u[SETTLE_ROUNDS] = shards->rounds;
    payload.u[SETTLE_SKIPS] = skips;
    if (shards->streams != NULL) {
        payload.u[SETTLE_GATHERS] = shards->streams->gathers_n;
        payload.u[SETTLE_GATHERED] = shards->gather_hash;
    }
    payload.u[FS_PAYLOAD_OP] = what.op;
    bool losses;
    do {
        FS_TRY(fs_meet(shards->world, &what, &payload, shards->records, 0));
        losses = false;
        for (int r = 0; r < shards->size; r++) {
            losses = losses || shards->records[r].u[FS_PAYLOAD_OP] == FS_OP_LOSS;
        }
    } while (losses); /* the others end their micro-batches first */
    return FS_OK;
}

/* Have all ranks put the same gathers into their queues? Else some device waits for one for ever. A
 * rank whose batch failed, or that brought fewer micro-batches, has followed the others by now, but
 * perhaps after it said its words. */
static fs_status
check_gathers(fs_shards *shards)
{
    uint64_t first = shards->records[0].u[SETTLE_GATHERS], other = first;
    uint64_t hash = shards->records[0].u[SETTLE_GATHERED];
    int differs = -1;
    if (shards->uneven) {
        first = shards->streams->gathers_n;
    }
    for (int r = 0; r < shards->size && differs < 0 && !shards->skipping; r++) {
        other = shards->records[r].u[SETTLE_GATHERS];
        if (other > first || (!shards->uneven && (other < first ||
                                                  shards->records[r].u[SETTLE_GATHERED] != hash))) {
            differs = r;
        }
    }
    if (differs < 0) {
        return FS_OK;
    }
    fs_status st = FS_FAIL(FS_EINVAL,
                           "rank %d made %llu gathers and rank %d %llu, or of other units: all "
                           "ranks gather the same units in the same order",
                           shards->uneven ? shards->rank : 0, (unsigned long long)first, differs,
                           (unsigned long long)other);
    return fs_world_fail(shards->world, FS_CAUSE_MISMATCH, st);
}

fs_status
fs_settle(fs_shards *shards, bool skips)
{
    if (shards->settled) {
        return FS_OK;
    }
    fs_counters *mine = shards->blocks[shards->rank].counters;
    uint64_t order_n = (uint64_t)shards->layout->order_n;
    if (skips && shards->streams != NULL) {
        fs_grad_give_up_round(shards);
    } else {
        FS_TRY(fs_grad_finish_rounds(shards));
    }
    shards->skips = skips;
    shards->finished = true;
    atomic_store_explicit(&mine->fin, shards->base + shards->rounds * order_n,
                          memory_order_release);
    fs_bell(shards->world);
    FS_TRY(meet_settled(shards, skips));
    uint64_t most = 0, least = UINT64_MAX;
    shards->skipping = false;
    for (int r = 0; r < shards->size; r++) {
        uint64_t rounds = shards->records[r].u[SETTLE_ROUNDS];
        shards->skipping = shards->skipping || shards->records[r].u[SETTLE_SKIPS] != 0;
        most = rounds > most ? rounds : most;
        least = rounds < least ? rounds : least;
        shards->fins[r] = shards->base + rounds * order_n;
    }
    shards->fins_known = true;
    shards->uneven = least < most;
    FS_TRY(fs_drain(shards));
    if (shards->streams != NULL) {
        while (shards->red < shards->base + most * order_n) { /* nobody has brought the rest */
            FS_TRY(fs_exchange(shards, shards->red, false));
        }
        FS_TRY(check_gathers(shards));
        FS_TRY(fs_exchange_settle(shards));
        fs_grad_close_spills(shards, false);
    }
    if (shards->red != shards->base + most * order_n) {
        return FS_FAIL(FS_EINTERNAL, "settled at contribution %llu of %llu",
                       (unsigned long long)shards->red,
                       (unsigned long long)(shards->base + most * order_n));
    }
    /* Peers that still sum know from their own meet how far this rank came (fins): the counter is
     * set back before the next fence, pub moves on after it (fs_step_begin_next). */
    atomic_store_explicit(&mine->fin, UINT64_MAX, memory_order_release);
    shards->settled = true;
    return FS_OK;
}

fs_status
fs_grad_drop(fs_shards *shards)
{
    FS_TRY(fs_shards_ready(shards));
    FS_TRY(fs_settle(shards, false));
    if (!shards->agreed) {
        const fs_what what = {.op = FS_OP_SETTLE, .dtype = -1, .root = 1};
        FS_TRY(fs_meet(shards->world, &what, NULL, NULL, 0));
        fs_step_begin_next(shards);
    }
    fs_grad_reset(shards);
    return FS_OK;
}
