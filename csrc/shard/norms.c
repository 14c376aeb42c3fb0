/* Gradients looked at and changed parameter by parameter, between the last micro-batch and the
 * step: for front ends whose users clip or edit them before they step. A factor is remembered and
 * folded into the update, so that scaling costs no pass over memory. */
#include "shards_internal.h"

#include <math.h>

fs_status
fs_grad_sums(fs_shards *shards, double *out_sumsq, double *out_absmax)
{
    const fs_layout *layout = shards->layout;
    FS_TRY(fs_shards_ready(shards));
    FS_TRY(fs_settle(shards, false));
    for (int p = 0; p < layout->params_n; p++) {
        out_sumsq[p] = out_absmax[p] = 0.0;
    }
    for (fs_seg_range s = fs_segs(layout, shards->rank, -1); s.seg < s.end; s.seg++) {
        int p = s.seg->param;
        if (s.seg->pos_n != FS_FROZEN && shards->had[p]) {
            double factor = shards->factor[p];
            out_sumsq[p] += shards->sumsq[s.seg - layout->segs] * factor * factor;
            double largest = shards->absmax[s.seg - layout->segs] * fabs(factor);
            /* NaN stays: it is larger than whatever it is compared with. */
            out_absmax[p] = largest <= out_absmax[p] ? out_absmax[p] : largest;
        }
    }
    return FS_OK;
}

/* A change must be one of a settled step that nobody has agreed on yet. */
static fs_status
check_changeable(const fs_shards *shards, int param)
{
    FS_TRY(fs_shards_ready(shards));
    if (param < 0 || param >= shards->layout->params_n) {
        return FS_FAIL(FS_EINVAL, "parameter %d of %d", param, shards->layout->params_n);
    }
    if (!shards->settled || shards->agreed) {
        return FS_FAIL(FS_ESTATE, "rank %d: the gradient of %s changes %s", shards->rank,
                       shards->layout->params[param].name,
                       shards->agreed ? "after the ranks agreed on the step"
                                      : "while micro-batches may still come");
    }
    return FS_OK;
}

fs_status
fs_grad_scale(fs_shards *shards, int param, double factor)
{
    FS_TRY(check_changeable(shards, param));
    shards->factor[param] *= factor;
    return FS_OK;
}

fs_status
fs_grad_forget(fs_shards *shards, int param)
{
    FS_TRY(check_changeable(shards, param));
    shards->had[param] = 0;
    shards->factor[param] = 0.0; /* compared when the ranks agree: all of them must forget it */
    return FS_OK;
}

fs_status
fs_grad_replaced(fs_shards *shards, int param)
{
    const fs_layout *layout = shards->layout;
    fs_dtype dtype = shards->policy.precision.accumulate;
    FS_TRY(check_changeable(shards, param));
    if (!fs_shards_trains(shards, param)) {
        return FS_FAIL(FS_EINVAL, "%s is frozen: it has no gradient", layout->params[param].name);
    }
    for (fs_seg_range s = fs_segs(layout, shards->rank, layout->params[param].unit);
         s.seg < s.end; s.seg++) {
        if (s.seg->param != param) {
            continue;
        }
        const void *nothing[1] = {NULL}; /* adds nothing; norm and finiteness come anew */
        fs_sums here = {.bad_source = -1};
        fs_sums *found = fs_found_at(shards, s.seg, &here);
        fs_sum sum = {
            .found = found,
            .src = nothing,
            .src_n = 1,
            .src_dtype = dtype,
            .acc = shards->blocks[shards->rank].acc +
                   fs_state_at(shards, s.seg) * fs_dtype_nbytes(dtype),
            .acc_dtype = dtype,
            .accumulate = true,
            .n = s.seg->end - s.seg->begin,
        };
        shards->exec->device->sum(shards->exec, &sum);
        FS_TRY(fs_mark_wait(shards, FS_STREAM_COMPUTE, 0));
        shards->sumsq[s.seg - layout->segs] = found->sumsq;
        shards->absmax[s.seg - layout->segs] = found->absmax;
        if (!found->finite && (shards->bad_param < 0 || shards->bad_param > param)) {
            shards->bad_param = param;
            shards->bad_rank = shards->rank;
        }
    }
    shards->factor[param] = 1.0;
    shards->had[param] = 1;
    return FS_OK;
}
