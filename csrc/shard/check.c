/* Checksums of the copies that this rank holds, so that ranks can compare what must be equal. */
#include "shards_internal.h"

#include "../base/checked.h"
#include "../base/crc32c.h"

/* Elements of a master that are rounded at once, on the stack. */
#define TILE_N 4096

typedef struct check {
    fs_shards *shards;
    uint64_t *out;
    fs_status status; /* of a device */
} check;

static void
put(check *c, const fs_seg *seg, fs_copy kind, uint32_t crc)
{
    size_t at = (size_t)(seg - c->shards->layout->segs);
    c->out[(size_t)kind * c->shards->layout->segs_n + at] = FS_COPY_HELD | crc;
}

/* Is there a compute copy of cut here that no other rank holds? Of shared weights there is one, and
 * the rank that writes it answers for it. */
static bool
holds_weight(const fs_shards *shards, int cut)
{
    switch (shards->policy.weights) {
    case FS_WEIGHTS_SHARED:
        return cut == shards->rank;
    case FS_WEIGHTS_WHOLE:
        return true;
    case FS_WEIGHTS_SHARD:
        break;
    }
    return fs_keeps(shards, cut);
}

/* Of bytes that lie in the device's memory, or here. */
static uint32_t
bytes_crc(check *c, const void *bytes, size_t nbytes)
{
    fs_streams *streams = c->shards->streams;
    if (streams == NULL) {
        return fs_crc32c(0, bytes, nbytes);
    }
    uint32_t crc = 0;
    size_t some;
    for (size_t i = 0; i < nbytes && c->status == FS_OK; i += some) {
        some = fs_min_size(nbytes - i, streams->transfer_n * FS_TRANSFER_WIDTH);
        streams->runtime->copy(c->shards->exec, streams->landing,
                               (const unsigned char *)bytes + i, some);
        c->status = fs_mark_wait(c->shards, FS_STREAM_COMPUTE, 0);
        crc = fs_crc32c(crc, streams->landing, some);
    }
    return crc;
}

/* What the compute copy must be: the master, rounded. */
static uint32_t
rounded_crc(check *c, const float *master, size_t n)
{
    const fs_shards *shards = c->shards;
    fs_streams *streams = shards->streams;
    fs_dtype dtype = shards->policy.precision.param;
    if (streams != NULL) {
        uint32_t crc = 0;
        size_t some;
        for (size_t i = 0; i < n && c->status == FS_OK; i += some) {
            some = fs_bring_n(shards, n - i);
            shards->exec->device->convert(shards->exec, streams->landing, dtype, master + i,
                                          FS_F32, some);
            c->status = fs_mark_wait(c->shards, FS_STREAM_COMPUTE, 0);
            crc = fs_crc32c(crc, streams->landing, some * sizeof(uint16_t));
        }
        return crc;
    }
    uint16_t tile[TILE_N]; /* what has a master is a 16-bit dtype */
    uint32_t crc = 0;
    for (size_t i = 0; i < n; i += TILE_N) {
        size_t some = n - i < TILE_N ? n - i : TILE_N;
        shards->exec->device->convert(shards->exec, tile, dtype, master + i, FS_F32, some);
        crc = fs_crc32c(crc, tile, some * sizeof tile[0]);
    }
    return crc;
}

static void
check_segment(void *ctx, size_t index)
{
    check *c = ctx;
    const fs_shards *shards = c->shards;
    const fs_seg *seg = &shards->layout->segs[index];
    const fs_block *block = &shards->blocks[shards->rank];
    size_t n = seg->end - seg->begin;
    if (holds_weight(shards, seg->cut)) {
        const void *weight = fs_own_at(shards, shards->rank, seg);
        put(c, seg, FS_COPY_WEIGHT, bytes_crc(c, weight, n * fs_param_nbytes(shards)));
    }
    if (!fs_keeps(shards, seg->cut) || seg->pos_n == FS_FROZEN) {
        return;
    }
    size_t at = fs_state_at(shards, seg);
    if (block->master != NULL) {
        const float *master = block->master + at;
        put(c, seg, FS_COPY_ROUNDED, rounded_crc(c, master, n));
        put(c, seg, FS_COPY_MASTER, bytes_crc(c, master, n * sizeof *master));
    }
    if (block->remainder != NULL) {
        const uint16_t *rest = block->remainder + at;
        put(c, seg, FS_COPY_MASTER, bytes_crc(c, rest, n * sizeof *rest));
    }
    size_t width = fs_dtype_nbytes(shards->policy.precision.moments);
    for (int m = 0; m < shards->moments_n; m++) {
        const void *moment = block->moments[m] + at * width;
        put(c, seg, (fs_copy)(FS_COPY_MOMENT1 + m), bytes_crc(c, moment, n * width));
    }
}

fs_status
fs_shards_checksums(fs_shards *shards, uint64_t *out)
{
    FS_TRY(fs_shards_ready(shards));
    size_t segs_n = shards->layout->segs_n;
    for (size_t i = 0; i < segs_n * FS_COPY_COUNT; i++) {
        out[i] = 0;
    }
    check c = {shards, out, FS_OK};
    if (shards->streams != NULL) {
        fs_mark_after(shards, FS_STREAM_COMPUTE, shards->streams->published);
        for (size_t i = 0; i < segs_n && c.status == FS_OK; i++) {
            check_segment(&c, i);
        }
        return c.status;
    }
    fs_parallel(shards->exec->pool, segs_n, check_segment, &c);
    return FS_OK;
}
