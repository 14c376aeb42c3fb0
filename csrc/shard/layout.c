/* What is flat: parameters in units, cuts, segments, gradient slots. Pure arithmetic, made once. */
#include "shard.h"

#include <stdlib.h>
#include <string.h>

#include "../base/checked.h"

// ---- parameters and units -----------------------------------------------------------------------

static fs_status
copy_param(const fs_param_def *def, int units_n, fs_param *param)
{
    if (def->dims_n > FS_DIMS_MAX) {
        return FS_FAIL(FS_EINVAL, "parameter %s has %zu dimensions, at most %d", def->name,
                       def->dims_n, FS_DIMS_MAX);
    }
    if (def->unit < 0 || def->unit >= units_n) {
        return FS_FAIL(FS_EINVAL, "parameter %s names unit %d of %d", def->name, def->unit,
                       units_n);
    }
    param->dims_n = def->dims_n;
    param->numel = 1;
    for (size_t d = 0; d < def->dims_n; d++) {
        param->dims[d] = def->dims[d];
        FS_TRY(fs_mul_size(param->numel, def->dims[d], &param->numel));
    }
    param->rows = def->dims_n == 0 ? 1 : def->dims[0];
    param->unit = def->unit;
    param->trainable = def->trainable;
    param->group = def->group;
    FS_TRY(fs_strdup(def->name, &param->name));
    return def->tied_name == NULL ? FS_OK : fs_strdup(def->tied_name, &param->tied_name);
}

static fs_status
round_to_align(size_t n, size_t *out)
{
    FS_TRY(fs_add_size(n, FS_SHARD_ALIGN_N - 1, out));
    *out &= ~(size_t)(FS_SHARD_ALIGN_N - 1);
    return FS_OK;
}

/* Offsets in unit buffers and slots; sizes of units and of the whole image. */
static fs_status
place_params(fs_layout *layout)
{
    for (int p = 0; p < layout->params_n; p++) {
        fs_param *param = &layout->params[p];
        fs_unit_layout *unit = &layout->units[param->unit];
        if (p > 0 && param->unit < layout->params[p - 1].unit) {
            return FS_FAIL(FS_EINVAL, "parameter %s of unit %s is listed after one of unit %s",
                           param->name, unit->name, layout->units[layout->params[p - 1].unit].name);
        }
        size_t rounded;
        FS_TRY(round_to_align(param->numel, &rounded));
        param->offset_n = unit->numel;
        FS_TRY(fs_add_size(unit->numel, rounded, &unit->numel));
        param->grad_n = FS_FROZEN;
        if (param->trainable) {
            param->grad_n = unit->grad_n;
            FS_TRY(fs_add_size(unit->grad_n, rounded, &unit->grad_n));
        }
    }
    int p = 0;
    for (int u = 0; u < layout->units_n; u++) {
        fs_unit_layout *unit = &layout->units[u];
        unit->first = p;
        while (p < layout->params_n && layout->params[p].unit == u) {
            p++;
        }
        unit->end = p;
        unit->at_n = layout->image_n;
        FS_TRY(fs_add_size(layout->image_n, unit->numel, &layout->image_n));
        layout->unit_max_n = fs_max_size(layout->unit_max_n, unit->numel);
        if (unit->end - unit->first > layout->unit_params_max) {
            layout->unit_params_max = unit->end - unit->first;
        }
    }
    return FS_OK;
}

static int
compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static fs_status
check_names(const fs_layout *layout)
{
    const char **names = NULL;
    size_t n = 0;
    FS_TRY(fs_calloc((size_t)layout->params_n * 2 + 1, sizeof *names, &names));
    for (int p = 0; p < layout->params_n; p++) {
        names[n++] = layout->params[p].name;
        if (layout->params[p].tied_name != NULL) {
            names[n++] = layout->params[p].tied_name;
        }
    }
    qsort(names, n, sizeof *names, compare_names);
    fs_status status = FS_OK;
    for (size_t i = 1; i < n && status == FS_OK; i++) {
        if (strcmp(names[i - 1], names[i]) == 0) {
            status = FS_FAIL(FS_EINVAL, "two parameters are named %s", names[i]);
        }
    }
    fs_free(names);
    return status;
}

// ---- order and slots ----------------------------------------------------------------------------

static bool
is_tied(const fs_unit_layout *unit)
{
    return unit->opens < unit->publishes;
}

/* Even if all of them are empty: a unit with such a parameter takes part like any other. */
static bool
has_trainable(const fs_layout *layout, const fs_unit_layout *unit)
{
    for (int p = unit->first; p < unit->end; p++) {
        if (layout->params[p].trainable) {
            return true;
        }
    }
    return false;
}

/* order[]: units with gradients by their place; places are then renumbered without gaps. */
static fs_status
make_order(fs_layout *layout)
{
    for (int u = 0; u < layout->units_n; u++) {
        fs_unit_layout *unit = &layout->units[u];
        unit->slot = -1;
        if (!has_trainable(layout, unit)) {
            continue;
        }
        if (unit->opens > unit->publishes) {
            return FS_FAIL(FS_EINVAL, "unit %s opens at %d, after it publishes at %d", unit->name,
                           unit->opens, unit->publishes);
        }
        int at = layout->order_n++;
        while (at > 0 && layout->units[layout->order[at - 1]].publishes > unit->publishes) {
            layout->order[at] = layout->order[at - 1];
            at--;
        }
        layout->order[at] = u;
        if (at > 0 && layout->units[layout->order[at - 1]].publishes == unit->publishes) {
            return FS_FAIL(FS_EINVAL, "units %s and %s both publish at place %d", unit->name,
                           layout->units[layout->order[at - 1]].name, unit->publishes);
        }
    }
    /* A unit opens when all that publish before the place it named have done so. The last place is
     * renumbered first, so that every comparison is among the caller's numbers. */
    for (int k = layout->order_n - 1; k >= 0; k--) {
        fs_unit_layout *unit = &layout->units[layout->order[k]];
        int opens = 0;
        while (opens < k && layout->units[layout->order[opens]].publishes < unit->opens) {
            opens++;
        }
        unit->opens = opens;
        unit->publishes = k;
    }
    return FS_OK;
}

static fs_status
make_slots(fs_layout *layout, bool slot_per_unit)
{
    FS_TRY(fs_calloc((size_t)layout->order_n + 2, sizeof *layout->slot_n, &layout->slot_n));
    int untied = 0;
    for (int k = 0; k < layout->order_n; k++) {
        untied += !is_tied(&layout->units[layout->order[k]]);
    }
    int turns = untied < 2 ? untied : 2; /* slots used in turn; the rest are dedicated */
    layout->slots_n = slot_per_unit ? 0 : turns;
    int turn = 0;
    for (int k = 0; k < layout->order_n; k++) {
        fs_unit_layout *unit = &layout->units[layout->order[k]];
        if (slot_per_unit || is_tied(unit)) {
            unit->slot = layout->slots_n++;
        } else {
            unit->slot = turn++ % turns;
        }
        layout->slot_n[unit->slot] = fs_max_size(layout->slot_n[unit->slot], unit->grad_n);
    }
    return FS_OK;
}

// ---- cuts and segments --------------------------------------------------------------------------

/* The part [*begin, *end) of param that lies in cut: the one place where partitions differ. */
static void
cut_param(const fs_layout *layout, const fs_param *param, int cut, size_t *begin, size_t *end)
{
    size_t size = (size_t)layout->size;
    size_t c = (size_t)cut;
    if (layout->partition == FS_PARTITION_FLAT) {
        size_t numel = layout->units[param->unit].numel;
        size_t slice = fs_round_up(numel / size + (numel % size != 0), FS_SHARD_ALIGN_N);
        /* slice * size < numel + size * ALIGN, which fits where numel was allocated at all */
        size_t first = fs_min_size(slice * c, numel);
        size_t last = fs_min_size(first + slice, numel);
        size_t low = fs_max_size(first, param->offset_n);
        size_t high = fs_min_size(last, param->offset_n + param->numel);
        *begin = low < high ? low - param->offset_n : 0;
        *end = low < high ? high - param->offset_n : 0;
    } else {
        size_t rows = param->rows;
        size_t chunk = rows / size + (rows % size != 0);
        size_t row_n = rows == 0 ? 0 : param->numel / rows;
        *begin = fs_min_size(chunk * c, rows) * row_n;
        *end = fs_min_size(chunk * c + chunk, rows) * row_n;
    }
}

static fs_status
make_segs(fs_layout *layout)
{
    size_t cuts = (size_t)layout->size;
    size_t units = (size_t)layout->units_n;
    size_t most;
    FS_TRY(fs_mul_size((size_t)layout->params_n, cuts, &most));
    FS_TRY(fs_calloc(most + 1, sizeof *layout->segs, &layout->segs));
    FS_TRY(fs_calloc(cuts + 1, sizeof *layout->cut_first, &layout->cut_first));
    FS_TRY(fs_calloc(cuts * (units + 1), sizeof *layout->cut_unit_first, &layout->cut_unit_first));
    FS_TRY(fs_calloc(cuts, sizeof *layout->own_n, &layout->own_n));
    FS_TRY(fs_calloc(cuts, sizeof *layout->state_n, &layout->state_n));
    for (int c = 0; c < layout->size; c++) {
        layout->cut_first[c] = layout->segs_n;
        for (int u = 0; u < layout->units_n; u++) {
            const fs_unit_layout *unit = &layout->units[u];
            layout->cut_unit_first[(size_t)c * (units + 1) + (size_t)u] = layout->segs_n;
            for (int p = unit->first; p < unit->end; p++) {
                const fs_param *param = &layout->params[p];
                fs_seg seg = {.param = p, .unit = u, .cut = c};
                cut_param(layout, param, c, &seg.begin, &seg.end);
                if (seg.begin == seg.end) {
                    continue;
                }
                size_t rounded = fs_round_up(seg.end - seg.begin, FS_SHARD_ALIGN_N);
                seg.at_n = param->offset_n + seg.begin;
                seg.own_n = layout->own_n[c];
                layout->own_n[c] += rounded;
                seg.pos_n = FS_FROZEN;
                if (param->trainable) {
                    seg.pos_n = layout->state_n[c];
                    layout->state_n[c] += rounded;
                }
                layout->segs[layout->segs_n++] = seg;
            }
        }
        layout->cut_unit_first[(size_t)c * (units + 1) + units] = layout->segs_n;
    }
    layout->cut_first[cuts] = layout->segs_n;
    return FS_OK;
}

fs_seg_range
fs_segs(const fs_layout *layout, int cut, int unit)
{
    const size_t *first = &layout->cut_unit_first[(size_t)cut * ((size_t)layout->units_n + 1)];
    if (unit < 0) {
        return (fs_seg_range){&layout->segs[first[0]], &layout->segs[first[layout->units_n]]};
    }
    return (fs_seg_range){&layout->segs[first[unit]], &layout->segs[first[unit + 1]]};
}

void
fs_shards_range(const fs_layout *layout, int param, int cut, size_t *out_begin, size_t *out_end)
{
    cut_param(layout, &layout->params[param], cut, out_begin, out_end);
}

// ---- hash ---------------------------------------------------------------------------------------

static uint64_t
hash_bytes(uint64_t hash, const void *bytes, size_t nbytes)
{
    const unsigned char *b = bytes;
    for (size_t i = 0; i < nbytes; i++) {
        hash = (hash ^ b[i]) * UINT64_C(0x100000001b3); /* FNV-1a */
    }
    return hash;
}

static uint64_t
hash_u64(uint64_t hash, uint64_t value)
{
    return hash_bytes(hash, &value, sizeof value);
}

static uint64_t
hash_layout(const fs_layout *layout)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    hash = hash_u64(hash, (uint64_t)layout->size);
    hash = hash_u64(hash, (uint64_t)layout->partition);
    hash = hash_u64(hash, (uint64_t)layout->slots_n);
    for (int u = 0; u < layout->units_n; u++) {
        const fs_unit_layout *unit = &layout->units[u];
        hash = hash_bytes(hash, unit->name, strlen(unit->name) + 1);
        hash = hash_u64(hash, (uint64_t)unit->opens);
        hash = hash_u64(hash, (uint64_t)unit->publishes);
    }
    for (int p = 0; p < layout->params_n; p++) {
        const fs_param *param = &layout->params[p];
        hash = hash_bytes(hash, param->name, strlen(param->name) + 1);
        if (param->tied_name != NULL) {
            hash = hash_bytes(hash, param->tied_name, strlen(param->tied_name) + 1);
        }
        hash = hash_u64(hash, param->dims_n);
        for (size_t d = 0; d < param->dims_n; d++) {
            hash = hash_u64(hash, param->dims[d]);
        }
        hash = hash_u64(hash, (uint64_t)param->unit * 2 + param->trainable);
        hash = hash_u64(hash, (uint64_t)param->group);
    }
    return hash;
}

// ---- make and free ------------------------------------------------------------------------------

fs_status
fs_layout_make(const fs_param_def *params, int params_n, const fs_unit_def *units, int units_n,
               int size, fs_partition partition, bool slot_per_unit, fs_layout **out)
{
    if (size < 1 || size > FS_RANKS_MAX) {
        return FS_FAIL(FS_EINVAL, "world size %d is not between 1 and %d", size, FS_RANKS_MAX);
    }
    if (params_n < 0 || units_n < 0) {
        return FS_FAIL(FS_EINVAL, "%d parameters in %d units", params_n, units_n);
    }
    fs_layout *layout = NULL;
    FS_TRY(fs_calloc(1, sizeof *layout, &layout));
    fs_status st = FS_OK;
    layout->size = size;
    layout->partition = partition;
    FS_TRY_GOTO(fs_calloc((size_t)params_n, sizeof *layout->params, &layout->params), st, fail);
    FS_TRY_GOTO(fs_calloc((size_t)units_n, sizeof *layout->units, &layout->units), st, fail);
    FS_TRY_GOTO(fs_calloc((size_t)units_n, sizeof *layout->order, &layout->order), st, fail);
    for (layout->units_n = 0; layout->units_n < units_n; layout->units_n++) {
        fs_unit_layout *unit = &layout->units[layout->units_n];
        unit->opens = units[layout->units_n].opens;
        unit->publishes = units[layout->units_n].publishes;
        FS_TRY_GOTO(fs_strdup(units[layout->units_n].name, &unit->name), st, fail);
    }
    for (layout->params_n = 0; layout->params_n < params_n;) {
        int p = layout->params_n++; /* counted first: a half-copied one is freed too */
        FS_TRY_GOTO(copy_param(&params[p], units_n, &layout->params[p]), st, fail);
    }
    FS_TRY_GOTO(check_names(layout), st, fail);
    FS_TRY_GOTO(place_params(layout), st, fail);
    FS_TRY_GOTO(make_order(layout), st, fail);
    FS_TRY_GOTO(make_slots(layout, slot_per_unit), st, fail);
    FS_TRY_GOTO(make_segs(layout), st, fail);
    layout->hash = hash_layout(layout);
    *out = layout;
    return FS_OK;
fail:
    fs_layout_free(layout);
    return st;
}

void
fs_layout_free(fs_layout *layout)
{
    if (layout == NULL) {
        return;
    }
    for (int p = 0; p < layout->params_n; p++) {
        fs_free(layout->params[p].name);
        fs_free(layout->params[p].tied_name);
    }
    for (int u = 0; u < layout->units_n; u++) {
        fs_free(layout->units[u].name);
    }
    fs_free(layout->params);
    fs_free(layout->units);
    fs_free(layout->order);
    fs_free(layout->segs);
    fs_free(layout->cut_first);
    fs_free(layout->cut_unit_first);
    fs_free(layout->own_n);
    fs_free(layout->state_n);
    fs_free(layout->slot_n);
    fs_free(layout);
}

int
fs_layout_find(const fs_layout *layout, const char *name)
{
    for (int p = 0; p < layout->params_n; p++) {
        const fs_param *param = &layout->params[p];
        if (strcmp(param->name, name) == 0 ||
            (param->tied_name != NULL && strcmp(param->tied_name, name) == 0)) {
            return p;
        }
    }
    return -1;
}
