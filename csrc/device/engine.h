/* What moves data between the memories of several devices: an engine that exists, such as NCCL.
 *
 * An engine only moves bytes: sums are the device table's, in rank order. Every call that moves is
 * stream-ordered on the exec's stream and returns at once, but for the first time that two ranks
 * meet in an engine, when it waits for both to have come so far. All ranks of an engine make the
 * same calls in the same order, each with its own lists; with two engines, the calls of both in one
 * order, and none by two threads of a rank at a time. A failure that shows later comes out of
 * check; after any failure all calls tell it again. Waits take a function that is asked between
 * looks and ends them. */
#ifndef FS_DEVICE_ENGINE_H
#define FS_DEVICE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>

#include "../base/dtype.h"
#include "../base/status.h"

struct fs_exec;
struct fs_context;

typedef struct fs_engine fs_engine;

#define FS_ENGINE_ID_NBYTES 128

/* What rank 0 makes and every rank of one engine is given. Plain bytes. */
typedef struct fs_engine_id {
    unsigned char bytes[FS_ENGINE_ID_NBYTES];
} fs_engine_id;

/* Asked in waits; any failure ends the wait, and is what it returns. May be NULL. */
typedef fs_status (*fs_engine_patience)(void *ctx);

typedef struct fs_engine_open {
    fs_engine_id id;
    int rank, size;
    const char *name; /* in errors: "gather", "reduce"; copied */
    fs_engine_patience patience; /* asked in open, and in calls that wait for a first time */
    void *patience_ctx;          /* valid until abort or close */
} fs_engine_open;

/* nbytes that rank `root` holds at src and every rank, root too, wants at dst. src is read on root
 * alone. On root src and dst may be the same place, or must not overlap. The targets of a list lie
 * at the same distances from each other on every rank. */
typedef struct fs_engine_piece {
    int root;
    const void *src;
    void *dst;
    size_t nbytes;
} fs_engine_piece;

/* nbytes for, or from, a peer. Between two ranks sends and receives are matched in the order of
 * their lists, with equal sizes. A piece for the rank itself is a copy. */
typedef struct fs_engine_part {
    int peer;
    void *data;
    size_t nbytes;
} fs_engine_part;

typedef struct fs_engine_ops {
    /* A new id; one rank calls it. */
    fs_status (*make_id)(fs_engine_id *out);
    /* Collective; waits for all ranks, as far as patience goes. The context's device is used. */
    fs_status (*open)(struct fs_context *context, const fs_engine_open *open, fs_engine **out);
    /* Lists have the same pieces on every rank, src aside; empty pieces are fine. */
    fs_status (*gather)(fs_engine *engine, const struct fs_exec *exec,
                        const fs_engine_piece *pieces, size_t n);
    fs_status (*alltoall)(fs_engine *engine, const struct fs_exec *exec,
                          const fs_engine_part *sends, size_t sends_n,
                          const fs_engine_part *receives, size_t receives_n);
    /* out (n elements) = this rank's part of the sum over ranks of in (size * n), by the engine's
     * own algorithm: faster on some fabrics; order and rounding are the engine's. */
    fs_status (*reduce_scatter)(fs_engine *engine, const struct fs_exec *exec, fs_dtype dtype,
                                const void *in, size_t n, void *out);
    /* The first failure of what was given so far, FS_OK while there is none. Does not wait. */
    fs_status (*check)(fs_engine *engine);
    /* Ends what is under way, here, without waiting for peers; all later calls fail. */
    void (*abort)(fs_engine *engine);
    /* After abort, or when everything given is done, on this rank and on the peers: they may still
     * read what this one sent. Waits for nothing after abort, else at most two seconds for peers to
     * close too. NULL is fine. */
    void (*close)(fs_engine *engine);
} fs_engine_ops;

#endif
