/* Weights: the outside writer (store) and the outside reader (load). */
#include "shards_internal.h"

#include <string.h>

#include "../base/checked.h"

// ---- between host and device --------------------------------------------------------------------

/* Elements of host memory where an operation of the compute stream can read them: as they are on
 * the CPU, through the transfer buffer (at most transfer_n at once) on a device. src is read
 * before this returns. */
const void *
fs_bring(fs_shards *shards, const void *src, size_t nbytes)
{
    fs_streams *streams = shards->streams;
    if (streams == NULL) {
        return src;
    }
    streams->runtime->copy(shards->exec, streams->transfer, src, nbytes);
    return streams->transfer;
}

/* The operations that read what was brought have been given. */
void
fs_brought(fs_shards *shards)
{
    if (shards->streams != NULL) {
        fs_mark_set(shards, FS_STREAM_COMPUTE, shards->streams->brought);
    }
}

/* How many of n elements go at once. */
size_t
fs_bring_n(const fs_shards *shards, size_t n)
{
    return shards->streams == NULL ? n : fs_min_size(n, shards->streams->transfer_n);
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
    FS_TRY(fs_meet(shards->world, &what, NULL, NULL, 0));
    fs_gather_let_write(shards);
    return FS_OK;
}

fs_status
fs_store_end(fs_shards *shards)
{
    FS_TRY(fs_publish(shards, FS_OP_STORE));
    return fs_streams_check(shards);
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

/* Writes n elements of a kept cut; from: on a device, device memory. */
static void
store_part(fs_shards *shards, fs_array array, const fs_seg *seg, const void *from,
           fs_dtype src_dtype)
{
    const fs_exec *exec = shards->exec;
    const fs_block *block = &shards->blocks[shards->rank];
    size_t n = seg->end - seg->begin;
    fs_dtype dtype = FS_F32;
    unsigned char *to;
    if (array != FS_WEIGHT && array != FS_MASTER) {
        to = state_array(shards, shards->rank, array, seg, &dtype);
        exec->device->convert(exec, to, dtype, from, src_dtype, n);
        return;
    }
    if (is_split(shards, seg)) {
        uint16_t *half = (uint16_t *)(void *)fs_own_at(shards, shards->rank, seg);
        uint16_t *rest = block->remainder + fs_state_at(shards, seg);
        exec->device->split(exec, fs_writes_weight(shards, seg->cut) ? half : NULL, rest, from,
                            src_dtype, n);
        return;
    }
    const void *value = from;
    fs_dtype value_dtype = src_dtype;
    if (block->master != NULL && seg->pos_n != FS_FROZEN) {
        to = state_array(shards, shards->rank, FS_MASTER, seg, &dtype);
        exec->device->convert(exec, to, dtype, from, src_dtype, n);
        value = to; /* the compute copy is always the rounded master */
        value_dtype = dtype;
    }
    if (fs_writes_weight(shards, seg->cut)) {
        to = state_array(shards, shards->rank, FS_WEIGHT, seg, &dtype);
        exec->device->convert(exec, to, dtype, value, value_dtype, n);
    }
}

fs_status
fs_store(fs_shards *shards, int param, fs_array array, size_t begin, size_t end, const void *src,
         fs_dtype src_dtype)
{
    size_t width = fs_dtype_nbytes(src_dtype), n;
    FS_TRY(check_range(shards, param, array, begin, end));
    for (int c = shards->keep_first; c < shards->keep_first + shards->policy.keep; c++) {
        overlap part;
        for (size_t at = begin; find_overlap(shards->layout, param, c, at, end, &part); at += n) {
            at += part.skip;
            n = fs_bring_n(shards, part.seg.end - part.seg.begin);
            part.seg.end = part.seg.begin + n;
            const void *from = fs_bring(
                shards, (const unsigned char *)src + (at - begin) * width, n * width);
            store_part(shards, array, &part.seg, from, src_dtype);
        }
    }
    fs_brought(shards);
    if (array == FS_GRAD && shards->streams != NULL) {
        fs_mark_set(shards, FS_STREAM_COMPUTE, shards->streams->sums);
    }
    return FS_OK;
}

// ---- load ---------------------------------------------------------------------------------------

/* Puts n elements of seg, as rank has them, into `to` in stream order of exec. */
static void
load_part(const fs_shards *shards, const fs_exec *exec, int rank, fs_array array,
          const fs_seg *seg, void *to, fs_dtype dst_dtype)
{
    fs_dtype dtype = FS_F32;
    size_t n = seg->end - seg->begin;
    if (array == FS_MASTER && is_split(shards, seg)) {
        const void *half = fs_own_at(shards, rank, seg);
        exec->device->join(exec, to, dst_dtype, half,
                           shards->blocks[rank].remainder + fs_state_at(shards, seg), n);
        return;
    }
    const unsigned char *src = state_array(shards, rank, array, seg, &dtype);
    exec->device->convert(exec, to, dst_dtype, src, dtype, n);
}

/* Is every cut of this array in this rank's memory, on every rank alike? */
static bool
has_all(const fs_shards *shards, int param, fs_array array)
{
    const fs_policy *policy = &shards->policy;
    if (shards->streams == NULL || policy->keep == shards->size) {
        return true;
    }
    bool weight = array == FS_WEIGHT || (array == FS_MASTER && (policy->precision.master == 0 ||
                                         !shards->layout->params[param].trainable));
    return weight && policy->weights == FS_WEIGHTS_WHOLE;
}

/* On a device: a part that lies here, through pinned memory. */
static fs_status
fetch_part(fs_shards *shards, fs_array array, fs_seg seg, unsigned char *to, fs_dtype dst_dtype)
{
    fs_streams *streams = shards->streams;
    size_t width = fs_dtype_nbytes(dst_dtype), end = seg.end, n;
    fs_mark_after(shards, FS_STREAM_COMPUTE, streams->published);
    for (; seg.begin < end; seg.begin += n, seg.at_n += n, seg.own_n += n, to += n * width) {
        n = fs_bring_n(shards, end - seg.begin);
        seg.end = seg.begin + n;
        load_part(shards, shards->exec, shards->rank, array, &seg, streams->landing, dst_dtype);
        FS_TRY(fs_mark_wait(shards, FS_STREAM_COMPUTE, 0));
        memcpy(to, streams->landing, n * width);
        seg.pos_n += seg.pos_n == FS_FROZEN ? 0 : n;
    }
    return FS_OK;
}

/* On a device: a range that lies on several ranks, each part from the rank that speaks for it. */
static fs_status
fetch_from_all(fs_shards *shards, int param, fs_array array, size_t begin, size_t end,
               unsigned char *dst, fs_dtype dst_dtype)
{
    fs_streams *streams = shards->streams;
    const fs_exec *exec = fs_exec_on(shards, FS_STREAM_GATHER);
    const fs_what what = {.op = FS_OP_LOAD, .dtype = (int32_t)dst_dtype, .root = (int32_t)array,
                          .nbytes = end - begin, .tag = (uint64_t)param << 40 ^ begin};
    size_t width = fs_dtype_nbytes(dst_dtype), n;
    FS_TRY(fs_meet(shards->world, &what, NULL, NULL, 0));
    fs_mark_after(shards, FS_STREAM_GATHER, streams->weights);
    fs_mark_after(shards, FS_STREAM_GATHER, streams->brought);
    for (size_t at = begin; at < end; at += n) {
        n = fs_bring_n(shards, end - at);
        for (int c = 0; c < shards->size; c++) {
            overlap part;
            if (!find_overlap(shards->layout, param, c, at, at + n, &part)) {
                continue;
            }
            unsigned char *to = streams->transfer + part.skip * width;
            size_t part_n = part.seg.end - part.seg.begin;
            if (c == shards->rank) {
                load_part(shards, exec, c, array, &part.seg, to, dst_dtype);
            }
            fs_engine_piece piece = {
                .root = c, .src = to, .dst = to, .nbytes = part_n * width};
            FS_TRY(fs_streams_end(shards, streams->runtime->engine->gather(streams->gathers, exec,
                                                                           &piece, 1)));
        }
        streams->runtime->copy(exec, streams->landing, streams->transfer, n * width);
        FS_TRY(fs_mark_wait(shards, FS_STREAM_GATHER, 0));
        memcpy(dst + (at - begin) * width, streams->landing, n * width);
    }
    return FS_OK;
}

static fs_status
check_load(const fs_shards *shards, int param, fs_array array, size_t begin, size_t end)
{
    FS_TRY(fs_shards_whole(shards));
    FS_TRY(check_range(shards, param, array, begin, end));
    if (shards->streams != NULL && array == FS_GRAD && shards->rounds > 0 && !shards->settled &&
        !shards->agreed) {
        return FS_FAIL(FS_ESTATE, "rank %d: the gradient of %s is still summed: settle the step "
                                  "(grad_norm()) first",
                       shards->rank, shards->layout->params[param].name);
    }
    return FS_OK;
}

/* Reads the parts that lie in cuts [first, end_cut). A cut is read here when it is kept here, or
 * from the rank that speaks for it. */
static fs_status
load_cuts(fs_shards *shards, int param, fs_array array, size_t begin, size_t end, int first,
          int end_cut, void *dst, fs_dtype dst_dtype)
{
    size_t width = fs_dtype_nbytes(dst_dtype);
    for (int c = first; c < end_cut; c++) {
        overlap part;
        if (!find_overlap(shards->layout, param, c, begin, end, &part)) {
            continue;
        }
        unsigned char *to = (unsigned char *)dst + part.skip * width;
        if (shards->streams != NULL) {
            FS_TRY(fetch_part(shards, array, part.seg, to, dst_dtype));
            continue;
        }
        int from = fs_keeps(shards, c) ? shards->rank : c;
        load_part(shards, shards->exec, from, array, &part.seg, to, dst_dtype);
    }
    return FS_OK;
}

fs_status
fs_load(fs_shards *shards, int param, fs_array array, size_t begin, size_t end, void *dst,
        fs_dtype dst_dtype)
{
    FS_TRY(check_load(shards, param, array, begin, end));
    if (array == FS_GRAD && !shards->had[param]) {
        memset(dst, 0, (end - begin) * fs_dtype_nbytes(dst_dtype));
        return FS_OK;
    }
    if (!has_all(shards, param, array)) {
        return fetch_from_all(shards, param, array, begin, end, dst, dst_dtype);
    }
    return load_cuts(shards, param, array, begin, end, 0, shards->size, dst, dst_dtype);
}

fs_status
fs_load_kept(fs_shards *shards, int param, fs_array array, size_t begin, size_t end, void *dst,
             fs_dtype dst_dtype)
{
    FS_TRY(check_load(shards, param, array, begin, end));
    size_t n = 0;
    int first = shards->keep_first, end_cut = first + shards->policy.keep;
    for (int c = first; c < end_cut; c++) {
        overlap part;
        if (find_overlap(shards->layout, param, c, begin, end, &part)) {
            n += part.seg.end - part.seg.begin;
        }
    }
    if (n != end - begin) {
        return FS_FAIL(FS_EINVAL, "rank %d keeps %zu of elements [%zu, %zu) of %s: the rest lies "
                                  "with other ranks",
                       shards->rank, n, begin, end, shards->layout->params[param].name);
    }
    if (array == FS_GRAD && !shards->had[param]) {
        memset(dst, 0, n * fs_dtype_nbytes(dst_dtype));
        return FS_OK;
    }
    return load_cuts(shards, param, array, begin, end, first, end_cut, dst, dst_dtype);
}
