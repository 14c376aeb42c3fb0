/* Gradients on a device: what a rank published goes through the engine to the ranks that keep it,
 * and is summed there, in rank order, all in the queue of the reduce stream. The host waits once,
 * at the end of the step.
 *
 * Contribution k is the same unit on every rank, so the order of contributions is the order of the
 * engine's collectives, and all ranks take part in all of them. Which parameters a peer has a
 * gradient for its host knows, not ours: what is absent is sent as -0.0, which added to anything
 * leaves its bits; that a parameter had a gradient is folded from all ranks' words at the end.
 * Where the policy asks for a ring, the engine sums: ring.c. */
#include "shards_internal.h"

#include <string.h>

#include "../base/checked.h"

fs_sums *
fs_found_at(const fs_shards *shards, const fs_seg *seg, fs_sums *here)
{
    const fs_layout *layout = shards->layout;
    if (shards->streams == NULL) {
        return here;
    }
    return &shards->streams->found[(size_t)(seg - layout->segs) - layout->cut_first[shards->rank]];
}

/* What this rank brings in a contribution. */
typedef struct brought {
    int unit;
    const unsigned char *present; /* flags of the unit's parameters; NULL: none is */
    unsigned char *slot;
    bool first; /* of the unit in this step: sums begin anew */
} brought;

static brought
look_at(const fs_shards *shards, uint64_t k, bool came)
{
    const fs_layout *layout = shards->layout;
    uint64_t order_n = (uint64_t)layout->order_n;
    int u = layout->order[(k - shards->base) % order_n];
    const fs_unit_layout *unit = &layout->units[u];
    brought mine = {.unit = u, .first = k - shards->base < order_n,
                    .slot = fs_slot_data(shards, shards->rank, unit->slot)};
    const unsigned char *present = fs_slot_present(shards, shards->rank, unit->slot);
    for (int p = unit->first; came && p < unit->end; p++) {
        mine.present = present[p - unit->first] ? present : mine.present;
    }
    return mine;
}

/* Peers are sent -0.0 of a parameter that is absent among others that are not. */
static void
fill_absent(fs_shards *shards, const brought *mine)
{
    const fs_exec *exec = fs_exec_on(shards, FS_STREAM_REDUCE);
    const fs_unit_layout *unit = &shards->layout->units[mine->unit];
    size_t width = fs_dtype_nbytes(shards->policy.precision.reduce), n;
    for (int p = unit->first; p < unit->end; p++) {
        const fs_param *param = &shards->layout->params[p];
        if (!param->trainable || mine->present[p - unit->first]) {
            continue;
        }
        unsigned char *to = mine->slot + param->grad_n * width;
        for (size_t left = param->numel * width; left > 0; left -= n, to += n) {
            n = fs_min_size(left, shards->streams->absent_nbytes);
            exec->device->copy(exec, to, shards->streams->absent, n);
        }
    }
}

static unsigned char *
piece_of(const fs_shards *shards, int peer)
{
    size_t at = (size_t)(peer < shards->rank ? peer : peer - 1);
    return shards->streams->staging + at * shards->streams->piece_nbytes;
}

/* One cut of each keeper's, the turn'th it keeps: every rank sends its part to that keeper. */
static fs_status
exchange_cuts(fs_shards *shards, const brought *mine, int turn)
{
    const fs_layout *layout = shards->layout;
    fs_streams *streams = shards->streams;
    size_t width = fs_dtype_nbytes(shards->policy.precision.reduce);
    size_t sends_n = 0, receives_n = 0;
    for (int peer = 0; peer < shards->size; peer++) {
        if (peer == shards->rank) {
            continue;
        }
        int theirs = peer - peer % shards->policy.keep + turn;
        fs_grad_run run = {0};
        for (fs_seg_range s = fs_segs(layout, theirs, mine->unit);
             fs_next_grad_run(layout, &s, &run);) {
            void *from = mine->present != NULL ? mine->slot + run.slot_n * width : streams->absent;
            streams->sends[sends_n++] = (fs_engine_part){peer, from, run.n * width};
        }
        run = (fs_grad_run){0};
        for (fs_seg_range s = fs_segs(layout, shards->keep_first + turn, mine->unit);
             fs_next_grad_run(layout, &s, &run);) {
            fs_log_add(shards->world, run.n * width);
            streams->receives[receives_n++] = (fs_engine_part){
                peer, piece_of(shards, peer) + run.piece_n * width, run.n * width};
        }
    }
    return fs_streams_end(shards, streams->runtime->engine->alltoall(
                                      streams->reduces, fs_exec_on(shards, FS_STREAM_REDUCE),
                                      streams->sends, sends_n, streams->receives, receives_n));
}

/* The engine has summed this segment over the ranks already. */
static void
sum_of_ring(fs_shards *shards, const brought *mine, const fs_seg *seg, size_t piece_n)
{
    const fs_exec *exec = fs_exec_on(shards, FS_STREAM_REDUCE);
    size_t width = fs_dtype_nbytes(shards->policy.precision.reduce);
    shards->sources[0] = fs_ring_sum(shards, mine->unit, seg->cut) + piece_n * width;
    fs_sum sum = fs_sum_of_ranks(shards, seg, !mine->first);
    sum.src_n = 1;
    sum.found = seg->cut == shards->rank ? fs_found_at(shards, seg, NULL) : NULL;
    exec->device->sum(exec, &sum);
}

static void
sum_segment(fs_shards *shards, const brought *mine, const fs_seg *seg, size_t slot_n,
            size_t piece_n)
{
    if (shards->policy.ring && shards->size > 1) {
        sum_of_ring(shards, mine, seg, piece_n);
        return;
    }
    const fs_exec *exec = fs_exec_on(shards, FS_STREAM_REDUCE);
    const fs_precision *precision = &shards->policy.precision;
    const fs_unit_layout *unit = &shards->layout->units[mine->unit];
    size_t width = fs_dtype_nbytes(precision->reduce);
    for (int r = 0; r < shards->size; r++) {
        shards->sources[r] = r == shards->rank ? NULL : piece_of(shards, r) + piece_n * width;
    }
    bool present = mine->present != NULL && mine->present[seg->param - unit->first];
    if (present) {
        shards->sources[shards->rank] = mine->slot + slot_n * width;
    }
    bool accumulate = !mine->first;
    if (shards->size == 1) { /* nobody else: known here and now */
        if (!present) {
            return;
        }
        accumulate = shards->had[seg->param] != 0;
    }
    fs_sum sum = fs_sum_of_ranks(shards, seg, accumulate);
    sum.found = seg->cut == shards->rank ? fs_found_at(shards, seg, NULL) : NULL;
    exec->device->sum(exec, &sum);
}

static void
sum_cut(fs_shards *shards, const brought *mine, int cut)
{
    const fs_layout *layout = shards->layout;
    fs_grad_run run = {0};
    fs_seg_range next = fs_segs(layout, cut, mine->unit);
    for (const fs_seg *seg = next.seg; fs_next_grad_run(layout, &next, &run);) {
        for (; seg < next.seg; seg++) {
            if (seg->pos_n != FS_FROZEN) {
                size_t slot_n = layout->params[seg->param].grad_n + seg->begin;
                sum_segment(shards, mine, seg, slot_n, run.piece_n + (slot_n - run.slot_n));
            }
        }
    }
}

fs_status
fs_exchange(fs_shards *shards, uint64_t k, bool came)
{
    fs_streams *streams = shards->streams;
    fs_block *block = &shards->blocks[shards->rank];
    brought mine = look_at(shards, k, came);
    const fs_unit_layout *unit = &shards->layout->units[mine.unit];
    if (shards->size == 1 && mine.present == NULL) {
        shards->red = k + 1;
        return FS_OK;
    }
    fs_log_begin(shards->world, FS_OP_REDUCE, shards->units[mine.unit].log_unit, 0);
    if (mine.present != NULL) {
        fs_mark_set(shards, FS_STREAM_COMPUTE, streams->handed);
        fs_mark_after(shards, FS_STREAM_REDUCE, streams->handed);
    } else { /* no slot is read; but an update may still read the last sums */
        fs_mark_after(shards, FS_STREAM_REDUCE, streams->sums);
    }
    if (mine.present != NULL && shards->size > 1) {
        fill_absent(shards, &mine);
    }
    fs_status st = FS_OK;
    bool ring = shards->policy.ring && shards->size > 1;
    if (ring) {
        st = fs_ring_reduce(shards, mine.unit, mine.present != NULL ? mine.slot : NULL,
                            mine.present);
    }
    for (int turn = 0; turn < shards->policy.keep && st == FS_OK; turn++) {
        st = shards->size > 1 && !ring ? exchange_cuts(shards, &mine, turn) : FS_OK;
        if (st == FS_OK) {
            sum_cut(shards, &mine, shards->keep_first + turn);
        }
    }
    fs_log_end(shards->world);
    FS_TRY(st);
    if (mine.present != NULL) {
        fs_mark_set(shards, FS_STREAM_REDUCE, &streams->slots[unit->slot]);
    }
    for (int p = unit->first; mine.present != NULL && p < unit->end; p++) {
        block->brought[p] |= mine.present[p - unit->first];
        shards->had[p] |= shards->size == 1 ? mine.present[p - unit->first] : 0;
    }
    shards->red = k + 1;
    return FS_OK;
}

fs_status
fs_exchange_settle(fs_shards *shards)
{
    const fs_layout *layout = shards->layout;
    const fs_streams *streams = shards->streams;
    if (shards->red > shards->base) {
        fs_ring_bring(shards);
        FS_TRY(fs_mark_wait(shards, FS_STREAM_REDUCE, 0));
    }
    FS_TRY(fs_streams_check(shards));
    for (int r = 0; r < shards->size; r++) {
        for (int p = 0; p < layout->params_n; p++) {
            shards->had[p] |= shards->blocks[r].brought[p];
        }
    }
    for (fs_seg_range s = fs_segs(layout, shards->rank, -1); s.seg < s.end; s.seg++) {
        if (s.seg->pos_n == FS_FROZEN || !shards->had[s.seg->param]) {
            continue;
        }
        const fs_sums *found = fs_found_at(shards, s.seg, NULL);
        shards->sumsq[s.seg - layout->segs] = found->sumsq;
        shards->absmax[s.seg - layout->segs] = found->absmax;
        if (!found->finite && (shards->bad_param < 0 || shards->bad_param > s.seg->param)) {
            shards->bad_param = s.seg->param;
            shards->bad_rank = streams->firsts != NULL ? -1 : (int)found->bad_source; /* a rank */
        }
    }
    fs_ring_settle(shards);
    return FS_OK;
}
