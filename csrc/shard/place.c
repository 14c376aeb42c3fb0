/* Where everything of a rank lies: functions that only bump arenas, run without memory for the plan
 * and with it by open, and for every peer to find what it has. */
#include "shards_internal.h"

#include <unistd.h>

#include "../base/checked.h"

// ---- policy -------------------------------------------------------------------------------------

fs_status
fs_precision_check(const fs_precision *p)
{
    const fs_dtype all[] = {p->param, p->reduce, p->accumulate, p->moments};
    static const char *const names[] = {"param", "reduce", "accumulate", "moments"};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (all[i] != FS_F32 && all[i] != FS_BF16 && all[i] != FS_F16) {
            return FS_FAIL(FS_EUNSUPPORTED,
                           "precision: %s=%s is not offered; float32, bfloat16 and float16 are",
                           names[i], fs_dtype_name(all[i]));
        }
    }
    if (p->stochastic && (p->param != FS_BF16 || p->master)) {
        return FS_FAIL(FS_EINVAL,
                       "precision: rounding=stochastic with %s: it is for bfloat16 weights that "
                       "the step itself moves",
                       p->master ? "a master" : "a param that is not bfloat16");
    }
    if (p->master == FS_MASTERS_SPLIT && p->param != FS_BF16) {
        return FS_FAIL(FS_EINVAL, "precision: master=split with param=%s: the halves of a split "
                                  "master are a bfloat16 weight and its remainder",
                       fs_dtype_name(p->param));
    }
    if (p->master && p->param == FS_F32) {
        return FS_FAIL(
            FS_EINVAL,
            "precision: master=float32 with param=float32: the weight is its own master");
    }
    return FS_OK;
}

fs_status
fs_policy_check(const fs_policy *policy, int size, bool device)
{
    FS_TRY(fs_precision_check(&policy->precision));
    if (device && policy->weights == FS_WEIGHTS_SHARED) {
        return FS_FAIL(FS_EUNSUPPORTED,
                       "weights that all ranks read in place (gather=\"view\") lie in host memory: "
                       "on a device they are gathered (gather=\"copy\")");
    }
    if (device && policy->on_host.params && policy->weights != FS_WEIGHTS_SHARD) {
        return FS_FAIL(FS_EUNSUPPORTED,
                       "Offload(params=\"cpu\") with weights that are whole in each rank: they are "
                       "read in place and stay on the device; stage 3 gathers them when needed");
    }
    if (!device && policy->ring) {
        return FS_FAIL(FS_EUNSUPPORTED,
                       "reduce_order=\"ring\" is an engine's sum between devices: on the CPU "
                       "gradients are summed in fp32 in rank order (reduce_order=\"rank\")");
    }
    if (policy->keep < 1 || policy->keep > size || size % policy->keep != 0) {
        return FS_FAIL(FS_EINVAL, "replicate=%d does not divide the world size %d", policy->keep,
                       size);
    }
    if (policy->pool_units < FS_NO_POOL) {
        return FS_FAIL(FS_EINVAL, "a pool of %d units", policy->pool_units);
    }
    return FS_OK;
}

// ---- placing ------------------------------------------------------------------------------------

static size_t
present_nbytes(const fs_layout *layout)
{
    return fs_round_up((size_t)layout->unit_params_max, FS_ARENA_ALIGN);
}

unsigned char *
fs_slot_present(const fs_shards *shards, int rank, int slot)
{
    return shards->blocks[rank].present + (size_t)slot * present_nbytes(shards->layout);
}

/* Offsets of the slots in a rank's `slots`, and their total. */
fs_status
fs_place_slots(const fs_layout *layout, const fs_policy *policy, size_t *slot_at,
               size_t *out_nbytes)
{
    size_t total = 0;
    for (int s = 0; s < layout->slots_n; s++) {
        if (slot_at != NULL) {
            slot_at[s] = total;
        }
        size_t nbytes;
        FS_TRY(fs_mul_size(layout->slot_n[s], fs_dtype_nbytes(policy->precision.reduce), &nbytes));
        FS_TRY(fs_add_size(total, fs_round_up(nbytes, FS_ARENA_ALIGN), &total));
    }
    *out_nbytes = total;
    return FS_OK;
}

/* Elements of state and of packed weights that rank keeps. */
static void
kept_sizes(const fs_layout *layout, const fs_policy *policy, int rank, size_t *own_n,
           size_t *state_n)
{
    int first = rank - rank % policy->keep;
    *own_n = *state_n = 0;
    for (int c = first; c < first + policy->keep; c++) {
        *own_n += layout->own_n[c];
        *state_n += layout->state_n[c];
    }
}

/* A step walks along all of a rank's state at once, at one place of each array. Arrays whose
 * distances are multiples of a way of the second-level cache (128 KiB on common processors) would
 * meet in a few of its sets, and throw each other out: an update four times as slow. So each large
 * array begins at a place of its own in a way; the gap before it is charged to its class. */
#define WAY_NBYTES ((size_t)128 << 10)
#define STAGGER_NBYTES ((size_t)16 << 10)
#define STAGGER_FROM_NBYTES ((size_t)16 << 20)
enum { PLACE_ACC, PLACE_MASTER, PLACE_MOMENTS };

static fs_status
take_staggered(fs_arena *arena, fs_mem_class memory_class, size_t nbytes, int place, void *out)
{
    size_t gap = ((size_t)place * STAGGER_NBYTES - arena->used) & (WAY_NBYTES - 1);
    if (nbytes >= STAGGER_FROM_NBYTES && gap > 0) {
        void *unused;
        FS_TRY(fs_arena_take(arena, memory_class, gap, &unused));
    }
    return fs_arena_take(arena, memory_class, nbytes, out);
}

fs_status
fs_place_words(const fs_layout *layout, bool device, fs_arena *arena, fs_block *block)
{
    size_t nbytes;
    FS_TRY(fs_arena_take(arena, FS_MEM_WINDOWS, sizeof(fs_counters), &block->counters));
    FS_TRY(fs_mul_size((size_t)layout->slots_n, present_nbytes(layout), &nbytes));
    FS_TRY(fs_arena_take(arena, FS_MEM_GRADIENTS, nbytes, &block->present));
    if (device) {
        FS_TRY(fs_arena_take(arena, FS_MEM_WINDOWS, (size_t)layout->params_n, &block->brought));
        FS_TRY(fs_arena_take(arena, FS_MEM_WINDOWS, sizeof(fs_talk), &block->talk));
    }
    return FS_OK;
}

/* Everything of a rank, moments aside (the optimizer decides on those). */
fs_status
fs_place_block(const fs_layout *layout, const fs_policy *policy, int rank, fs_arena *arena,
               fs_arena *host, fs_block *block)
{
    const fs_precision *precision = &policy->precision;
    fs_arena *params = policy->on_host.params ? host : arena;
    fs_arena *grads = policy->on_host.grads ? host : arena;
    fs_arena *state = policy->on_host.state ? host : arena;
    size_t own_n, state_n, nbytes;
    kept_sizes(layout, policy, rank, &own_n, &state_n);
    if (policy->weights == FS_WEIGHTS_SHARED) {
        own_n = 0;
    } else if (policy->weights == FS_WEIGHTS_WHOLE) {
        own_n = layout->image_n;
    }
    FS_TRY(fs_mul_size(own_n, fs_dtype_nbytes(precision->param), &nbytes));
    FS_TRY(fs_arena_take(params, FS_MEM_WEIGHTS, nbytes, &block->own));
    FS_TRY(fs_place_slots(layout, policy, NULL, &nbytes));
    FS_TRY(fs_arena_take(arena, FS_MEM_GRADIENTS, nbytes, &block->slots));
    FS_TRY(fs_mul_size(state_n, fs_dtype_nbytes(precision->accumulate), &nbytes));
    FS_TRY(take_staggered(grads, FS_MEM_ACCUMULATORS, nbytes, PLACE_ACC, &block->acc));
    static const size_t master_nbytes[] = {
        [FS_MASTERS_NONE] = 0,
        [FS_MASTERS_SEPARATE] = sizeof(float),
        [FS_MASTERS_SPLIT] = sizeof(uint16_t),
    };
    void *master;
    FS_TRY(fs_mul_size(state_n, master_nbytes[precision->master], &nbytes));
    FS_TRY(take_staggered(state, FS_MEM_MASTER, nbytes, PLACE_MASTER, &master));
    block->master = precision->master == FS_MASTERS_SEPARATE ? master : NULL;
    block->remainder = precision->master == FS_MASTERS_SPLIT ? master : NULL;
    return FS_OK;
}

fs_status
fs_place_moments(const fs_layout *layout, const fs_policy *policy, int moments_n, int rank,
                 fs_arena *arena, fs_block *block)
{
    size_t own_n, state_n, nbytes;
    kept_sizes(layout, policy, rank, &own_n, &state_n);
    FS_TRY(fs_mul_size(state_n, fs_dtype_nbytes(policy->precision.moments), &nbytes));
    for (int m = 0; m < moments_n; m++) {
        FS_TRY(take_staggered(arena, FS_MEM_MOMENTS, nbytes, PLACE_MOMENTS + m,
                              &block->moments[m]));
    }
    return FS_OK;
}

/* A rank's share of the image that all ranks read: page rounded, so that each pays for its own. */
fs_status
fs_place_image(const fs_layout *layout, const fs_policy *policy, size_t *out)
{
    *out = 0;
    if (policy->weights != FS_WEIGHTS_SHARED) {
        return FS_OK;
    }
    size_t nbytes;
    FS_TRY(fs_mul_size(layout->image_n, fs_dtype_nbytes(policy->precision.param), &nbytes));
    size_t size = (size_t)layout->size;
    *out = fs_round_up(nbytes / size + (nbytes % size != 0), (size_t)sysconf(_SC_PAGESIZE));
    return FS_OK;
}

static bool
is_held(const fs_unit_layout *unit)
{
    return unit->slot >= 0 && unit->opens < unit->publishes;
}

/* How many buffers the pool has: policy.pool_units in turn for ordinary units, and one for each
 * unit that stays gathered over others (a tie). Fills sizes when it is not NULL. */
int
fs_place_pool_units(const fs_layout *layout, const fs_policy *policy, fs_unit *units,
                    size_t *size_n)
{
    int buffers = 0;
    size_t largest = 0;
    int ordinary = 0;
    if (policy->weights != FS_WEIGHTS_SHARD || policy->pool_units == FS_NO_POOL) {
        return 0;
    }
    for (int u = 0; u < layout->units_n; u++) {
        if (!is_held(&layout->units[u])) {
            largest = fs_max_size(largest, layout->units[u].numel);
            ordinary++;
        }
    }
    bool each = policy->pool_units == 0 || policy->pool_units > ordinary;
    int turns = each ? 0 : policy->pool_units;
    for (int b = 0; b < turns; b++) {
        if (size_n != NULL) {
            size_n[b] = largest;
        }
    }
    buffers = turns;
    for (int u = 0; u < layout->units_n; u++) {
        bool own = each || is_held(&layout->units[u]);
        if (units != NULL) {
            units[u].pool_first = own ? buffers : 0;
            units[u].pool_end = own ? buffers + 1 : turns;
        }
        if (own) {
            if (size_n != NULL) {
                size_n[buffers] = layout->units[u].numel;
            }
            buffers++;
        }
    }
    return buffers;
}

fs_status
fs_place_pool(const fs_layout *layout, const fs_policy *policy, fs_arena *arena,
                 fs_pool_buffer *pool)
{
    size_t *size_n = NULL;
    size_t turns = policy->pool_units > 0 ? (size_t)policy->pool_units : 0;
    FS_TRY(fs_calloc((size_t)layout->units_n + 1 + turns, sizeof *size_n, &size_n));
    int buffers = fs_place_pool_units(layout, policy, NULL, size_n);
    fs_status st = FS_OK;
    for (int b = 0; b < buffers && st == FS_OK; b++) {
        size_t nbytes;
        void *data = NULL;
        FS_TRY_GOTO(fs_mul_size(size_n[b], fs_dtype_nbytes(policy->precision.param), &nbytes), st,
                    done);
        FS_TRY_GOTO(fs_arena_take(arena, FS_MEM_POOL, nbytes, &data), st, done);
        if (pool != NULL) {
            pool[b] = (fs_pool_buffer){.data = data, .unit = -1};
        }
    }
done:
    fs_free(size_n);
    return st;
}

fs_status
fs_shards_plan(const fs_layout *layout, const fs_policy *policy, int moments_n, int rank,
               bool device, fs_ledger *plan)
{
    FS_TRY(fs_policy_check(policy, layout->size, device));
    if (rank < 0 || rank >= layout->size) {
        return FS_FAIL(FS_EINVAL, "rank %d of a world of %d", rank, layout->size);
    }
    fs_home arrays = device ? FS_HOME_DEVICE : FS_HOME_WORLD;
    bool state_on_host = device && policy->on_host.state;
    fs_arena image, words, block, host, moments, pool, pinned;
    fs_arena_init_counting(&image, plan, FS_HOME_WORLD);
    fs_arena_init_counting(&words, plan, FS_HOME_WORLD);
    fs_arena_init_counting(&block, plan, arrays);
    fs_arena_init_counting(&host, plan, FS_HOME_PRIVATE);
    fs_arena_init_counting(&moments, plan, state_on_host ? FS_HOME_PRIVATE : arrays);
    fs_arena_init_counting(&pool, plan, device ? FS_HOME_DEVICE : FS_HOME_PRIVATE);
    fs_arena_init_counting(&pinned, plan, FS_HOME_PRIVATE);
    fs_block placed = {0};
    size_t stride;
    void *ignored;
    FS_TRY(fs_place_image(layout, policy, &stride));
    FS_TRY(fs_arena_take(&image, FS_MEM_WEIGHTS, stride, &ignored));
    FS_TRY(fs_place_words(layout, device, &words, &placed));
    FS_TRY(fs_place_block(layout, policy, rank, &block, device ? &host : &block, &placed));
    FS_TRY(fs_place_moments(layout, policy, moments_n, rank, &moments, &placed));
    FS_TRY(fs_place_pool(layout, policy, &pool, NULL));
    if (device) {
        fs_streams streams = {0};
        FS_TRY(fs_place_staging(layout, policy, &pool, &streams));
        FS_TRY(fs_place_pinned(layout, policy, rank, &pinned, &streams));
        fs_ledger_charge(plan, FS_MEM_SCRATCH, FS_HOME_DEVICE,
                         2 * fs_shards_scratch_nbytes(layout));
    }
    return FS_OK;
}

// ---- a device -----------------------------------------------------------------------------------

static size_t
transfer_n(const fs_extents *extents)
{
    return fs_min_size(extents->param_n, FS_TRANSFER_N);
}

size_t
fs_shards_scratch_nbytes(const fs_layout *layout)
{
    const fs_extents extents = fs_extents_of(layout);
    return fs_sum_scratch_nbytes(fs_max_size(extents.seg_n, transfer_n(&extents)));
}

fs_status
fs_place_staging(const fs_layout *layout, const fs_policy *policy, fs_arena *arena,
                 fs_streams *streams)
{
    const fs_extents extents = fs_extents_of(layout);
    size_t width = fs_dtype_nbytes(policy->precision.reduce);
    size_t peers = (size_t)layout->size - 1, nbytes;
    bool ring = policy->ring && peers > 0;
    FS_TRY(fs_mul_size(extents.piece_n * width, peers + ring, &nbytes));
    streams->piece_nbytes = extents.piece_n * width;
    if (ring) {
        FS_TRY(fs_arena_take(arena, FS_MEM_WORKSPACE,
                             ((size_t)layout->params_n + 1) * sizeof *streams->firsts,
                             &streams->firsts));
    }
    FS_TRY(fs_arena_take(arena, FS_MEM_GRADIENTS, nbytes, &streams->staging));
    streams->absent_nbytes = peers > 0 ? extents.run_n * width : 0;
    FS_TRY(fs_arena_take(arena, FS_MEM_GRADIENTS, streams->absent_nbytes, &streams->absent));
    streams->transfer_n = transfer_n(&extents);
    return fs_arena_take(arena, FS_MEM_WORKSPACE, streams->transfer_n * FS_TRANSFER_WIDTH,
                         &streams->transfer);
}

fs_status
fs_place_pinned(const fs_layout *layout, const fs_policy *policy, int rank, fs_arena *arena,
                fs_streams *streams)
{
    const fs_precision *precision = &policy->precision;
    fs_offload *offload = &streams->offload;
    size_t segs_n = layout->cut_first[rank + 1] - layout->cut_first[rank];
    const fs_extents extents = fs_extents_of(layout);
    streams->transfer_n = transfer_n(&extents);
    FS_TRY(fs_arena_take(arena, FS_MEM_WORKSPACE, segs_n * sizeof(fs_sums), &streams->found));
    FS_TRY(fs_arena_take(arena, FS_MEM_WORKSPACE, streams->transfer_n * FS_TRANSFER_WIDTH,
                         &streams->landing));
    if (policy->ring && layout->size > 1) {
        FS_TRY(fs_arena_take(arena, FS_MEM_WORKSPACE,
                             (size_t)layout->params_n * sizeof *streams->firsts_here,
                             &streams->firsts_here));
    }
    offload->n = policy->on_host.state ? fs_min_size(extents.seg_n, FS_OFFLOAD_N) : 0;
    for (int b = 0; b < 2 && offload->n > 0; b++) {
        if (!policy->on_host.grads) {
            FS_TRY(fs_arena_take(arena, FS_MEM_WORKSPACE,
                                 offload->n * fs_dtype_nbytes(precision->accumulate),
                                 &offload->grads[b]));
        }
        if (!policy->on_host.params) {
            FS_TRY(fs_arena_take(arena, FS_MEM_WORKSPACE,
                                 offload->n * fs_dtype_nbytes(precision->param),
                                 &offload->weights[b]));
        }
    }
    return FS_OK;
}

// ---- addresses ----------------------------------------------------------------------------------

size_t
fs_state_at(const fs_shards *shards, const fs_seg *seg)
{
    size_t at = seg->pos_n;
    for (int c = fs_group_first(shards, seg->cut); c < seg->cut; c++) {
        at += shards->layout->state_n[c];
    }
    return at;
}

unsigned char *
fs_own_at(const fs_shards *shards, int rank, const fs_seg *seg)
{
    const fs_layout *layout = shards->layout;
    size_t at = layout->units[seg->unit].at_n + seg->at_n;
    unsigned char *from = shards->image;
    if (shards->policy.weights != FS_WEIGHTS_SHARED) {
        from = shards->blocks[rank].own;
    }
    if (shards->policy.weights == FS_WEIGHTS_SHARD) {
        at = seg->own_n;
        for (int c = fs_group_first(shards, seg->cut); c < seg->cut; c++) {
            at += layout->own_n[c];
        }
    }
    return from + at * fs_param_nbytes(shards);
}

unsigned char *
fs_slot_data(const fs_shards *shards, int rank, int slot)
{
    return shards->blocks[rank].slots + shards->slot_at[slot];
}
