/* The step: agree (write fence, verdict), update, publish (read fence). */
#include "shards_internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

// ---- agree --------------------------------------------------------------------------------------

enum {
    RECORD_HAS_COUNT = 1u << 0,  /* a round with a count was ended */
    RECORD_HAS_PLAIN = 1u << 1,  /* a round without one was ended */
    RECORD_SKIP = 1u << 2,       /* this rank asks for the step to be skipped */
    RECORD_GRADIENT = 1u << 3    /* some parameter had a gradient (equal on all ranks) */
};

/* What a rank says of its cut. Everything the verdict depends on is in here. A finite sum times its
 * factor may be none: then nobody but the sum is to blame. */
static fs_payload
make_record(const fs_shards *shards, bool local_skip)
{
    const fs_layout *layout = shards->layout;
    fs_payload record = {.u = {0}};
    double sumsq = 0.0, absmax = 0.0;
    int bad_param = shards->bad_param, bad_rank = shards->bad_rank;
    bool gradient = false;
    for (fs_seg_range s = fs_segs(layout, shards->rank, -1); s.seg < s.end; s.seg++) {
        if (s.seg->pos_n != FS_FROZEN && shards->had[s.seg->param]) {
            double factor = shards->factor[s.seg->param];
            sumsq += shards->sumsq[s.seg - layout->segs] * factor * factor;
            double largest = shards->absmax[s.seg - layout->segs] * fabs(factor);
            absmax = largest > absmax ? largest : absmax; /* NaN: told by bad_param */
            if (!(largest <= (double)FLT_MAX) && (bad_param < 0 || s.seg->param < bad_param)) {
                bad_param = s.seg->param;
                bad_rank = -1;
            }
        }
    }
    for (int p = 0; p < layout->params_n; p++) {
        gradient = gradient || shards->had[p] != 0;
    }
    record.d[0] = sumsq;
    record.i[1] = shards->count;
    record.u[2] = (shards->has_count ? RECORD_HAS_COUNT : 0u) |
                  (shards->has_plain ? RECORD_HAS_PLAIN : 0u) | (local_skip ? RECORD_SKIP : 0u) |
                  (gradient ? RECORD_GRADIENT : 0u);
    record.i[3] = bad_param;
    record.i[4] = bad_rank;
    record.d[5] = absmax;
    return record;
}

/* The verdict: a pure function of all records, so that every rank holds the same. */
static fs_verdict
fold(const fs_payload *records, int size, double max_norm, fs_grad_norm norm, double factor,
     bool scaled)
{
    fs_verdict verdict = {.bad_param = -1, .bad_rank = -1, .clip = 1.0};
    double sumsq = 0.0, absmax = 0.0;
    uint64_t flags = 0;
    for (int r = 0; r < size; r++) {
        sumsq += records[r].d[0];
        absmax = records[r].d[5] > absmax ? records[r].d[5] : absmax;
        verdict.count += records[r].i[1];
        flags |= records[r].u[2];
        int64_t param = records[r].i[3];
        bool same = param >= 0 && param == verdict.bad_param && verdict.bad_rank < 0;
        if (same || (param >= 0 && (verdict.bad_param < 0 || param < verdict.bad_param))) {
            verdict.bad_param = (int)param;
            verdict.bad_rank = (int)records[r].i[4];
        }
    }
    /* Divided once: by the tokens of all ranks, or by the number of ranks where nobody counts. With
     * counts that add up to nothing every gradient is zero, and so is the step. */
    double divisor = (flags & RECORD_HAS_COUNT) ? (double)(verdict.count > 0 ? verdict.count : 1)
                                                : (double)size;
    divisor *= factor; /* a power of two: exact */
    verdict.norm = (norm == FS_NORM_INF ? absmax : sqrt(sumsq)) / divisor;
    if (max_norm > 0.0) {
        double clip = max_norm / (verdict.norm + 1e-6); /* torch's form */
        verdict.clip = clip < 1.0 ? clip : 1.0;
    }
    verdict.grad_scale = verdict.clip / divisor;
    if (flags & RECORD_SKIP) {
        verdict.reason = FS_SKIP_RANK;
        verdict.bad_param = verdict.bad_rank = -1; /* half a batch proves nothing */
    } else if (verdict.bad_param >= 0) {
        verdict.reason = scaled ? FS_SKIP_OVERFLOW : FS_SKIP_NONFINITE;
        verdict.norm = (double)NAN;
    } else if (!(flags & RECORD_GRADIENT)) {
        verdict.reason = FS_SKIP_NO_GRADIENT;
    } else {
        verdict.applied = true;
    }
    return verdict;
}

/* Factors must be equal on all ranks, or parts of a parameter would move differently; 0 when nobody
 * scaled. */
static uint64_t
hash_factors(const fs_shards *shards)
{
    uint64_t hash = 0;
    for (int p = 0; p < shards->layout->params_n; p++) {
        uint64_t bits;
        memcpy(&bits, &shards->factor[p], sizeof bits);
        if (shards->factor[p] != 1.0) {
            hash = (hash ^ bits ^ (uint64_t)p) * UINT64_C(0x100000001b3);
        }
    }
    return hash;
}

/* Some ranks counted and some did not: the mean has no meaning. Equal on all ranks. */
static fs_status
check_counts(const fs_shards *shards)
{
    int counted = -1, plain = -1;
    for (int r = 0; r < shards->size; r++) {
        if (shards->records[r].u[2] & RECORD_HAS_COUNT) {
            counted = r;
        }
        if (shards->records[r].u[2] & RECORD_HAS_PLAIN) {
            plain = r;
        }
    }
    if (counted >= 0 && plain >= 0) {
        return FS_FAIL(
            FS_EINVAL,
            "rank %d gave a count with its micro-batches and rank %d ended one without: give a "
            "count everywhere or nowhere",
            counted, plain);
    }
    return FS_OK;
}

fs_status
fs_shards_set_loss_scale(fs_shards *shards, double scale)
{
    int exponent;
    FS_TRY(fs_shards_ready(shards));
    if (scale < 0.0 || !isfinite(scale) || (scale > 0.0 && frexp(scale, &exponent) != 0.5)) {
        return FS_FAIL(FS_EINVAL, "a loss scale of %g: expected a power of two", scale);
    }
    if (scale == shards->loss_scale) {
        return FS_OK; /* an optimizer made after the first backward changes nothing */
    }
    if (shards->rounds > 0 || shards->cursor > 0 || shards->agreed) {
        return FS_FAIL(FS_ESTATE, "rank %d: the loss scale changes in the middle of a step",
                       shards->rank);
    }
    shards->loss_scale = scale;
    return FS_OK;
}

void
fs_shards_set_prescale(fs_shards *shards, double prescale)
{
    shards->prescale = prescale;
}

double
fs_shards_gradient_factor(const fs_shards *shards)
{
    double scale = shards->loss_scale > 0.0 ? shards->loss_scale : 1.0;
    return shards->prescale > 0.0 ? scale * shards->prescale : scale;
}

void
fs_step_begin_next(fs_shards *shards)
{
    shards->base = shards->red;
    shards->fins_known = false;
    atomic_store_explicit(&shards->blocks[shards->rank].counters->pub, shards->base,
                          memory_order_release);
    if (shards->streams != NULL) {
        memset(shards->blocks[shards->rank].brought, 0, (size_t)shards->layout->params_n);
    }
}

static const char *const norm_names[FS_NORM_COUNT] = {
    [FS_NORM_2] = "2-norm", [FS_NORM_INF] = "infinity-norm",
};

fs_status
fs_step_agree(fs_shards *shards, double max_norm, fs_grad_norm norm, bool local_skip,
              fs_verdict *out)
{
    FS_TRY(fs_shards_ready(shards));
    if (shards->agreed) {
        bool same = memcmp(&max_norm, &shards->agreed_max_norm, sizeof max_norm) == 0;
        if (!same) {
            return FS_FAIL(FS_EINVAL, "rank %d: max_norm is %g, but grad_norm() agreed on %g",
                           shards->rank, max_norm, shards->agreed_max_norm);
        }
        if (norm != shards->agreed_norm) {
            return FS_FAIL(FS_EINVAL,
                           "rank %d: the norm is the %s, but grad_norm() agreed on the %s",
                           shards->rank, norm_names[norm], norm_names[shards->agreed_norm]);
        }
        if (local_skip && shards->verdict.reason != FS_SKIP_RANK) {
            return FS_FAIL(FS_ESTATE,
                           "rank %d: a skip was asked for after grad_norm() had agreed on the step",
                           shards->rank);
        }
        *out = shards->verdict;
        return FS_OK;
    }
    FS_TRY(fs_settle(shards, local_skip));
    fs_payload record = make_record(shards, local_skip);
    fs_what what = {.op = FS_OP_AGREE, .dtype = -1, .root = -1};
    /* A rank whose batch failed, or with fewer micro-batches, gathered less than the others. */
    what.tag = shards->skipping || shards->uneven ? 0 : shards->gather_hash;
    uint64_t scale_bits;
    memcpy(&what.nbytes, &max_norm, sizeof what.nbytes);
    double factor = fs_shards_gradient_factor(shards);
    memcpy(&scale_bits, &factor, sizeof scale_bits);
    what.tag ^= scale_bits ^ (uint64_t)norm; /* a power of two has no bits down there */
    what.tag ^= hash_factors(shards);
    FS_TRY(fs_meet(shards->world, &what, &record, shards->records, 0));
    fs_step_begin_next(shards);
    fs_status st = shards->skipping ? FS_OK : check_counts(shards);
    if (st != FS_OK) {
        fs_grad_reset(shards);
        return st;
    }
    shards->verdict = fold(shards->records, shards->size, max_norm, norm,
                           fs_shards_gradient_factor(shards), shards->loss_scale > 0.0);
    shards->agreed_max_norm = max_norm;
    shards->agreed_norm = norm;
    shards->agreed = true;
    *out = shards->verdict;
    return FS_OK;
}

bool
fs_step_agreed(const fs_shards *shards)
{
    return shards->agreed;
}

const unsigned char *
fs_step_had(const fs_shards *shards)
{
    return shards->had;
}

// ---- update -------------------------------------------------------------------------------------

fs_update
fs_update_of(const fs_shards *shards, const fs_seg *seg, size_t at, size_t n)
{
    const fs_precision *precision = &shards->policy.precision;
    const fs_block *block = &shards->blocks[shards->rank];
    size_t state_at = fs_state_at(shards, seg) + at;
    unsigned char *weight = fs_own_at(shards, shards->rank, seg) + at * fs_param_nbytes(shards);
    fs_update update = {
        .grad_scale = (float)(shards->verdict.grad_scale * shards->factor[seg->param]),
        .grad = block->acc + state_at * fs_dtype_nbytes(precision->accumulate),
        .grad_dtype = precision->accumulate,
        .master = block->master == NULL ? NULL : block->master + state_at,
        .remainder = block->remainder == NULL ? NULL : block->remainder + state_at,
        .weight_dtype = precision->param,
        .moment_dtype = precision->moments,
        .stochastic = precision->stochastic,
        .first = seg->begin + at,
        .n = n,
    };
    if (fs_writes_weight(shards, seg->cut)) {
        update.weight = weight;
    } else {
        update.weight_read = weight;
    }
    size_t moment_at = state_at * fs_dtype_nbytes(precision->moments);
    update.moment1 = shards->moments_n > 0 ? block->moments[0] + moment_at : NULL;
    update.moment2 = shards->moments_n > 1 ? block->moments[1] + moment_at : NULL;
    update.moment3 = shards->moments_n > 2 ? block->moments[2] + moment_at : NULL;
    return update;
}

static void
update_cut(fs_shards *shards, int cut, const fs_hyper *hyper)
{
    for (fs_seg_range s = fs_segs(shards->layout, cut, -1); s.seg < s.end; s.seg++) {
        if (s.seg->pos_n != FS_FROZEN && shards->had[s.seg->param]) {
            fs_update update = fs_update_of(shards, s.seg, 0, s.seg->end - s.seg->begin);
            update.hyper = hyper[s.seg->param];
            shards->exec->device->update(shards->exec, &update);
        }
    }
}

/* Where the state lives, which is where weights and gradients are, or reached from there. */
static fs_status
update_in_place(fs_shards *shards, const fs_hyper *hyper)
{
    const fs_policy *policy = &shards->policy;
    int end = shards->keep_first + policy->keep;
    for (int c = shards->keep_first; c < end; c++) {
        if (c != shards->rank) {
            update_cut(shards, c, hyper);
        }
    }
    /* Where the shared weight is its own master, or the upper half of it, the copies of a cut's
     * state are moved from the old weight: its one writer waits until all have read it. */
    if (policy->keep > 1 && policy->weights == FS_WEIGHTS_SHARED &&
        policy->precision.master != FS_MASTERS_SEPARATE) {
        const fs_what what = {.op = FS_OP_UPDATE, .dtype = -1, .root = -1};
        FS_TRY(fs_meet(shards->world, &what, NULL, NULL, FS_NOSIG));
    }
    update_cut(shards, shards->rank, hyper);
    return FS_OK;
}

static fs_status
update_and_publish(fs_shards *shards, const fs_hyper *hyper)
{
    bool on_host = shards->streams != NULL && shards->policy.on_host.state;
    fs_gather_let_write(shards);
    FS_TRY(on_host ? fs_offload_update(shards, hyper) : update_in_place(shards, hyper));
    if (shards->streams != NULL) {
        fs_mark_set(shards, FS_STREAM_COMPUTE, shards->streams->sums);
    }
    return fs_publish(shards, FS_OP_PUBLISH);
}

fs_status
fs_step_finish(fs_shards *shards, const fs_hyper *hyper)
{
    FS_TRY(fs_shards_ready(shards));
    if (!shards->agreed) {
        return FS_FAIL(FS_ESTATE, "rank %d: no step was agreed on", shards->rank);
    }
    if (shards->verdict.applied) {
        shards->in_step = true;
        FS_TRY(update_and_publish(shards, hyper));
        FS_TRY(fs_streams_check(shards));
        shards->in_step = false;
    }
    fs_grad_reset(shards);
    return FS_OK;
}
