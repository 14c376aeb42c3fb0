/* Gradients: slots, the cursor over the fixed order, and the sum over ranks that see all memory
 * (exchange.c has a device's).
 *
 * The whole protocol: contribution k is the same unit on every rank. pub[r] counts what rank r has
 * put into its slots, red[r] what it has summed. Filling a slot needs red past the slot's last
 * tenant on every rank; summing k needs, of every rank, pub > k or fin <= k (the rank will not
 * come: absent). A unit out of turn stays private; the end of a micro-batch moves the cursor over
 * what did not come. Every wait sums first, so nobody waits for a rank that waits for him. */
#include "shards_internal.h"

#include <string.h>

// ---- slots --------------------------------------------------------------------------------------

typedef struct slot_wait {
    const fs_shards *shards;
    uint64_t tenant; /* red must reach this on every rank */
} slot_wait;

static bool
slot_is_free(void *ctx)
{
    const slot_wait *wait = ctx;
    for (int r = 0; r < wait->shards->size; r++) {
        if (atomic_load_explicit(&wait->shards->blocks[r].counters->red, memory_order_acquire) <
            wait->tenant) {
            return false;
        }
    }
    return true;
}

/* Is it unit u's turn to hold a slot? Where every unit has its own, always. */
static bool
may_open(const fs_shards *shards, int u)
{
    const fs_unit_layout *unit = &shards->layout->units[u];
    return shards->units[u].opened || shards->policy.slot_per_unit ||
           (unit->opens <= shards->cursor && shards->cursor <= unit->publishes);
}

size_t
fs_unit_grad_nbytes(const fs_shards *shards, int u)
{
    return shards->layout->units[u].grad_n * fs_dtype_nbytes(shards->policy.precision.reduce);
}

static fs_home
spill_home(const fs_shards *shards)
{
    return shards->streams == NULL ? FS_HOME_PRIVATE : FS_HOME_DEVICE;
}

static void
free_spill(fs_shards *shards, int u)
{
    fs_unit *unit = &shards->units[u];
    if (unit->spill != NULL) {
        size_t nbytes = fs_unit_grad_nbytes(shards, u);
        fs_ledger_discharge(fs_world_ledger(shards->world), FS_MEM_SPILL, spill_home(shards),
                            nbytes);
        if (shards->streams == NULL) {
            fs_free(unit->spill);
        } else {
            shards->streams->runtime->memory_close(shards->exec->context, unit->spill, nbytes);
        }
    }
    fs_free(unit->spill_present);
    unit->spill = unit->spill_present = NULL;
    unit->in_spill = false;
}

void
fs_grad_close_spills(fs_shards *shards, bool all)
{
    for (int u = 0; shards->units != NULL && u < shards->layout->units_n; u++) {
        if (all || !shards->units[u].in_spill) {
            free_spill(shards, u);
        }
    }
}

/* What the compute stream is given from now on may write the slot of unit u. */
static void
order_writes(fs_shards *shards, int u)
{
    if (shards->streams != NULL) {
        const fs_mark *summed = &shards->streams->slots[shards->layout->units[u].slot];
        fs_mark_after(shards, FS_STREAM_COMPUTE, summed);
    }
}

/* Makes the slot of unit u this rank's to write; brings in what came out of turn. */
static fs_status
open_slot(fs_shards *shards, int u)
{
    fs_unit *unit = &shards->units[u];
    const fs_unit_layout *layout = &shards->layout->units[u];
    if (unit->opened) {
        return FS_OK;
    }
    slot_wait wait = {shards, shards->slot_tenant[layout->slot]};
    /* On a device only its own reduce stream reads a slot: whoever writes it comes after that. */
    if (shards->streams == NULL && !slot_is_free(&wait)) {
        fs_world_note_op(shards->world, FS_OP_REDUCE, layout->name);
        fs_log_begin(shards->world, FS_OP_SLOT, unit->log_unit, 0);
        fs_status st = fs_wait(shards->world, slot_is_free, &wait, 0);
        fs_log_end(shards->world);
        FS_TRY(st);
    }
    size_t params_n = (size_t)(layout->end - layout->first);
    unsigned char *present = fs_slot_present(shards, shards->rank, layout->slot);
    memset(present, 0, params_n);
    if (unit->in_spill) {
        memcpy(present, unit->spill_present, params_n);
        order_writes(shards, u);
        shards->exec->device->copy(shards->exec, fs_slot_data(shards, shards->rank, layout->slot),
                                   unit->spill, fs_unit_grad_nbytes(shards, u));
        unit->in_spill = false;
        if (shards->streams == NULL) {
            free_spill(shards, u);
        } /* a device may still read it: freed where the step is settled */
    }
    unit->opened = true;
    return FS_OK;
}

/* No gradient may come once the ranks have agreed on the step. */
static fs_status
check_not_agreed(const fs_shards *shards, int u)
{
    FS_TRY(fs_shards_ready(shards));
    if (shards->agreed) {
        return FS_FAIL(FS_ESTATE,
                       "rank %d: a gradient of unit %s came between grad_norm() and step(), or "
                       "after a step() that was interrupted: call step() to end it, or zero() to "
                       "drop it",
                       shards->rank, shards->layout->units[u].name);
    }
    if (shards->settled) {
        return FS_FAIL(FS_ESTATE,
                       "rank %d: a gradient of unit %s came after all of this step were summed up "
                       "to be looked at; step() or drop them first",
                       shards->rank, shards->layout->units[u].name);
    }
    return FS_OK;
}

static fs_status
check_open(const fs_shards *shards, int u)
{
    FS_TRY(check_not_agreed(shards, u));
    if (shards->units[u].complete) {
        return FS_FAIL(FS_ESTATE, "rank %d: unit %s was already reduced in this micro-batch",
                       shards->rank, shards->layout->units[u].name);
    }
    return FS_OK;
}

fs_status
fs_grad_open(fs_shards *shards, int u, void **out_slot, bool *out_add)
{
    const fs_unit_layout *layout = &shards->layout->units[u];
    FS_TRY(check_open(shards, u));
    if (layout->slot < 0) {
        return FS_FAIL(FS_ESTATE, "unit %s is frozen: it has no gradient", layout->name);
    }
    if (!may_open(shards, u)) {
        return FS_FAIL(FS_ESTATE, "rank %d: unit %s is out of turn; %s comes next", shards->rank,
                       layout->name,
                       shards->layout->units[shards->layout->order[shards->cursor]].name);
    }
    FS_TRY(open_slot(shards, u));
    order_writes(shards, u);
    const unsigned char *present = fs_slot_present(shards, shards->rank, layout->slot);
    *out_add = false;
    for (int p = 0; p < layout->end - layout->first; p++) {
        *out_add = *out_add || present[p] != 0;
    }
    *out_slot = fs_slot_data(shards, shards->rank, layout->slot);
    return FS_OK;
}

void
fs_grad_mark(fs_shards *shards, int u, int param)
{
    const fs_unit_layout *layout = &shards->layout->units[u];
    fs_slot_present(shards, shards->rank, layout->slot)[param - layout->first] = 1;
}

static fs_status
open_spill(fs_shards *shards, int u)
{
    fs_unit *unit = &shards->units[u];
    const fs_unit_layout *layout = &shards->layout->units[u];
    if (unit->in_spill) {
        return FS_OK;
    }
    size_t params_n = (size_t)(layout->end - layout->first);
    size_t nbytes = fs_unit_grad_nbytes(shards, u);
    if (unit->spill_present == NULL) {
        FS_TRY(fs_calloc(params_n, 1, &unit->spill_present));
    }
    memset(unit->spill_present, 0, params_n);
    if (unit->spill == NULL) {
        void *spill;
        FS_TRY(shards->streams == NULL ? fs_calloc(nbytes, 1, &spill)
                                       : fs_streams_take(shards, "spill", nbytes, &spill));
        unit->spill = spill;
        fs_ledger_charge(fs_world_ledger(shards->world), FS_MEM_SPILL, spill_home(shards), nbytes);
    }
    unit->in_spill = true;
    return FS_OK;
}

fs_status
fs_grad_put(fs_shards *shards, int param, const void *src, fs_dtype src_dtype)
{
    const fs_param *p = &shards->layout->params[param];
    const fs_unit_layout *layout = &shards->layout->units[p->unit];
    fs_unit *unit = &shards->units[p->unit];
    /* A unit that is complete but not published yet may still be added to: a gradient that comes in
     * two parts (recomputation inside backward) is their sum. */
    FS_TRY(check_not_agreed(shards, p->unit));
    if (!fs_shards_trains(shards, param)) {
        return FS_FAIL(FS_EINVAL, "rank %d: %s is frozen and got a gradient", shards->rank,
                       p->name);
    }
    unsigned char *present, *data;
    if (may_open(shards, p->unit)) {
        FS_TRY(open_slot(shards, p->unit));
        order_writes(shards, p->unit);
        present = fs_slot_present(shards, shards->rank, layout->slot);
        data = fs_slot_data(shards, shards->rank, layout->slot);
    } else {
        FS_TRY(open_spill(shards, p->unit));
        present = unit->spill_present;
        data = unit->spill;
    }
    const fs_exec *exec = shards->exec;
    fs_dtype dtype = shards->policy.precision.reduce;
    unsigned char *to = data + p->grad_n * fs_dtype_nbytes(dtype);
    unsigned char *flag = &present[param - layout->first];
    size_t width = fs_dtype_nbytes(src_dtype), n;
    for (size_t at = 0; at < p->numel; at += n, to += n * fs_dtype_nbytes(dtype)) {
        n = fs_bring_n(shards, p->numel - at);
        const void *sources[1] = {
            fs_bring(shards, (const unsigned char *)src + at * width, n * width)};
        if (!*flag) {
            exec->device->convert(exec, to, dtype, sources[0], src_dtype, n);
            continue;
        }
        fs_sum sum = {.src = sources,
                      .src_n = 1,
                      .src_dtype = src_dtype,
                      .acc = to,
                      .acc_dtype = dtype,
                      .accumulate = true,
                      .n = n};
        exec->device->sum(exec, &sum);
    }
    *flag = 1;
    fs_brought(shards);
    return FS_OK;
}

// ---- publishing ---------------------------------------------------------------------------------

/* Publishes the unit at the cursor (or keeps it for the next micro-batch) and moves the cursor. */
static fs_status
publish_next(fs_shards *shards, bool keep_local)
{
    int u = shards->layout->order[shards->cursor];
    fs_unit *unit = &shards->units[u];
    FS_TRY(open_slot(shards, u)); /* an absent unit shows that no parameter is present */
    if (keep_local) {
        unit->kept_local = true;
    } else {
        uint64_t k = shards->base + shards->rounds * (uint64_t)shards->layout->order_n +
                     (uint64_t)shards->cursor;
        shards->slot_tenant[shards->layout->units[u].slot] = k + 1;
        unit->opened = unit->kept_local = false;
        /* Before a device's queue is given anything: an engine may want peers there for that. */
        atomic_store_explicit(&shards->blocks[shards->rank].counters->pub, k + 1,
                              memory_order_release);
        fs_bell(shards->world);
        if (shards->streams != NULL) {
            FS_TRY(fs_exchange(shards, k, true));
        }
    }
    unit->complete = false;
    shards->cursor++;
    return keep_local ? FS_OK : fs_drain(shards);
}

fs_status
fs_grad_publish(fs_shards *shards, int u, bool keep_local)
{
    FS_TRY(check_open(shards, u));
    if (keep_local && !shards->policy.slot_per_unit) {
        return FS_FAIL(
            FS_EINVAL,
            "gradients can stay local (sync=False) where every unit has its own slot: "
            "at stages 0 and 1; at stages 2 and 3 each micro-batch is reduced as it comes");
    }
    if (shards->layout->units[u].slot < 0) {
        return FS_OK;
    }
    if (shards->layout->units[u].publishes < shards->cursor) {
        return FS_FAIL(FS_ESTATE, "rank %d: unit %s was already reduced in this micro-batch",
                       shards->rank, shards->layout->units[u].name);
    }
    fs_world_note_op(shards->world, FS_OP_REDUCE, shards->layout->units[u].name);
    shards->units[u].complete = true;
    while (shards->cursor < shards->layout->order_n &&
           shards->units[shards->layout->order[shards->cursor]].complete) {
        FS_TRY(publish_next(shards, keep_local));
    }
    return FS_OK;
}

fs_status
fs_round_end(fs_shards *shards, int64_t count, bool keep_local)
{
    FS_TRY(fs_shards_ready(shards));
    if (keep_local && !shards->policy.slot_per_unit) {
        return FS_FAIL(FS_EINVAL, "gradients can stay local (sync=False) at stages 0 and 1 only");
    }
    if (shards->agreed) {
        return FS_FAIL(FS_ESTATE, "rank %d: a micro-batch ended between grad_norm() and step()",
                       shards->rank);
    }
    while (shards->cursor < shards->layout->order_n) {
        FS_TRY(publish_next(shards, keep_local));
    }
    shards->cursor = 0;
    shards->rounds += !keep_local;
    if (count < 0) {
        shards->has_plain = true;
    } else {
        shards->has_count = true;
        shards->count += count;
    }
    return FS_OK;
}

/* Is a micro-batch begun and not ended, or kept? */
static bool
has_round(const fs_shards *shards)
{
    bool left = shards->cursor > 0;
    for (int u = 0; u < shards->layout->units_n; u++) {
        const fs_unit *unit = &shards->units[u];
        left = left || unit->opened || unit->in_spill || unit->complete;
    }
    return left;
}

fs_status
fs_grad_finish_rounds(fs_shards *shards)
{
    if (!has_round(shards)) {
        return FS_OK;
    }
    while (shards->cursor < shards->layout->order_n) {
        FS_TRY(publish_next(shards, false));
    }
    shards->cursor = 0;
    shards->rounds++;
    return FS_OK;
}

// ---- summing ------------------------------------------------------------------------------------

/* Is contribution k complete? False when a rank is still to come; *out_nobody: no rank brings
 * it. */
static bool
all_came(const fs_shards *shards, uint64_t k, bool *out_nobody)
{
    bool nobody = true;
    for (int r = 0; r < shards->size; r++) {
        const fs_counters *counters = shards->blocks[r].counters;
        if (atomic_load_explicit(&counters->pub, memory_order_acquire) > k) {
            nobody = false;
            continue;
        }
        uint64_t fin = shards->fins_known
                           ? shards->fins[r]
                           : atomic_load_explicit(&counters->fin, memory_order_acquire);
        if (fin > k) {
            return false;
        }
    }
    *out_nobody = nobody;
    return true;
}

/* This segment of rank r's contribution k, or NULL when the rank or the parameter is absent. */
static const void *
source_of(const fs_shards *shards, int r, uint64_t k, const fs_seg *seg)
{
    const fs_unit_layout *unit = &shards->layout->units[seg->unit];
    if (atomic_load_explicit(&shards->blocks[r].counters->pub, memory_order_acquire) <= k ||
        !fs_slot_present(shards, r, unit->slot)[seg->param - unit->first]) {
        return NULL;
    }
    size_t at = shards->layout->params[seg->param].grad_n + seg->begin;
    return fs_slot_data(shards, r, unit->slot) +
           at * fs_dtype_nbytes(shards->policy.precision.reduce);
}

fs_sum
fs_sum_of_ranks(const fs_shards *shards, const fs_seg *seg, bool accumulate)
{
    const fs_precision *precision = &shards->policy.precision;
    return (fs_sum){
        .src = shards->sources,
        .src_n = (size_t)shards->size,
        .src_dtype = precision->reduce,
        .acc = shards->blocks[shards->rank].acc +
               fs_state_at(shards, seg) * fs_dtype_nbytes(precision->accumulate),
        .acc_dtype = precision->accumulate,
        .accumulate = accumulate,
        .n = seg->end - seg->begin,
    };
}

static void
sum_segment(fs_shards *shards, uint64_t k, const fs_seg *seg)
{
    fs_sums found = {.bad_source = -1};
    size_t n = seg->end - seg->begin;
    size_t sources_n = 0;
    for (int r = 0; r < shards->size; r++) {
        shards->sources[r] = source_of(shards, r, k, seg);
        sources_n += shards->sources[r] != NULL;
    }
    if (sources_n == 0) {
        return;
    }
    fs_log_add(shards->world, sources_n * n * fs_dtype_nbytes(shards->policy.precision.reduce));
    fs_sum sum = fs_sum_of_ranks(shards, seg, shards->had[seg->param] != 0);
    sum.found = &found;
    shards->exec->device->sum(shards->exec, &sum);
    if (seg->cut == shards->rank) {
        shards->sumsq[seg - shards->layout->segs] = found.sumsq;
        shards->absmax[seg - shards->layout->segs] = found.absmax;
        if (!found.finite && (shards->bad_param < 0 || shards->bad_param > seg->param)) {
            shards->bad_param = seg->param;
            shards->bad_rank = (int)found.bad_source; /* sources are ranks */
        }
    }
}

static void
sum_contribution(fs_shards *shards, uint64_t k)
{
    const fs_layout *layout = shards->layout;
    int u = layout->order[(k - shards->base) % (uint64_t)layout->order_n];
    const fs_unit_layout *unit = &layout->units[u];
    for (int c = shards->keep_first; c < shards->keep_first + shards->policy.keep; c++) {
        for (fs_seg_range s = fs_segs(layout, c, u); s.seg < s.end; s.seg++) {
            if (s.seg->pos_n != FS_FROZEN) {
                sum_segment(shards, k, s.seg);
            }
        }
    }
    /* After the segments: had decides whether they set or add. */
    for (int r = 0; r < shards->size; r++) {
        if (atomic_load_explicit(&shards->blocks[r].counters->pub, memory_order_acquire) <= k) {
            continue;
        }
        const unsigned char *present = fs_slot_present(shards, r, unit->slot);
        for (int p = unit->first; p < unit->end; p++) {
            shards->had[p] |= present[p - unit->first];
        }
    }
}

void
fs_grad_give_up_round(fs_shards *shards)
{
    shards->rounds += has_round(shards);
    shards->cursor = 0;
    for (int u = 0; u < shards->layout->units_n; u++) {
        fs_unit *unit = &shards->units[u];
        unit->opened = unit->complete = unit->kept_local = unit->in_spill = false;
    }
}

/* A device's exchanges and gathers are collectives: a rank that brings fewer micro-batches, or
 * whose batch failed, takes part in the rest with nothing, so that its peers' devices get on. */
static fs_status
follow_peers(fs_shards *shards)
{
    if (!shards->finished || shards->settled) {
        return FS_OK;
    }
    for (int r = 0; r < shards->size; r++) {
        const fs_counters *counters = shards->blocks[r].counters;
        for (bool found = true; found;) {
            found = false;
            /* Published first: a gather before it is seen then, and both go in the peer's order. */
            uint64_t pub = atomic_load_explicit(&counters->pub, memory_order_acquire);
            FS_TRY(fs_gather_follow(shards, r, &found));
            if (!found && pub > shards->red) {
                FS_TRY(fs_exchange(shards, shards->red, false));
                found = true;
            }
        }
    }
    return FS_OK;
}

fs_status
fs_drain(void *ctx)
{
    fs_shards *shards = ctx;
    bool nobody, moved = false;
    if (shards->streams != NULL) {
        return follow_peers(shards);
    }
    while (shards->layout->order_n > 0 && all_came(shards, shards->red, &nobody) && !nobody) {
        int u = shards->layout->order[(shards->red - shards->base) %
                                      (uint64_t)shards->layout->order_n];
        fs_log_begin(shards->world, FS_OP_REDUCE, shards->units[u].log_unit, 0);
        sum_contribution(shards, shards->red);
        fs_log_end(shards->world);
        shards->red++;
        atomic_store_explicit(&shards->blocks[shards->rank].counters->red, shards->red,
                              memory_order_release);
        moved = true;
    }
    if (moved) {
        fs_bell(shards->world);
    }
    return FS_OK;
}
