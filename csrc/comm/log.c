/* The log of a world: what each rank has done in it, how many bytes that moved, and how long it
 * waited.
 *
 * A rank writes its own page and everyone may read it, at any time, also after the rank has died:
 * the pages lie behind the windows, in world memory. Totals are kept for ever, one row for each
 * operation and unit; single operations in a ring of the last FS_LOG_EVENTS. Nothing is allocated
 * after open, and nothing is shared that another rank would have to wait for: a word of a page has
 * one writer.
 *
 * Operations nest: a sum that a rank does while it waits stands inside the wait. Totals count a
 * nanosecond once, for the innermost operation; events keep their whole length. */
#define _GNU_SOURCE
#include "shared.h"

#include <string.h>

#include "../base/checked.h"

static _Atomic bool is_off;

void
fs_log_set_off(bool off)
{
    atomic_store(&is_off, off);
}

#define BIT(op) ((uint64_t)1 << (op))

bool
fs_op_is_control(fs_op op)
{
    const uint64_t data = BIT(FS_OP_ALL_GATHER) | BIT(FS_OP_REDUCE_SCATTER) |
                          BIT(FS_OP_ALL_REDUCE) | BIT(FS_OP_BROADCAST) | BIT(FS_OP_ALL_TO_ALL) |
                          BIT(FS_OP_GATHER) | BIT(FS_OP_REDUCE);
    return (data >> op & 1) == 0;
}

// ---- writing ------------------------------------------------------------------------------------

static inline uint64_t
get(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static inline void
set(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_relaxed);
}

static inline void
add(_Atomic uint64_t *word, uint64_t value)
{
    set(word, get(word) + value); /* one writer */
}

static inline uint64_t
pack_key(fs_op op, int unit)
{
    return (uint64_t)op << 32 | (uint64_t)unit;
}

static void
add_event(fs_log_page *page, uint64_t key, int64_t start, int64_t spent, int64_t waited,
          uint64_t nbytes)
{
    uint64_t n = get(&page->events_n);
    fs_log_event *event = &page->event[n % FS_LOG_EVENTS];
    set(&event->number, 0); /* being written */
    atomic_thread_fence(memory_order_release);
    set(&event->key, key);
    set(&event->start_ns, (uint64_t)start);
    set(&event->spent_ns, (uint64_t)spent);
    set(&event->waited_ns, (uint64_t)waited);
    set(&event->nbytes, nbytes);
    atomic_store_explicit(&event->number, n + 1, memory_order_release);
    atomic_store_explicit(&page->events_n, n + 1, memory_order_release);
}

/* The row of an operation and unit; where there is no room for another, that of no unit. */
static fs_log_row *
find_row(fs_log *log, fs_op op, int unit)
{
    uint16_t *known = &log->row_of[unit][op];
    if (*known != 0) {
        return &log->page->row[*known - 1];
    }
    uint64_t n = get(&log->page->rows_n);
    /* The last rows are kept for operations without a unit: each of them has one. */
    if (unit != 0 && n >= FS_LOG_ROWS - FS_LOG_OPS) {
        return find_row(log, op, 0);
    }
    fs_log_row *row = &log->page->row[n];
    set(&row->key, pack_key(op, unit));
    atomic_store_explicit(&log->page->rows_n, n + 1, memory_order_release);
    *known = (uint16_t)(n + 1);
    return row;
}

int
fs_log_unit(fs_world *world, const char *name)
{
    fs_log *log = &world->log;
    char other[FS_NOTE_UNIT_NBYTES];
    if (log->page == NULL) {
        return 0;
    }
    uint64_t n = get(&log->page->units_n);
    size_t length = fs_min_size(strlen(name), sizeof other - 1);
    for (uint64_t u = 0; u < n; u++) {
        fs_note_load(log->page->unit[u], sizeof other, other);
        if (strlen(other) == length && memcmp(other, name, length) == 0) {
            return (int)u + 1;
        }
    }
    if (n + 1 >= FS_LOG_UNITS) {
        return 0;
    }
    fs_note_store(log->page->unit[n], sizeof other, name);
    atomic_store_explicit(&log->page->units_n, n + 1, memory_order_release);
    return (int)n + 1;
}

void
fs_log_begin(fs_world *world, fs_op op, int unit, uint64_t nbytes)
{
    fs_log *log = &world->log;
    int depth = log->depth++;
    if (depth >= FS_LOG_DEPTH - 1) {
        return; /* deeper than anything here goes: counted, so that ends still match */
    }
    fs_log_scope *scope = &log->scope[depth + 1];
    bool off = log->page == NULL || atomic_load_explicit(&is_off, memory_order_relaxed);
    *scope = (fs_log_scope){.op = op, .unit = unit, .nbytes = nbytes, .off = off};
    if (!off) {
        scope->start = scope->looked = fs_now_ns();
    }
}

void
fs_log_add(fs_world *world, uint64_t nbytes)
{
    fs_log *log = &world->log;
    if (log->depth > 0 && log->depth < FS_LOG_DEPTH) {
        log->scope[log->depth].nbytes += nbytes;
    }
}

void
fs_log_end(fs_world *world)
{
    fs_log *log = &world->log;
    int depth = log->depth--;
    if (depth >= FS_LOG_DEPTH || log->scope[depth].off || log->page == NULL) {
        return;
    }
    fs_log_scope *scope = &log->scope[depth];
    /* A fence ends with its wait; looking at the clock once more would cost more than it shows. */
    bool is_known = scope->waited > 0 && fs_op_is_control(scope->op);
    int64_t spent = (is_known ? scope->looked : fs_now_ns()) - scope->start;
    log->scope[depth - 1].inner += spent;
    fs_log_row *row = find_row(log, scope->op, scope->unit);
    add(&row->count, 1);
    add(&row->nbytes, scope->nbytes);
    add(&row->spent_ns, (uint64_t)(spent - scope->inner));
    add(&row->waited_ns, (uint64_t)scope->waited);
    add_event(log->page, pack_key(scope->op, scope->unit), scope->start, spent, scope->waited,
              scope->nbytes);
}

bool
fs_log_is_in_collective(const fs_world *world)
{
    int depth = world->log.depth;
    return depth > 0 && depth < FS_LOG_DEPTH && !fs_op_is_control(world->log.scope[depth].op);
}

/* Shorter waits are not worth an event; they are in the totals. */
#define FS_LOG_WAIT_NS 20000

void
fs_log_wait_begin(fs_world *world, fs_log_wait *out)
{
    const fs_log *log = &world->log;
    const fs_log_scope *scope = &log->scope[log->depth < FS_LOG_DEPTH ? log->depth : 0];
    out->off = log->page == NULL || atomic_load_explicit(&is_off, memory_order_relaxed);
    out->inner = scope->inner;
    out->start = 0;
    if (!out->off) {
        /* A fence begins with its wait. */
        bool is_known = scope->waited == 0 && scope->looked != 0 && fs_op_is_control(scope->op);
        out->start = is_known ? scope->looked : fs_now_ns();
    }
}

void
fs_log_wait_end(fs_world *world, const fs_log_wait *wait)
{
    fs_log *log = &world->log;
    if (wait->off || log->page == NULL) {
        return;
    }
    fs_log_scope *scope = &log->scope[log->depth < FS_LOG_DEPTH ? log->depth : 0];
    scope->looked = fs_now_ns();
    int64_t spent = scope->looked - wait->start;
    int64_t waited = spent - (scope->inner - wait->inner); /* sums of ours are not waiting */
    scope->waited += waited;
    if (waited >= FS_LOG_WAIT_NS) {
        add_event(log->page, pack_key(FS_OP_WAIT, scope->unit), wait->start, spent, waited, 0);
    }
}

// ---- reading ------------------------------------------------------------------------------------

const fs_log_page *
fs_log_page_of(const fs_world *world, int rank)
{
    if (world->log.page == NULL || rank < 0 || rank >= world->size) {
        return NULL;
    }
    return rank == world->rank
               ? world->log.page
               : (const fs_log_page *)(const void *)(fs_region_block(world->windows, rank) +
                                                     2 * world->half_nbytes);
}

/* Copies the name that a key's unit has in a page; "" where it has none. */
static void
copy_unit(const fs_log_page *page, uint64_t key, char unit[FS_LOG_UNIT_NBYTES])
{
    uint64_t u = key & 0xffffffffu;
    unit[0] = '\0';
    if (u > 0 && u < FS_LOG_UNITS) {
        fs_note_load(page->unit[u - 1], FS_NOTE_UNIT_NBYTES, unit);
    }
}

size_t
fs_log_read_totals(const fs_world *world, int rank, fs_log_entry *out, size_t n)
{
    const fs_log_page *page = fs_log_page_of(world, rank);
    uint64_t rows_n =
        page != NULL ? atomic_load_explicit(&page->rows_n, memory_order_acquire) : 0;
    n = fs_min_size(n, fs_min_size((size_t)rows_n, FS_LOG_ROWS));
    for (size_t i = 0; i < n; i++) {
        const fs_log_row *row = &page->row[i];
        out[i] = (fs_log_entry){.op = (fs_op)(get(&row->key) >> 32),
                                .count = get(&row->count),
                                .nbytes = get(&row->nbytes),
                                .spent_ns = get(&row->spent_ns),
                                .waited_ns = get(&row->waited_ns)};
        copy_unit(page, get(&row->key), out[i].unit);
    }
    return n;
}

size_t
fs_log_read_events(const fs_world *world, int rank, fs_log_entry *out, size_t n,
                   uint64_t *out_lost)
{
    const fs_log_page *page = fs_log_page_of(world, rank);
    uint64_t end = page != NULL ? atomic_load_explicit(&page->events_n, memory_order_acquire) : 0;
    uint64_t kept = fs_min_size((size_t)fs_min_size((size_t)end, FS_LOG_EVENTS), n);
    size_t found = 0;
    for (uint64_t k = end - kept; k < end; k++) {
        const fs_log_event *event = &page->event[k % FS_LOG_EVENTS];
        if (atomic_load_explicit(&event->number, memory_order_acquire) != k + 1) {
            continue; /* written over meanwhile */
        }
        uint64_t key = get(&event->key);
        fs_log_entry entry = {.op = (fs_op)(key >> 32),
                              .count = 1,
                              .nbytes = get(&event->nbytes),
                              .start_ns = get(&event->start_ns),
                              .spent_ns = get(&event->spent_ns),
                              .waited_ns = get(&event->waited_ns)};
        atomic_thread_fence(memory_order_acquire);
        if (get(&event->number) == k + 1) {
            copy_unit(page, key, entry.unit);
            out[found++] = entry;
        }
    }
    *out_lost = end - found;
    return found;
}
