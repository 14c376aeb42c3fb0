/* A job, its worlds, and the only ways to wait: fs_wait, fs_meet, fs_show.
 *
 * A job is the ranks' shared fate: one abort cause, what each rank is doing now, liveness. A
 * world is some of its ranks with a gate. A region is a stretch of the job's data file: every
 * rank's block at base + rank * stride, touched by the rank that pays for it. Ranks are
 * processes or threads; only fs_job_threads and fs_job_join know which. */
#ifndef FS_COMM_COMM_H
#define FS_COMM_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/arena.h"
#include "../base/dtype.h"
#include "../base/status.h"
#include "../device/device.h"

typedef struct fs_job fs_job;
typedef struct fs_world fs_world;
typedef struct fs_region fs_region;

#define FS_RANKS_MAX 1024

// ---- cause --------------------------------------------------------------------------------------

typedef enum fs_cause_kind {
    FS_CAUSE_NONE = 0,
    FS_CAUSE_DIED,        /* a rank's process ended without leaving */
    FS_CAUSE_LEFT,        /* a rank closed its world or ended by an exception while others wait */
    FS_CAUSE_TIMEOUT,     /* a rank did not come in time */
    FS_CAUSE_MISMATCH,    /* ranks called different operations, sizes, dtypes */
    FS_CAUSE_INTERRUPTED, /* Ctrl-C in a rank */
    FS_CAUSE_ERROR        /* a rank failed inside an operation of ours */
} fs_cause_kind;

/* Why the job was aborted: the first cause wins, and stays. */
typedef struct fs_cause {
    fs_cause_kind kind;
    int rank;    /* the culprit, counted in the job; -1: nobody in particular */
    int64_t pid; /* of the culprit, 0 if unknown */
} fs_cause;

/* Why the job is over; FS_CAUSE_NONE, rank -1, as long as it is not. */
fs_cause fs_job_cause(const fs_job *job);
bool fs_job_is_threads(const fs_job *job);

#define FS_REPORT_NBYTES 8192

/* Formats who arrived, who did not, each rank's operation, unit, step and Python line, and the
 * cause. Text stored by fs_job_leave appears here. Always ends the text with NUL. */
void fs_job_report(const fs_job *job, char *buffer, size_t nbytes);

// ---- job and world ------------------------------------------------------------------------------

typedef struct fs_deadlines {
    double timeout_s;      /* raise after this long in one wait */
    double report_after_s; /* queue a report for the logger after this long in one wait */
} fs_deadlines;

/* A job of n ranks that are threads of this process. Each thread then opens its world. */
FS_NODISCARD fs_status
fs_job_threads(int n, fs_job **out);

/* Asked in waits; true = stop waiting. The binding runs Python's signal handlers here. */
typedef bool (*fs_interrupted)(void *ctx);

/* How processes find each other; see join.c. */
typedef struct fs_join {
    int rank, size;
    const char *name;   /* unique per job, user and restart: equal on all ranks, on no other job */
    /* Of ranks that somebody started by hand: the process that started this one. Ranks of one
     * parent are brought together before others of the same name; 0: the name is no other job's. */
    int64_t parent;
    const char *folder; /* where a socket may be made in a private folder; NULL: nowhere */
    /* Descriptors that a launcher made with fs_job_create and this process inherited: taken over,
     * on failure too; -1: none, ask rank 0 through a socket. */
    int data_fd, lock_fd;
    double timeout_s;
    fs_interrupted interrupted; /* may be NULL */
    void *interrupted_ctx;
} fs_join;

/* Makes the shared state of a job of size processes, for a launcher: ranks inherit the
 * descriptors. The launcher may ask for cause and report, and closes the job at the end. */
FS_NODISCARD fs_status
fs_job_create(int size, fs_job **out, int *out_data_fd, int *out_lock_fd);

/* Joins a job of processes of this host. Every rank of the job must call it. FS_ABORTED when not
 * all came in time, or when interrupted; FS_EUNSUPPORTED where only worlds of threads exist. */
FS_NODISCARD fs_status
fs_job_join(const fs_join *join, fs_job **out);

/* Marks the calling rank as gone, and says how: failed with an exception (every wait of the job
 * ends at once), or in peace (waits for this rank end). text may be NULL. Called by close, by
 * atexit, and by a rank thread's finally; the first call counts. */
void fs_job_leave(fs_job *job, int rank, bool failed, const char *text);

/* Keeps a line of this rank's log; the last few stand in reports that name it as late. */
void fs_job_say(fs_job *job, int rank, const char *text);

/* True the first time in this process: whoever asks writes the report of the end. */
bool fs_job_tell_once(fs_job *job);

/* Asked by every wait of worlds opened on the job from now on, as by fs_world_set_interrupted. */
void fs_job_set_interrupted(fs_job *job, fs_interrupted interrupted, void *ctx);

// ---- where a late rank is -----------------------------------------------------------------------

/* In a job of threads: writes the Python lines of a thread (pthread_self) as faulthandler does,
 * innermost first, '  File "F", line N in FUNCTION' each, and returns their length. Called by a
 * failing rank's thread, without locks held. */
typedef size_t (*fs_locate)(int64_t thread, char *lines, size_t nbytes);
void fs_job_set_locate(fs_job *job, fs_locate locate);

/* In a job of processes: lets this rank be asked, by a real-time signal, where it is. Installs a
 * handler that stays for the life of the process, and opens a descriptor for the lines. The caller
 * puts a handler before ours that writes the lines of the interrupted thread there and then calls
 * ours; then it says so (ready). number: the signal, 0: the first that is free from
 * FS_ANSWER_SIGNAL on. *out_number is 0 where this is not to be had (threads, no /proc, no free
 * signal, a second job): reports then name the line of the last operation. A handler that the
 * signal had before is called for signals that nobody of ours sent. */
#define FS_ANSWER_SIGNAL 54 /* SIGRTMIN + 20 where the C library takes two */
FS_NODISCARD fs_status
fs_job_answer_open(fs_job *job, int number, int *out_number, int *out_fd);
void fs_job_answer_ready(fs_job *job);
/* Is that handler still the one that the signal reaches? Then the caller may take it away. */
bool fs_job_answer_is_on_top(const fs_job *job);
/* Not asked any more; closes the descriptor (unless the signal has another handler now, which may
 * call the one that writes). Does nothing in a forked child. */
void fs_job_answer_close(fs_job *job);

/* For a launcher: asks every rank that does not wait where it is, and waits for the answers that
 * long; reports then say it. */
void fs_job_locate(fs_job *job, double patience_s);

/* Ends the job from outside of its ranks (Ctrl-C in the thread that waits for rank threads): every
 * wait of every rank fails with FS_CAUSE_INTERRUPTED, rank -1. */
void fs_job_interrupt(fs_job *job);

/* Drops one reference; the last one unmaps. Never waits; does nothing in a forked child. */
void fs_job_close(fs_job *job);

/* The world of all ranks of the job, seen from rank. Takes a reference on the job. Collective.
 * exec: where the rank computes, and its threads; the world keeps the pointer. */
FS_NODISCARD fs_status
fs_world_open(fs_job *job, int rank, const fs_exec *exec, const fs_deadlines *deadlines,
              fs_world **out);

/* A world of the ranks that passed the same color, ordered by key, then rank. A negative color
 * joins none: *out is NULL. Collective. Uses exec and deadlines of world, and its interrupted. */
FS_NODISCARD fs_status
fs_world_split(fs_world *world, int64_t color, int64_t key, fs_world **out);

/* Leaves (if nobody did) and drops the opener's reference. Never waits. NULL is fine. */
void fs_world_close(fs_world *world);

/* Keeps a closed world's struct (not its membership) for what was opened in it and is closed
 * later. */
void fs_world_retain(fs_world *world);
void fs_world_release(fs_world *world);

/* This rank in its world, 0 to fs_world_size - 1. */
int fs_world_rank(const fs_world *world);
/* The same rank in the world of all ranks (fs_cause.rank counts there). */
int fs_world_job_rank(const fs_world *world);
int fs_world_size(const fs_world *world);
fs_job *fs_world_job(const fs_world *world);
/* Where the rank computes: on the CPU, or on a device. */
const fs_exec *fs_world_exec(const fs_world *world);
/* The same on the CPU: for arrays in host memory, such as those of collectives. */
const fs_exec *fs_world_host_exec(const fs_world *world);
fs_ledger *fs_world_ledger(fs_world *world);
/* True where ranks are threads of one process. */
bool fs_world_is_threads(const fs_world *world);
/* FS_OK, FS_ABORTED (poisoned), or FS_ESTATE (closed, or used after fork). */
FS_NODISCARD fs_status
fs_world_usable(const fs_world *world);

/* Marks this rank's world as in a call: false if it is in one already. One call at a time. */
bool fs_world_enter(fs_world *world);
void fs_world_exit(fs_world *world);

/* Changes how long this rank waits, from the next wait on. */
void fs_world_set_deadlines(fs_world *world, const fs_deadlines *deadlines);
fs_deadlines fs_world_deadlines(const fs_world *world);

// ---- the rank's device --------------------------------------------------------------------------

/* At least so much scratch for a stream of the rank's device; what it grows by is charged to the
 * ledger. Before operations. */
FS_NODISCARD fs_status
fs_world_reserve(fs_world *world, fs_stream_id stream, size_t nbytes);

/* What is there, free, and held by this process. FS_ESTATE on the CPU. */
FS_NODISCARD fs_status
fs_world_device_memory(fs_world *world, fs_device_memory *out);

/* What the rank's compute stream is given from now on comes after what stream (a cudaStream_t of
 * its device; NULL: the legacy default stream) was given so far; or the other way round. FS_ESTATE
 * on the CPU. Neither waits. */
FS_NODISCARD fs_status
fs_world_after_stream(fs_world *world, void *stream);
FS_NODISCARD fs_status
fs_world_stream_after(fs_world *world, void *stream);

/* Until this rank's device has come past the event, with FS_NOBELL and flags: an eye is kept on
 * peers, the deadline and Ctrl-C. Whether the device failed meanwhile is the caller's to ask. */
FS_NODISCARD fs_status
fs_world_await(fs_world *world, fs_event *event, unsigned flags);

/* dst, in host memory, = nbytes of device memory at src, once all that the compute stream was given
 * is done. Waits, as fs_wait does. */
FS_NODISCARD fs_status
fs_world_fetch(fs_world *world, void *dst, const void *src, size_t nbytes);

/* Waits for what this rank's device was given, peers' parts in it included: whoever leaves without
 * it might leave operations behind that nobody ends. On the CPU there is nothing to wait for. */
FS_NODISCARD fs_status
fs_world_finish(fs_world *world);

/* Likewise between two places of device memory, in the order of the compute stream: no waiting. */
FS_NODISCARD fs_status
fs_world_copy(fs_world *world, void *dst, const void *src, size_t nbytes);

// ---- what this rank is doing --------------------------------------------------------------------

typedef enum fs_op {
    FS_OP_BARRIER = 1, FS_OP_ALL_GATHER, FS_OP_REDUCE_SCATTER, FS_OP_ALL_REDUCE, FS_OP_BROADCAST,
    FS_OP_ALL_TO_ALL, FS_OP_SPLIT, FS_OP_REGION, FS_OP_OPEN, FS_OP_SETTLE, FS_OP_AGREE,
    FS_OP_UPDATE, FS_OP_PUBLISH, FS_OP_STORE, FS_OP_SAVE, FS_OP_LOAD, FS_OP_HASH, FS_OP_LOSS,
    FS_OP_FREEZE, FS_OP_CLOSE,
    FS_OP_SKIP, /* a rank whose batch failed: goes with whatever FS_OP_LOSS or FS_OP_SETTLE the
                 * others are at, without a say in what is compared */
    /* Of a unit, without a fence of their own. */
    FS_OP_GATHER, FS_OP_REDUCE,
    FS_OP_SLOT, /* room for a unit's gradient: its last tenant must have been summed */
    FS_OP_WAIT  /* part of another operation */
} fs_op;

/* "barrier", "all_gather", ...: as reports and logs name it. */
const char *fs_op_name(fs_op op);
/* Does it move small agreements between ranks, and not the caller's data? */
bool fs_op_is_control(fs_op op);

/* Stored before any call that may wait; everyone may read it. Strings are copied (and cut). */
void fs_world_note_line(fs_world *world, const char *file, int line);
/* This rank gathers or reduces unit, until it comes to a fence. */
void fs_world_note_op(fs_world *world, fs_op op, const char *unit);
/* The step, -1: none; and the unit, NULL: none, until it is noted again. */
void fs_world_note_unit(fs_world *world, const char *unit, int64_t step);

/* Asked in every wait of this rank but those with FS_NOSIG, every 50 ms; true ends the job with
 * FS_CAUSE_INTERRUPTED. */
void fs_world_set_interrupted(fs_world *world, fs_interrupted interrupted, void *ctx);

/* Messages for the logger, queued by C and drained by Python: false when the queue is empty. */
bool fs_world_next_event(fs_world *world, char *buffer, size_t nbytes);

// ---- the log ------------------------------------------------------------------------------------

/* What every rank has done in the world so far: fences and collectives log themselves; shards say
 * which unit they gather, sum, and wait for. Costs two looks at the clock an operation. */
#define FS_LOG_EVENTS 4096 /* single operations kept for each rank */
#define FS_LOG_UNIT_NBYTES 64

/* One operation, or the total of all with this op and unit. */
typedef struct fs_log_entry {
    fs_op op;
    char unit[FS_LOG_UNIT_NBYTES]; /* "": none */
    uint64_t count, nbytes;
    uint64_t start_ns;  /* CLOCK_MONOTONIC; 0 in a total */
    uint64_t spent_ns;  /* in a total: without what other operations took inside this one */
    uint64_t waited_ns; /* of spent_ns: for other ranks */
} fs_log_entry;

/* The number of a unit's name for fs_log_begin; 0: no unit (or no room for more names). */
int fs_log_unit(fs_world *world, const char *name);
/* Around an operation of this rank; they nest, and every begin has its end. */
void fs_log_begin(fs_world *world, fs_op op, int unit, uint64_t nbytes);
void fs_log_add(fs_world *world, uint64_t nbytes); /* to the operation under way */
void fs_log_end(fs_world *world);

/* Up to n totals, or the last n single operations in the order they ended, of a rank of the world;
 * may be asked of any rank at any time, and waits for nobody. Returns how many; *out_lost:
 * operations that are not kept any more. */
size_t fs_log_read_totals(const fs_world *world, int rank, fs_log_entry *out, size_t n);
size_t fs_log_read_events(const fs_world *world, int rank, fs_log_entry *out, size_t n,
                          uint64_t *out_lost);
#define FS_LOG_TOTALS 512 /* most totals of a rank */

/* Test hook: nothing is logged in this process. */
void fs_log_set_off(bool off);

// ---- waiting ------------------------------------------------------------------------------------

#define FS_NOSIG 1u  /* Ctrl-C is remembered, not obeyed, during this wait */
#define FS_NOBELL 2u /* nobody rings when the condition holds (a device): looks often */

/* True when the wait is over. Called often, from the waiting thread; must not block. */
typedef bool (*fs_condition)(void *ctx);

/* The only wait: condition? idle hooks (this rank's ready reduces)? abort, liveness, deadline,
 * Ctrl-C? spin a few microseconds where cores are free, then sleep in slices of 10 ms. */
FS_NODISCARD fs_status
fs_wait(fs_world *world, fs_condition condition, void *ctx, unsigned flags);

/* Between the pieces of long work that waits for nobody (a file that is written): FS_ABORTED when
 * the job is over, FS_ESTATE on Ctrl-C, which is looked for every 50 ms. Ends no job by itself. */
FS_NODISCARD fs_status
fs_world_pause(fs_world *world);

/* For waits that somebody else's library makes and asks from: what would end an fs_wait (abort,
 * death, deadline, Ctrl-C) is looked at, at most once in a slice of a wait. Looks are zeroed at
 * first; one that comes seconds after the last is of another wait. */
typedef struct fs_looks {
    int64_t began_ns, last_ns;
} fs_looks;
FS_NODISCARD fs_status
fs_world_look(fs_world *world, fs_looks *looks);

/* Ends the job because this rank found that it cannot go on: status, whose message all ranks get.
 * Returns status; FS_ABORTED where the job was over already. */
FS_NODISCARD fs_status
fs_world_fail(fs_world *world, fs_cause_kind kind, fs_status status);

/* Wakes ranks that sleep in fs_wait, after a shared counter moved. */
void fs_bell(fs_world *world);

/* Work that every wait of this rank does first. Hooks run on the waiting thread, must not wait. */
typedef fs_status (*fs_idle)(void *ctx);
FS_NODISCARD fs_status
fs_world_add_idle(fs_world *world, fs_idle idle, void *ctx);
void fs_world_remove_idle(fs_world *world, fs_idle idle, void *ctx);

/* Called when a function of this rank reports that the job is over, before it returns, each time:
 * whatever works for the world elsewhere (a device) must be ended. Must not wait. */
typedef void (*fs_over)(void *ctx);
FS_NODISCARD fs_status
fs_world_add_over(fs_world *world, fs_over over, void *ctx);
void fs_world_remove_over(fs_world *world, fs_over over, void *ctx);

/* What is compared at a fence; a difference is FS_CAUSE_MISMATCH on all ranks, naming both. */
typedef struct fs_what {
    fs_op op;
    int32_t dtype;   /* fs_dtype, or -1 */
    int32_t root;    /* root rank or reduce op, or -1 */
    uint64_t nbytes; /* or any number that must be equal on all ranks */
    uint64_t tag;    /* likewise: a hash */
} fs_what;

#define FS_PAYLOAD_NBYTES 64
/* Where FS_OP_LOSS, FS_OP_SETTLE and FS_OP_SKIP say in u what they are, for ranks that skip. */
#define FS_PAYLOAD_OP 7
typedef union fs_payload {
    unsigned char bytes[FS_PAYLOAD_NBYTES];
    uint64_t u[8];
    int64_t i[8];
    double d[8];
} fs_payload;

/* The only fence: barrier, comparison of what, and all-gather of 64 bytes. mine may be NULL
 * (zeros); all (size entries) may be NULL. On FS_ABORTED nothing was agreed, on any rank. */
FS_NODISCARD fs_status
fs_meet(fs_world *world, const fs_what *what, const fs_payload *mine, fs_payload *all,
        unsigned flags);

// ---- regions ------------------------------------------------------------------------------------

/* World memory: stride bytes for each rank (page rounded; equal on all ranks), zeroed. Collective;
 * fails on all ranks if one fails. Room is checked against cgroup, limits and system before it is
 * taken: FS_EBUDGET. name appears in errors. */
FS_NODISCARD fs_status
fs_region_open(fs_world *world, const char *name, size_t stride_nbytes, fs_region **out);

/* The block of a rank; block(0) + size * stride is one mapping. Valid until close. */
unsigned char *fs_region_block(const fs_region *region, int rank);
size_t fs_region_stride(const fs_region *region);

/* Local; the last rank's close gives the memory back. Never waits. NULL is fine. A view handed to
 * Python holds a reference (retain/release), and outlives close. */
void fs_region_close(fs_region *region);
void fs_region_retain(fs_region *region);

// ---- collectives --------------------------------------------------------------------------------

/* Private or world memory, any count; sums of bf16 and fp16 in fp32 in rank order, rounded once;
 * mean divides before that rounding; integers wrap, and mean of integers is FS_EINVAL.
 * counts: size element counts, or NULL for equal counts of n. In place where said. */

/* out: concatenation of every rank's in (counts[r] elements). */
FS_NODISCARD fs_status
fs_all_gather(fs_world *world, fs_dtype dtype, const void *in, size_t n, const size_t *counts,
              void *out);
/* in: sum of counts elements; out: this rank's counts[rank] of the reduction. */
FS_NODISCARD fs_status
fs_reduce_scatter(fs_world *world, fs_dtype dtype, fs_reduce_op op, const void *in,
                  const size_t *counts, void *out);
/* inout may be the same memory. */
FS_NODISCARD fs_status
fs_all_reduce(fs_world *world, fs_dtype dtype, fs_reduce_op op, const void *in, void *out,
              size_t n);
FS_NODISCARD fs_status
fs_broadcast(fs_world *world, fs_dtype dtype, int root, void *inout, size_t n);
/* Block r of in (n elements) goes to rank r; block r of out came from rank r. */
FS_NODISCARD fs_status
fs_all_to_all(fs_world *world, fs_dtype dtype, const void *in, size_t n, void *out);
FS_NODISCARD fs_status
fs_barrier(fs_world *world);

/* Test hook: every fs_wait of this process first sleeps a seeded random time up to max_us; 0 =
 * off. */
void fs_wait_set_delay(uint32_t seed, uint32_t max_us);
/* Test hook: the nth fs_wait of this process from now on does what (1 = SIGKILL to itself, 2 =
 * SIGSTOP, 3 = fails as if interrupted); 0 = off. Returns the number of waits since the last
 * call. */
size_t fs_wait_fault_at(size_t nth, int what);

#endif
