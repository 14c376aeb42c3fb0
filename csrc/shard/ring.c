/* Gradients that the engine sums itself: a reduce-scatter of each unit, in the dtype of the wire
 * and in whatever order the engine adds. Every rank packs its gradients of the unit by cuts, each
 * as long as the longest, and finds its own cut's sum in the place of its own part; ranks that keep
 * more cuts gather theirs after that. Such a sum does not tell who brought what is not finite: each
 * rank searches what it brings, before it goes in. */
#include "shards_internal.h"

#include "../base/checked.h"

/* Bytes that runtime->fill repeats: a number beyond any element. */
enum { NONE_BYTE = 0x7f };

/* Elements of one cut's place: the longest cut of the unit. */
static size_t
place_n(const fs_shards *shards, int unit)
{
    const fs_layout *layout = shards->layout;
    size_t most = 0;
    for (int cut = 0; cut < shards->size; cut++) {
        fs_grad_run run = {0};
        for (fs_seg_range s = fs_segs(layout, cut, unit); fs_next_grad_run(layout, &s, &run);) {
            most = fs_max_size(most, run.piece_n + run.n);
        }
    }
    return fs_round_up(most, FS_SHARD_ALIGN_N);
}

static unsigned char *
place_of(const fs_shards *shards, int unit, int cut)
{
    size_t width = fs_dtype_nbytes(shards->policy.precision.reduce);
    return shards->streams->staging + (size_t)cut * place_n(shards, unit) * width;
}

const unsigned char *
fs_ring_sum(const fs_shards *shards, int unit, int cut)
{
    return place_of(shards, unit, cut);
}

/* Between the runs of a cut, and after the last of a short one, lies what was there before: nobody
 * reads the sum of that. */
static void
pack(fs_shards *shards, int unit, const unsigned char *slot)
{
    const fs_exec *exec = fs_exec_on(shards, FS_STREAM_REDUCE);
    const fs_layout *layout = shards->layout;
    const fs_streams *streams = shards->streams;
    size_t width = fs_dtype_nbytes(shards->policy.precision.reduce);
    for (int cut = 0; cut < shards->size; cut++) {
        unsigned char *place = place_of(shards, unit, cut);
        fs_grad_run run = {0};
        for (fs_seg_range s = fs_segs(layout, cut, unit); fs_next_grad_run(layout, &s, &run);) {
            const void *from = slot != NULL ? slot + run.slot_n * width : streams->absent;
            exec->device->copy(exec, place + run.piece_n * width, from, run.n * width);
        }
    }
}

/* Keeps each parameter's first element that is not finite, of all micro-batches of the step; its
 * number of elements where there is none. */
static void
search(fs_shards *shards, int unit, const unsigned char *slot, const unsigned char *present)
{
    const fs_exec *exec = fs_exec_on(shards, FS_STREAM_REDUCE);
    const fs_layout *layout = shards->layout;
    const fs_unit_layout *of = &layout->units[unit];
    fs_dtype dtype = shards->policy.precision.reduce;
    int64_t *firsts = shards->streams->firsts, *latest = firsts + layout->params_n;
    for (int p = of->first; p < of->end; p++) {
        const fs_param *param = &layout->params[p];
        if (param->trainable && present[p - of->first] && param->numel > 0) {
            exec->device->find_nonfinite(exec, slot + param->grad_n * fs_dtype_nbytes(dtype),
                                         dtype, param->numel, (uint64_t *)(void *)latest);
            exec->device->combine(exec, FS_MIN, FS_I64, &firsts[p], latest, 1);
        }
    }
}

/* Ranks that keep other cuts too: every rank's sum to all of them, in its place. */
static fs_status
share(fs_shards *shards, int unit, size_t nbytes)
{
    fs_streams *streams = shards->streams;
    for (int r = 0; r < shards->size; r++) {
        unsigned char *place = place_of(shards, unit, r);
        streams->pieces[r] = (fs_engine_piece){r, place, place, nbytes};
    }
    fs_log_add(shards->world, (size_t)(shards->size - 1) * nbytes);
    return fs_streams_end(shards, streams->runtime->engine->gather(
                                      streams->reduces, fs_exec_on(shards, FS_STREAM_REDUCE),
                                      streams->pieces, (size_t)shards->size));
}

fs_status
fs_ring_reduce(fs_shards *shards, int unit, const unsigned char *slot,
               const unsigned char *present)
{
    fs_streams *streams = shards->streams;
    fs_dtype dtype = shards->policy.precision.reduce;
    size_t n = place_n(shards, unit), nbytes = n * fs_dtype_nbytes(dtype);
    if (slot != NULL) {
        search(shards, unit, slot, present);
    }
    pack(shards, unit, slot);
    fs_log_add(shards->world, (size_t)(shards->size - 1) * nbytes);
    FS_TRY(fs_streams_end(shards, streams->runtime->engine->reduce_scatter(
                                      streams->reduces, fs_exec_on(shards, FS_STREAM_REDUCE),
                                      dtype, streams->staging, n,
                                      place_of(shards, unit, shards->rank))));
    return shards->policy.keep > 1 ? share(shards, unit, nbytes) : FS_OK;
}

// ---- what is not finite -------------------------------------------------------------------------

void
fs_ring_reset(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    if (streams->firsts != NULL) {
        streams->runtime->fill(fs_exec_on(shards, FS_STREAM_REDUCE), streams->firsts, NONE_BYTE,
                               (size_t)shards->layout->params_n * sizeof *streams->firsts);
    }
}

void
fs_ring_bring(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    if (streams->firsts != NULL) {
        streams->runtime->copy(fs_exec_on(shards, FS_STREAM_REDUCE), streams->firsts_here,
                               streams->firsts,
                               (size_t)shards->layout->params_n * sizeof *streams->firsts);
        fs_ring_reset(shards);
    }
}

/* What a rank brought is told by itself, of all cuts: the verdict takes the first parameter, and of
 * that a rank that knows. The sum is not finite then either, but may be so without it: 16 bits
 * overflow. */
void
fs_ring_settle(fs_shards *shards)
{
    const fs_layout *layout = shards->layout;
    const fs_streams *streams = shards->streams;
    for (int p = 0; streams->firsts != NULL && p < layout->params_n; p++) {
        if (layout->params[p].trainable && shards->had[p] &&
            (uint64_t)streams->firsts_here[p] < layout->params[p].numel) {
            if (shards->bad_param < 0 || shards->bad_param >= p) {
                shards->bad_param = p;
                shards->bad_rank = shards->rank;
            }
            return;
        }
    }
}
