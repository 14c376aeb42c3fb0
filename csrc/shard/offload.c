/* The update of a state that lives in host memory: Offload(state="cpu") on a device.
 *
 * The CPU's table moves it, with the device's bits. What it needs of the device comes in pieces
 * through pinned buffers: summed gradients, and old weights where these are the master or half of
 * it; new weights go back. All copies go through the copy stream, in this order:
 *
 *     down 0, down 1, up 0, down 2, up 1, down 3, up 2, ...
 *
 * so that piece k + 1 is on its way down and piece k - 1 on its way up while the host updates piece
 * k. Two buffers suffice: once piece k has come down, what went up from its buffer, piece k - 2, is
 * up; where nothing comes down, that is waited for. Gradients and weights that live in host memory
 * themselves are used in place. */
#include "../base/checked.h"
#include "shards_internal.h"

/* Part of a segment. */
typedef struct piece {
    const fs_seg *seg;
    size_t at, n; /* elements of the segment */
    int buffer;
} piece;

/* Where a walk over the kept segments that move stands. */
typedef struct piece_walk {
    int cut;
    fs_seg_range range;
    size_t at; /* of *range.seg: what comes next */
    int turn;
} piece_walk;

static piece_walk
walk_begin(const fs_shards *shards)
{
    int cut = shards->keep_first;
    return (piece_walk){.cut = cut, .range = fs_segs(shards->layout, cut, -1)};
}

static bool
walk_next(const fs_shards *shards, piece_walk *walk, piece *out)
{
    int end_cut = shards->keep_first + shards->policy.keep;
    for (;;) {
        if (walk->range.seg == walk->range.end) {
            if (++walk->cut >= end_cut) {
                return false;
            }
            walk->range = fs_segs(shards->layout, walk->cut, -1);
            walk->at = 0;
            continue;
        }
        const fs_seg *seg = walk->range.seg;
        size_t n = seg->end - seg->begin;
        if (seg->pos_n == FS_FROZEN || !shards->had[seg->param] || walk->at == n) {
            walk->range.seg++;
            walk->at = 0;
            continue;
        }
        *out = (piece){seg, walk->at, fs_min_size(n - walk->at, shards->streams->offload.n),
                       walk->turn};
        walk->at += out->n;
        walk->turn ^= 1;
        return true;
    }
}

/* Does anything come down? Gradients, or old weights that are part of what the update reads. */
static bool
brings(const fs_shards *shards)
{
    const fs_policy *policy = &shards->policy;
    return !policy->on_host.grads ||
           (!policy->on_host.params && policy->precision.master != FS_MASTERS_SEPARATE);
}

static void
bring_down(fs_shards *shards, const piece *p)
{
    fs_streams *streams = shards->streams;
    const fs_policy *policy = &shards->policy;
    const fs_exec *exec = fs_exec_on(shards, FS_STREAM_COPY);
    fs_update update = fs_update_of(shards, p->seg, p->at, p->n);
    if (!brings(shards)) {
        return;
    }
    if (!policy->on_host.grads) {
        streams->runtime->copy(exec, streams->offload.grads[p->buffer], update.grad,
                               p->n * fs_dtype_nbytes(update.grad_dtype));
    }
    if (!policy->on_host.params && policy->precision.master != FS_MASTERS_SEPARATE) {
        streams->runtime->copy(exec, streams->offload.weights[p->buffer], update.weight,
                               p->n * fs_dtype_nbytes(update.weight_dtype));
    }
    fs_mark_set(shards, FS_STREAM_COPY, streams->offload.ready[p->buffer]);
}

static fs_status
update_piece(fs_shards *shards, const piece *p, const fs_hyper *hyper)
{
    fs_streams *streams = shards->streams;
    fs_offload *offload = &streams->offload;
    const fs_policy *policy = &shards->policy;
    fs_update update = fs_update_of(shards, p->seg, p->at, p->n);
    void *weight = update.weight;
    FS_TRY(fs_mark_await(shards, offload->ready[p->buffer], FS_NOSIG));
    update.hyper = hyper[p->seg->param];
    update.grad = policy->on_host.grads ? update.grad : offload->grads[p->buffer];
    update.weight = policy->on_host.params ? weight : offload->weights[p->buffer];
    offload->host.device->update(&offload->host, &update);
    if (policy->on_host.params) {
        return FS_OK;
    }
    streams->runtime->copy(fs_exec_on(shards, FS_STREAM_COPY), weight, update.weight,
                           p->n * fs_dtype_nbytes(update.weight_dtype));
    if (!brings(shards)) {
        fs_mark_set(shards, FS_STREAM_COPY, offload->ready[p->buffer]);
    }
    return FS_OK;
}

fs_status
fs_offload_update(fs_shards *shards, const fs_hyper *hyper)
{
    fs_streams *streams = shards->streams;
    piece_walk walk = walk_begin(shards);
    piece now, next;
    bool more = walk_next(shards, &walk, &now);
    /* What the device wrote to the state (stores), and reads of the weights (gathers), are over. */
    FS_TRY(fs_mark_wait(shards, FS_STREAM_COMPUTE, FS_NOSIG));
    if (more) {
        bring_down(shards, &now);
    }
    while (more) {
        more = walk_next(shards, &walk, &next);
        if (more) {
            bring_down(shards, &next);
        }
        FS_TRY(update_piece(shards, &now, hyper));
        now = next;
    }
    if (!shards->policy.on_host.params) {
        fs_mark_set(shards, FS_STREAM_COPY, streams->handed);
        fs_mark_after(shards, FS_STREAM_COMPUTE, streams->handed);
    }
    return FS_OK;
}
