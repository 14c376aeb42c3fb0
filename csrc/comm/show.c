#define _GNU_SOURCE
#include "show.h"

#include <string.h>

#include "../base/checked.h"

/* Two of these per rank. Fits the second-level cache beside what is summed from it. */
#define FS_HALF_NBYTES ((size_t)256 * 1024)

// ---- windows ------------------------------------------------------------------------------------

fs_status
fs_windows_open(fs_world *world)
{
    size_t size = (size_t)world->size;
    fs_arena *arena = &world->scratch_arena;
    fs_status st;
    world->half_nbytes = FS_HALF_NBYTES;
    /* A block for each rank, worth a copy. */
    while (world->half_nbytes / size < 1024) {
        world->half_nbytes *= 2;
    }
    FS_TRY_GOTO(fs_calloc(size, sizeof *world->pieces, &world->pieces), st, unable);
    FS_TRY_GOTO(fs_calloc(size, sizeof *world->sources, &world->sources), st, unable);
    FS_TRY_GOTO(fs_calloc(size, sizeof *world->blocks, &world->blocks), st, unable);
    FS_TRY_GOTO(fs_calloc(size, sizeof *world->payloads, &world->payloads), st, unable);
    FS_TRY_GOTO(fs_calloc(size, sizeof *world->counts, &world->counts), st, unable);
    FS_TRY_GOTO(fs_calloc(size, sizeof *world->offsets, &world->offsets), st, unable);
    size_t scratch_nbytes = FS_SCRATCH_N * sizeof(float), log_nbytes = sizeof(fs_log_page);
    size_t private_nbytes = scratch_nbytes + (size == 1 ? log_nbytes + FS_CACHE_LINE : 0);
    FS_TRY_GOTO(fs_arena_open(arena, &world->ledger, private_nbytes), st, unable);
    FS_TRY_GOTO(fs_arena_take(arena, FS_MEM_WINDOWS, scratch_nbytes, &world->scratch), st, unable);
    void *page = NULL;
    if (size > 1) {
        /* Behind the halves, this rank's page of the log. */
        size_t nbytes = fs_round_up(2 * world->half_nbytes + log_nbytes, fs_page_nbytes());
        FS_TRY(fs_region_open(world, "windows", nbytes, &world->windows));
        fs_ledger_charge(&world->ledger, FS_MEM_WINDOWS, FS_HOME_WORLD, nbytes);
        page = fs_region_block(world->windows, world->rank) + 2 * world->half_nbytes;
    } else {
        FS_TRY_GOTO(fs_arena_take(arena, FS_MEM_WINDOWS, log_nbytes, &page), st, unable);
    }
    world->log.page = page;
    return FS_OK;
unable:
    fs_world_abort(world, FS_CAUSE_ERROR, world->ranks[world->rank], 0);
    return st;
}

void
fs_windows_close(fs_world *world)
{
    world->log.page = NULL;
    fs_region_close(world->windows);
    world->windows = NULL;
    fs_arena_close(&world->scratch_arena);
    fs_free(world->pieces);
    fs_free(world->sources);
    fs_free(world->blocks);
    fs_free(world->payloads);
    fs_free(world->counts);
    fs_free(world->offsets);
    world->pieces = NULL;
    world->sources = NULL;
    world->blocks = NULL;
    world->payloads = NULL;
    world->counts = world->offsets = NULL;
}

unsigned char *
fs_window(const fs_world *world)
{
    return fs_region_block(world->windows, world->rank) + (world->shown & 1) * world->half_nbytes;
}

void
fs_windows_turn(fs_world *world)
{
    for (int r = 0; r < world->size; r++) {
        world->pieces[r] =
            fs_region_block(world->windows, r) + (world->shown & 1) * world->half_nbytes;
    }
    world->shown++;
}

void
fs_copy_out(const fs_world *world, void *dst, const void *src, size_t nbytes)
{
    if (nbytes == 0 || dst == src) {
        return;
    }
    if (nbytes >= 64 * 1024) {
        world->host.device->copy(&world->host, dst, src, nbytes);
    } else {
        memcpy(dst, src, nbytes);
    }
}

// ---- show ---------------------------------------------------------------------------------------

/* What a rank says of its operand in the first fence: an address, or one of these. */
enum { SHOWN_PRIVATE = 0, SHOWN_NOTHING = 1 };

size_t
fs_bulk_part_n(const fs_bulk *b, size_t n, size_t begin)
{
    return begin < n ? fs_min_size(n - begin, b->chunk) : 0;
}

/* Operands as every rank sees them. A rank that has closed a region which a peer still uses ends
 * the job: the peer would wait for it for ever. */
static fs_status
find_operands(const fs_bulk *b)
{
    fs_world *world = b->world;
    for (int r = 0; r < world->size; r++) {
        uint64_t address = world->payloads[r].u[0];
        world->pieces[r] = NULL;
        if (address == SHOWN_NOTHING) {
            continue;
        }
        world->pieces[r] =
            r == world->rank ? b->operand
                             : fs_region_find(world->job, address, (size_t)world->payloads[r].u[1]);
        if (world->pieces[r] == NULL) {
            fs_world_abort(world, FS_CAUSE_ERROR, world->ranks[world->rank], 0);
            return FS_FAIL(FS_ESTATE, "rank %d passed world memory that rank %d has closed",
                           world->ranks[r], world->ranks[world->rank]);
        }
    }
    return FS_OK;
}

fs_status
fs_show_first(const fs_bulk *b, bool *out_in_place, bool *out_shown)
{
    fs_world *world = b->world;
    fs_payload mine = {{0}};
    mine.u[1] = b->operand_nbytes;
    if (b->shows_nothing || b->operand_nbytes == 0) {
        mine.u[0] = SHOWN_NOTHING;
    } else if (b->private_only) {
        mine.u[0] = SHOWN_PRIVATE;
    } else {
        mine.u[0] = fs_region_address(world->job, b->operand, b->operand_nbytes);
    }
    if (mine.u[0] == SHOWN_PRIVATE) {
        b->fill(b, 0, fs_window(world));
    }
    FS_TRY(fs_meet(world, &b->what, &mine, world->payloads, 0));
    bool all_in_place = true, any_in_place = false;
    for (int r = 0; r < world->size; r++) {
        uint64_t said = world->payloads[r].u[0];
        all_in_place = all_in_place && said != SHOWN_PRIVATE;
        any_in_place = any_in_place || said > SHOWN_NOTHING;
    }
    *out_in_place = all_in_place;
    *out_shown = !all_in_place && !any_in_place;
    if (all_in_place) {
        world->shown++; /* the half stays unread, but turns are counted alike on all ranks */
        return find_operands(b);
    }
    fs_windows_turn(world);
    return FS_OK;
}

static fs_status
show(const fs_bulk *b)
{
    fs_world *world = b->world;
    if (world->size == 1) {
        FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
        world->pieces[0] = b->operand;
        b->visit(b, 0, true);
        return FS_OK;
    }
    bool in_place, shown;
    FS_TRY(fs_show_first(b, &in_place, &shown));
    if (in_place) {
        b->visit(b, 0, true);
        return fs_meet(world, &b->what, NULL, NULL, 0);
    }
    for (size_t round = 0; round < b->rounds; round++) {
        if (round > 0 || !shown) {
            b->fill(b, round * b->chunk, fs_window(world));
            FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
            fs_windows_turn(world);
        }
        b->visit(b, round * b->chunk, false);
    }
    return FS_OK;
}

fs_status
fs_show(const fs_bulk *b)
{
    fs_log_begin(b->world, b->what.op, 0, b->what.nbytes);
    fs_status st = show(b);
    fs_log_end(b->world);
    return st;
}
