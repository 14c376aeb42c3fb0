/* What the files of shard/ share. Nobody else includes this. */
#ifndef FS_SHARD_SHARDS_INTERNAL_H
#define FS_SHARD_SHARDS_INTERNAL_H

#include "shard.h"

#include <stdatomic.h>

#include "streams.h"

/* A rank's progress through the contributions of all rounds of all steps, numbered without gaps:
 * contribution k is unit order[(k - base) % order_n] on every rank. In world memory, one cache line
 * each; written by its rank alone (release), read by all (acquire). */
typedef struct fs_counters {
    _Alignas(64) _Atomic uint64_t pub; /* contributions below this are in this rank's slots */
    _Alignas(64) _Atomic uint64_t red; /* contributions below this are summed by this rank */
    _Alignas(
        64) _Atomic uint64_t fin; /* from this on the rank counts as absent; UINT64_MAX: not yet */
} fs_counters;

/* Where a rank's words and arrays are. Words lie in its block of world memory, found for every rank
 * by the same placing function, so that peers need no pointer tables. Arrays follow them there; on
 * a device they lie in its memory, and are NULL for peers. */
typedef struct fs_block {
    fs_counters *counters;
    unsigned char *present; /* flags of each gradient slot, see fs_slot_present */
    unsigned char *brought; /* device: [params_n] the rank had a gradient in this step */
    fs_talk *talk;          /* device */
    unsigned char *own;    /* weights: the packed kept cuts, or the whole image; NULL in view */
    unsigned char *slots;  /* gradient slots, see fs_slot_* */
    unsigned char *acc;    /* summed gradients of the kept cuts, packed */
    float *master;         /* of the kept cuts, packed; NULL without separate masters */
    uint16_t *remainder;   /* likewise, of split masters; the other half is the compute copy */
    unsigned char *moments[FS_MOMENTS_MAX];
} fs_block;

/* One buffer for gathered units (FS_WEIGHTS_SHARD). */
typedef struct fs_pool_buffer {
    unsigned char *data;
    int unit;       /* whose weights it holds, -1: none yet */
    uint64_t epoch; /* of those weights */
    bool ahead;     /* gathered ahead, and not asked for yet */
    fs_mark *filled, *read; /* device: gathered; read by the last that held it */
} fs_pool_buffer;

/* A unit at run time. */
typedef struct fs_unit {
    int gathers;       /* not yet released */
    int pool_first, pool_end; /* buffers it may use */
    int pool;          /* buffer it is gathered in, -1 */
    int log_unit;      /* its name in the world's log */
    bool opened; /* its slot is ours to write and holds this micro-batch's or kept gradients */
    bool complete;     /* published out of turn: waits for the cursor */
    bool kept_local;   /* the slot holds earlier micro-batches that are not published yet */
    bool in_spill;     /* gradients came out of turn into spill */
    unsigned char *spill; /* grad_n elements of precision.reduce, private; NULL until needed */
    unsigned char *spill_present;
} fs_unit;

struct fs_shards {
    fs_world *world; /* not owned */
    const fs_exec *exec;
    fs_layout *layout;
    fs_policy policy;
    int rank, size;
    int keep_first; /* cuts [keep_first, keep_first + policy.keep) are kept here */
    int moments_n;
    bool moments_open;

    fs_streams *streams; /* NULL on the CPU */

    fs_region *image_region; /* FS_WEIGHTS_SHARED */
    fs_region *block_region;
    fs_region *moments_region; /* CPU */
    fs_arena image_arena, block_arena, moments_arena, pool_arena;
    fs_arena arrays_arena; /* device: what stands in the block on the CPU */
    fs_arena host_arena;   /* device: of that, what lives in host memory */
    unsigned char *image; /* FS_WEIGHTS_SHARED: all unit buffers end to end */
    fs_block *blocks;     /* [size] */
    fs_pool_buffer *pool;
    int pool_n;
    fs_unit *units;
    size_t *slot_at;        /* [slots_n]: bytes from a block's slots */
    uint64_t *slot_tenant;  /* [slots_n]: my last contribution published there, + 1; 0: none */
    const void **sources;   /* [size]: scratch of a sum */

    uint64_t weights_epoch; /* moves when weights do */
    uint64_t gather_hash;   /* of this step's gathers, compared at agree */

    uint64_t base;    /* first contribution of this step */
    uint64_t rounds;  /* published by this rank in this step */
    uint64_t red;     /* this rank's counters->red; on a device: contributions put into its queue */
    bool fins_known; /* settled: every rank's last contribution is in fins, its counter may be reset
                      */
    uint64_t *fins;   /* [size] */
    int cursor;       /* next contribution of the current micro-batch */
    fs_payload *records; /* [size]: what the ranks said at the last fence */
    int64_t count;    /* of this step's micro-batches here */
    bool has_count, has_plain; /* a count was given; a round without one was ended */
    unsigned char *frozen; /* [params_n] trainable, and frozen for now: see freeze.c */
    unsigned char *had; /* [params_n] a rank had a gradient in this step */
    double *sumsq;      /* [segs_n] of what was last written to acc; own cut only */
    double *absmax;     /* [segs_n] likewise: its largest magnitude */
    double *factor;     /* [params_n] of its gradient in norm and update: fs_grad_scale */
    int bad_param, bad_rank;

    double loss_scale; /* 0: none */
    double prescale;   /* 0: none */
    bool finished; /* this rank's rounds of the step are all published */
    bool skips;    /* its batch failed */
    bool settled, agreed;
    bool skipping; /* settled, and some rank asked for a skip */
    bool uneven;   /* settled, and not all ranks brought as many micro-batches */
    double agreed_max_norm;
    fs_grad_norm agreed_norm;
    fs_verdict verdict;
    bool in_step; /* between agree and published: weights are torn if the job ends here */
    fs_hyper *hyper;    /* [params_n] scratch of the optimizer */
};

// ---- place.c ------------------------------------------------------------------------------------

/* FS_EINVAL or FS_EUNSUPPORTED names what does not go together. */
FS_NODISCARD fs_status
fs_policy_check(const fs_policy *policy, int size, bool device);

/* Offsets of the slots in a block's slots (slot_at may be NULL), and their total. */
FS_NODISCARD fs_status fs_place_slots(const fs_layout *layout, const fs_policy *policy,
                                      size_t *slot_at, size_t *out_nbytes);

/* What ranks say of themselves, in world memory. */
FS_NODISCARD fs_status
fs_place_words(const fs_layout *layout, bool device, fs_arena *arena, fs_block *block);

/* A rank's arrays, moments aside; host: for those that live in host memory (policy->on_host), arena
 * itself where there is no device. */
FS_NODISCARD fs_status fs_place_block(const fs_layout *layout, const fs_policy *policy, int rank,
                                      fs_arena *arena, fs_arena *host, fs_block *block);
FS_NODISCARD fs_status fs_place_moments(const fs_layout *layout, const fs_policy *policy,
                                        int moments_n, int rank, fs_arena *arena, fs_block *block);

/* A rank's share of the image that all ranks read, page rounded; 0 without one. */
FS_NODISCARD fs_status
fs_place_image(const fs_layout *layout, const fs_policy *policy, size_t *out);

/* How many buffers the pool has; fills which of them a unit may use, and their sizes, where not
 * NULL. */
int fs_place_pool_units(const fs_layout *layout, const fs_policy *policy, fs_unit *units,
                        size_t *size_n);

/* pool may be NULL while counting. */
FS_NODISCARD fs_status fs_place_pool(const fs_layout *layout, const fs_policy *policy,
                                     fs_arena *arena, fs_pool_buffer *pool);

/* What the streams need: in device memory, and in pinned memory. */
FS_NODISCARD fs_status fs_place_staging(const fs_layout *layout, const fs_policy *policy,
                                        fs_arena *arena, fs_streams *streams);
FS_NODISCARD fs_status fs_place_pinned(const fs_layout *layout, const fs_policy *policy, int rank,
                                       fs_arena *arena, fs_streams *streams);

/* Bytes of one element of the compute copy. */
static inline size_t
fs_param_nbytes(const fs_shards *shards)
{
    return fs_dtype_nbytes(shards->policy.precision.param);
}

static inline bool
fs_keeps(const fs_shards *shards, int cut)
{
    return cut >= shards->keep_first && cut < shards->keep_first + shards->policy.keep;
}

/* First cut of the group that keeps cut: the kept cuts of a rank are packed from there on. */
static inline int
fs_group_first(const fs_shards *shards, int cut)
{
    return cut - cut % shards->policy.keep;
}

/* Element of seg in the packed state of any rank that keeps its cut. */
size_t fs_state_at(const fs_shards *shards, const fs_seg *seg);

/* The compute copy of seg as rank (which keeps its cut, or holds whole weights) has it. */
unsigned char *fs_own_at(const fs_shards *shards, int rank, const fs_seg *seg);

/* May this rank write the compute copy of cut? Shared weights have one writer per cut. */
static inline bool
fs_writes_weight(const fs_shards *shards, int cut)
{
    return shards->policy.weights == FS_WEIGHTS_SHARED ? cut == shards->rank
                                                       : fs_keeps(shards, cut);
}

/* Flags of unit_params_max parameters of a rank's slot; the gradients (this rank's on a device). */
unsigned char *fs_slot_present(const fs_shards *shards, int rank, int slot);
unsigned char *fs_slot_data(const fs_shards *shards, int rank, int slot);

/* After weights moved: brings whole copies up to date and meets. */
FS_NODISCARD fs_status
fs_publish(fs_shards *shards, fs_op op);

/* See weights.c. */
const void *fs_bring(fs_shards *shards, const void *src, size_t nbytes);
void fs_brought(fs_shards *shards);
size_t fs_bring_n(const fs_shards *shards, size_t n);

/* A device's: what this rank's compute stream is given from now on may write weights. */
void fs_gather_let_write(fs_shards *shards);

/* A device's, of a rank that brings nothing more in this step: takes part in the next gather that
 * peer has made, if that is what peer did next. */
FS_NODISCARD fs_status
fs_gather_follow(fs_shards *shards, int peer, bool *out_found);

/* A device's: puts contribution k into the queue of the reduce stream: exchanged and summed there.
 * came: it lies in this rank's slot; else the rank has none. */
FS_NODISCARD fs_status
fs_exchange(fs_shards *shards, uint64_t k, bool came);

/* A device's, with policy.ring: this rank's gradients of a unit (at slot; NULL: none; flags of its
 * parameters) into the
 * engine's sum, in the queue of the reduce stream. */
FS_NODISCARD fs_status
fs_ring_reduce(fs_shards *shards, int unit, const unsigned char *slot,
               const unsigned char *present);
/* Where the sum of a cut of the unit lies then, of the cuts this rank keeps. */
const unsigned char *fs_ring_sum(const fs_shards *shards, int unit, int cut);
/* Around the wait in which a step is settled: brings what searches found; takes it over. */
void fs_ring_bring(fs_shards *shards);
void fs_ring_settle(fs_shards *shards);
/* No search has found anything. */
void fs_ring_reset(fs_shards *shards);

/* The sum over shards.sources into this rank's accumulator of seg, but for where it tells what it
 * finds. */
fs_sum fs_sum_of_ranks(const fs_shards *shards, const fs_seg *seg, bool accumulate);

/* Where a sum of this segment of the cut that this rank speaks for tells what it finds: here, or
 * on a device where that can write. */
fs_sums *fs_found_at(const fs_shards *shards, const fs_seg *seg, fs_sums *here);

/* A device's: waits until all that was put there is summed, and takes over what the sums found. */
FS_NODISCARD fs_status
fs_exchange_settle(fs_shards *shards);

/* Sums what every rank has published; never waits. The idle hook of the world. On a device: takes
 * part in what peers gather and publish after this rank's last round. */
FS_NODISCARD fs_status
fs_drain(void *shards);

/* Publishes what is left of the current micro-batch and of kept ones; end of this rank's step. */
FS_NODISCARD fs_status
fs_grad_finish_rounds(fs_shards *shards);

/* A device's, where the batch failed: what is left of it is not published but followed, since only
 * peers know which gathers come in between. */
void fs_grad_give_up_round(fs_shards *shards);

size_t fs_unit_grad_nbytes(const fs_shards *shards, int unit);

/* Gives back what was held out of turn: all of it, or what is empty again. */
void fs_grad_close_spills(fs_shards *shards, bool all);

/* Forgets gradients, counts and verdict; everyone has summed everything. */
void fs_grad_reset(fs_shards *shards);

/* Settles: every rank's contributions are in and summed. skips: this rank's batch failed; it goes
 * with the fences of micro-batches that the others still end. */
FS_NODISCARD fs_status
fs_settle(fs_shards *shards, bool skips);

/* After the fence that follows settling: numbers the next step's contributions. */
void fs_step_begin_next(fs_shards *shards);

/* The update of n elements from element `at` of seg, but for its hyperparameters. */
fs_update
fs_update_of(const fs_shards *shards, const fs_seg *seg, size_t at, size_t n);

/* Moves the kept segments on the host: where masters and moments live there. */
FS_NODISCARD fs_status
fs_offload_update(fs_shards *shards, const fs_hyper *hyper);

/* The world's lock on misuse: usable, and no step half done. */
FS_NODISCARD fs_status
fs_shards_ready(const fs_shards *shards);

#endif
