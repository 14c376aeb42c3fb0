/* Weights on their way to whoever computes with them: gather and release, and what follows a write.
 *
 * On a device a gather is put into the queue of the gather stream, which fills a buffer of the pool
 * once its last reader is done, and the compute stream waits for it: the host waits for neither. */
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

/* Brings the cuts of unit into buffer, each from the rank that speaks for it. Where all ranks see
 * all memory, those that are kept here anyway may be left out. */
static fs_status
pull_unit(fs_shards *shards, int unit, unsigned char *buffer, bool but_kept)
{
    fs_streams *streams = shards->streams;
    bool engine = streams != NULL && streams->gathers != NULL;
    const fs_exec *exec = fs_exec_on(shards, FS_STREAM_GATHER);
    size_t nbytes = fs_param_nbytes(shards), n = 0;
    fs_run run;
    for (int c = 0; c < shards->size; c++) {
        if (but_kept && !engine && fs_keeps(shards, c)) {
            continue;
        }
        fs_seg_range s = fs_segs(shards->layout, c, unit);
        while (fs_next_run(shards->layout, &s, &run)) {
            unsigned char *to = buffer + run.first->at_n * nbytes;
            fs_log_add(shards->world, run.n * nbytes);
            if (!engine) {
                exec->device->copy(exec, to, fs_own_at(shards, c, run.first), run.n * nbytes);
                continue;
            }
            const void *from = c == shards->rank ? fs_own_at(shards, c, run.first) : NULL;
            if (from != NULL && shards->policy.on_host.params) {
                /* Engines move what lies in device memory. */
                exec->device->copy(exec, to, from, run.n * nbytes);
                from = to;
            }
            streams->pieces[n++] =
                (fs_engine_piece){.root = c, .src = from, .dst = to, .nbytes = run.n * nbytes};
        }
    }
    if (!engine) {
        return FS_OK;
    }
    return fs_streams_end(
        shards, streams->runtime->engine->gather(streams->gathers, exec, streams->pieces, n));
}

// ---- what ranks say of their gathers ------------------------------------------------------------

/* An engine's gathers are collectives that compare nothing: ranks that bring different units would
 * wait for ever, or mix them up. So each says in world memory what it gathers before it does, and
 * looks at what the others said of the same number: of two that differ the later one sees it. */
#define TALK_UNIT_BITS 24
#define TALK_EXCHANGE_BITS 8
#define TALK_NUMBER_BITS (64 - TALK_UNIT_BITS - TALK_EXCHANGE_BITS)

static uint64_t
low_bits(uint64_t x, int bits)
{
    return x & ((UINT64_C(1) << bits) - 1);
}

/* -1: the rank has not come to it yet. *out_exchanges: how many it began before, the last bits. */
static int
unit_of_gather(const fs_shards *shards, int rank, uint64_t number, uint64_t *out_exchanges)
{
    const fs_talk *talk = shards->blocks[rank].talk;
    uint64_t said = atomic_load(&talk->gathers[number % FS_TALK_GATHERS]);
    *out_exchanges = low_bits(said, TALK_EXCHANGE_BITS);
    said >>= TALK_EXCHANGE_BITS;
    return said >> TALK_UNIT_BITS == low_bits(number + 1, TALK_NUMBER_BITS)
               ? (int)low_bits(said, TALK_UNIT_BITS)
               : -1;
}

/* Is nobody so far behind that what it has still to compare would be overwritten? */
static bool
is_near(void *ctx)
{
    const fs_shards *shards = ctx;
    for (int r = 0; r < shards->size; r++) {
        if (atomic_load(&shards->blocks[r].talk->gathers_n) + FS_TALK_GATHERS <=
            shards->streams->gathers_n) {
            return false;
        }
    }
    return true;
}

static fs_status
say_gather(fs_shards *shards, int unit)
{
    uint64_t number = shards->streams->gathers_n;
    fs_talk *talk = shards->blocks[shards->rank].talk;
    if (!is_near(shards)) {
        FS_TRY(fs_wait(shards->world, is_near, shards, 0));
    }
    uint64_t entry = low_bits(number + 1, TALK_NUMBER_BITS) << TALK_UNIT_BITS | (uint64_t)unit;
    atomic_store(&talk->gathers[number % FS_TALK_GATHERS],
                 entry << TALK_EXCHANGE_BITS | low_bits(shards->red, TALK_EXCHANGE_BITS));
    atomic_store(&talk->gathers_n, number + 1);
    shards->streams->gathers_n = number + 1;
    fs_bell(shards->world);
    for (int r = 0; r < shards->size; r++) {
        uint64_t exchanges;
        int other = unit_of_gather(shards, r, number, &exchanges);
        if (other >= 0 && other != unit) {
            fs_status st = FS_FAIL(
                FS_EINVAL,
                "gather %llu is of unit %s on rank %d and of unit %s on rank %d: all ranks gather "
                "the same units in the same order",
                (unsigned long long)number, shards->layout->units[unit].name, shards->rank,
                shards->layout->units[other].name, r);
            return fs_world_fail(shards->world, FS_CAUSE_MISMATCH, st);
        }
    }
    return FS_OK;
}

// ---- the pool -----------------------------------------------------------------------------------

static bool
is_valid(const fs_shards *shards, const fs_pool_buffer *buffer, int u)
{
    return buffer->unit == u && buffer->epoch == shards->weights_epoch;
}

/* The buffer for unit u, -1: none. What was gathered ahead is given up only if it must be. Nothing
 * that happened before weights moved matters: ranks that only followed then choose alike again. */
static int
choose_buffer(const fs_shards *shards, int u, bool must)
{
    const fs_unit *unit = &shards->units[u];
    int empty = -1, ahead = -1;
    for (int b = unit->pool_first; b < unit->pool_end; b++) {
        const fs_pool_buffer *buffer = &shards->pool[b];
        if (is_valid(shards, buffer, u)) {
            return b;
        }
        if (buffer->unit >= 0 && shards->units[buffer->unit].pool == b) {
            continue;
        }
        if (buffer->ahead && buffer->epoch == shards->weights_epoch) {
            ahead = ahead < 0 ? b : ahead;
        } else {
            empty = empty < 0 ? b : empty;
        }
    }
    return empty >= 0 || !must ? empty : ahead;
}

/* Fills a buffer, on a device in its turn of the gather stream. */
static fs_status
fill_buffer(fs_shards *shards, int u, fs_pool_buffer *buffer)
{
    fs_streams *streams = shards->streams;
    fs_log_begin(shards->world, FS_OP_GATHER, shards->units[u].log_unit, 0);
    fs_status st = streams != NULL && shards->size > 1 ? say_gather(shards, u) : FS_OK;
    if (streams != NULL && st == FS_OK) {
        fs_mark_after(shards, FS_STREAM_GATHER, streams->weights);
        fs_mark_after(shards, FS_STREAM_GATHER, buffer->read);
    }
    st = st == FS_OK ? pull_unit(shards, u, buffer->data, false) : st;
    fs_log_end(shards->world);
    FS_TRY(st);
    if (streams != NULL) {
        fs_mark_set(shards, FS_STREAM_GATHER, buffer->filled);
        streams->gathered = buffer->filled;
    }
    buffer->unit = u;
    buffer->epoch = shards->weights_epoch;
    buffer->ahead = false;
    return FS_OK;
}

static fs_status
gather_into_pool(fs_shards *shards, int u)
{
    if (shards->policy.pool_units == FS_NO_POOL) {
        return FS_FAIL(FS_ESTATE, "rank %d: unit %s: whoever opened these shards gathers by itself",
                       shards->rank, shards->layout->units[u].name);
    }
    int chosen = choose_buffer(shards, u, true);
    if (chosen < 0) {
        return pool_is_full(shards, u);
    }
    fs_pool_buffer *buffer = &shards->pool[chosen];
    remember_gather(shards, u);
    if (!is_valid(shards, buffer, u)) {
        FS_TRY(fill_buffer(shards, u, buffer));
    }
    buffer->ahead = false;
    shards->units[u].pool = chosen;
    if (shards->streams != NULL) {
        fs_mark_after(shards, FS_STREAM_COMPUTE, buffer->filled);
    }
    return FS_OK;
}

fs_status
fs_unit_prefetch(fs_shards *shards, int u)
{
    FS_TRY(fs_shards_ready(shards));
    if (shards->streams == NULL || shards->policy.weights != FS_WEIGHTS_SHARD ||
        shards->policy.pool_units == FS_NO_POOL || shards->units[u].gathers > 0) {
        return FS_OK;
    }
    int chosen = choose_buffer(shards, u, false);
    if (chosen < 0 || is_valid(shards, &shards->pool[chosen], u)) {
        return FS_OK;
    }
    FS_TRY(fill_buffer(shards, u, &shards->pool[chosen]));
    shards->pool[chosen].ahead = true;
    return FS_OK;
}

fs_status
fs_gather_follow(fs_shards *shards, int peer, bool *out_found)
{
    uint64_t exchanges;
    int u = unit_of_gather(shards, peer, shards->streams->gathers_n, &exchanges);
    *out_found = u >= 0 && exchanges == low_bits(shards->red, TALK_EXCHANGE_BITS);
    if (!*out_found) {
        return FS_OK;
    }
    int chosen = choose_buffer(shards, u, true);
    return chosen < 0 ? pool_is_full(shards, u)
                      : fill_buffer(shards, u, &shards->pool[chosen]);
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
        if (shards->streams != NULL) {
            fs_mark_after(shards, FS_STREAM_COMPUTE, shards->streams->published);
        }
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
    if (--unit->gathers == 0 && unit->pool >= 0) {
        fs_mark_set(shards, FS_STREAM_COMPUTE, shards->pool[unit->pool].read);
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
    if (shards->streams != NULL) {
        return NULL;
    }
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
static fs_status
pull_whole(fs_shards *shards)
{
    size_t nbytes = fs_param_nbytes(shards);
    if (shards->policy.keep == shards->size) {
        return FS_OK; /* everyone has written all of it */
    }
    if (shards->streams != NULL) {
        fs_mark_after(shards, FS_STREAM_GATHER, shards->streams->weights);
    }
    for (int u = 0; u < shards->layout->units_n; u++) {
        unsigned char *unit =
            shards->blocks[shards->rank].own + shards->layout->units[u].at_n * nbytes;
        FS_TRY(pull_unit(shards, u, unit, true));
    }
    if (shards->streams != NULL) {
        fs_mark_set(shards, FS_STREAM_GATHER, shards->streams->published);
        shards->streams->gathered = shards->streams->published;
    }
    return FS_OK;
}

/* What is written next must not be read any more: a gather that nobody asked for after all. */
void
fs_gather_let_write(fs_shards *shards)
{
    if (shards->streams != NULL && shards->streams->gathered != NULL) {
        fs_mark_after(shards, FS_STREAM_COMPUTE, shards->streams->gathered);
    }
}

fs_status
fs_publish(fs_shards *shards, fs_op op)
{
    const fs_what what = {.op = op, .dtype = -1, .root = -1};
    if (shards->streams != NULL) {
        fs_mark_set(shards, FS_STREAM_COMPUTE, shards->streams->weights);
    }
    FS_TRY(fs_meet(shards->world, &what, NULL, NULL, FS_NOSIG));
    /* Owners write next after the next write fence, which this rank reaches only after pulling. */
    if (shards->policy.weights == FS_WEIGHTS_WHOLE) {
        fs_log_begin(shards->world, FS_OP_GATHER, 0, 0);
        fs_status st = pull_whole(shards);
        fs_log_end(shards->world);
        FS_TRY(st);
    }
    shards->weights_epoch++;
    return FS_OK;
}
