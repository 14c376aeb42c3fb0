/* Freezing and thawing between steps. A frozen parameter is one without a gradient: what has none
 * is in no norm, is not updated or decayed, and does not age. Its slot and its state stay where
 * they are, so that thawing goes on from them and neither allocates. */
#include "shards_internal.h"

#include <string.h>

/* Does this rank hold anything of a step that was not taken? */
static bool
has_gradients(const fs_shards *shards)
{
    if (shards->rounds > 0 || shards->cursor > 0 || shards->agreed) {
        return true;
    }
    for (int u = 0; u < shards->layout->units_n; u++) {
        const fs_unit *unit = &shards->units[u];
        if (unit->opened || unit->in_spill || unit->complete) {
            return true;
        }
    }
    return false;
}

static uint64_t
hash_flags(const unsigned char *flags, int n)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int p = 0; p < n; p++) {
        hash = (hash ^ (flags[p] != 0)) * UINT64_C(0x100000001b3); /* FNV-1a */
    }
    return hash;
}

fs_status
fs_shards_freeze(fs_shards *shards, const unsigned char *frozen)
{
    const fs_layout *layout = shards->layout;
    FS_TRY(fs_shards_ready(shards));
    fs_payload mine = {.u = {has_gradients(shards)}};
    const fs_what what = {
        .op = FS_OP_FREEZE, .dtype = -1, .root = -1, .tag = hash_flags(frozen, layout->params_n)};
    FS_TRY(fs_meet(shards->world, &what, &mine, shards->records, 0));
    for (int r = 0; r < shards->size; r++) {
        if (shards->records[r].u[0] != 0) {
            return FS_FAIL(FS_ESTATE,
                           "rank %d has gradients of a step that was not taken: what is frozen "
                           "changes between steps, after step() or zero()",
                           r);
        }
    }
    for (int p = 0; p < layout->params_n; p++) {
        shards->frozen[p] = layout->params[p].trainable && frozen[p] != 0;
    }
    return FS_OK;
}

bool
fs_shards_trains(const fs_shards *shards, int param)
{
    return shards->layout->params[param].trainable && !shards->frozen[param];
}
