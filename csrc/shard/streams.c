/* Streams, marks and engines of shards on a device: how they begin, order each other, and end. */
#include "streams.h"

#include <string.h>

#include "../base/checked.h"
#include "shards_internal.h"

// ---- marks --------------------------------------------------------------------------------------

const fs_exec *
fs_exec_on(const fs_shards *shards, fs_stream_id stream)
{
    return shards->streams == NULL ? shards->exec : &shards->streams->exec[stream];
}

static void
join_clock(uint64_t *clock, const uint64_t *other)
{
    for (int s = 0; s < FS_STREAMS_N; s++) {
        clock[s] = other[s] > clock[s] ? other[s] : clock[s];
    }
}

void
fs_mark_set(fs_shards *shards, fs_stream_id stream, fs_mark *mark)
{
    fs_streams *streams = shards->streams;
    if (streams == NULL) {
        return;
    }
    streams->runtime->record(&streams->exec[stream], mark->event);
    streams->clock[stream][stream]++;
    memcpy(mark->clock, streams->clock[stream], sizeof mark->clock);
    mark->stream = stream;
}

void
fs_mark_after(fs_shards *shards, fs_stream_id stream, const fs_mark *mark)
{
    fs_streams *streams = shards->streams;
    if (streams == NULL ||
        mark->clock[mark->stream] <= streams->clock[stream][mark->stream]) {
        return; /* never set, or implied by what the stream waits for already */
    }
    streams->runtime->after(&streams->exec[stream], mark->event);
    join_clock(streams->clock[stream], mark->clock);
}

fs_status
fs_mark_await(fs_shards *shards, fs_mark *mark, unsigned flags)
{
    fs_streams *streams = shards->streams;
    if (mark->clock[mark->stream] == 0) {
        return FS_OK;
    }
    FS_TRY(fs_world_await(shards->world, mark->event, flags));
    for (int s = 0; s < FS_STREAMS_N; s++) { /* the host gives nothing before it has seen this */
        join_clock(streams->clock[s], mark->clock);
    }
    return fs_streams_check(shards);
}

fs_status
fs_mark_wait(fs_shards *shards, fs_stream_id stream, unsigned flags)
{
    if (shards->streams == NULL) {
        return FS_OK;
    }
    fs_mark_set(shards, stream, shards->streams->awaited);
    return fs_mark_await(shards, shards->streams->awaited, flags);
}

// ---- failures -----------------------------------------------------------------------------------

void
fs_streams_abort(void *ctx)
{
    fs_shards *shards = ctx;
    fs_streams *streams = shards->streams;
    if (streams == NULL || atomic_exchange(&streams->aborted, true)) {
        return;
    }
    fs_engine *engines[] = {streams->gathers, streams->reduces};
    for (int i = 0; i < 2; i++) {
        if (engines[i] != NULL) {
            streams->runtime->engine->abort(engines[i]);
        }
    }
}

fs_status
fs_streams_end(fs_shards *shards, fs_status status)
{
    return status == FS_OK ? FS_OK : fs_world_fail(shards->world, FS_CAUSE_ERROR, status);
}

fs_status
fs_streams_check(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    if (streams == NULL) {
        return FS_OK;
    }
    FS_TRY(fs_world_usable(shards->world)); /* then what an aborted engine says is no news */
    fs_status st = streams->runtime->check(shards->exec->context);
    if (st == FS_OK && streams->gathers != NULL) {
        st = streams->runtime->engine->check(streams->gathers);
    }
    if (st == FS_OK && streams->reduces != NULL) {
        st = streams->runtime->engine->check(streams->reduces);
    }
    return fs_streams_end(shards, st);
}

// ---- open ---------------------------------------------------------------------------------------

fs_status
fs_streams_take(fs_shards *shards, const char *what, size_t nbytes, void **out)
{
    return shards->streams->runtime->memory_open(shards->exec->context, what, nbytes, out);
}

/* A number of events of its own for each slot and buffer. */
static fs_status
open_marks(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    fs_mark **single[] = {
        &streams->handed,    &streams->weights, &streams->sums,
        &streams->brought,   &streams->published, &streams->awaited,
        &streams->offload.ready[0], &streams->offload.ready[1],
    };
    size_t single_n = sizeof single / sizeof single[0];
    size_t slots_n = (size_t)shards->layout->slots_n, pool_n = (size_t)shards->pool_n;
    FS_TRY(fs_calloc(single_n + slots_n + 2 * pool_n, sizeof *streams->marks, &streams->marks));
    streams->marks_n = single_n + slots_n + 2 * pool_n;
    fs_mark *next = streams->marks;
    for (size_t i = 0; i < single_n; i++) {
        *single[i] = next++;
    }
    streams->slots = next;
    next += slots_n;
    for (size_t b = 0; b < pool_n; b++) {
        shards->pool[b].filled = next++;
        shards->pool[b].read = next++;
    }
    for (size_t i = 0; i < streams->marks_n; i++) {
        FS_TRY(streams->runtime->event_open(shards->exec->context, &streams->marks[i].event));
    }
    return FS_OK;
}

static fs_status
open_lists(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    const fs_extents extents = fs_extents_of(shards->layout);
    size_t peers_n = (size_t)shards->size - 1;
    size_t pieces_n = fs_max_size(extents.unit_runs, (size_t)shards->size); /* a ring's: all cuts */
    FS_TRY(fs_calloc(pieces_n, sizeof *streams->pieces, &streams->pieces));
    FS_TRY(fs_calloc(extents.runs * peers_n, sizeof *streams->sends, &streams->sends));
    FS_TRY(fs_calloc(extents.runs * peers_n, sizeof *streams->receives, &streams->receives));
    size_t scratch = fs_shards_scratch_nbytes(shards->layout);
    FS_TRY(fs_world_reserve(shards->world, FS_STREAM_COMPUTE, scratch));
    return fs_world_reserve(shards->world, FS_STREAM_REDUCE, scratch);
}

static fs_status
open_pinned(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    fs_arena counting;
    fs_arena_init_counting(&counting, NULL, FS_HOME_PRIVATE);
    FS_TRY(fs_place_pinned(shards->layout, &shards->policy, shards->rank, &counting, streams));
    FS_TRY(streams->runtime->pinned_open(shards->exec->context, counting.used, &streams->pinned));
    fs_arena_init_over(&streams->pinned_arena, fs_world_ledger(shards->world), FS_HOME_PRIVATE,
                       streams->pinned, counting.used);
    return fs_place_pinned(shards->layout, &shards->policy, shards->rank, &streams->pinned_arena,
                           streams);
}

/* What is sent where there is no gradient: -0.0 added to anything leaves its bits. */
static void
fill_absent(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    const fs_exec *exec = fs_exec_on(shards, FS_STREAM_REDUCE);
    uint16_t pattern[256];
    size_t have = fs_min_size(sizeof pattern, streams->absent_nbytes);
    bool wide = fs_dtype_nbytes(shards->policy.precision.reduce) == sizeof(float);
    for (size_t i = 0; i < sizeof pattern / sizeof pattern[0]; i++) {
        uint16_t high = 0x8000; /* little-endian: the sign is the last bit of an element */
        pattern[i] = !wide || i % 2 == 1 ? high : 0;
    }
    streams->runtime->copy(exec, streams->absent, pattern, have);
    while (have < streams->absent_nbytes) {
        size_t more = fs_min_size(have, streams->absent_nbytes - have);
        exec->device->copy(exec, streams->absent + have, streams->absent, more);
        have += more;
    }
}

/* The CPU's table, for a state that lives on the host. */
static fs_status
open_host(fs_shards *shards)
{
    fs_exec *host = &shards->streams->offload.host;
    if (!shards->policy.on_host.state) {
        return FS_OK;
    }
    FS_TRY(fs_device_choose(&host->device));
    host->pool = shards->exec->pool;
    return FS_OK;
}

fs_status
fs_streams_open(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    FS_TRY(open_marks(shards));
    FS_TRY(open_pinned(shards));
    FS_TRY(open_lists(shards));
    FS_TRY(open_host(shards));
    if (streams->absent_nbytes > 0) {
        fill_absent(shards);
    }
    fs_ring_reset(shards);
    fs_talk *talk = shards->blocks[shards->rank].talk;
    if (shards->rank == 0 && shards->size > 1) {
        FS_TRY(streams->runtime->engine->make_id(&talk->ids[0]));
        FS_TRY(streams->runtime->engine->make_id(&talk->ids[1]));
    }
    return FS_OK;
}

/* Asked while an engine waits for peers: what ends a wait of ours ends that one. */
static fs_status
look_around(void *ctx)
{
    fs_shards *shards = ctx;
    return fs_world_look(shards->world, &shards->streams->looks);
}

fs_status
fs_streams_connect(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    if (streams == NULL || shards->size == 1) {
        return FS_OK;
    }
    const fs_talk *talk = shards->blocks[0].talk;
    static const char *const names[] = {"gather", "reduce"};
    fs_engine **engines[] = {&streams->gathers, &streams->reduces};
    for (int i = 0; i < 2; i++) {
        fs_engine_open open = {.id = talk->ids[i], .rank = shards->rank, .size = shards->size,
                               .name = names[i], .patience = look_around, .patience_ctx = shards};
        fs_status st =
            streams->runtime->engine->open(shards->exec->context, &open, engines[i]);
        /* The others may wait for this rank inside the engine, where they meet nobody. */
        FS_TRY(fs_streams_end(shards, st));
    }
    return FS_OK;
}

// ---- close --------------------------------------------------------------------------------------

void
fs_streams_close_moments(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    if (!shards->policy.on_host.state) {
        streams->runtime->memory_close(shards->exec->context, streams->moments_memory,
                                       streams->moments_nbytes);
    } else if (streams->moments_memory != NULL) {
        streams->runtime->pinned_close(shards->exec->context, streams->moments_memory);
    }
}

void
fs_streams_close(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    if (streams == NULL) {
        return;
    }
    const fs_runtime *runtime = streams->runtime;
    fs_context *context = shards->exec->context;
    if (fs_world_usable(shards->world) != FS_OK) {
        fs_streams_abort(shards);
    }
    if (runtime->engine != NULL) {
        runtime->engine->close(streams->gathers);
        runtime->engine->close(streams->reduces);
    }
    fs_grad_close_spills(shards, true); /* waits for the device, so after the engines' end */
    runtime->memory_close(context, streams->memory, streams->memory_nbytes);
    fs_streams_close_moments(shards);
    fs_arena_close(&streams->pinned_arena);
    if (streams->pinned != NULL) {
        runtime->pinned_close(context, streams->pinned);
    }
    if (streams->on_host != NULL) {
        runtime->pinned_close(context, streams->on_host);
    }
    for (size_t i = 0; i < streams->marks_n; i++) {
        if (streams->marks[i].event != NULL) {
            runtime->event_close(context, streams->marks[i].event);
        }
    }
    fs_free(streams->marks);
    fs_free(streams->pieces);
    fs_free(streams->sends);
    fs_free(streams->receives);
    fs_free(streams);
    shards->streams = NULL;
}
