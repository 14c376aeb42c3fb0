/* Weights: gather and release, the outside writer (store) and the outside reader (load). */
#include "shards_internal.h"

#include <stdio.h>
#include <string.h>

#include "../base/checked.h"

// ---- gather -------------------------------------------------------------------------------------

/* The pool's contract is a collective's (on GPUs it is one): what every rank gathered in a step is
 * compared at the step's fence. */
static void
remember_gather(fs_shards *shards, int unit)
{
    shards->gather_hash = (shards->gather_hash ^ (uint64_t)(unit + 1)) * UINT64_C(0x100000001b3);
}

static fs_status
pool_is_full(const fs_shards *shards, int unit)
{
    char holders[256] = "";
    size_t used = 0;
    for (int u = 0; u < shards->layout->units_n && used < sizeof holders; u++) {
        if (shards->units[u].gathers > 0) {
            int n = snprintf(holders + used, sizeof holders - used, "%s%s", used > 0 ? ", " : "",
                             shards->layout->units[u].name);
            used += n > 0 ? (size_t)n : 0;
        }
    }
    return FS_FAIL(FS_ESTATE,
                   "rank %d: no buffer to gather unit %s: held by %s; release one first, or use "
                   "reshard_after_forward=False or gather=\"view\"",
                   shards->rank, shards->layout->units[unit].name, holders);
}

/* Copies every owner's part of unit into buffer; neighbours in both places go in one copy. */
static void
pull_unit(fs_shards *shards, int unit, unsigned char *buffer)
{
    const fs_exec *exec = shards->exec;
    size_t nbytes = fs_param_nbytes(shards);
    for (int c = 0; c < shards->size; c++) {
        fs_seg_range s = fs_segs(shards->layout, c, unit);
        while (s.seg < s.end) {
            const fs_seg *first = s.seg;
            size_t n = first->end - first->begin;
            for (s.seg++; s.seg < s.end && s.seg->at_n - first->at_n == s.seg->own_n - first->own_n;
                 s.seg++) {
                n = s.seg->at_n - first->at_n + (s.seg->end - s.seg->begin);
            }
            exec->device->copy(exec, buffer + first->at_n * nbytes, fs_own_at(shards, c, first),
                               n * nbytes);
            fs_log_add(shards->world, n * nbytes);
        }
    }
}

static fs_status
gather_into_pool(fs_shards *shards, int u)
{
    fs_unit *unit = &shards->units[u];
    int chosen = -1;
    if (shards->policy.pool_units == FS_NO_POOL) {
        return FS_FAIL(FS_ESTATE, "rank %d: unit %s: whoever opened these shards gathers by itself",
                       shards->rank, shards->layout->units[u].name);
    }
    for (int b = unit->pool_first; b < unit->pool_end; b++) {
        const fs_pool_buffer *buffer = &shards->pool[b];
        bool busy = buffer->unit >= 0 && buffer->unit != u && shards->units[buffer->unit].pool == b;
        if (buffer->unit == u) {
            chosen = b; /* perhaps still valid */
            break;
        }
        if (!busy && chosen < 0) {
            chosen = b;
        }
    }
    if (chosen < 0) {
        return pool_is_full(shards, u);
    }
    fs_pool_buffer *buffer = &shards->pool[chosen];
    remember_gather(shards, u);
    if (buffer->unit != u || buffer->epoch != shards->weights_epoch) {
        fs_log_begin(shards->world, FS_OP_GATHER, unit->log_unit, 0);
        pull_unit(shards, u, buffer->data);
        fs_log_end(shards->world);
        buffer->unit = u;
        buffer->epoch = shards->weights_epoch;
    }
    unit->pool = chosen;
    return FS_OK;
}

fs_status
fs_unit_gather(fs_shards *shards, int u, const void **out)
{
    fs_unit *unit = &shards->units[u];
    const fs_layout *layout = shards->layout;
    size_t at = layout->units[u].at_n * fs_param_nbytes(shards);
    FS_TRY(fs_shards_ready(shards));
    if (shards->policy.weights == FS_WEIGHTS_SHARD && unit->gathers == 0) {
        fs_world_note_op(shards->world, FS_OP_GATHER, layout->units[u].name);
        FS_TRY(gather_into_pool(shards, u));
    }
    unit->gathers++;
    switch (shards->policy.weights) {
    case FS_WEIGHTS_SHARED:
        *out = shards->image + at;
        break;
    case FS_WEIGHTS_WHOLE:
        *out = shards->blocks[shards->rank].own + at;
        break;
    case FS_WEIGHTS_SHARD:
        *out = shards->pool[unit->pool].data;
        break;
    }
    return FS_OK;
}

fs_status
fs_unit_release(fs_shards *shards, int u)
{
    fs_unit *unit = &shards->units[u];
    if (unit->gathers == 0) {
        return FS_FAIL(FS_ESTATE, "rank %d: unit %s is released but not gathered", shards->rank,
                       shards->layout->units[u].name);
    }
    if (--unit->gathers == 0) {
        unit->pool = -1;
    }
    return FS_OK;
}

int
fs_unit_gathers(const fs_shards *shards, int u)
{
    return shards->units[u].gathers;
}

fs_region *
fs_unit_region(const fs_shards *shards)
{
    switch (shards->policy.weights) {
    case FS_WEIGHTS_SHARED:
        return shards->image_region;
    case FS_WEIGHTS_WHOLE:
        return shards->block_region;
    case FS_WEIGHTS_SHARD:
        break;
    }
    return NULL;
}

// ---- publish ------------------------------------------------------------------------------------

/* Whole copies: takes the cuts that others write from the rank that speaks for them. */
static void
pull_whole(fs_shards *shards)
{
    const fs_exec *exec = shards->exec;
    size_t nbytes = fs_param_nbytes(shards);
    for (int c = 0; c < shards->size; c++) {
        if (fs_keeps(shards, c)) {
            continue;
        }
        for (fs_seg_range s = fs_segs(shards->layout, c, -1); s.seg < s.end; s.seg++) {
            exec->device->copy(exec, fs_own_at(shards, shards->rank, s.seg),
                               fs_own_at(shards, c, s.seg), (s.seg->end - s.seg->begin) * nbytes);
            fs_log_add(shards->world, (s.seg->end - s.seg->begin) * nbytes);
        }
    }
}

fs_status
fs_publish(fs_shards *shards, fs_op op)
{
    const fs_what what = {.op = op, .dtype = -1, .root = -1};
    FS_TRY(fs_meet(shards->world, &what, NULL, NULL, FS_NOSIG));
    /* Owners write next after the next write fence, which this rank reaches only after pulling. */
    if (shards->policy.weights == FS_WEIGHTS_WHOLE) {
        fs_log_begin(shards->world, FS_OP_GATHER, 0, 0);
        pull_whole(shards);
        fs_log_end(shards->world);
    }
    shards->weights_epoch++;
    return FS_OK;
}

// ---- store --------------------------------------------------------------------------------------

fs_status
fs_store_begin(fs_shards *shards)
{
    FS_TRY(fs_shards_ready(shards));
    if (shards->agreed) {
        return FS_FAIL(FS_ESTATE,
                       "rank %d: weights may not be written between grad_norm() and step()",
                       shards->rank);
    }
    const fs_what what = {.op = FS_OP_STORE, .dtype = -1, .root = -1};
    return fs_meet(shards->world, &what, NULL, NULL, 0);
}

fs_status
fs_store_end(fs_shards *shards)
{
    return fs_publish(shards, FS_OP_STORE);
}

static fs_status
check_range(const fs_shards *shards, int param, fs_array array, size_t begin, size_t end)
{
    const fs_layout *layout = shards->layout;
    if (param < 0 || param >= layout->params_n) {
        return FS_FAIL(FS_EINVAL, "parameter %d of %d", param, layout->params_n);
    }
    const fs_param *p = &layout->params[param];
    if (begin > end || end > p->numel) {
        return FS_FAIL(FS_EINVAL, "elements [%zu, %zu) of %s, which has %zu", begin, end, p->name,
                       p->numel);
    }
    int moment = (int)array - (int)FS_MOMENT1;
    if (moment >= 0 && moment >= shards->moments_n) {
        return FS_FAIL(FS_EINVAL, "%s has no moment %d: the optimizer keeps %d", p->name,
                       moment + 1, shards->moments_n);
    }
    if (!p->trainable && array != FS_WEIGHT && array != FS_MASTER) {
        return FS_FAIL(FS_EINVAL, "%s is frozen: it has no gradient and no optimizer state",
                       p->name);
    }
    return FS_OK;
}

/* A state array of rank at seg; *dtype is its element type. */
static unsigned char *
state_array(const fs_shards *shards, int rank, fs_array array, const fs_seg *seg, fs_dtype *dtype)
{
    const fs_precision *precision = &shards->policy.precision;
    const fs_block *block = &shards->blocks[rank];
    unsigned char *base = NULL;
    switch (array) {
    case FS_WEIGHT:
        *dtype = precision->param;
        return fs_own_at(shards, rank, seg);
    case FS_MASTER:
        if (block->master == NULL || seg->pos_n == FS_FROZEN) {
            *dtype = precision->param;
            return fs_own_at(shards, rank, seg);
        }
        *dtype = FS_F32;
        base = (unsigned char *)block->master;
        break;
    case FS_GRAD:
        *dtype = precision->accumulate;
        base = block->acc;
        break;
    case FS_MOMENT1:
    case FS_MOMENT2:
    case FS_MOMENT3:
        *dtype = precision->moments;
        base = block->moments[array - FS_MOMENT1];
        break;
    case FS_ARRAY_COUNT: /* check_range lets none through */
        *dtype = precision->moments;
        break;
    }
    return base + fs_state_at(shards, seg) * fs_dtype_nbytes(*dtype);
}

/* Is the master of seg a compute copy and a remainder? Frozen parameters have the copy alone. */
static bool
is_split(const fs_shards *shards, const fs_seg *seg)
{
    return shards->policy.precision.master == FS_MASTERS_SPLIT && seg->pos_n != FS_FROZEN;
}

/* Calls for the part of [begin, end) of param that lies in cut. */
typedef struct overlap {
    fs_seg seg; /* shortened to the overlap */
    size_t skip; /* elements of [begin, end) before it */
} overlap;

static bool
find_overlap(const fs_layout *layout, int param, int cut, size_t begin, size_t end, overlap *out)
{
    for (fs_seg_range s = fs_segs(layout, cut, layout->params[param].unit); s.seg < s.end;
         s.seg++) {
        if (s.seg->param != param) {
            continue;
        }
        size_t low = fs_max_size(begin, s.seg->begin);
        size_t high = fs_min_size(end, s.seg->end);
        if (low >= high) {
            return false;
        }
        size_t into = low - s.seg->begin;
        out->seg = *s.seg;
        out->seg.begin = low;
        out->seg.end = high;
        out->seg.at_n += into;
        out->seg.own_n += into;
        out->seg.pos_n += s.seg->pos_n == FS_FROZEN ? 0 : into;
        out->skip = low - begin;
        return true;
    }
    return false;
}

fs_status
fs_store(fs_shards *shards, int param, fs_array array, size_t begin, size_t end, const void *src,
         fs_dtype src_dtype)
{
    const fs_exec *exec = shards->exec;
    FS_TRY(check_range(shards, param, array, begin, end));
    bool weights = array == FS_WEIGHT || array == FS_MASTER;
    for (int c = shards->keep_first; c < shards->keep_first + shards->policy.keep; c++) {
        overlap part;
        if (!find_overlap(shards->layout, param, c, begin, end, &part)) {
            continue;
        }
        size_t n = part.seg.end - part.seg.begin;
        const unsigned char *from =
            (const unsigned char *)src + part.skip * fs_dtype_nbytes(src_dtype);
        fs_dtype dtype;
        unsigned char *to;
        if (!weights) {
            to = state_array(shards, shards->rank, array, &part.seg, &dtype);
            exec->device->convert(exec, to, dtype, from, src_dtype, n);
            continue;
        }
        if (is_split(shards, &part.seg)) {
            uint16_t *half = (uint16_t *)(void *)fs_own_at(shards, shards->rank, &part.seg);
            uint16_t *rest = shards->blocks[shards->rank].remainder;
            rest += fs_state_at(shards, &part.seg);
            exec->device->split(exec, fs_writes_weight(shards, c) ? half : NULL, rest, from,
                                src_dtype, n);
            continue;
        }
        const void *value = from;
        fs_dtype value_dtype = src_dtype;
        if (shards->blocks[shards->rank].master != NULL && part.seg.pos_n != FS_FROZEN) {
            to = state_array(shards, shards->rank, FS_MASTER, &part.seg, &dtype);
            exec->device->convert(exec, to, dtype, from, src_dtype, n);
            value = to; /* the compute copy is always the rounded master */
            value_dtype = dtype;
        }
        if (fs_writes_weight(shards, c)) {
            to = state_array(shards, shards->rank, FS_WEIGHT, &part.seg, &dtype);
            exec->device->convert(exec, to, dtype, value, value_dtype, n);
        }
    }
    return FS_OK;
}

// ---- load ---------------------------------------------------------------------------------------

fs_status
fs_load(fs_shards *shards, int param, fs_array array, size_t begin, size_t end, void *dst,
        fs_dtype dst_dtype)
{
    const fs_exec *exec = shards->exec;
    FS_TRY(fs_shards_whole(shards));
    FS_TRY(check_range(shards, param, array, begin, end));
    size_t width = fs_dtype_nbytes(dst_dtype);
    if (array == FS_GRAD && !shards->had[param]) {
        memset(dst, 0, (end - begin) * width);
        return FS_OK;
    }
    for (int c = 0; c < shards->size; c++) {
        overlap part;
        if (!find_overlap(shards->layout, param, c, begin, end, &part)) {
            continue;
        }
        fs_dtype dtype;
        /* A cut is read from the rank that speaks for it, or here when it is kept here. */
        int from = fs_keeps(shards, c) ? shards->rank : c;
        void *to = (unsigned char *)dst + part.skip * width;
        size_t n = part.seg.end - part.seg.begin;
        if (array == FS_MASTER && is_split(shards, &part.seg)) {
            const void *half = fs_own_at(shards, from, &part.seg);
            exec->device->join(exec, to, dst_dtype, half,
                               shards->blocks[from].remainder + fs_state_at(shards, &part.seg), n);
            continue;
        }
        const unsigned char *src = state_array(shards, from, array, &part.seg, &dtype);
        exec->device->convert(exec, to, dst_dtype, src, dtype, n);
    }
    return FS_OK;
}
