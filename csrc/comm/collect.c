/* The collectives: what each shows to the other ranks, and what it takes of what they show. How
 * bytes are shown is show.h's. */
#define _GNU_SOURCE
#include "show.h"

#include <string.h>

#include "../base/checked.h"

/* Reductions up to this size (of all ranks together) are done by every rank: one fence, not two. */
#define FS_DIRECT_NBYTES ((size_t)64 * 1024)

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
set_rounds(fs_bulk *b, size_t blocks, size_t n)
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
gather_fill(const fs_bulk *b, size_t begin, unsigned char *to)
{
    size_t n = fs_bulk_part_n(b, b->world->counts[b->world->rank], begin);
    if (n != 0) {
        memcpy(to, b->in + begin * b->each, n * b->each);
    }
}

static void
gather_visit(const fs_bulk *b, size_t begin, bool in_place)
{
    const fs_world *world = b->world;
    for (int r = 0; r < world->size; r++) {
        size_t n = in_place ? world->counts[r] : fs_bulk_part_n(b, world->counts[r], begin);
        const unsigned char *from =
            r == world->rank ? b->in + begin * b->each : world->pieces[r];
        fs_copy_out(world, b->out + (world->offsets[r] + begin) * b->each, from, n * b->each);
    }
}

fs_status
fs_all_gather(fs_world *world, fs_dtype dtype, const void *in, size_t n, const size_t *counts,
              void *out)
{
    FS_TRY(fs_world_usable(world));
    fs_bulk b = {.world = world, .dtype = dtype, .each = fs_dtype_nbytes(dtype), .in = in,
                 .out = out, .fill = gather_fill, .visit = gather_visit};
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
scatter_fill(const fs_bulk *b, size_t begin, unsigned char *to)
{
    const fs_world *world = b->world;
    for (int r = 0; r < world->size; r++) {
        size_t n = fs_bulk_part_n(b, world->counts[r], begin);
        if (r != world->rank && n != 0) {
            memcpy(to + (size_t)r * b->chunk * b->each,
                   b->in + (world->offsets[r] + begin) * b->each, n * b->each);
        }
    }
}

static void
scatter_visit(const fs_bulk *b, size_t begin, bool in_place)
{
    fs_world *world = b->world;
    int me = world->rank;
    size_t n = in_place ? world->counts[me] : fs_bulk_part_n(b, world->counts[me], begin);
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
    fs_bulk b = {.world = world, .dtype = dtype, .each = fs_dtype_nbytes(dtype), .op = op, .in = in,
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
exchange_visit(const fs_bulk *b, size_t begin, bool in_place)
{
    const fs_world *world = b->world;
    int me = world->rank;
    size_t n = in_place ? world->counts[me] : fs_bulk_part_n(b, world->counts[me], begin);
    size_t at = in_place ? world->offsets[me] * b->each : (size_t)me * b->chunk * b->each;
    for (int r = 0; r < world->size; r++) {
        const unsigned char *from = r == me ? b->in + (world->offsets[me] + begin) * b->each
                                            : world->pieces[r] + at;
        fs_copy_out(world, b->out + (world->offsets[r] + begin) * b->each, from, n * b->each);
    }
}

fs_status
fs_all_to_all(fs_world *world, fs_dtype dtype, const void *in, size_t n, void *out)
{
    FS_TRY(fs_world_usable(world));
    fs_bulk b = {.world = world, .dtype = dtype, .each = fs_dtype_nbytes(dtype), .in = in,
                 .out = out, .fill = scatter_fill, .visit = exchange_visit};
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
broadcast_fill(const fs_bulk *b, size_t begin, unsigned char *to)
{
    size_t n = fs_bulk_part_n(b, b->world->counts[0], begin);
    if (b->world->rank == b->root && n != 0) {
        memcpy(to, b->in + begin * b->each, n * b->each);
    }
}

static void
broadcast_visit(const fs_bulk *b, size_t begin, bool in_place)
{
    const fs_world *world = b->world;
    if (world->rank != b->root) {
        size_t n = in_place ? world->counts[0] : fs_bulk_part_n(b, world->counts[0], begin);
        fs_copy_out(world, b->out + begin * b->each, world->pieces[b->root], n * b->each);
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
    fs_bulk b = {.world = world, .dtype = dtype, .each = fs_dtype_nbytes(dtype), .in = inout,
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
reduce_direct(const fs_bulk *b, size_t n)
{
    fs_world *world = b->world;
    if (n != 0) {
        memcpy(fs_window(world), b->in, n * b->each);
    }
    FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
    fs_windows_turn(world);
    fs_reduce_pieces(world, b->dtype, b->op, (const void *const *)world->pieces, n, b->out);
    return FS_OK;
}

/* Blocks of one round: block r is elements [r * chunk, (r + 1) * chunk) after begin. */
static size_t
block_n(const fs_bulk *b, size_t n, size_t begin, int r)
{
    return fs_bulk_part_n(b, n, begin + (size_t)r * b->chunk);
}

static void
all_reduce_fill(const fs_bulk *b, size_t begin, unsigned char *to)
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
all_reduce_round(const fs_bulk *b, size_t n, size_t begin)
{
    fs_world *world = b->world;
    size_t at = (size_t)world->rank * b->chunk;
    for (int r = 0; r < world->size; r++) {
        world->pieces[r] = r == world->rank ? b->in + (begin + at) * b->each
                                            : world->pieces[r] + at * b->each;
    }
    fs_reduce_pieces(world, b->dtype, b->op, (const void *const *)world->pieces,
                     block_n(b, n, begin, world->rank), fs_window(world));
    FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
    fs_windows_turn(world);
    for (int r = 0; r < world->size; r++) {
        fs_copy_out(world, b->out + (begin + (size_t)r * b->chunk) * b->each, world->pieces[r],
                    block_n(b, n, begin, r) * b->each);
    }
    return FS_OK;
}

/* Operands in world memory, each its own output: this rank reduces its block of all of them into
 * its own operand, then takes the other blocks from the ranks that reduced those. */
static fs_status
all_reduce_in_place(const fs_bulk *b, size_t n)
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
        fs_reduce_pieces(world, b->dtype, b->op, world->blocks, part, fs_window(world));
        memcpy(b->out + i * b->each, fs_window(world), part * b->each);
    }
    FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
    for (int r = 0; r < world->size; r++) {
        begin = fs_min_size((size_t)r * per, n);
        end = fs_min_size(begin + per, n);
        if (r != me) {
            fs_copy_out(world, b->out + begin * b->each, world->pieces[r] + begin * b->each,
                        (end - begin) * b->each);
        }
    }
    return fs_meet(world, &b->what, NULL, NULL, 0);
}

/* Larger than FS_DIRECT_NBYTES of all ranks together. */
static fs_status
reduce_in_rounds(fs_bulk *b, size_t n)
{
    fs_world *world = b->world;
    set_rounds(b, (size_t)world->size, 0);
    size_t round_n = b->chunk * (size_t)world->size;
    world->counts[0] = n;
    b->operand = b->in;
    b->operand_nbytes = n * b->each;
    b->private_only = b->in != b->out; /* in place, blocks travel from output to output */
    bool in_place, shown;
    FS_TRY(fs_show_first(b, &in_place, &shown));
    if (in_place) {
        return all_reduce_in_place(b, n);
    }
    for (size_t begin = 0; begin < n; begin += round_n) {
        if (begin > 0 || !shown) {
            all_reduce_fill(b, begin, fs_window(world));
            FS_TRY(fs_meet(world, &b->what, NULL, NULL, 0));
            fs_windows_turn(world);
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
    fs_bulk b = {.world = world, .dtype = dtype, .each = fs_dtype_nbytes(dtype), .op = op, .in = in,
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
            fs_copy_out(world, out, in, nbytes); /* the reduction of one is itself */
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
