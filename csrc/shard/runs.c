/* Runs: what of a cut of a unit lies end to end in two places, and so goes in one piece. */
#include "shards_internal.h"

#include "../base/checked.h"

/* Does next go on where seg ends, but for padding between their parameters? Else other cuts may lie
 * between them. */
static bool
goes_on(const fs_layout *layout, const fs_seg *seg, const fs_seg *next)
{
    return seg->end == layout->params[seg->param].numel && next->begin == 0;
}

bool
fs_next_run(const fs_layout *layout, fs_seg_range *range, fs_run *out)
{
    if (range->seg >= range->end) {
        return false;
    }
    const fs_seg *first = range->seg;
    size_t n = first->end - first->begin;
    for (range->seg++; range->seg < range->end; range->seg++) {
        const fs_seg *seg = range->seg;
        if (!goes_on(layout, seg - 1, seg) ||
            seg->at_n - first->at_n != seg->own_n - first->own_n) {
            break;
        }
        n = seg->at_n - first->at_n + (seg->end - seg->begin);
    }
    *out = (fs_run){first, n};
    return true;
}

static void
skip_frozen(fs_seg_range *range)
{
    while (range->seg < range->end && range->seg->pos_n == FS_FROZEN) {
        range->seg++;
    }
}

bool
fs_next_grad_run(const fs_layout *layout, fs_seg_range *range, fs_grad_run *run)
{
    skip_frozen(range);
    if (range->seg >= range->end) {
        return false;
    }
    run->piece_n = fs_round_up(run->piece_n + run->n, FS_SHARD_ALIGN_N);
    run->slot_n = layout->params[range->seg->param].grad_n + range->seg->begin;
    for (const fs_seg *last = NULL; range->seg < range->end; skip_frozen(range)) {
        if (last != NULL && !goes_on(layout, last, range->seg)) {
            break;
        }
        last = range->seg++;
        run->n = layout->params[last->param].grad_n + last->end - run->slot_n;
    }
    return true;
}

fs_extents
fs_extents_of(const fs_layout *layout)
{
    fs_extents most = {0};
    for (int u = 0; u < layout->units_n; u++) {
        size_t unit_runs = 0;
        for (int c = 0; c < layout->size; c++) {
            size_t runs = 0;
            fs_grad_run run = {0};
            for (fs_seg_range s = fs_segs(layout, c, u); fs_next_grad_run(layout, &s, &run);) {
                runs++;
                most.run_n = fs_max_size(most.run_n, run.n);
                most.piece_n = fs_max_size(most.piece_n, run.piece_n + run.n);
            }
            fs_run whole;
            for (fs_seg_range s = fs_segs(layout, c, u); fs_next_run(layout, &s, &whole);) {
                unit_runs++;
            }
            most.runs = fs_max_size(most.runs, runs);
        }
        most.unit_runs = fs_max_size(most.unit_runs, unit_runs);
    }
    most.piece_n = fs_round_up(most.piece_n, FS_SHARD_ALIGN_N);
    for (size_t i = 0; i < layout->segs_n; i++) {
        most.seg_n = fs_max_size(most.seg_n, layout->segs[i].end - layout->segs[i].begin);
    }
    for (int p = 0; p < layout->params_n; p++) {
        most.param_n = fs_max_size(most.param_n, layout->params[p].numel);
    }
    return most;
}
