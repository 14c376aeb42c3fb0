/* What lies in memory that ranks share, and the structs of this process that point to it.
 * Private to comm/.
 *
 * A job's data file (a sealed memfd; in a thread job the heap stands in for it) holds first the
 * job's page, then spans: the page of each split world, and regions. Shared structures hold
 * offsets, never pointers; in a thread job an offset IS the address. An offset whose memory was
 * taken is never given to another.
 *
 *     0                                             end
 *     | job page: cause, slots, root world | span | span | ...
 *
 * Everything here is written by one rank and read by others through C11 atomics; where plain
 * memory is read by others (records, reasons, reports), the comment names the atomic that
 * publishes it. */
#ifndef FS_COMM_SHARED_H
#define FS_COMM_SHARED_H

/* Processes need sealed memory files and futexes: Linux. Elsewhere, and where a build asks for it,
 * only worlds of threads exist. */
#if !defined(__linux__) && !defined(FS_THREADS_ONLY)
#define FS_THREADS_ONLY 1
#endif

#include <pthread.h>
#include <stdatomic.h>

#include "comm.h"

#define FS_CACHE_LINE 64
#define FS_WAIT_SLICE_NS 10000000 /* how long a wait sleeps before it looks around */

// ---- shared -------------------------------------------------------------------------------------

/* Text of up to NBYTES - 1 bytes as atomic words: a reader may see a mix of two texts of a rank
 * that is moving (harmless in a report), never a data race, always an end. */
#define FS_NOTE_FILE_NBYTES 128
#define FS_NOTE_UNIT_NBYTES 64

/* What a rank is doing. The rank writes, everyone reads. */
typedef struct fs_note {
    _Atomic int32_t op;   /* of the last fence entered; 0: none yet */
    _Atomic int32_t line; /* of the caller in Python, 0 if unknown */
    _Atomic int32_t waiting;
    _Atomic int64_t step; /* -1: none */
    _Atomic uint64_t unit[FS_NOTE_UNIT_NBYTES / 8];
    _Atomic uint64_t file[FS_NOTE_FILE_NBYTES / 8];
} fs_note;

#define FS_REASON_NBYTES 1024

typedef enum fs_left { FS_HERE = 0, FS_LEFT = 1, FS_LEFT_FAILED = 2 } fs_left;

/* The last lines of a rank's log. */
#define FS_SAID_N 4
#define FS_SAID_NBYTES 192

/* Where a rank is, asked once when the job fails: see locate.c. */
typedef enum fs_answer { FS_ANSWER_NONE = 0, FS_ANSWER_ASKED = 1, FS_ANSWER_GIVEN = 2 } fs_answer;
/* What 100 frames of Python take at most, with names of 500 characters. */
#define FS_ANSWER_NBYTES ((size_t)128 * 1024)

typedef struct fs_slot {
    _Alignas(FS_CACHE_LINE) _Atomic int64_t pid; /* 0: has not joined yet */
    _Atomic uint32_t left;                       /* fs_left; publishes reason */
    _Atomic int64_t thread;                      /* that opened the world; see fs_thread_id */
    _Atomic int32_t answer_signal;               /* 0: does not answer */
    _Atomic uint32_t answer;                     /* fs_answer; publishes answer_nbytes */
    _Atomic uint32_t answer_nbytes;
    _Atomic uint32_t said_n; /* lines so far; the last FS_SAID_N of them are kept */
    _Atomic uint64_t said[FS_SAID_N][FS_SAID_NBYTES / 8];
    char reason[FS_REASON_NBYTES];
    /* Written by this rank before it tries to set abort; read only if it won, so published by
     * abort. */
    char report[FS_REPORT_NBYTES];
    fs_note note;
} fs_slot;

/* One rank's part in a fence: kept for two fences, since nobody enters fence k + 2 before
 * everyone has left fence k. Published by arrived, then gate. */
typedef struct fs_rec {
    _Atomic uint64_t fence; /* number of the fence + 1; 0: none. Also read by reports */
    fs_what what;
    fs_payload payload;
} fs_rec;

typedef struct fs_member {
    _Alignas(FS_CACHE_LINE) fs_rec rec[2];
    _Atomic uint32_t closed; /* closed its world: will not come to another fence */
} fs_member;

#define FS_GATE_ABORTED ((uint64_t)1 << 63)

/* gate: number of finished fences. From k it goes to k + 1 or to k | ABORTED by one
 * compare-and-swap; both are final for everyone. */
typedef struct fs_world_page {
    _Alignas(FS_CACHE_LINE) _Atomic uint64_t gate;
    _Atomic uint32_t bell;     /* futex word: changes when sleepers should look again */
    _Atomic uint32_t sleepers; /* ranks in, or on their way to, a sleep */
    _Alignas(FS_CACHE_LINE) _Atomic uint64_t arrived; /* arrivals at all fences so far */
    _Alignas(FS_CACHE_LINE) _Atomic uint32_t open;    /* ranks that have this page mapped */
#ifdef FS_THREADS_ONLY
    pthread_mutex_t lock; /* stand in for the futex */
    pthread_cond_t moved;
#endif
    fs_member member[];
} fs_world_page;

// ---- the log ------------------------------------------------------------------------------------

/* A row: everything of one operation and unit so far. An event: one operation. Words of one writer,
 * which everyone may read; see log.c. */
#define FS_LOG_UNITS 256
#define FS_LOG_OPS 32 /* more than there are in fs_op */
#define FS_LOG_ROWS FS_LOG_TOTALS

typedef struct fs_log_row {
    _Atomic uint64_t key, count, nbytes, spent_ns, waited_ns;
} fs_log_row;

typedef struct fs_log_event {
    _Atomic uint64_t number; /* from 1; 0: being written. Publishes the others */
    _Atomic uint64_t key, nbytes, start_ns, spent_ns, waited_ns;
} fs_log_event;

typedef struct fs_log_page {
    _Atomic uint64_t rows_n, units_n, events_n; /* publish rows, names, events */
    _Atomic uint64_t unit[FS_LOG_UNITS][FS_NOTE_UNIT_NBYTES / 8];
    fs_log_row row[FS_LOG_ROWS];
    fs_log_event event[FS_LOG_EVENTS]; /* a ring */
} fs_log_page;

#define FS_JOB_MAGIC 0x626f6a6472616873u /* "shardjob" */
#define FS_JOB_LAYOUT 3u                 /* changes when these structs do */

typedef struct fs_job_page {
    uint64_t magic;
    uint32_t layout, size;
    uint64_t nonce; /* random; ranks of one job agree on it */
    size_t nbytes, root_at;
    uint64_t answers_at; /* FS_ANSWER_NBYTES of the data file for each rank, mapped by nobody */
    _Alignas(FS_CACHE_LINE) _Atomic uint64_t abort; /* packed cause, 0: none; publishes a report */
    _Atomic uint64_t end;                           /* next free offset of the data file */
    fs_slot slot[];
} fs_job_page;

/* First page of a region; the ranks' blocks follow. */
typedef struct fs_region_page {
    _Atomic uint32_t open; /* ranks that have not closed it */
} fs_region_page;

// ---- of this process ----------------------------------------------------------------------------

struct fs_job {
    _Atomic int refs;
    bool threads;
    int size;
    int self;            /* rank of this process; -1 in a thread job */
    unsigned generation; /* of the process that opened it, see fs_fork_generation */
    fs_job_page *page;
    fs_arena memory; /* of page, in a thread job */
    int data_fd, lock_fd;
    int answer_fd;             /* -1: this process does not answer */
    fs_locate locate;          /* NULL: lines are those of the last operations */
    _Atomic bool told;         /* this process has written the report of the end */
    fs_interrupted interrupted; /* of worlds opened from now on */
    void *interrupted_ctx;
    pthread_mutex_t lock; /* guards what follows. A leaf: nothing is waited for while it is held */
    fs_region *regions;
    struct fs_orphan *orphans; /* [orphans_n]: spans of a thread job that go with the job */
    size_t orphans_n;
};

/* A span that nobody opened in the end, and that ranks may still be touching. */
typedef struct fs_orphan {
    uint64_t at;
    size_t nbytes;
} fs_orphan;


struct fs_region {
    fs_job *job;
    _Atomic int refs;
    char *name;
    int size;
    size_t stride;
    uint64_t at; /* of the region page */
    size_t nbytes;
    unsigned char *base;
    fs_region *next; /* in job->regions */
};

typedef struct fs_hook {
    fs_idle idle;
    void *ctx;
} fs_hook;

typedef struct fs_over_hook {
    fs_over over;
    void *ctx;
} fs_over_hook;

#define FS_EVENTS_MAX 4

#define FS_LOG_DEPTH 8

/* An operation under way. */
typedef struct fs_log_scope {
    fs_op op;
    int unit;
    bool off;
    int64_t start, waited, inner; /* ns; inner: of operations inside this one */
    int64_t looked; /* at the clock, last */
    uint64_t nbytes;
} fs_log_scope;

/* This rank's side of the log. */
typedef struct fs_log {
    fs_log_page *page; /* NULL before and after the windows */
    int depth;
    fs_log_scope scope[FS_LOG_DEPTH]; /* [0]: outside of any operation */
    uint16_t row_of[FS_LOG_UNITS][FS_LOG_OPS]; /* number of the row, from 1; 0: none yet */
} fs_log;

typedef struct fs_log_wait {
    int64_t start, inner;
    bool off;
} fs_log_wait;

struct fs_world {
    fs_job *job;
    int rank, size;
    int *ranks; /* [size]: in the job */
    bool root;
    fs_world_page *page;
    uint64_t page_at;
    size_t page_nbytes;
    uint64_t fences; /* entered and finished by this rank: the k of the next one */
    const fs_exec *exec;
    fs_exec host; /* exec, or the CPU's table where that is a device's: for collectives */
    fs_deadlines deadlines;
    fs_ledger ledger;

    fs_hook *hooks;
    size_t hooks_n;
    fs_over_hook *over_hooks;
    size_t over_hooks_n;
    bool in_hooks;
    fs_interrupted interrupted;
    void *interrupted_ctx;
    int64_t pause_at; /* when fs_world_pause asks it again */
    int64_t look_at;  /* when fs_world_look looks again */

    /* Windows: two halves of a block of world memory for each rank, see show.h. */
    fs_region *windows;
    size_t half_nbytes;
    uint64_t shown; /* halves used so far; the next is shown & 1 */
    fs_log log;
    fs_arena scratch_arena;
    float *scratch; /* FS_SCRATCH_N elements: fp32 sums of 16-bit operands */
    /* Of the collective under way, [size] each. */
    const unsigned char **pieces; /* what every rank shows */
    const void **sources; /* scratch of fs_reduce_pieces */
    const void **blocks;
    fs_payload *payloads;
    size_t *counts, *offsets; /* elements */

    int64_t spin_ns, spin_max_ns;
    char *events; /* [FS_EVENTS_MAX][FS_REPORT_NBYTES] */
    unsigned events_first, events_n;
    _Atomic bool busy; /* in a call */
    bool closed;       /* has left; the struct stays for those who retained it */
    _Atomic int refs;
};

// ---- job.c --------------------------------------------------------------------------------------

/* Changes in a forked child, where every handle of the parent must be left alone. */
unsigned fs_fork_generation(void);
static inline bool
fs_job_is_forked(const fs_job *job)
{
    return job->generation != fs_fork_generation();
}

/* Bytes of the page of a job of size ranks, the root world's page included. */
size_t fs_job_page_nbytes(int size);
/* Where the root world's page lies in it. */
size_t fs_job_root_at(int size);
void fs_job_page_init(fs_job_page *page, int size, uint64_t nonce);
FS_NODISCARD fs_status
fs_job_new(int size, fs_job **out);

/* Sets the cause if there is none yet; true if this call did. The caller's report must lie in
 * slot[reporter].report; reporter -1: none. */
bool fs_job_abort(fs_job *job, int reporter, fs_cause_kind kind, int culprit);

/* A rank that can no longer come (its process ended, or it failed), or -1. Costs a system call per
 * rank in a job of processes. */
int fs_job_lost(fs_job *job, fs_cause_kind *out_kind);

/* A rank that has done nothing yet. The memory is zeroed. */
void fs_note_init(fs_note *note);
/* Stores what fits of text; always ends it. nbytes: a multiple of 8. */
void fs_note_store(_Atomic uint64_t *words, size_t nbytes, const char *text);
void fs_note_load(const _Atomic uint64_t *words, size_t nbytes, char *text);

// ---- log.c --------------------------------------------------------------------------------------

/* A wait of the operation under way. */
void fs_log_wait_begin(fs_world *world, fs_log_wait *out);
void fs_log_wait_end(fs_world *world, const fs_log_wait *wait);
/* Is the operation under way one whose fences are its own business? */
bool fs_log_is_in_collective(const fs_world *world);

// ---- locate.c -----------------------------------------------------------------------------------

/* Asks the ranks that keep world waiting where they are, and waits for the answers that long. */
void fs_world_locate(const fs_world *world, int64_t patience_ns);
/* Where rank is now, as far as it has answered (a rank that is a thread need not): "file:line in
 * function, called at file:line in function, ..."; returns the length, 0: not known. */
size_t fs_job_where(fs_job *job, int rank, char *text, size_t nbytes);
/* Of the calling thread: its number in the kernel, or pthread_self in a job of threads. */
int64_t fs_thread_id(const fs_job *job);
#ifndef FS_THREADS_ONLY
/* The letter of a process's state ('T': stopped), or 0 if it is gone or not ours to see. */
char fs_process_state(int64_t pid);
#endif

// ---- join.c -------------------------------------------------------------------------------------

/* In a job of processes: does rank still hold its lock? *out_pid: its process as seen from here,
 * 0 if it is in another namespace. */
bool fs_job_holds_lock(fs_job *job, int rank, int64_t *out_pid);

// ---- rendezvous.c -------------------------------------------------------------------------------

/* Hands the job's descriptors to every other rank; came: size entries, false. FS_ABORTED when not
 * all came in time. */
FS_NODISCARD fs_status
fs_rendezvous_serve(const fs_job *job, const fs_join *join, bool *came);

/* Gets them from rank 0, and the nonce of its job. */
FS_NODISCARD fs_status
fs_rendezvous_ask(fs_job *job, const fs_join *join, uint64_t *out_nonce);

// ---- report.c -----------------------------------------------------------------------------------

/* The cause in words, then every rank: has it come, what is it in or was it last in, where. world
 * (may be NULL) is the world that waits; seconds (0: not said) is how long. */
void fs_report_format(fs_job *job, const fs_world *world, fs_cause cause, double seconds,
                      char *text, size_t nbytes);

// ---- region.c -----------------------------------------------------------------------------------

/* Address space of the data file (the heap in a thread job), taken and given back. nbytes is
 * rounded up to pages by all four. */
FS_NODISCARD fs_status
fs_span_reserve(fs_job *job, size_t nbytes, uint64_t *out_at);
FS_NODISCARD fs_status
fs_span_map(fs_job *job, uint64_t at, size_t nbytes, void *out);
/* Makes the bytes at offset real: their memory is there, and charged to this process. */
FS_NODISCARD fs_status
fs_span_populate(fs_job *job, uint64_t at, void *mapped, size_t nbytes);
void fs_span_unmap(fs_job *job, void *mapped, size_t nbytes);
void fs_span_free(fs_job *job, uint64_t at, size_t nbytes);
/* Gives back a span when the job was aborted while ranks may have been mapping it: at once in a job
 * of processes (each has its own mapping), with the job in a thread job. */
void fs_span_abandon(fs_job *job, uint64_t at, size_t nbytes);
size_t fs_page_nbytes(void);

/* Where nbytes at memory lie in world memory, as every rank of the job can find them; 0: not
 * there. */
uint64_t fs_region_address(fs_job *job, const void *memory, size_t nbytes);
/* The other way round; NULL if this process has not opened (or has closed) that region. */
const void *fs_region_find(fs_job *job, uint64_t address, size_t nbytes);

// ---- room.c -------------------------------------------------------------------------------------

/* How much memory may still be taken here, and who says so. */
typedef struct fs_room {
    uint64_t group_nbytes; /* least room in the memory cgroups from ours to the root */
    uint64_t group_id;     /* hash of the cgroup's name: ranks with one id share group_nbytes */
    uint64_t host_nbytes;  /* MemAvailable */
} fs_room;

/* Unlimited is UINT64_MAX. root is "" outside tests; files that are missing mean no limit. */
void fs_room_read(const char *root, fs_room *out);

// ---- wait.c -------------------------------------------------------------------------------------

/* Of a clock that never goes back. */
int64_t fs_now_ns(void);
/* Has rank (of world) come to the fence that this rank is in? */
bool fs_world_has_come(const fs_world *world, int rank);
/* Aborts with a report about world; text of the report goes to the rank's slot first. */
void fs_world_abort(fs_world *world, fs_cause_kind kind, int culprit, double seconds);
void fs_world_queue_event(fs_world *world, const char *text);
/* FS_ABORTED with the cause as message. */
FS_NODISCARD fs_status
fs_world_aborted(const fs_world *world);

// ---- world.c ------------------------------------------------------------------------------------

/* A world's page: where its ranks meet. */
size_t fs_world_page_nbytes(int size);
void fs_world_page_init(fs_world_page *page, int size);

// ---- reduce.c -----------------------------------------------------------------------------------

#define FS_SCRATCH_N ((size_t)32 * 1024)

/* out[i] = op over r of src[r][i] in rank order; out overlaps no source. src: size pointers to n
 * elements. */
void fs_reduce_pieces(fs_world *world, fs_dtype dtype, fs_reduce_op op, const void *const *src,
                      size_t n, void *out);

#endif
