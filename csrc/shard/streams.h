/* What shards on a device have besides arrays: streams, events, engines. All of it is NULL on the
 * CPU, where operations are done when they return and every function here does nothing.
 *
 * Four streams of the rank's context: compute, which is the caller's; gather, which fills the pool
 * and brings whole weights up to date; reduce, which exchanges gradients and sums them; copy, for a
 * state that the host moves (offload.c). What one
 * hands to another is ordered by marks. The host waits for the device in two places: where a step
 * is settled, and where the caller asks for something of it. */
#ifndef FS_SHARD_STREAMS_H
#define FS_SHARD_STREAMS_H

#include <stdatomic.h>

#include "shard.h"

#define FS_STREAMS_N (FS_STREAM_COPY + 1)

/* A point of a stream. clock: how far every stream had come by then, in marks set: what follows
 * this mark follows those. A wait that other waits imply already is not made. */
typedef struct fs_mark {
    fs_event *event;
    fs_stream_id stream;
    uint64_t clock[FS_STREAMS_N]; /* all 0: never set */
} fs_mark;

/* Gathers of a rank, the last of them: an entry is number + 1, unit, and how many exchanges the
 * rank began before it. What a device's queue holds is far less than this; a rank that is further
 * ahead waits. */
#define FS_TALK_GATHERS 1024

/* What a rank of a device says in world memory: the engines' ids (rank 0), its gathers. */
typedef struct fs_talk {
    fs_engine_id ids[2];
    _Alignas(64) _Atomic uint64_t gathers_n;
    _Alignas(64) _Atomic uint64_t gathers[FS_TALK_GATHERS];
} fs_talk;

/* Elements that go between the host and the device at once, and the widest of them. */
#define FS_TRANSFER_N ((size_t)1 << 19)
#define FS_TRANSFER_WIDTH sizeof(double)

/* Elements of a piece that goes between device and host in an update on the host. */
#ifndef FS_OFFLOAD_N /* tests take small ones */
#define FS_OFFLOAD_N ((size_t)1 << 20)
#endif

/* What an update on the host needs; nothing of it is there while state lives on the device. */
typedef struct fs_offload {
    fs_exec host; /* the CPU's table and this rank's threads */
    size_t n;     /* elements of a buffer */
    unsigned char *grads[2], *weights[2]; /* pinned; NULL where used in place */
    fs_mark *ready[2]; /* copy: the host may use the buffer */
} fs_offload;

typedef struct fs_streams {
    const fs_runtime *runtime;
    fs_exec exec[FS_STREAMS_N];
    uint64_t clock[FS_STREAMS_N][FS_STREAMS_N]; /* of each stream: the marks it comes after */
    fs_mark *marks; /* all of them */
    size_t marks_n;
    fs_mark *handed;    /* compute: what it hands to another stream, set each time anew */
    fs_mark *weights;   /* compute: weights were written */
    fs_mark *sums;      /* compute: summed gradients were read or written */
    fs_mark *brought;   /* compute: the transfer buffer was read */
    fs_mark *published; /* gather: whole weights are up to date */
    fs_mark *awaited;   /* of a wait of the host */
    fs_mark *slots;     /* [slots_n] reduce: the slot was summed */
    const fs_mark *gathered; /* gather: the latest of filled and published; NULL: none */

    fs_engine *gathers, *reduces; /* NULL in a world of one */
    _Atomic bool aborted;
    fs_looks looks; /* while an engine waits */
    uint64_t gathers_n; /* of this rank */

    void *memory, *moments_memory, *pinned, *on_host;
    size_t memory_nbytes, moments_nbytes;
    fs_offload offload;
    unsigned char *staging; /* what peers send of a cut of a unit: size - 1 pieces; with a ring
                             * this rank's gradients of a unit, all size cuts of them */
    size_t piece_nbytes;
    int64_t *firsts; /* ring: [params_n] the first element that this rank brought not finite, and
                      * one more for the latest search */
    int64_t *firsts_here; /* pinned: [params_n] of them, once settled */
    unsigned char *absent; /* -0.0: adds nothing, not even a sign */
    size_t absent_nbytes;
    unsigned char *transfer; /* on its way between host and device: transfer_n elements */
    unsigned char *landing;  /* pinned: likewise */
    size_t transfer_n;
    fs_sums *found; /* pinned: of the segments of the cut that this rank speaks for */
    fs_arena pinned_arena;
    fs_engine_piece *pieces; /* scratch of one call of an engine */
    fs_engine_part *sends, *receives;
} fs_streams;

/* Local: after the arrays' arena was placed. fs_streams_close undoes it, and whatever was done. */
FS_NODISCARD fs_status
fs_streams_open(fs_shards *shards);

/* Collective: opens the engines with the ids that rank 0 wrote into world memory before. */
FS_NODISCARD fs_status
fs_streams_connect(fs_shards *shards);

/* What was given to the engines gets some seconds to leave this rank, unless the job is over. */
void fs_streams_close(fs_shards *shards);

/* Ends what the engines have under way, so that no stream waits for ever. Once the job is over. */
void fs_streams_abort(void *shards);

/* FS_OK, or the device's or an engine's first failure: it ends the job. Does not wait. */
FS_NODISCARD fs_status
fs_streams_check(fs_shards *shards);

/* status, which came from an engine or a device: unless it is FS_OK it ends the job. */
FS_NODISCARD fs_status
fs_streams_end(fs_shards *shards, fs_status status);

/* Where operations of a stream run. On the CPU: where all do. */
const fs_exec *fs_exec_on(const fs_shards *shards, fs_stream_id stream);

/* mark stands for all that stream was given. */
void fs_mark_set(fs_shards *shards, fs_stream_id stream, fs_mark *mark);
/* What stream is given from now on comes after mark; a mark that was never set is none. */
void fs_mark_after(fs_shards *shards, fs_stream_id stream, const fs_mark *mark);
/* The host waits until the device has done all that stream was given. flags: of fs_wait. */
FS_NODISCARD fs_status
fs_mark_wait(fs_shards *shards, fs_stream_id stream, unsigned flags);

/* Gives the memory of the moments back, on the device or on the host. */
void fs_streams_close_moments(fs_shards *shards);

/* The host waits for mark; one that was never set is none. flags: of fs_wait. */
FS_NODISCARD fs_status
fs_mark_await(fs_shards *shards, fs_mark *mark, unsigned flags);

/* Device memory of the shards, counted under home by the arena over it. */
FS_NODISCARD fs_status
fs_streams_take(fs_shards *shards, const char *what, size_t nbytes, void **out);

// ---- runs.c: what goes in one piece -------------------------------------------------------------

/* Weights that lie end to end in a cut's packed weights and in the unit's buffer. */
typedef struct fs_run {
    const fs_seg *first;
    size_t n;
} fs_run;
bool fs_next_run(const fs_layout *layout, fs_seg_range *range, fs_run *out);

/* Gradients of a cut of a unit that lie end to end in a slot (padding between parameters goes
 * along): where in the slot, and where in the packed piece. *run is {0} at first. */
typedef struct fs_grad_run {
    size_t slot_n, piece_n, n; /* elements */
} fs_grad_run;
bool fs_next_grad_run(const fs_layout *layout, fs_seg_range *range, fs_grad_run *run);

/* The largest of each, over all cuts and units. */
typedef struct fs_extents {
    size_t run_n, piece_n; /* elements */
    size_t param_n;        /* of a parameter */
    size_t seg_n;          /* of a segment */
    size_t runs;           /* of gradients of a cut of a unit */
    size_t unit_runs;      /* of weights of a unit */
} fs_extents;
fs_extents fs_extents_of(const fs_layout *layout);

#endif
