/* Shards: what is flat, what a rank owns, gather and reduce, the verdict.
 *
 * Words. A parameter belongs to one unit (a tie is one parameter with two names). A unit's
 * parameters lie end to end in one buffer, each at an offset rounded to FS_SHARD_ALIGN_N elements.
 * The buffer is cut W ways (W = world size); a segment is part of one parameter in one cut. Rank r
 * speaks for cut r (norm, shared weights, checkpoint) at every stage and keeps (reduces, updates)
 * the R cuts of its group, its own among them: R = 1 sharded, R = replicate hybrid, R = W stage 0.
 *
 * Stages, gathers, hybrid and reshard are three integers fixed at open (fs_policy); no code below
 * fs_shards_open mentions a stage. */
#ifndef FS_SHARD_SHARD_H
#define FS_SHARD_SHARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/arena.h"
#include "../base/dtype.h"
#include "../base/status.h"
#include "../comm/comm.h"
#include "../device/device.h"

/* 128 bytes of the narrowest compute dtype; equal for all dtypes so that cuts do not depend on
 * it. */
#define FS_SHARD_ALIGN_N 64
#define FS_DIMS_MAX 8

/* fs_policy.pool_units: nothing is gathered here. */
#define FS_NO_POOL (-1)

/* Place of something that a frozen parameter does not have. */
#define FS_FROZEN SIZE_MAX

// ---- layout -------------------------------------------------------------------------------------

/* What a caller says of a parameter. Strings are copied. */
typedef struct fs_param_def {
    const char *name;
    const char *tied_name; /* second name of the same parameter, or NULL */
    size_t dims_n;
    size_t dims[FS_DIMS_MAX];
    int unit; /* index of its unit; parameters of a unit are listed in order */
    bool trainable;
    int group; /* of the optimizer; 0 unless the caller has several */
} fs_param_def;

typedef struct fs_unit_def {
    const char *name;
    /* Places in the order of publishing: contribution `publishes` of a round is this unit's, and
     * its slot is needed from contribution `opens` on (earlier than publishes only for a tied unit
     * whose gradient starts at one place and ends at another). */
    int opens, publishes;
} fs_unit_def;

typedef enum fs_partition { FS_PARTITION_FLAT = 0, FS_PARTITION_PER_PARAMETER = 1 } fs_partition;

typedef struct fs_param {
    char *name;
    char *tied_name; /* or NULL */
    size_t dims_n;
    size_t dims[FS_DIMS_MAX];
    size_t numel;
    size_t rows; /* dims[0], 1 for a scalar */
    int unit;
    size_t offset_n; /* in the unit's buffer of weights, elements */
    size_t grad_n;   /* in the unit's gradient slot, elements; FS_FROZEN: has none */
    bool trainable;
    int group;
} fs_param;

typedef struct fs_unit_layout {
    char *name;
    int first, end; /* parameters [first, end) */
    size_t numel;   /* of the buffer, padding included; a multiple of FS_SHARD_ALIGN_N */
    size_t grad_n;  /* of its gradients in a slot: trainable parameters alone, padded likewise */
    size_t at_n;    /* of the buffer in the image of the whole model, elements */
    int opens, publishes;
    int slot; /* which gradient slot its contributions use; -1: all frozen, publishes nothing */
} fs_unit_layout;

/* Part of one parameter in one cut. Never crosses a parameter, never holds padding. */
typedef struct fs_seg {
    int param, unit, cut;
    size_t begin, end; /* elements of the parameter */
    size_t at_n;       /* of begin in the unit's buffer */
    size_t own_n;      /* of begin in the cut's packed weights */
    size_t pos_n;      /* of begin in the cut's packed state; FS_FROZEN: no state */
} fs_seg;

/* Immutable after fs_layout_make. segs are sorted by (cut, unit, param). */
typedef struct fs_layout {
    int size; /* W: cuts */
    fs_partition partition;
    fs_param *params;
    int params_n;
    fs_unit_layout *units;
    int units_n;
    int *order; /* contributions of a round: order[k] is a unit with trainable parameters */
    int order_n;
    fs_seg *segs;
    size_t segs_n;
    size_t *cut_first;      /* [W + 1]: segs of cut c are [cut_first[c], cut_first[c + 1]) */
    size_t *cut_unit_first; /* [W * (units_n + 1)]: segs of cut c, unit u */
    size_t *own_n;          /* [W]: packed weights of a cut, elements */
    size_t *state_n;        /* [W]: packed state of a cut, elements */
    size_t image_n;         /* all unit buffers end to end, elements */
    size_t unit_max_n;      /* largest unit, elements */
    size_t *slot_n;         /* [slots_n]: elements of each gradient slot */
    int slots_n;
    int unit_params_max; /* most parameters in one unit */
    uint64_t hash; /* of everything above: compared at the first meet */
} fs_layout;

/* slot_per_unit: one gradient slot per unit, else two in turn and one for each unit whose slot is
 * open over others (a tie). Parameters are listed unit by unit. Names must be
 * unique (ties included). Fails before allocating anything large. */
FS_NODISCARD fs_status fs_layout_make(const fs_param_def *params, int params_n,
                                      const fs_unit_def *units, int units_n, int size,
                                      fs_partition partition, bool slot_per_unit, fs_layout **out);
void fs_layout_free(fs_layout *layout);

/* The one loop over segments: those of a cut, of one unit (or all: unit -1). Use:
 * for (fs_seg_range s = fs_segs(layout, cut, unit); s.seg < s.end; s.seg++) */
typedef struct fs_seg_range {
    const fs_seg *seg, *end;
} fs_seg_range;
fs_seg_range fs_segs(const fs_layout *layout, int cut, int unit);

/* Index of the parameter with this name (either name of a tie), or -1. */
int fs_layout_find(const fs_layout *layout, const char *name);

// ---- policy -------------------------------------------------------------------------------------

typedef enum fs_weights {
    FS_WEIGHTS_SHARED = 0,
    FS_WEIGHTS_WHOLE = 1,
    FS_WEIGHTS_SHARD = 2
} fs_weights;

/* What the optimizer moves behind a low-precision compute copy. */
typedef enum fs_masters {
    FS_MASTERS_NONE = 0,     /* the compute copy itself */
    FS_MASTERS_SEPARATE = 1, /* fp32 weights; published rounded to nearest even */
    FS_MASTERS_SPLIT = 2     /* fp32 weights, kept as the bf16 compute copy and a 16-bit remainder;
                              * published rounded to nearest, ties away from zero */
} fs_masters;

typedef struct fs_precision {
    fs_dtype param;      /* compute copy */
    fs_dtype reduce;     /* gradient slots: what is put on the wire */
    fs_dtype accumulate; /* summed gradients of the owned segments */
    fs_masters master;
    fs_dtype moments;
    bool stochastic;     /* the step rounds bf16 weights and moments at random, in proportion */
    uint64_t seed;       /* of that */
} fs_precision;

/* Which arrays of a device's rank live in pinned host memory instead. Without a device there is one
 * home, and this says nothing. */
typedef struct fs_on_host {
    bool params; /* compute copies: gathers pull them from there (FS_WEIGHTS_SHARD) */
    bool grads;  /* summed gradients */
    bool state;  /* masters and moments: the CPU moves them */
} fs_on_host;

typedef struct fs_policy {
    int keep; /* R, a divisor of W */
    bool slot_per_unit;
    fs_weights weights;
    int pool_units; /* FS_WEIGHTS_SHARD: buffers for gathered units; 0 = one per unit; FS_NO_POOL =
                     * none: the caller reads whole weights with fs_load into memory of its own */
    fs_precision precision;
    fs_on_host on_host;
    bool ring; /* a device's: the engine sums gradients, in precision.reduce and an order of its
                * own; else this rank does, in fp32 and rank order */
} fs_policy;

/* Checks the mix; FS_EINVAL names the impossible pair. */
FS_NODISCARD fs_status
fs_precision_check(const fs_precision *precision);

// ---- shards -------------------------------------------------------------------------------------

/* Most moment arrays of an optimizer. */
#define FS_MOMENTS_MAX 3

typedef struct fs_shards fs_shards;

/* What an array of the state is. */
typedef enum fs_array {
    FS_WEIGHT = 0, FS_MASTER = 1, FS_GRAD = 2, FS_MOMENT1 = 3, FS_MOMENT2 = 4, FS_MOMENT3 = 5,
    FS_ARRAY_COUNT
} fs_array;

/* Adds to plan what fs_shards_open (with moments_n moment arrays) will charge to rank's ledger, on
 * a device or on the CPU. Needs no world. */
FS_NODISCARD fs_status
fs_shards_plan(const fs_layout *layout, const fs_policy *policy, int moments_n, int rank,
               bool device, fs_ledger *plan);

/* Scratch that a device's compute stream has for shards of this layout, and its reduce stream. */
size_t fs_shards_scratch_nbytes(const fs_layout *layout);

/* Collective: layout hash and policy are compared first. Takes ownership of layout, on failure too.
 * Everything is zero. */
FS_NODISCARD fs_status
fs_shards_open(fs_world *world, fs_layout *layout, const fs_policy *policy, fs_shards **out);

/* Collective: room for the optimizer's state. A second call with another number is FS_ESTATE. */
FS_NODISCARD fs_status
fs_shards_open_moments(fs_shards *shards, int moments_n);
int fs_shards_moments_n(const fs_shards *shards);

/* Local; never waits. NULL is fine. */
void fs_shards_close(fs_shards *shards);

const fs_layout *fs_shards_layout(const fs_shards *shards);
const fs_policy *fs_shards_policy(const fs_shards *shards);
fs_world *fs_shards_world(const fs_shards *shards);

// ---- weights ------------------------------------------------------------------------------------

/* Makes the unit's compute copy readable and returns it (unit buffer of precision.param elements,
 * parameter p at layout->params[p].offset_n). Nested gathers of one unit count. Same contract as a
 * collective: every rank gathers the same units in the same order. Fails with FS_ESTATE when the
 * pool is full, naming the units that hold it. On a device: valid for what the compute stream is
 * given from now on, until the release; the host waits for nothing. */
FS_NODISCARD fs_status
fs_unit_gather(fs_shards *shards, int unit, const void **out);
FS_NODISCARD fs_status
fs_unit_release(fs_shards *shards, int unit);

/* On a device: begins to gather a unit that is asked for soon, where a buffer is free, and makes
 * nobody wait. Every rank does the same. Elsewhere nothing. */
FS_NODISCARD fs_status
fs_unit_prefetch(fs_shards *shards, int unit);

/* Gathers of a unit that were not yet released. */
int fs_unit_gathers(const fs_shards *shards, int unit);

/* The world memory that gathered units lie in (retain it for a view that may outlive a release), or
 * NULL where they lie in the pool, which a release takes back. */
fs_region *fs_unit_region(const fs_shards *shards);

/* Outside writes (load, init, set_full) stand between begin and end, both collective; fs_store and
 * fs_load move elements [begin, end) of a parameter. fs_store touches the segments this rank keeps,
 * master and compute copy together (for FS_WEIGHT and FS_MASTER alike), and ignores the rest. */
FS_NODISCARD fs_status
fs_store_begin(fs_shards *shards);
FS_NODISCARD fs_status
fs_store_end(fs_shards *shards);
FS_NODISCARD fs_status
fs_store(fs_shards *shards, int param, fs_array array, size_t begin, size_t end, const void *src,
         fs_dtype src_dtype);

/* Outside reads, between steps: on the CPU never a collective. On a device every rank makes the
 * same call (compared), unless each has all of the array: whole weights, or all cuts kept.
 * FS_WEIGHT is the compute copy, FS_MASTER the fp32 master where there is one (split or not), else
 * the compute copy widened. FS_GRAD is the summed gradient, unscaled. */
FS_NODISCARD fs_status
fs_load(fs_shards *shards, int param, fs_array array, size_t begin, size_t end, void *dst,
        fs_dtype dst_dtype);
/* The same of elements that this rank keeps (FS_EINVAL if it does not), and never a collective. */
FS_NODISCARD fs_status
fs_load_kept(fs_shards *shards, int param, fs_array array, size_t begin, size_t end, void *dst,
             fs_dtype dst_dtype);

/* Does rank r of the layout speak for element ranges of param? The begin and end of the parameter
 * in cut r (equal when none). */
void fs_shards_range(const fs_layout *layout, int param, int cut, size_t *out_begin,
                     size_t *out_end);

// ---- copies -------------------------------------------------------------------------------------

/* What a rank may hold a copy of, that others hold too or that follows from something else. */
typedef enum fs_copy {
    FS_COPY_WEIGHT = 0,  /* the compute copy */
    FS_COPY_ROUNDED = 1, /* what it must be: the separate master, rounded to nearest */
    FS_COPY_MASTER = 2,  /* separate master, or remainder of a split one */
    FS_COPY_MOMENT1 = 3, FS_COPY_MOMENT2 = 4, FS_COPY_MOMENT3 = 5,
    FS_COPY_COUNT
} fs_copy;

/* Set in an entry of fs_shards_checksums where this rank holds that copy of that segment. */
#define FS_COPY_HELD ((uint64_t)1 << 32)

/* Crc32c of every copy that this rank holds: out[copy * segs_n + segment], FS_COPY_COUNT * segs_n
 * entries. Of one segment all ranks that hold a copy must say the same, and weight and rounded must
 * agree. Local, between steps; reads each byte held once. */
FS_NODISCARD fs_status
fs_shards_checksums(fs_shards *shards, uint64_t *out);

// ---- gradients ----------------------------------------------------------------------------------

/* The slot of a unit whose turn it is, for writing gradients in place: parameter p at
 * (fp32 *)slot + layout->params[p].grad_n when precision.reduce is fp32. *out_add says that the
 * slot already holds this round's sum (beta 1); false: write, do not add (beta 0). Waits until
 * every rank has summed the slot's last tenant. */
FS_NODISCARD fs_status
fs_grad_open(fs_shards *shards, int unit, void **out_slot, bool *out_add);

/* Says that the slot now holds a gradient for param (native writers; fs_grad_put does it
 * itself). */
void fs_grad_mark(fs_shards *shards, int unit, int param);

/* For callers with arrays: copies (first) or adds (again) numel elements; out of turn they are held
 * privately until their turn or the end of the round. What comes after its unit was published
 * belongs to the next round, or to one of its own at the end of the step: sums are linear. */
FS_NODISCARD fs_status
fs_grad_put(fs_shards *shards, int param, const void *src, fs_dtype src_dtype);

/* The unit's gradient of this micro-batch is complete. keep_local (legal where slots are one per
 * unit): not published yet, the next micro-batch adds to it. */
FS_NODISCARD fs_status
fs_grad_publish(fs_shards *shards, int unit, bool keep_local);

/* Ends a micro-batch (not once a step was agreed on): units that did not come are absent. count:
 * tokens or samples it held, or -1 for "no count" (plain mean over ranks). */
FS_NODISCARD fs_status
fs_round_end(fs_shards *shards, int64_t count, bool keep_local);

/* Forgets this step's gradients. Collective. */
FS_NODISCARD fs_status
fs_grad_drop(fs_shards *shards);

/* From now on exactly the trainable parameters with frozen[param] set (params_n bytes, equal on all
 * ranks, else a mismatch) have no gradients, and so keep weight, master, moments and step count.
 * Collective; FS_ESTATE on all ranks, and nothing changes, while one has gradients of a step that
 * was not taken. Allocates nothing: slots and state stay, for thawing. */
FS_NODISCARD fs_status
fs_shards_freeze(fs_shards *shards, const unsigned char *frozen);

/* May the parameter have a gradient now? Not where it is frozen, from the start or for now. */
bool fs_shards_trains(const fs_shards *shards, int param);

/* Each parameter's gradient as all micro-batches of this step gave it: the sum of squares and the
 * largest magnitude in the cut that this rank speaks for, neither divided nor clipped; out_* have
 * params_n entries, 0 where there is no gradient. Collective: settles, after which no gradient may
 * come before the step or a drop (FS_ESTATE). */
FS_NODISCARD fs_status
fs_grad_sums(fs_shards *shards, double *out_sumsq, double *out_absmax);

/* Multiplies the gradient of param by a factor, equal on all ranks (compared when they agree), in
 * norm and update; fs_load does not show it. A product that is not finite is a gradient that is
 * not. Local, between fs_grad_sums and the step. */
FS_NODISCARD fs_status
fs_grad_scale(fs_shards *shards, int param, double factor);

/* The parameter has no gradient after all: it is in no norm and does not move. Every rank says it
 * of the same parameters (compared when they agree). Local, between fs_grad_sums and the step. */
FS_NODISCARD fs_status
fs_grad_forget(fs_shards *shards, int param);

/* The gradient of param was written with fs_store(FS_GRAD): norm and finiteness are taken anew, the
 * factor is 1 again, and the parameter has a gradient. Every rank says it of the same parameters.
 * Local, between fs_grad_sums and the step. */
FS_NODISCARD fs_status
fs_grad_replaced(fs_shards *shards, int param);

// ---- step ---------------------------------------------------------------------------------------

/* The factor by which losses, and so gradients, are multiplied in backward: undone inside the step,
 * in fp32. A power of two, equal on all ranks (compared when they agree); may change only between
 * steps: FS_ESTATE once a gradient has come. A non-finite gradient is then an overflow. 0 restores
 * "none". */
FS_NODISCARD fs_status
fs_shards_set_loss_scale(fs_shards *shards, double scale);

/* For a producer of sums over many tokens: a constant power of two that it multiplies gradients by,
 * on top of the loss scale, so that the sums fit a 16-bit slot. Once, before the first gradient. */
void fs_shards_set_prescale(fs_shards *shards, double prescale);

/* What backward multiplies gradients by: loss scale times prescale; 1 without either. */
double fs_shards_gradient_factor(const fs_shards *shards);

typedef enum fs_reason {
    FS_APPLIED = 0, FS_SKIP_NONFINITE = 1, FS_SKIP_OVERFLOW = 2, FS_SKIP_RANK = 3,
    FS_SKIP_NO_GRADIENT = 4
} fs_reason;

/* Of all gradients as one vector: Euclidean, or the largest magnitude. */
typedef enum fs_grad_norm { FS_NORM_2 = 0, FS_NORM_INF = 1, FS_NORM_COUNT } fs_grad_norm;

/* A pure function of the records of all ranks: equal on all of them. */
typedef struct fs_verdict {
    bool applied;
    fs_reason reason;
    double norm;      /* of the averaged, unscaled gradient, before clipping */
    double clip;      /* coefficient, 1 when not clipped */
    double grad_scale; /* clip / (count or ranks * loss scale) */
    int bad_param,
        bad_rank;     /* first parameter that is not finite, and a rank that produced it; -1 */
    int64_t count;    /* global sum of counts, 0 when none was given */
} fs_verdict;

/* Settles (everyone's contributions are in) and agrees: the write fence. max_norm <= 0: no
 * clipping. local_skip: this rank wants the step skipped (an error in its batch); it may stand
 * anywhere in a micro-batch, and goes with the others' loss fences until they settle. A second call
 * before fs_step_finish returns the same verdict and costs nothing (max_norm and norm must be
 * equal, here and on all ranks). */
FS_NODISCARD fs_status fs_step_agree(fs_shards *shards, double max_norm, fs_grad_norm norm,
                                     bool local_skip, fs_verdict *out);

/* Updates the kept segments with hyper[param] (params_n entries) if the verdict applied, publishes:
 * the read fence. No signal, allocation or Python in between. had[param] tells which parameters had
 * a gradient (their step counts move). */
FS_NODISCARD fs_status
fs_step_finish(fs_shards *shards, const fs_hyper *hyper);

/* Was a step agreed on and not finished? False again as soon as fs_step_finish is done. */
bool fs_step_agreed(const fs_shards *shards);

/* Which parameters had a gradient in the step agreed on: params_n bytes, equal on all ranks. */
const unsigned char *fs_step_had(const fs_shards *shards);

/* FS_ESTATE if a step was begun and not finished (a torn update): save refuses such a model. */
FS_NODISCARD fs_status
fs_shards_whole(const fs_shards *shards);

#endif
