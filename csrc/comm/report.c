/* Who has come, who has not, and where each rank is: the text behind every WorldError. */
#define _GNU_SOURCE
#include "shared.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Ranks named one by one in a report; of the others only the number is given. */
#define FS_REPORT_RANKS_MAX 24

typedef struct text {
    char *at;
    size_t left;
} text;

static void add(text *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void
add(text *out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(out->at, out->left, format, args);
    va_end(args);
    size_t used = n < 0 ? 0 : (size_t)n < out->left ? (size_t)n : out->left - 1;
    out->at += used;
    out->left -= used;
}

const char *
fs_op_name(fs_op op)
{
    static const char *const names[] = {
        [FS_OP_BARRIER] = "barrier",     [FS_OP_ALL_GATHER] = "all_gather",
        [FS_OP_REDUCE_SCATTER] = "reduce_scatter", [FS_OP_ALL_REDUCE] = "all_reduce",
        [FS_OP_BROADCAST] = "broadcast", [FS_OP_ALL_TO_ALL] = "all_to_all",
        [FS_OP_SPLIT] = "split",         [FS_OP_REGION] = "allocation of world memory",
        [FS_OP_OPEN] = "opening",        [FS_OP_SETTLE] = "end of the gradients",
        [FS_OP_AGREE] = "agreement on the step", [FS_OP_UPDATE] = "update",
        [FS_OP_PUBLISH] = "publishing of the weights", [FS_OP_STORE] = "writing of weights",
        [FS_OP_SAVE] = "save",           [FS_OP_LOAD] = "load",
        [FS_OP_HASH] = "hash",           [FS_OP_LOSS] = "loss",
        [FS_OP_CLOSE] = "close",         [FS_OP_SKIP] = "skip of the step",
        [FS_OP_FREEZE] = "freezing of parameters",
        [FS_OP_GATHER] = "gather",       [FS_OP_REDUCE] = "reduce",
        [FS_OP_SLOT] = "room for gradients", [FS_OP_WAIT] = "wait",
    };
    size_t i = (size_t)op;
    return i < sizeof names / sizeof names[0] && names[i] != NULL ? names[i] : "nothing yet";
}

static void
add_cause(text *out, fs_job *job, fs_cause cause, double seconds)
{
    const fs_slot *slot;
    uint32_t left;
    char pid[32] = "";
    if (cause.pid != 0) {
        (void)snprintf(pid, sizeof pid, " (pid %lld)", (long long)cause.pid);
    }
    switch (cause.kind) {
    case FS_CAUSE_NONE:
        if (seconds > 0) {
            add(out, "still waiting after %.1f s", seconds);
        } else {
            add(out, "no rank waits for another");
        }
        break;
    case FS_CAUSE_DIED:
        add(out, "rank %d%s died: its process ended without a word (a signal, a crash, os._exit)",
            cause.rank, pid);
        break;
    case FS_CAUSE_LEFT:
        slot = &job->page->slot[cause.rank];
        left = atomic_load(&slot->left);
        if (left == FS_LEFT_FAILED) {
            add(out, "rank %d%s failed: %s", cause.rank, pid, slot->reason);
        } else {
            add(out, "rank %d%s left: %s while others need it", cause.rank, pid,
                left == FS_LEFT && slot->reason[0] != '\0' ? slot->reason : "it closed its world");
        }
        break;
    case FS_CAUSE_TIMEOUT:
        if (cause.rank >= 0) {
            add(out, "rank %d%s did not come within %.1f s", cause.rank, pid, seconds);
        } else {
            add(out, "no rank could go on for %.1f s: all of them wait", seconds);
        }
        break;
    case FS_CAUSE_MISMATCH:
        add(out, "ranks called different operations at one fence");
        break;
    case FS_CAUSE_INTERRUPTED:
        if (cause.rank >= 0) {
            add(out, "rank %d%s was interrupted", cause.rank, pid);
        } else {
            add(out, "the job was interrupted");
        }
        break;
    case FS_CAUSE_ERROR:
        add(out, "rank %d%s failed inside an operation", cause.rank, pid);
        break;
    }
}

/* "all_reduce of 8 elements of float32 (sum)": the comparable part of a record. */
static void
add_what(text *out, const fs_what *what)
{
    static const char *const reductions[] = {"sum", "mean", "max", "min"};
    add(out, "%s", fs_op_name(what->op));
    if (what->dtype >= 0 && what->dtype < FS_DTYPE_COUNT) {
        size_t each = fs_dtype_nbytes((fs_dtype)what->dtype);
        add(out, " of %llu elements of %s", (unsigned long long)(what->nbytes / each),
            fs_dtype_name((fs_dtype)what->dtype));
    } else if (what->nbytes != 0) {
        add(out, " of %llu bytes", (unsigned long long)what->nbytes);
    }
    if (what->root >= 0) {
        if (what->op == FS_OP_BROADCAST) {
            add(out, " from rank %d", what->root);
        } else if (what->root < 4 &&
                   (what->op == FS_OP_ALL_REDUCE || what->op == FS_OP_REDUCE_SCATTER)) {
            add(out, " (%s)", reductions[what->root]);
        }
    }
    if (what->tag != 0) {
        add(out, " [%016llx]", (unsigned long long)what->tag);
    }
}

#ifndef FS_THREADS_ONLY
static void
add_process(text *out, fs_job *job, int rank)
{
    int64_t pid;
    fs_slot *slot = &job->page->slot[rank];
    if (job->threads || rank == job->self || atomic_load(&slot->pid) == 0 ||
        atomic_load(&slot->left) != FS_HERE) {
        return;
    }
    if (!fs_job_holds_lock(job, rank, &pid)) {
        add(out, "; its process is gone");
        return;
    }
    if (atomic_load(&slot->answer) == FS_ANSWER_ASKED) {
        add(out, "; it was asked where it is now and does not answer");
    }
    switch (pid != 0 ? fs_process_state(pid) : 0) {
    case 'T':
        add(out, "; its process is stopped (SIGSTOP), and that line its last known one");
        break;
    case 't':
        add(out, "; its process is stopped by a debugger, and that line its last known one");
        break;
    case 'D':
        add(out, "; its process waits for a disk or device");
        break;
    case 'R':
        add(out, "; its process is running");
        break;
    case 'S':
        add(out, "; its process is sleeping");
        break;
    default:
        break;
    }
}
#else
static void
add_process(text *out, fs_job *job, int rank)
{
    (void)out;
    (void)job;
    (void)rank;
}
#endif

/* The last lines of a rank's log, oldest first. */
static void
add_said(text *out, const fs_slot *slot)
{
    char line[FS_SAID_NBYTES];
    uint32_t end = atomic_load(&slot->said_n);
    for (uint32_t i = end > FS_SAID_N ? end - FS_SAID_N : 0; i < end; i++) {
        fs_note_load(slot->said[i % FS_SAID_N], sizeof line, line);
        add(out, "\n    its log: %s", line);
    }
}

/* What a rank of world did last, oldest first; a dead one too: its log lies in world memory. */
static void
add_operations(text *out, const fs_world *world, int rank)
{
    fs_log_entry found[8];
    uint64_t lost;
    size_t n = fs_log_read_events(world, rank, found, sizeof found / sizeof found[0], &lost);
    size_t first = n, shown = 0;
    while (first > 0 && shown < 3) {
        shown += found[--first].op != FS_OP_WAIT;
    }
    const char *before = "\n    its last operations: ";
    for (size_t i = first; i < n; i++) {
        const fs_log_entry *entry = &found[i];
        int64_t age = fs_now_ns() - (int64_t)(entry->start_ns + entry->spent_ns);
        if (entry->op != FS_OP_WAIT) {
            add(out, "%s%s%s%s %.1f s ago", before, fs_op_name(entry->op),
                entry->unit[0] != '\0' ? " of " : "", entry->unit, (double)age * 1e-9);
            before = ", ";
        }
    }
}

static void
add_rank(text *out, fs_job *job, int rank, const fs_rec *rec, bool in_fence, bool come)
{
    fs_slot *slot = &job->page->slot[rank];
    char file[FS_NOTE_FILE_NBYTES], unit[FS_NOTE_UNIT_NBYTES], now[512];
    fs_note_load(slot->note.file, sizeof file, file);
    fs_note_load(slot->note.unit, sizeof unit, unit);
    int line = atomic_load(&slot->note.line);
    long long step = (long long)atomic_load(&slot->note.step);
    add(out, "\n  rank %d: ", rank);
    if (atomic_load(&slot->pid) == 0) {
        add(out, "has not started");
        return;
    }
    if (come) {
        add(out, "in ");
        add_what(out, &rec->what);
    } else {
        int op = atomic_load(&slot->note.op);
        add(out, "%s%s in %s", in_fence ? "has not come; " : "",
            atomic_load(&slot->note.waiting) ? "waits" : "last", fs_op_name((fs_op)op));
    }
    if (unit[0] != '\0') {
        add(out, ", unit %s", unit);
    }
    if (step >= 0) {
        add(out, ", step %lld", step);
    }
    if (file[0] != '\0') {
        add(out, ", at %s:%d", file, line);
    }
    if (!come && fs_job_where(job, rank, now, sizeof now) != 0) {
        add(out, "; now at %s", now);
    }
    uint32_t left = atomic_load(&slot->left);
    if (left == FS_LEFT_FAILED) {
        add(out, "; failed: %s", slot->reason);
    } else if (left == FS_LEFT) {
        add(out, "; left");
    } else if (!come && !atomic_load(&slot->note.waiting)) {
        add_process(out, job, rank);
    }
    if (!come) {
        add_said(out, slot);
    }
}

void
fs_report_format(fs_job *job, const fs_world *world, fs_cause cause, double seconds, char *buffer,
                 size_t nbytes)
{
    text out = {buffer, nbytes};
    buffer[0] = '\0';
    add_cause(&out, job, cause, seconds);
    uint64_t k = world != NULL ? world->fences : 0;
    bool in_fence =
        world != NULL && atomic_load(&world->page->member[world->rank].rec[k & 1].fence) == k + 1;
    if (in_fence) {
        add(&out, ". Fence %llu of %s of %d ranks, seen from rank %d:", (unsigned long long)k,
            world->root ? "the world" : "a part", world->size, world->ranks[world->rank]);
    } else if (world != NULL) {
        add(&out, ". Seen from rank %d:", world->ranks[world->rank]);
    } else {
        add(&out, ". The ranks:");
    }
    /* Who has not come is what the reader looks for: first. */
    int size = world != NULL ? world->size : job->size, named = 0;
    bool waits[FS_RANKS_MAX]; /* looked at once: a rank may move meanwhile */
    for (int r = 0; r < size; r++) {
        const fs_slot *slot = &job->page->slot[world != NULL ? world->ranks[r] : r];
        waits[r] = in_fence ? fs_world_has_come(world, r) : atomic_load(&slot->note.waiting) != 0;
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int r = 0; r < size; r++) {
            const fs_rec *rec = world != NULL ? &world->page->member[r].rec[k & 1] : NULL;
            if (waits[r] == (pass == 1) && named++ < FS_REPORT_RANKS_MAX) {
                add_rank(&out, job, world != NULL ? world->ranks[r] : r, rec, in_fence,
                         in_fence && waits[r]);
                if (world != NULL && !waits[r]) {
                    add_operations(&out, world, r);
                }
            }
        }
    }
    if (named > FS_REPORT_RANKS_MAX) {
        add(&out, "\n  and %d more", named - FS_REPORT_RANKS_MAX);
    }
    /* A rank outside this world can end it too: say where that one is. */
    if (world != NULL && cause.rank >= 0) {
        bool member = false;
        for (int r = 0; r < size; r++) {
            member = member || world->ranks[r] == cause.rank;
        }
        if (!member) {
            add_rank(&out, job, cause.rank, NULL, false, false);
        }
    }
}
