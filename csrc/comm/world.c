/* A world: some ranks of a job, with a gate. */
#define _GNU_SOURCE
#include "show.h"

#include <string.h>

#include "../base/checked.h"
#include "../base/cpu.h"

// ---- page ---------------------------------------------------------------------------------------

size_t
fs_world_page_nbytes(int size)
{
    return sizeof(fs_world_page) + (size_t)size * sizeof(fs_member);
}

void
fs_world_page_init(fs_world_page *page, int size)
{
    atomic_store(&page->open, (uint32_t)size);
#ifdef FS_THREADS_ONLY
    (void)pthread_mutex_init(&page->lock, NULL);
    (void)pthread_cond_init(&page->moved, NULL);
#endif
}

// ---- open and close -----------------------------------------------------------------------------

/* A wake-up costs tens of microseconds: up to that long it pays to look again and again, but only
 * where every rank has a processor of its own. */
#define FS_SPIN_MAX_NS 20000

static void
world_free(fs_world *world)
{
    if (world == NULL) {
        return;
    }
    fs_free(world->ranks);
    fs_free(world->hooks);
    fs_free(world->over_hooks);
    fs_free(world->events);
    fs_free(world);
}

/* Collectives are over host memory, whatever device the rank has. */
static fs_status
host_exec(const fs_exec *exec, fs_exec *out)
{
    *out = (fs_exec){.device = exec->device, .pool = exec->pool};
    if (exec->device->runtime == NULL) {
        return FS_OK;
    }
    return fs_device_choose(&out->device);
}

static fs_status
world_new(fs_job *job, int rank, int size, const fs_exec *exec, const fs_deadlines *deadlines,
          fs_world **out)
{
    fs_world *world;
    FS_TRY(fs_calloc(1, sizeof *world, &world));
    fs_status st;
    FS_TRY_GOTO(host_exec(exec, &world->host), st, fail);
    FS_TRY_GOTO(fs_calloc((size_t)size, sizeof *world->ranks, &world->ranks), st, fail);
    FS_TRY_GOTO(fs_calloc(FS_EVENTS_MAX, FS_REPORT_NBYTES, &world->events), st, fail);
    atomic_store(&world->refs, 1);
    world->job = job;
    world->rank = rank;
    world->size = size;
    world->exec = exec;
    world->deadlines = *deadlines;
    world->interrupted = job->interrupted;
    world->interrupted_ctx = job->interrupted_ctx;
    world->spin_max_ns = (size_t)job->size <= fs_cpu_count() ? FS_SPIN_MAX_NS : 0;
    world->spin_ns = world->spin_max_ns;
    *out = world;
    return FS_OK;
fail:
    world_free(world);
    return st;
}

fs_status
fs_world_open(fs_job *job, int rank, const fs_exec *exec, const fs_deadlines *deadlines,
              fs_world **out)
{
    if (fs_job_is_forked(job)) {
        return FS_FAIL(FS_ESTATE, "this job belongs to the parent process");
    }
    if (rank < 0 || rank >= job->size || (!job->threads && rank != job->self)) {
        return FS_FAIL(FS_EINVAL, "rank %d is not this rank of a job of %d", rank, job->size);
    }
    fs_world *world;
    FS_TRY(world_new(job, rank, job->size, exec, deadlines, &world));
    atomic_fetch_add(&job->refs, 1);
    for (int r = 0; r < job->size; r++) {
        world->ranks[r] = r;
    }
    world->root = true;
    atomic_store(&job->page->slot[rank].thread, fs_thread_id(job));
    world->page = (fs_world_page *)((unsigned char *)job->page + job->page->root_at);
    if (rank == 0) {
        fs_ledger_charge(&world->ledger, FS_MEM_WINDOWS, FS_HOME_WORLD, job->page->nbytes);
    }
    const fs_what what = {FS_OP_OPEN, -1, -1, 0, 0};
    fs_status st = fs_meet(world, &what, NULL, NULL, 0);
    if (st == FS_OK) {
        st = fs_windows_open(world);
    }
    if (st != FS_OK) {
        fs_world_close(world);
        return st;
    }
    *out = world;
    return FS_OK;
}

static void
world_leave(fs_world *world)
{
    fs_job *job = world->job;
    if (!fs_job_is_forked(job)) {
        atomic_store(&world->page->member[world->rank].closed, 1);
        fs_windows_close(world);
        if (world->root) {
            fs_job_leave(job, world->ranks[world->rank], false, NULL);
        } else {
            bool last = atomic_fetch_sub(&world->page->open, 1) == 1;
            fs_span_unmap(job, world->page, world->page_nbytes);
            if (last) {
                fs_span_free(job, world->page_at, world->page_nbytes);
            }
        }
    }
    world->closed = true;
}

void
fs_world_close(fs_world *world)
{
    if (world == NULL) {
        return;
    }
    if (!world->closed) {
        world_leave(world);
    }
    fs_world_release(world);
}

void
fs_world_retain(fs_world *world)
{
    atomic_fetch_add(&world->refs, 1);
}

void
fs_world_release(fs_world *world)
{
    if (atomic_fetch_sub(&world->refs, 1) == 1) {
        fs_job_close(world->job);
        world_free(world);
    }
}

// ---- split --------------------------------------------------------------------------------------

enum { SPLIT_COLOR, SPLIT_KEY, SPLIT_AT, SPLIT_STATUS };

/* The members of color in order: key, then rank. Returns how many; *out_me: this rank's place. */
static int
find_members(const fs_world *world, const fs_payload *all, int64_t color, int *members, int *out_me)
{
    int n = 0;
    for (int r = 0; r < world->size; r++) {
        if (all[r].i[SPLIT_COLOR] != color) {
            continue;
        }
        int at = n++;
        while (at > 0 && all[members[at - 1]].i[SPLIT_KEY] > all[r].i[SPLIT_KEY]) {
            members[at] = members[at - 1];
            at--;
        }
        members[at] = r;
    }
    for (int i = 0; i < n; i++) {
        if (members[i] == world->rank) {
            *out_me = i;
        }
    }
    return n;
}

/* The first member makes the new world's page. */
static fs_status
make_page(fs_job *job, int size, uint64_t *out_at)
{
    size_t nbytes = fs_world_page_nbytes(size);
    uint64_t at;
    void *page;
    FS_TRY(fs_span_reserve(job, nbytes, &at));
    fs_status st = fs_span_map(job, at, nbytes, &page);
    if (st == FS_OK) {
        st = fs_span_populate(job, at, page, nbytes);
        if (st == FS_OK) {
            fs_world_page_init(page, size);
            *out_at = at;
        }
        fs_span_unmap(job, page, nbytes);
    }
    if (st != FS_OK) {
        fs_span_free(job, at, nbytes);
    }
    return st;
}

static fs_status
split_found(fs_world *world, const int *members, int n, int me, uint64_t at, fs_world **out)
{
    fs_job *job = world->job;
    fs_world *part;
    void *page;
    FS_TRY(world_new(job, me, n, world->exec, &world->deadlines, &part));
    fs_status st = fs_span_map(job, at, fs_world_page_nbytes(n), &page);
    if (st != FS_OK) {
        world_free(part);
        return st;
    }
    part->page = page;
    part->page_at = at;
    part->page_nbytes = fs_world_page_nbytes(n);
    part->interrupted = world->interrupted;
    part->interrupted_ctx = world->interrupted_ctx;
    for (int i = 0; i < n; i++) {
        part->ranks[i] = world->ranks[members[i]];
    }
    atomic_fetch_add(&job->refs, 1);
    if (me == 0) {
        fs_ledger_charge(&part->ledger, FS_MEM_WINDOWS, FS_HOME_WORLD,
                         fs_round_up(part->page_nbytes, fs_page_nbytes()));
    }
    st = fs_windows_open(part);
    if (st != FS_OK) {
        fs_world_close(part);
        return st;
    }
    *out = part;
    return FS_OK;
}

fs_status
fs_world_split(fs_world *world, int64_t color, int64_t key, fs_world **out)
{
    FS_TRY(fs_world_usable(world));
    *out = NULL;
    fs_payload mine = {{0}}, *all = NULL;
    int *members = NULL, me = 0, n = 0;
    fs_status st;
    fs_what what = {FS_OP_SPLIT, -1, -1, 0, 0};
    FS_TRY_GOTO(fs_calloc((size_t)world->size, sizeof *all, &all), st, unable);
    FS_TRY_GOTO(fs_calloc((size_t)world->size, sizeof *members, &members), st, unable);
    mine.i[SPLIT_COLOR] = color;
    mine.i[SPLIT_KEY] = key;
    FS_TRY_GOTO(fs_meet(world, &what, &mine, all, 0), st, done);
    n = find_members(world, all, color, members, &me);

    fs_status made = FS_OK;
    uint64_t at = 0;
    if (me == 0 && color >= 0) {
        made = make_page(world->job, n, &at);
    }
    mine.u[SPLIT_AT] = at;
    mine.u[SPLIT_STATUS] = (uint64_t)made;
    what.root = 1; /* the second half */
    st = fs_meet(world, &what, &mine, all, 0);
    if (st != FS_OK) {
        if (at != 0) {
            fs_span_abandon(world->job, at, fs_world_page_nbytes(n));
        }
        goto done;
    }
    st = made;
    for (int r = 0; r < world->size && st == FS_OK; r++) {
        if (all[r].u[SPLIT_STATUS] != FS_OK) {
            st = FS_FAIL(FS_ENOMEM, "split: rank %d could not make its part's page",
                         world->ranks[r]);
        }
    }
    if (st != FS_OK && at != 0) {
        fs_span_free(world->job, at, fs_world_page_nbytes(n)); /* nobody maps it: all fail alike */
    }
    if (st == FS_OK && color >= 0) {
        st = split_found(world, members, n, me, all[members[0]].u[SPLIT_AT], out);
    }
    goto done;

unable:
    fs_world_abort(world, FS_CAUSE_ERROR, world->ranks[world->rank], 0);
done:
    fs_free(members);
    fs_free(all);
    return st;
}

// ---- what others ask ----------------------------------------------------------------------------

int
fs_world_rank(const fs_world *world)
{
    return world->rank;
}

int
fs_world_size(const fs_world *world)
{
    return world->size;
}

fs_job *
fs_world_job(const fs_world *world)
{
    return world->job;
}

int
fs_world_job_rank(const fs_world *world)
{
    return world->ranks[world->rank];
}

const fs_exec *
fs_world_exec(const fs_world *world)
{
    return world->exec;
}

const fs_exec *
fs_world_host_exec(const fs_world *world)
{
    return &world->host;
}

fs_ledger *
fs_world_ledger(fs_world *world)
{
    return &world->ledger;
}

bool
fs_world_is_threads(const fs_world *world)
{
    return world->job->threads;
}

fs_status
fs_world_usable(const fs_world *world)
{
    if (fs_job_is_forked(world->job)) {
        return FS_FAIL(FS_ESTATE,
                       "this world belongs to the parent process: a forked child cannot use "
                       "it; start workers with 'spawn', or do not touch the world in them");
    }
    if (world->closed) {
        return FS_FAIL(FS_ESTATE, "the world is closed");
    }
    if (atomic_load_explicit(&world->job->page->abort, memory_order_acquire) != 0) {
        return fs_world_aborted(world);
    }
    return FS_OK;
}

bool
fs_world_enter(fs_world *world)
{
    bool free = false;
    return atomic_compare_exchange_strong(&world->busy, &free, true);
}

void
fs_world_exit(fs_world *world)
{
    atomic_store(&world->busy, false);
}

void
fs_world_set_deadlines(fs_world *world, const fs_deadlines *deadlines)
{
    world->deadlines = *deadlines;
}

fs_deadlines
fs_world_deadlines(const fs_world *world)
{
    return world->deadlines;
}

// ---- notes, hooks, events -----------------------------------------------------------------------

static fs_note *
note_of(fs_world *world)
{
    return &world->job->page->slot[world->ranks[world->rank]].note;
}

void
fs_world_note_line(fs_world *world, const char *file, int line)
{
    fs_note *note = note_of(world);
    size_t n = strlen(file);
    if (n >= FS_NOTE_FILE_NBYTES) {
        file += n - (FS_NOTE_FILE_NBYTES - 1); /* the end says more than the beginning */
    }
    fs_note_store(note->file, FS_NOTE_FILE_NBYTES, file);
    atomic_store_explicit(&note->line, line, memory_order_relaxed);
}

void
fs_world_note_op(fs_world *world, fs_op op, const char *unit)
{
    fs_note *note = note_of(world);
    fs_note_store(note->unit, FS_NOTE_UNIT_NBYTES, unit);
    atomic_store_explicit(&note->op, (int32_t)op, memory_order_relaxed);
}

void
fs_world_note_unit(fs_world *world, const char *unit, int64_t step)
{
    fs_note *note = note_of(world);
    fs_note_store(note->unit, FS_NOTE_UNIT_NBYTES, unit != NULL ? unit : "");
    atomic_store_explicit(&note->step, step, memory_order_relaxed);
}

void
fs_world_set_interrupted(fs_world *world, fs_interrupted interrupted, void *ctx)
{
    world->interrupted = interrupted;
    world->interrupted_ctx = ctx;
}

fs_status
fs_world_add_idle(fs_world *world, fs_idle idle, void *ctx)
{
    FS_TRY(fs_grow(&world->hooks, world->hooks_n + 1, sizeof *world->hooks));
    world->hooks[world->hooks_n++] = (fs_hook){idle, ctx};
    return FS_OK;
}

void
fs_world_remove_idle(fs_world *world, fs_idle idle, void *ctx)
{
    for (size_t i = 0; i < world->hooks_n; i++) {
        if (world->hooks[i].idle == idle && world->hooks[i].ctx == ctx) {
            memmove(&world->hooks[i], &world->hooks[i + 1],
                    (--world->hooks_n - i) * sizeof *world->hooks);
            return;
        }
    }
}

fs_status
fs_world_add_over(fs_world *world, fs_over over, void *ctx)
{
    FS_TRY(fs_grow(&world->over_hooks, world->over_hooks_n + 1, sizeof *world->over_hooks));
    world->over_hooks[world->over_hooks_n++] = (fs_over_hook){over, ctx};
    return FS_OK;
}

void
fs_world_remove_over(fs_world *world, fs_over over, void *ctx)
{
    for (size_t i = 0; i < world->over_hooks_n; i++) {
        if (world->over_hooks[i].over == over && world->over_hooks[i].ctx == ctx) {
            memmove(&world->over_hooks[i], &world->over_hooks[i + 1],
                    (--world->over_hooks_n - i) * sizeof *world->over_hooks);
            return;
        }
    }
}

void
fs_world_queue_event(fs_world *world, const char *text)
{
    if (world->events_n == FS_EVENTS_MAX) {
        return; /* nobody drains: the first ones say more than the last */
    }
    unsigned slot = (world->events_first + world->events_n++) % FS_EVENTS_MAX;
    char *event = world->events + (size_t)slot * FS_REPORT_NBYTES;
    size_t n = fs_min_size(strlen(text), FS_REPORT_NBYTES - 1);
    memcpy(event, text, n);
    event[n] = '\0';
}

bool
fs_world_next_event(fs_world *world, char *buffer, size_t nbytes)
{
    if (world->events_n == 0) {
        return false;
    }
    const char *event = world->events + (size_t)world->events_first * FS_REPORT_NBYTES;
    size_t n = fs_min_size(strlen(event), nbytes - 1);
    memcpy(buffer, event, n);
    buffer[n] = '\0';
    world->events_first = (world->events_first + 1) % FS_EVENTS_MAX;
    world->events_n--;
    return true;
}
