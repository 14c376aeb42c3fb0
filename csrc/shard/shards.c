/* Opening and closing shards. */
#include "shards_internal.h"

#include "../base/checked.h"

// ---- open ---------------------------------------------------------------------------------------

/* Bytes of the largest block of any rank: the stride of the region. moments_n < 0: of the words,
 * and on the CPU of the arrays behind them. */
static fs_status
largest_block(const fs_layout *layout, const fs_policy *policy, int moments_n, bool device,
              size_t *out)
{
    *out = 0;
    for (int r = 0; r < layout->size; r++) {
        fs_arena counting;
        fs_block block = {0};
        fs_arena_init_counting(&counting, NULL, FS_HOME_WORLD);
        if (moments_n >= 0) {
            FS_TRY(fs_place_moments(layout, policy, moments_n, r, &counting, &block));
        } else {
            FS_TRY(fs_place_words(layout, device, &counting, &block));
            if (!device) {
                FS_TRY(fs_place_block(layout, policy, r, &counting, &counting, &block));
            }
        }
        *out = fs_max_size(*out, counting.used);
    }
    return FS_OK;
}

/* A device's arrays, in memory of its own. */
static fs_status
open_device_memory(fs_shards *shards)
{
    const fs_layout *layout = shards->layout;
    const fs_policy *policy = &shards->policy;
    fs_streams *streams = shards->streams;
    fs_arena *arena = &shards->arrays_arena, *host = &shards->host_arena;
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 0) {
            fs_arena_init_counting(arena, NULL, FS_HOME_DEVICE);
            fs_arena_init_counting(host, NULL, FS_HOME_PRIVATE);
        } else {
            size_t host_nbytes = host->used;
            FS_TRY(streams->runtime->pinned_open(shards->exec->context, host_nbytes,
                                                 &streams->on_host));
            fs_arena_init_over(host, fs_world_ledger(shards->world), FS_HOME_PRIVATE,
                               streams->on_host, host_nbytes);
            streams->memory_nbytes = arena->used;
            FS_TRY(fs_streams_take(shards, "shards", arena->used, &streams->memory));
            fs_arena_init_over(arena, fs_world_ledger(shards->world), FS_HOME_DEVICE,
                               streams->memory, streams->memory_nbytes);
        }
        FS_TRY(fs_place_block(layout, policy, shards->rank, arena, host,
                              &shards->blocks[shards->rank]));
        FS_TRY(fs_place_pool(layout, policy, arena, shards->pool));
        FS_TRY(fs_place_staging(layout, policy, arena, streams));
    }
    return fs_streams_open(shards);
}

static fs_status
open_memory(fs_shards *shards)
{
    const fs_layout *layout = shards->layout;
    const fs_policy *policy = &shards->policy;
    fs_ledger *ledger = fs_world_ledger(shards->world);
    bool device = shards->streams != NULL;
    size_t stride;
    FS_TRY(fs_place_image(layout, policy, &stride));
    if (policy->weights == FS_WEIGHTS_SHARED) {
        FS_TRY(fs_region_open(shards->world, "shared weights", stride, &shards->image_region));
        fs_arena_init_over(&shards->image_arena, ledger, FS_HOME_WORLD,
                           fs_region_block(shards->image_region, shards->rank),
                           fs_region_stride(shards->image_region));
        void *mine;
        FS_TRY(fs_arena_take(&shards->image_arena, FS_MEM_WEIGHTS, stride, &mine));
        shards->image = fs_region_block(shards->image_region, 0);
    }
    FS_TRY(largest_block(layout, policy, -1, device, &stride));
    FS_TRY(fs_region_open(shards->world, "shards", stride, &shards->block_region));
    for (int r = 0; r < shards->size; r++) {
        fs_arena peer;
        fs_arena *arena = r == shards->rank ? &shards->block_arena : &peer;
        fs_arena_init_over(arena, r == shards->rank ? ledger : NULL, FS_HOME_WORLD,
                           fs_region_block(shards->block_region, r),
                           fs_region_stride(shards->block_region));
        FS_TRY(fs_place_words(layout, device, arena, &shards->blocks[r]));
        if (!device) {
            FS_TRY(fs_place_block(layout, policy, r, arena, arena, &shards->blocks[r]));
        }
    }
    if (device) {
        return open_device_memory(shards);
    }
    fs_arena counting;
    fs_arena_init_counting(&counting, NULL, FS_HOME_PRIVATE);
    FS_TRY(fs_place_pool(layout, policy, &counting, NULL));
    FS_TRY(fs_arena_open(&shards->pool_arena, ledger, counting.used));
    if (counting.used > 0) {
        FS_TRY(fs_place_pool(layout, policy, &shards->pool_arena, shards->pool));
    }
    return FS_OK;
}

static fs_status
open_lists(fs_shards *shards)
{
    const fs_layout *layout = shards->layout;
    const fs_runtime *runtime = shards->exec->device->runtime;
    if (runtime != NULL) {
        FS_TRY(fs_calloc(1, sizeof *shards->streams, &shards->streams));
        shards->streams->runtime = runtime;
        for (int s = 0; s < FS_STREAMS_N; s++) {
            shards->streams->exec[s] = *shards->exec;
            shards->streams->exec[s].stream = (fs_stream_id)s;
        }
    }
    FS_TRY(fs_calloc((size_t)shards->size, sizeof *shards->blocks, &shards->blocks));
    FS_TRY(fs_calloc((size_t)layout->units_n, sizeof *shards->units, &shards->units));
    shards->pool_n = fs_place_pool_units(layout, &shards->policy, shards->units, NULL);
    FS_TRY(fs_calloc((size_t)shards->pool_n, sizeof *shards->pool, &shards->pool));
    FS_TRY(fs_calloc((size_t)layout->slots_n, sizeof *shards->slot_at, &shards->slot_at));
    FS_TRY(fs_calloc((size_t)layout->slots_n, sizeof *shards->slot_tenant, &shards->slot_tenant));
    size_t slots_nbytes;
    FS_TRY(fs_place_slots(layout, &shards->policy, shards->slot_at, &slots_nbytes));
    FS_TRY(fs_calloc((size_t)shards->size, sizeof *shards->fins, &shards->fins));
    FS_TRY(fs_calloc((size_t)shards->size, sizeof *shards->sources, &shards->sources));
    FS_TRY(fs_calloc((size_t)layout->params_n, 1, &shards->frozen));
    FS_TRY(fs_calloc((size_t)layout->params_n, 1, &shards->had));
    FS_TRY(fs_calloc((size_t)layout->params_n, sizeof *shards->hyper, &shards->hyper));
    FS_TRY(fs_calloc(layout->segs_n, sizeof *shards->sumsq, &shards->sumsq));
    FS_TRY(fs_calloc(layout->segs_n, sizeof *shards->absmax, &shards->absmax));
    FS_TRY(fs_calloc((size_t)layout->params_n, sizeof *shards->factor, &shards->factor));
    for (int p = 0; p < layout->params_n; p++) {
        shards->factor[p] = 1.0;
    }
    for (int u = 0; u < layout->units_n; u++) {
        shards->units[u].pool = -1;
        shards->units[u].log_unit = fs_log_unit(shards->world, layout->units[u].name);
    }
    return FS_OK;
}

/* Everything about the policy that must be equal on all ranks, as one number. */
static uint64_t
hash_policy(const fs_policy *policy, bool device)
{
    const fs_precision *p = &policy->precision;
    uint64_t hash = (uint64_t)policy->keep;
    const uint64_t parts[] = {policy->slot_per_unit,
                              (uint64_t)policy->weights,
                              (uint64_t)policy->pool_units,
                              (uint64_t)p->param,
                              (uint64_t)p->reduce,
                              (uint64_t)p->accumulate,
                              (uint64_t)p->master,
                              (uint64_t)p->moments,
                              p->stochastic,
                              p->seed,
                              device,
                              policy->on_host.params,
                              policy->on_host.grads,
                              policy->on_host.state,
                              policy->ring};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        hash = hash * UINT64_C(0x100000001b3) + parts[i];
    }
    return hash;
}

/* A fence at which one rank's failure becomes everybody's: without it the others would wait for a
 * rank that has gone back to its caller. The failing rank keeps its own message; it may have no
 * room for the records of the others. */
static fs_status
agree_on(fs_world *world, const fs_what *what, fs_status mine, fs_payload *records)
{
    fs_payload payload = {.u = {(uint64_t)mine}};
    fs_kept kept;
    fs_status_keep(mine, &kept);
    fs_status met = fs_meet(world, what, &payload, records, 0);
    if (mine != FS_OK) {
        return fs_status_tell(&kept, "");
    }
    FS_TRY(met);
    for (int r = 0; r < fs_world_size(world); r++) {
        if (records[r].u[0] != FS_OK) {
            return FS_FAIL((fs_status)records[r].u[0], "rank %d could not open its shards", r);
        }
    }
    return FS_OK;
}

static void
set_identity(fs_shards *shards, fs_world *world, const fs_policy *policy, fs_payload *records)
{
    fs_world_retain(world);
    shards->world = world;
    shards->exec = fs_world_exec(world);
    shards->rank = fs_world_rank(world);
    shards->size = fs_world_size(world);
    shards->policy = *policy;
    shards->records = records;
    shards->keep_first = shards->rank - shards->rank % policy->keep;
    shards->weights_epoch = 1;
    shards->bad_param = shards->bad_rank = -1;
}

fs_status
fs_shards_open(fs_world *world, fs_layout *layout, const fs_policy *policy, fs_shards **out)
{
    fs_shards *shards = NULL;
    fs_payload *records = NULL;
    bool device = fs_world_exec(world)->device->runtime != NULL;
    const fs_what what = {.op = FS_OP_OPEN, .dtype = (int32_t)policy->precision.param, .root = -1,
                          .nbytes = hash_policy(policy, device), .tag = layout->hash};
    fs_status st = fs_policy_check(policy, layout->size, device);
    if (st == FS_OK && layout->size != fs_world_size(world)) {
        st = FS_FAIL(FS_EINVAL, "a layout of %d cuts in a world of %d", layout->size,
                     fs_world_size(world));
    }
    if (st == FS_OK) {
        st = fs_calloc(1, sizeof *shards, &shards);
    }
    if (st == FS_OK) {
        st = fs_calloc((size_t)layout->size, sizeof *records, &records);
    }
    FS_TRY_GOTO(agree_on(world, &what, st, records), st, fail);
    set_identity(shards, world, policy, records);
    shards->layout = layout;
    layout = NULL;
    records = NULL;
    FS_TRY_GOTO(agree_on(world, &what, open_lists(shards), shards->records), st, fail);
    st = open_memory(shards);
    if (st == FS_OK) {
        atomic_store_explicit(&shards->blocks[shards->rank].counters->fin, UINT64_MAX,
                              memory_order_release);
        st = fs_world_add_idle(world, fs_drain, shards);
    }
    if (st == FS_OK && device) {
        st = fs_world_add_over(world, fs_streams_abort, shards);
    }
    /* Also the fence before which nobody may read a peer's counters. */
    FS_TRY_GOTO(agree_on(world, &what, st, shards->records), st, fail);
    FS_TRY_GOTO(fs_streams_connect(shards), st, fail);
    *out = shards;
    return FS_OK;
fail:
    if (layout != NULL) { /* not handed over yet: shards hold nothing */
        fs_layout_free(layout);
        fs_free(records);
        fs_free(shards);
        return st;
    }
    fs_shards_close(shards);
    return st;
}

static fs_status
open_device_moments(fs_shards *shards, int moments_n)
{
    fs_streams *streams = shards->streams;
    fs_arena *arena = &shards->moments_arena;
    fs_block *block = &shards->blocks[shards->rank];
    bool on_host = shards->policy.on_host.state;
    fs_home home = on_host ? FS_HOME_PRIVATE : FS_HOME_DEVICE;
    fs_arena_init_counting(arena, NULL, home);
    FS_TRY(fs_place_moments(shards->layout, &shards->policy, moments_n, shards->rank, arena,
                            block));
    size_t nbytes = arena->used;
    if (on_host) {
        FS_TRY(streams->runtime->pinned_open(shards->exec->context, nbytes,
                                             &streams->moments_memory));
    } else {
        FS_TRY(fs_streams_take(shards, "moments", nbytes, &streams->moments_memory));
    }
    streams->moments_nbytes = nbytes;
    if (nbytes == 0) {
        return FS_OK;
    }
    fs_arena_init_over(arena, fs_world_ledger(shards->world), home, streams->moments_memory,
                       nbytes);
    return fs_place_moments(shards->layout, &shards->policy, moments_n, shards->rank, arena,
                            block);
}

static void
close_device_moments(fs_shards *shards)
{
    fs_streams *streams = shards->streams;
    fs_arena_close(&shards->moments_arena);
    fs_streams_close_moments(shards);
    streams->moments_memory = NULL;
    streams->moments_nbytes = 0;
}

fs_status
fs_shards_open_moments(fs_shards *shards, int moments_n)
{
    FS_TRY(fs_shards_ready(shards));
    if (moments_n < 0 || moments_n > FS_MOMENTS_MAX) {
        return FS_FAIL(FS_EINVAL, "an optimizer with %d moments", moments_n);
    }
    if (shards->moments_open) {
        if (moments_n == shards->moments_n) {
            return FS_OK;
        }
        return FS_FAIL(FS_ESTATE,
                       "these shards already have an optimizer with %d moments; close them first",
                       shards->moments_n);
    }
    if (shards->streams != NULL) {
        const fs_what what = {
            .op = FS_OP_OPEN, .dtype = -1, .root = -1, .nbytes = (uint64_t)moments_n};
        fs_status st = open_device_moments(shards, moments_n);
        st = agree_on(shards->world, &what, st, shards->records);
        if (st != FS_OK) {
            close_device_moments(shards);
            return st;
        }
        shards->moments_n = moments_n;
        shards->moments_open = true;
        return FS_OK;
    }
    size_t stride;
    FS_TRY(largest_block(shards->layout, &shards->policy, moments_n, false, &stride));
    FS_TRY(fs_region_open(shards->world, "moments", stride, &shards->moments_region));
    for (int r = 0; r < shards->size; r++) {
        fs_arena peer;
        bool mine = r == shards->rank;
        fs_arena *arena = mine ? &shards->moments_arena : &peer;
        fs_arena_init_over(arena, mine ? fs_world_ledger(shards->world) : NULL, FS_HOME_WORLD,
                           fs_region_block(shards->moments_region, r),
                           fs_region_stride(shards->moments_region));
        FS_TRY(fs_place_moments(shards->layout, &shards->policy, moments_n, r, arena,
                                &shards->blocks[r]));
    }
    shards->moments_n = moments_n;
    shards->moments_open = true;
    return FS_OK;
}

int
fs_shards_moments_n(const fs_shards *shards)
{
    return shards->moments_n;
}

void
fs_shards_close(fs_shards *shards)
{
    if (shards == NULL) {
        return;
    }
    fs_world_remove_idle(shards->world, fs_drain, shards);
    fs_world_remove_over(shards->world, fs_streams_abort, shards);
    fs_streams_close(shards);
    fs_grad_close_spills(shards, true);
    fs_arena_close(&shards->image_arena);
    fs_arena_close(&shards->block_arena);
    fs_arena_close(&shards->moments_arena);
    fs_arena_close(&shards->pool_arena);
    fs_arena_close(&shards->arrays_arena);
    fs_arena_close(&shards->host_arena);
    fs_region_close(shards->image_region);
    fs_region_close(shards->block_region);
    fs_region_close(shards->moments_region);
    fs_free(shards->blocks);
    fs_free(shards->units);
    fs_free(shards->pool);
    fs_free(shards->slot_at);
    fs_free(shards->slot_tenant);
    fs_free(shards->sources);
    fs_free(shards->records);
    fs_free(shards->fins);
    fs_free(shards->frozen);
    fs_free(shards->had);
    fs_free(shards->hyper);
    fs_free(shards->sumsq);
    fs_free(shards->absmax);
    fs_free(shards->factor);
    fs_layout_free(shards->layout);
    fs_world_release(shards->world);
    fs_free(shards);
}

// ---- small answers ------------------------------------------------------------------------------

const fs_layout *
fs_shards_layout(const fs_shards *shards)
{
    return shards->layout;
}

const fs_policy *
fs_shards_policy(const fs_shards *shards)
{
    return &shards->policy;
}

fs_world *
fs_shards_world(const fs_shards *shards)
{
    return shards->world;
}

fs_status
fs_shards_whole(const fs_shards *shards)
{
    if (shards->in_step) {
        return FS_FAIL(FS_ESTATE,
                       "a step was begun and did not finish: some ranks' weights moved and others' "
                       "did not; load the last checkpoint");
    }
    return FS_OK;
}

fs_status
fs_shards_ready(const fs_shards *shards)
{
    FS_TRY(fs_world_usable(shards->world));
    return fs_shards_whole(shards);
}
