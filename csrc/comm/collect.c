/* The bulk collectives: show bytes, meet, visit what every rank shows.
 *
 * Private memory passes through windows: every rank has a block of world memory in two halves. A
 * rank fills one half, meets, and reads the same half of everyone. It may fill the other half at
 * once, while slow ranks still read the first: nobody fills a half again before the fence that
 * follows its reading. So a piece costs one fence, and the pieces stay in the cache.
 *
 *     fill A   meet   visit A, fill B   meet   visit B, fill A   meet ...
 *
 * Operands that lie in world memory on every rank are visited where they are, all at once; then
 * a closing fence says that nobody reads them any more. Which of the two it is, ranks tell each
 * other in the first fence. */
#define _GNU_SOURCE
#include "shared.h"

#include <string.h>

#include "../base/checked.h"

/* Two of these per rank. Fits the second-level cache beside what is summed from it. */
#define FS_HALF_NBYTES ((size_t)256 * 1024)

/* Reductions up to this size (of all ranks together) are done by every rank: one fence, not two. */
#define FS_DIRECT_NBYTES ((size_t)64 * 1024)

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

/* This rank's half for the next fence. */
static unsigned char *
window(const fs_world *world)
{
    return fs_region_block(world->windows, world->rank) + (world->shown & 1) * world->half_nbytes;
}

/* After the fence: pieces are the halves just shown; window() is the other half from now on. */
static void
turn_windows(fs_world *world)
{
    for (int r = 0; r < world->size; r++) {
        world->pieces[r] =
            fs_region_block(world->windows, r) + (world->shown & 1) * world->half_nbytes;
    }
    world->shown++;
}

/* Large copies may go past the cache; small ones stay in it. */
static void
copy_out(const fs_world *world, void *dst, const void *src, size_t nbytes)
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

/* A collective under way. */
typedef struct bulk {
    fs_world *world;
    fs_dtype dtype;
    size_t each; /* bytes of an element */
    fs_reduce_op op;
    int root;
    const unsigned char *in;
    unsigned char *out;
    size_t chunk; /* elements of a block that one round shows */
    size_t rounds;
    fs_what what;
    /* What this rank shows where it lies; shows_nothing: it shows nothing. */
    const void *operand;
    size_t operand_nbytes;
    bool shows_nothing;
    bool private_only; /* shown through windows wherever it lies */
    /* Puts elements [begin, begin + chunk) of each of this rank's blocks in its window. */
    void (*fill)(const struct bulk *b, size_t begin, unsigned char *window);
    /* Takes elements [begin, begin + chunk) from pieces. In place: all of them, from the
     * operands. */
    void (*visit)(const struct bulk *b, size_t begin, bool in_place);
} bulk;

/* What a rank says of its operand in the first fence: an address, or one of these. */
enum { SHOWN_PRIVATE = 0, SHOWN_NOTHING = 1 };

/* Elements of a block of n that lie in [begin, begin + chunk). */
static size_t
part_n(const bulk *b, size_t n, size_t begin)
{
    return begin < n ? fs_min_size(n - begin, b->chunk) : 0;
}

/* Operands as every rank sees them. A rank that has closed a region which a peer still uses ends
 * the job: the peer would wait for it for ever. */
static fs_status
find_operands(const bulk *b)
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

/* The first fence of a bulk collective; windows are filled if the operand is private.
 * *out_in_place: pieces are the operands; *out_shown: pieces are windows that hold round 0. */
static fs_status
show_first(const bulk *b, bool *out_in_place, bool *out_shown)
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
        b->fill(b, 0, window(world));
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
    turn_windows(world);
    return FS_OK;
}

static fs_status
show(const bulk *b)
{
    fs_world *world = b->world;
    if (world->size == 1) {
        FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
        world->pieces[0] = b->operand;
        b->visit(b, 0, true);
        return FS_OK;
    }
    bool in_place, shown;
    FS_TRY(show_first(b, &in_place, &shown));
    if (in_place) {
        b->visit(b, 0, true);
        return fs_meet(world, &b->what, NULL, NULL, 0);
    }
    for (size_t round = 0; round < b->rounds; round++) {
        if (round > 0 || !shown) {
            b->fill(b, round * b->chunk, window(world));
            FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
            turn_windows(world);
        }
        b->visit(b, round * b->chunk, false);
    }
    return FS_OK;
}

/* The only bulk collective. */
static fs_status
fs_show(const bulk *b)
{
    fs_log_begin(b->world, b->what.op, 0, b->what.nbytes);
    fs_status st = show(b);
    fs_log_end(b->world);
    return st;
}

// ---- arguments ----------------------------------------------------------------------------------

static uint64_t
hash_counts(const size_t *counts, size_t n)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ counts[i]) * 0x100000001b3u;
        hash ^= hash >> 29;
    }
    return hash | 1; /* 0 says "equal counts" */
}

/* Fills counts and offsets; *out_total: their sum, whose bytes fit. */
static fs_status
set_counts(fs_world *world, size_t each, const size_t *counts, size_t n, size_t *out_total,
           size_t *out_most)
{
    size_t total = 0, most = 0, nbytes;
    for (int r = 0; r < world->size; r++) {
        world->counts[r] = counts != NULL ? counts[r] : n;
        world->offsets[r] = total;
        most = fs_max_size(most, world->counts[r]);
        FS_TRY(fs_add_size(total, world->counts[r], &total));
    }
    FS_TRY(fs_mul_size(total, each, &nbytes));
    *out_total = total;
    *out_most = most;
    return FS_OK;
}

/* How many elements of a block a window holds when it is cut into `blocks` blocks, in whole cache
 * lines; and how many rounds a block of n then takes. At least one: the fence compares. */
static void
set_rounds(bulk *b, size_t blocks, size_t n)
{
    b->chunk = b->world->half_nbytes / blocks / FS_CACHE_LINE * FS_CACHE_LINE / b->each;
    b->rounds = n == 0 ? 1 : (n - 1) / b->chunk + 1;
}

static fs_status
check_reduction(fs_dtype dtype, fs_reduce_op op)
{
    if ((int)op < FS_SUM || op > FS_MIN) {
        return FS_FAIL(FS_EINVAL, "op: number %d is not sum, mean, max or min", (int)op);
    }
    if (op == FS_MEAN && !fs_dtype_is_float(dtype)) {
        return FS_FAIL(FS_EINVAL, "op: a mean of %s is not an integer; use sum, or a float dtype",
                       fs_dtype_name(dtype));
    }
    return FS_OK;
}

static bool
overlaps(const void *a, size_t a_nbytes, const void *b, size_t b_nbytes)
{
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return a_nbytes != 0 && b_nbytes != 0 && x < y + b_nbytes && y < x + a_nbytes;
}

static fs_status
check_apart(const void *in, size_t in_nbytes, const void *out, size_t out_nbytes)
{
    return overlaps(in, in_nbytes, out, out_nbytes)
               ? FS_FAIL(FS_EINVAL, "out overlaps the input: pass other memory")
               : FS_OK;
}

// ---- all_gather ---------------------------------------------------------------------------------

static void
gather_fill(const bulk *b, size_t begin, unsigned char *to)
{
    size_t n = part_n(b, b->world->counts[b->world->rank], begin);
    if (n != 0) {
        memcpy(to, b->in + begin * b->each, n * b->each);
    }
}

static void
gather_visit(const bulk *b, size_t begin, bool in_place)
{
    const fs_world *world = b->world;
    for (int r = 0; r < world->size; r++) {
        size_t n = in_place ? world->counts[r] : part_n(b, world->counts[r], begin);
        const unsigned char *from =
            r == world->rank ? b->in + begin * b->each : world->pieces[r];
        copy_out(world, b->out + (world->offsets[r] + begin) * b->each, from, n * b->each);
    }
}

fs_status
fs_all_gather(fs_world *world, fs_dtype dtype, const void *in, size_t n, const size_t *counts,
              void *out)
{
    FS_TRY(fs_world_usable(world));
    bulk b = {.world = world, .dtype = dtype, .each = fs_dtype_nbytes(dtype), .in = in, .out = out,
              .fill = gather_fill, .visit = gather_visit};
    size_t total, most;
    FS_TRY(set_counts(world, b.each, counts, n, &total, &most));
    if (world->counts[world->rank] != n) {
        return FS_FAIL(FS_EINVAL, "counts: rank %d has %zu elements, but counts[%d] is %zu",
                       world->rank, n, world->rank, world->counts[world->rank]);
    }
    /* Out may hold the input at its final place. */
    unsigned char *mine = b.out + world->offsets[world->rank] * b.each;
    if (in != mine) {
        FS_TRY(check_apart(in, n * b.each, out, total * b.each));
    }
    b.what = (fs_what){FS_OP_ALL_GATHER, (int32_t)dtype, -1, total * b.each,
                       counts != NULL ? hash_counts(counts, (size_t)world->size) : 0};
    b.operand = in;
    b.operand_nbytes = n * b.each;
    set_rounds(&b, 1, most);
    return fs_show(&b);
}

// ---- reduce_scatter -----------------------------------------------------------------------------

static void
scatter_fill(const bulk *b, size_t begin, unsigned char *to)
{
    const fs_world *world = b->world;
    for (int r = 0; r < world->size; r++) {
        size_t n = part_n(b, world->counts[r], begin);
        if (r != world->rank && n != 0) {
            memcpy(to + (size_t)r * b->chunk * b->each,
                   b->in + (world->offsets[r] + begin) * b->each, n * b->each);
        }
    }
}

static void
scatter_visit(const bulk *b, size_t begin, bool in_place)
{
    fs_world *world = b->world;
    int me = world->rank;
    size_t n = in_place ? world->counts[me] : part_n(b, world->counts[me], begin);
    size_t at = in_place ? world->offsets[me] * b->each : (size_t)me * b->chunk * b->each;
    for (int r = 0; r < world->size; r++) {
        world->pieces[r] = r == me ? b->in + (world->offsets[me] + begin) * b->each
                                   : world->pieces[r] + at;
    }
    fs_reduce_pieces(world, b->dtype, b->op, (const void *const *)world->pieces, n,
                     b->out + begin * b->each);
}

fs_status
fs_reduce_scatter(fs_world *world, fs_dtype dtype, fs_reduce_op op, const void *in,
                  const size_t *counts, void *out)
{
    FS_TRY(fs_world_usable(world));
    FS_TRY(check_reduction(dtype, op));
    bulk b = {.world = world, .dtype = dtype, .each = fs_dtype_nbytes(dtype), .op = op, .in = in,
              .out = out, .fill = scatter_fill, .visit = scatter_visit};
    size_t total, most;
    FS_TRY(set_counts(world, b.each, counts, 0, &total, &most));
    FS_TRY(check_apart(in, total * b.each, out, counts[world->rank] * b.each));
    b.what = (fs_what){FS_OP_REDUCE_SCATTER, (int32_t)dtype, (int32_t)op, total * b.each,
                       hash_counts(counts, (size_t)world->size)};
    b.operand = in;
    b.operand_nbytes = total * b.each;
    set_rounds(&b, (size_t)world->size, most);
    return fs_show(&b);
}

// ---- all_to_all ---------------------------------------------------------------------------------

static void
exchange_visit(const bulk *b, size_t begin, bool in_place)
{
    const fs_world *world = b->world;
    int me = world->rank;
    size_t n = in_place ? world->counts[me] : part_n(b, world->counts[me], begin);
    size_t at = in_place ? world->offsets[me] * b->each : (size_t)me * b->chunk * b->each;
    for (int r = 0; r < world->size; r++) {
        const unsigned char *from = r == me ? b->in + (world->offsets[me] + begin) * b->each
                                            : world->pieces[r] + at;
        copy_out(world, b->out + (world->offsets[r] + begin) * b->each, from, n * b->each);
    }
}

fs_status
fs_all_to_all(fs_world *world, fs_dtype dtype, const void *in, size_t n, void *out)
{
    FS_TRY(fs_world_usable(world));
    bulk b = {.world = world, .dtype = dtype, .each = fs_dtype_nbytes(dtype), .in = in, .out = out,
              .fill = scatter_fill, .visit = exchange_visit};
    size_t total, most;
    FS_TRY(set_counts(world, b.each, NULL, n, &total, &most));
    FS_TRY(check_apart(in, total * b.each, out, total * b.each));
    b.what = (fs_what){FS_OP_ALL_TO_ALL, (int32_t)dtype, -1, total * b.each, 0};
    b.operand = in;
    b.operand_nbytes = total * b.each;
    set_rounds(&b, (size_t)world->size, n);
    return fs_show(&b);
}

// ---- broadcast ----------------------------------------------------------------------------------

static void
broadcast_fill(const bulk *b, size_t begin, unsigned char *to)
{
    size_t n = part_n(b, b->world->counts[0], begin);
    if (b->world->rank == b->root && n != 0) {
        memcpy(to, b->in + begin * b->each, n * b->each);
    }
}

static void
broadcast_visit(const bulk *b, size_t begin, bool in_place)
{
    const fs_world *world = b->world;
    if (world->rank != b->root) {
        size_t n = in_place ? world->counts[0] : part_n(b, world->counts[0], begin);
        copy_out(world, b->out + begin * b->each, world->pieces[b->root], n * b->each);
    }
}

fs_status
fs_broadcast(fs_world *world, fs_dtype dtype, int root, void *inout, size_t n)
{
    FS_TRY(fs_world_usable(world));
    if (root < 0 || root >= world->size) {
        return FS_FAIL(FS_EINVAL, "root: rank %d does not exist in a world of %d", root,
                       world->size);
    }
    bulk b = {.world = world, .dtype = dtype, .each = fs_dtype_nbytes(dtype), .in = inout,
              .out = inout, .root = root, .fill = broadcast_fill, .visit = broadcast_visit};
    size_t nbytes;
    FS_TRY(fs_mul_size(n, b.each, &nbytes));
    world->counts[0] = n;
    b.what = (fs_what){FS_OP_BROADCAST, (int32_t)dtype, root, nbytes, 0};
    b.operand = inout;
    b.operand_nbytes = nbytes;
    b.shows_nothing = world->rank != root;
    set_rounds(&b, 1, n);
    return fs_show(&b);
}

// ---- all_reduce ---------------------------------------------------------------------------------

/* Small: every rank shows all of it and reduces all of it. */
static fs_status
reduce_direct(const bulk *b, size_t n)
{
    fs_world *world = b->world;
    if (n != 0) {
        memcpy(window(world), b->in, n * b->each);
    }
    FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
    turn_windows(world);
    fs_reduce_pieces(world, b->dtype, b->op, (const void *const *)world->pieces, n, b->out);
    return FS_OK;
}

/* Blocks of one round: block r is elements [r * chunk, (r + 1) * chunk) after begin. */
static size_t
block_n(const bulk *b, size_t n, size_t begin, int r)
{
    return part_n(b, n, begin + (size_t)r * b->chunk);
}

static void
all_reduce_fill(const bulk *b, size_t begin, unsigned char *to)
{
    size_t n = b->world->counts[0];
    for (int r = 0; r < b->world->size; r++) {
        size_t at = (size_t)r * b->chunk, part = block_n(b, n, begin, r);
        if (r != b->world->rank && part != 0) {
            memcpy(to + at * b->each, b->in + (begin + at) * b->each, part * b->each);
        }
    }
}

/* Reduces this rank's block of what windows show, shows the result, and takes everyone's. */
static fs_status
all_reduce_round(const bulk *b, size_t n, size_t begin)
{
    fs_world *world = b->world;
    size_t at = (size_t)world->rank * b->chunk;
    for (int r = 0; r < world->size; r++) {
        world->pieces[r] = r == world->rank ? b->in + (begin + at) * b->each
                                            : world->pieces[r] + at * b->each;
    }
    fs_reduce_pieces(world, b->dtype, b->op, (const void *const *)world->pieces,
                     block_n(b, n, begin, world->rank), window(world));
    FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
    turn_windows(world);
    for (int r = 0; r < world->size; r++) {
        copy_out(world, b->out + (begin + (size_t)r * b->chunk) * b->each, world->pieces[r],
                 block_n(b, n, begin, r) * b->each);
    }
    return FS_OK;
}

/* Operands in world memory, each its own output: this rank reduces its block of all of them into
 * its own operand, then takes the other blocks from the ranks that reduced those. */
static fs_status
all_reduce_in_place(const bulk *b, size_t n)
{
    fs_world *world = b->world;
    int me = world->rank;
    size_t lines = FS_CACHE_LINE / b->each;
    size_t per = fs_round_up((n - 1) / (size_t)world->size + 1, lines);
    size_t begin = fs_min_size((size_t)me * per, n), end = fs_min_size(begin + per, n);
    size_t step = world->half_nbytes / b->each;
    for (size_t i = begin; i < end; i += step) {
        size_t part = fs_min_size(end - i, step);
        for (int r = 0; r < world->size; r++) {
            world->blocks[r] = world->pieces[r] + i * b->each;
        }
        fs_reduce_pieces(world, b->dtype, b->op, world->blocks, part, window(world));
        memcpy(b->out + i * b->each, window(world), part * b->each);
    }
    FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
    for (int r = 0; r < world->size; r++) {
        begin = fs_min_size((size_t)r * per, n);
        end = fs_min_size(begin + per, n);
        if (r != me) {
            copy_out(world, b->out + begin * b->each, world->pieces[r] + begin * b->each,
                     (end - begin) * b->each);
        }
    }
    return fs_meet(world, &b->what, NULL, NULL, 0);
}

/* Larger than FS_DIRECT_NBYTES of all ranks together. */
static fs_status
reduce_in_rounds(bulk *b, size_t n)
{
    fs_world *world = b->world;
    set_rounds(b, (size_t)world->size, 0);
    size_t round_n = b->chunk * (size_t)world->size;
    world->counts[0] = n;
    b->operand = b->in;
    b->operand_nbytes = n * b->each;
    b->private_only = b->in != b->out; /* in place, blocks travel from output to output */
    bool in_place, shown;
    FS_TRY(show_first(b, &in_place, &shown));
    if (in_place) {
        return all_reduce_in_place(b, n);
    }
    for (size_t begin = 0; begin < n; begin += round_n) {
        if (begin > 0 || !shown) {
            all_reduce_fill(b, begin, window(world));
            FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
            turn_windows(world);
        }
        FS_TRY(all_reduce_round(b, n, begin));
    }
    return FS_OK;
}

fs_status
fs_all_reduce(fs_world *world, fs_dtype dtype, fs_reduce_op op, const void *in, void *out, size_t n)
{
    FS_TRY(fs_world_usable(world));
    FS_TRY(check_reduction(dtype, op));
    bulk b = {.world = world, .dtype = dtype, .each = fs_dtype_nbytes(dtype), .op = op, .in = in,
              .out = out, .fill = all_reduce_fill};
    size_t nbytes, all_nbytes;
    FS_TRY(fs_mul_size(n, b.each, &nbytes));
    FS_TRY(fs_mul_size(nbytes, (size_t)world->size, &all_nbytes));
    if (in != out) {
        FS_TRY(check_apart(in, nbytes, out, nbytes));
    }
    b.what = (fs_what){FS_OP_ALL_REDUCE, (int32_t)dtype, (int32_t)op, nbytes, 0};
    fs_status st;
    fs_log_begin(world, FS_OP_ALL_REDUCE, 0, nbytes);
    if (world->size == 1) {
        st = fs_meet(world, &b.what, NULL, NULL, 0);
        if (st == FS_OK) {
            copy_out(world, out, in, nbytes); /* the reduction of one is itself */
        }
    } else {
        st = all_nbytes <= FS_DIRECT_NBYTES ? reduce_direct(&b, n) : reduce_in_rounds(&b, n);
    }
    fs_log_end(world);
    return st;
}

// ---- barrier ------------------------------------------------------------------------------------

fs_status
fs_barrier(fs_world *world)
{
    const fs_what what = {FS_OP_BARRIER, -1, -1, 0, 0};
    return fs_meet(world, &what, NULL, NULL, 0);
}
