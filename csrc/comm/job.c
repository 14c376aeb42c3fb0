/* The ranks' shared fate: the cause that ends a job, who is still there, what each rank does. */
#define _GNU_SOURCE
#include "shared.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../base/checked.h"

// ---- fork ---------------------------------------------------------------------------------------

static _Atomic unsigned fork_generation;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void
in_child(void)
{
    atomic_fetch_add(&fork_generation, 1);
}

static void
register_fork(void)
{
    (void)pthread_atfork(NULL, NULL, in_child);
}

unsigned
fs_fork_generation(void)
{
    return atomic_load_explicit(&fork_generation, memory_order_relaxed);
}

// ---- notes --------------------------------------------------------------------------------------

void
fs_note_init(fs_note *note)
{
    atomic_store(&note->step, -1);
}

void
fs_note_store(_Atomic uint64_t *words, size_t nbytes, const char *text)
{
    size_t n = strnlen(text, nbytes - 1);
    for (size_t i = 0; i * 8 < nbytes; i++) {
        uint64_t word = 0;
        if (i * 8 < n) {
            memcpy(&word, text + i * 8, fs_min_size(8, n - i * 8));
        }
        atomic_store_explicit(&words[i], word, memory_order_relaxed);
        if (word == 0) {
            break;
        }
    }
}

void
fs_note_load(const _Atomic uint64_t *words, size_t nbytes, char *text)
{
    for (size_t i = 0; i * 8 < nbytes; i++) {
        uint64_t word = atomic_load_explicit(&words[i], memory_order_relaxed);
        memcpy(text + i * 8, &word, 8);
    }
    text[nbytes - 1] = '\0';
}

// ---- life ---------------------------------------------------------------------------------------

size_t
fs_job_root_at(int size)
{
    return fs_round_up(sizeof(fs_job_page) + (size_t)size * sizeof(fs_slot), FS_CACHE_LINE);
}

size_t
fs_job_page_nbytes(int size)
{
    return fs_job_root_at(size) + fs_world_page_nbytes(size);
}

void
fs_job_page_init(fs_job_page *page, int size, uint64_t nonce)
{
    page->layout = FS_JOB_LAYOUT;
    page->size = (uint32_t)size;
    page->nonce = nonce;
    page->nbytes = fs_job_page_nbytes(size);
    page->root_at = fs_job_root_at(size);
    for (int r = 0; r < size; r++) {
        fs_note_init(&page->slot[r].note);
    }
    fs_world_page_init((fs_world_page *)((unsigned char *)page + page->root_at), size);
    page->answers_at = fs_round_up(page->nbytes, fs_page_nbytes());
    atomic_store(&page->end, page->answers_at + (uint64_t)size * FS_ANSWER_NBYTES);
    page->magic = FS_JOB_MAGIC; /* last: who waits for the file to be ready looks at it */
}

fs_status
fs_job_new(int size, fs_job **out)
{
    if (size < 1 || size > FS_RANKS_MAX) {
        return FS_FAIL(FS_EINVAL, "a world has 1 to %d ranks, not %d", FS_RANKS_MAX, size);
    }
    (void)pthread_once(&fork_once, register_fork);
    fs_job *job;
    FS_TRY(fs_calloc(1, sizeof *job, &job));
    atomic_store(&job->refs, 1);
    job->size = size;
    job->self = job->data_fd = job->lock_fd = job->answer_fd = -1;
    job->generation = fs_fork_generation();
    (void)pthread_mutex_init(&job->lock, NULL);
    *out = job;
    return FS_OK;
}

fs_status
fs_job_threads(int n, fs_job **out)
{
    fs_job *job;
    FS_TRY(fs_job_new(n, &job));
    job->threads = true;
    fs_status st = fs_arena_open(&job->memory, NULL, fs_job_page_nbytes(n));
    if (st != FS_OK) {
        fs_free(job);
        return st;
    }
    job->page = (fs_job_page *)job->memory.base;
    fs_job_page_init(job->page, n, 0);
    for (int r = 0; r < n; r++) {
        atomic_store(&job->page->slot[r].pid, (int64_t)getpid());
    }
    *out = job;
    return FS_OK;
}

void
fs_job_close(fs_job *job)
{
    if (job == NULL || fs_job_is_forked(job) || atomic_fetch_sub(&job->refs, 1) != 1) {
        return;
    }
    for (size_t i = 0; i < job->orphans_n; i++) {
        fs_span_free(job, job->orphans[i].at, job->orphans[i].nbytes);
    }
    fs_free(job->orphans);
    if (job->threads) {
        fs_arena_close(&job->memory);
    } else {
        fs_job_answer_close(job);
        if (job->page != NULL) {
            (void)munmap(job->page, job->page->nbytes);
        }
        /* The byte lock goes with the descriptor; left was set before. */
        if (job->data_fd >= 0) {
            (void)close(job->data_fd);
        }
        if (job->lock_fd >= 0) {
            (void)close(job->lock_fd);
        }
    }
    (void)pthread_mutex_destroy(&job->lock);
    fs_free(job);
}

void
fs_job_leave(fs_job *job, int rank, bool failed, const char *text)
{
    if (job == NULL || fs_job_is_forked(job) || rank < 0 || rank >= job->size) {
        return;
    }
    fs_slot *slot = &job->page->slot[rank];
    if (atomic_load(&slot->left) != FS_HERE) {
        return;
    }
    if (text != NULL) {
        size_t n = strnlen(text, sizeof slot->reason - 1);
        memcpy(slot->reason, text, n);
        slot->reason[n] = '\0';
    }
    atomic_store(&slot->left, failed ? FS_LEFT_FAILED : FS_LEFT);
}

void
fs_job_say(fs_job *job, int rank, const char *text)
{
    if (fs_job_is_forked(job) || rank < 0 || rank >= job->size) {
        return;
    }
    fs_slot *slot = &job->page->slot[rank];
    uint32_t n = atomic_load_explicit(&slot->said_n, memory_order_relaxed);
    fs_note_store(slot->said[n % FS_SAID_N], FS_SAID_NBYTES, text);
    atomic_store(&slot->said_n, n + 1);
}

bool
fs_job_tell_once(fs_job *job)
{
    return !atomic_exchange(&job->told, true);
}

// ---- cause --------------------------------------------------------------------------------------

/* One word, so that one compare-and-swap decides: kind, culprit + 1, reporter + 1. */
static uint64_t
pack_cause(fs_cause_kind kind, int culprit, int reporter)
{
    return (uint64_t)kind | (uint64_t)(culprit + 1) << 8 | (uint64_t)(reporter + 1) << 24;
}

bool
fs_job_abort(fs_job *job, int reporter, fs_cause_kind kind, int culprit)
{
    uint64_t none = 0;
    return atomic_compare_exchange_strong(&job->page->abort, &none,
                                          pack_cause(kind, culprit, reporter));
}

void
fs_job_set_interrupted(fs_job *job, fs_interrupted interrupted, void *ctx)
{
    job->interrupted = interrupted;
    job->interrupted_ctx = ctx;
}

void
fs_job_interrupt(fs_job *job)
{
    if (!fs_job_is_forked(job)) {
        (void)fs_job_abort(job, -1, FS_CAUSE_INTERRUPTED, -1);
    }
}

fs_cause
fs_job_cause(const fs_job *job)
{
    uint64_t word = atomic_load(&job->page->abort);
    fs_cause cause = {(fs_cause_kind)(word & 0xff), (int)(word >> 8 & 0xffff) - 1, 0};
    if (cause.kind == FS_CAUSE_NONE) {
        cause.rank = -1;
    } else if (cause.rank >= 0 && cause.rank < job->size && !job->threads) {
        cause.pid = atomic_load(&job->page->slot[cause.rank].pid);
    }
    return cause;
}

bool
fs_job_is_threads(const fs_job *job)
{
    return job->threads;
}

void
fs_job_report(const fs_job *job, char *buffer, size_t nbytes)
{
    int reporter = (int)(atomic_load(&job->page->abort) >> 24 & 0xffff) - 1;
    if (reporter >= 0 && reporter < job->size) {
        /* The winner wrote it before it set abort, and nobody writes it again. */
        const char *report = job->page->slot[reporter].report;
        size_t n = fs_min_size(strnlen(report, FS_REPORT_NBYTES - 1), nbytes - 1);
        memcpy(buffer, report, n);
        buffer[n] = '\0';
        return;
    }
    fs_report_format((fs_job *)job, NULL, fs_job_cause(job), 0, buffer, nbytes);
}

int
fs_job_lost(fs_job *job, fs_cause_kind *out_kind)
{
    for (int r = 0; r < job->size; r++) {
        fs_slot *slot = &job->page->slot[r];
        bool gone = false;
        if (!job->threads && r != job->self && atomic_load(&slot->pid) != 0 &&
            atomic_load(&slot->left) == FS_HERE) {
            int64_t pid;
            gone = !fs_job_holds_lock(job, r, &pid);
        }
        /* After the lock: a rank says that it leaves before it lets go. */
        uint32_t left = atomic_load(&slot->left);
        if (left == FS_LEFT_FAILED || (gone && left == FS_HERE)) {
            *out_kind = left == FS_HERE ? FS_CAUSE_DIED : FS_CAUSE_LEFT;
            return r;
        }
    }
    return -1;
}
