/* The only fence. Each rank writes its record, then counts itself in; whoever sees that all are
 * in may move the gate from k to k + 1, and whoever gives up may move it from k to aborted. One
 * compare-and-swap decides, for everyone: there are never two verdicts on one fence. */
#define _GNU_SOURCE
#include "shared.h"

#include <string.h>

typedef struct gate {
    fs_world *world;
    uint64_t k;
    uint64_t all; /* arrived when everyone is in */
} gate;

static bool
gate_moved(void *ctx)
{
    const gate *g = ctx;
    fs_world_page *page = g->world->page;
    uint64_t now = atomic_load_explicit(&page->gate, memory_order_acquire);
    if (now != g->k) {
        return true;
    }
    if (atomic_load_explicit(&page->arrived, memory_order_acquire) < g->all) {
        return false;
    }
    uint64_t expected = g->k;
    if (atomic_compare_exchange_strong(&page->gate, &expected, g->k + 1)) {
        fs_bell(g->world);
    }
    return true;
}

/* A rank that skips has nothing to compare at the fences that it goes with. */
static bool
goes_with(const fs_what *skips, const fs_what *other)
{
    return skips->op == FS_OP_SKIP && (other->op == FS_OP_SKIP || other->op == FS_OP_LOSS ||
                                       other->op == FS_OP_SETTLE);
}

static bool
what_differs(const fs_what *a, const fs_what *b)
{
    if (goes_with(a, b) || goes_with(b, a)) {
        return false;
    }
    return a->op != b->op || a->dtype != b->dtype || a->root != b->root ||
           a->nbytes != b->nbytes || a->tag != b->tag;
}

/* The rank of the world whose record is in the minority (the later one where all are even), or
 * -1 if all are alike. Equal on all ranks: they read the same records. */
static int
find_odd(const fs_world *world, uint64_t k)
{
    const fs_what *first = &world->page->member[0].rec[k & 1].what;
    int odd = -1, like_first = 0, leader = 0;
    while (first->op == FS_OP_SKIP && leader + 1 < world->size) {
        first = &world->page->member[++leader].rec[k & 1].what; /* compare with one who compares */
    }
    for (int r = 0; r < world->size; r++) {
        if (!what_differs(first, &world->page->member[r].rec[k & 1].what)) {
            like_first++;
        } else if (odd < 0) {
            odd = r;
        }
    }
    return odd >= 0 && like_first * 2 < world->size ? leader : odd;
}

static fs_status
meet(fs_world *world, const fs_what *what, const fs_payload *mine, fs_payload *all, unsigned flags)
{
    fs_world_page *page = world->page;
    uint64_t k = world->fences;
    fs_rec *rec = &page->member[world->rank].rec[k & 1];
    rec->what = *what;
    if (mine != NULL) {
        rec->payload = *mine;
    } else {
        memset(&rec->payload, 0, sizeof rec->payload);
    }
    fs_note *note = &world->job->page->slot[world->ranks[world->rank]].note;
    if (atomic_load_explicit(&note->op, memory_order_relaxed) >= FS_OP_GATHER) {
        fs_note_store(note->unit, FS_NOTE_UNIT_NBYTES, ""); /* this is not about a unit */
    }
    atomic_store_explicit(&note->op, (int32_t)what->op, memory_order_relaxed);
    atomic_store_explicit(&rec->fence, k + 1, memory_order_release);
    atomic_fetch_add(&page->arrived, 1);

    gate g = {world, k, (k + 1) * (uint64_t)world->size};
    fs_status st = fs_wait(world, gate_moved, &g, flags);
    if (st != FS_OK) {
        uint64_t expected = k;
        if (atomic_compare_exchange_strong(&page->gate, &expected, k | FS_GATE_ABORTED)) {
            fs_bell(world);
        } else if (expected != (k | FS_GATE_ABORTED) && st == FS_ABORTED) {
            st = FS_OK; /* it was finished before we gave up, and that is final */
        }
    } else if (atomic_load(&page->gate) == (k | FS_GATE_ABORTED)) {
        /* Not any aborted gate: a fast rank may have given up on the next fence already. */
        st = fs_world_aborted(world);
    }
    if (st != FS_OK) {
        return st;
    }
    int odd = find_odd(world, k);
    if (odd >= 0) {
        fs_world_abort(world, FS_CAUSE_MISMATCH, world->ranks[odd], 0);
        return fs_world_aborted(world);
    }
    if (all != NULL) {
        for (int r = 0; r < world->size; r++) {
            all[r] = page->member[r].rec[k & 1].payload;
        }
    }
    world->fences = k + 1;
    return FS_OK;
}

fs_status
fs_meet(fs_world *world, const fs_what *what, const fs_payload *mine, fs_payload *all,
        unsigned flags)
{
    FS_TRY(fs_world_usable(world));
    if (fs_log_is_in_collective(world)) {
        return meet(world, what, mine, all, flags);
    }
    fs_log_begin(world, what->op, 0, sizeof(fs_rec));
    fs_status st = meet(world, what, mine, all, flags);
    fs_log_end(world);
    return st;
}
