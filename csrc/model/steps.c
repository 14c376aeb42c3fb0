/* The small steps that forward and backward are made of: weights in, products, gradients out. */
#include "parts.h"

// ---- weights ------------------------------------------------------------------------------------

fs_status
fs_llama_gather(fs_llama *llama, int unit, size_t widened_at_n, fs_unit_weights *out)
{
    const void *weights;
    FS_TRY(fs_unit_gather(llama->shards, unit, &weights));
    out->unit = unit;
    if (llama->precision.param == llama->at.dtype) {
        out->weights = weights;
        return FS_OK;
    }
    float *widened = llama->at.widened + widened_at_n;
    llama->exec->device->convert(llama->exec, widened, FS_F32, weights, llama->precision.param,
                                 llama->layout->units[unit].numel);
    out->weights = widened;
    return FS_OK;
}

fs_status
fs_llama_release(fs_llama *llama, const fs_unit_weights *weights)
{
    return fs_unit_release(llama->shards, weights->unit);
}

const void *
fs_layer_weight(const fs_llama *llama, const fs_unit_weights *weights, size_t layer, fs_role role)
{
    int param = fs_llama_param(&llama->config, layer, role);
    return param < 0 ? NULL : fs_param_weight(llama, weights, param);
}

fs_swiglu
fs_layer_swiglu(const fs_llama *llama, const fs_unit_weights *weights, size_t layer)
{
    const fs_batch *at = &llama->at;
    const fs_layer_saved *saved = &at->layers[layer];
    return (fs_swiglu){.rows = at->rows,
                       .width = llama->config.intermediate_size,
                       .dtype = at->dtype,
                       .gate_bias = fs_layer_weight(llama, weights, layer, FS_ROLE_GATE_BIAS),
                       .up_bias = fs_layer_weight(llama, weights, layer, FS_ROLE_UP_BIAS),
                       .gate = saved->gate,
                       .up = saved->up,
                       .act = at->wide};
}

// ---- products -----------------------------------------------------------------------------------

fs_gemm
fs_linear(const fs_llama *llama, void *y, size_t ldy, const void *x, const void *weight,
          size_t rows, size_t in, size_t out)
{
    return (fs_gemm){.trans_b = true,
                     .m = rows,
                     .n = out,
                     .k = in,
                     .dtype = llama->at.dtype,
                     .c_dtype = llama->at.dtype,
                     .rounding = llama->at.rounding,
                     .a = x,
                     .lda = in,
                     .b = weight,
                     .ldb = in,
                     .beta = 0.0f,
                     .c = y,
                     .ldc = ldy};
}

fs_gemm
fs_linear_input_grad(const fs_llama *llama, void *dx, const void *dy, size_t ldy,
                     const void *weight, size_t rows, size_t in, size_t out, bool add)
{
    return (fs_gemm){.m = rows,
                     .n = in,
                     .k = out,
                     .dtype = llama->at.dtype,
                     .c_dtype = llama->at.dtype,
                     .rounding = llama->at.rounding,
                     .a = dy,
                     .lda = ldy,
                     .b = weight,
                     .ldb = in,
                     .beta = add ? 1.0f : 0.0f,
                     .c = dx,
                     .ldc = in};
}

void
fs_multiply(const fs_llama *llama, const fs_gemm *gemms, size_t n)
{
    llama->exec->device->gemms(llama->exec, gemms, n);
}

/* dW (+)= dy' x; false when the parameter is frozen. */
static bool
weight_grad_gemm(fs_llama *llama, const fs_sink *sink, const fs_weight_grad *grad, fs_gemm *out)
{
    float *target;
    bool add;
    if (!fs_sink_begin(llama, sink, grad->param, &target, &add)) {
        return false;
    }
    size_t rows = llama->layout->params[grad->param].dims[0];
    size_t in = llama->layout->params[grad->param].dims[1];
    *out = (fs_gemm){.trans_a = true,
                     .m = rows,
                     .n = in,
                     .k = llama->at.rows,
                     .dtype = llama->at.dtype,
                     .c_dtype = FS_F32,
                     .rounding = llama->at.rounding,
                     .a = grad->dy,
                     .lda = grad->ldy,
                     .b = grad->x,
                     .ldb = in,
                     .beta = add ? 1.0f : 0.0f,
                     .c = target,
                     .ldc = in};
    return true;
}

void
fs_weight_grads(fs_llama *llama, const fs_sink *sink, const fs_weight_grad *grads, size_t n,
                const fs_gemm *beside)
{
    fs_gemm gemms[FS_WEIGHT_GRADS_MAX + 1];
    size_t taken = 0;
    if (beside != NULL) {
        gemms[taken++] = *beside;
    }
    bool staged = sink->staged; /* through one buffer: one after the other */
    for (size_t i = 0; i < n; i++) {
        if (!weight_grad_gemm(llama, sink, &grads[i], &gemms[taken])) {
            continue;
        }
        taken++;
        if (staged) {
            fs_multiply(llama, gemms, taken);
            taken = 0;
            fs_sink_end(llama, sink, grads[i].param);
        }
    }
    fs_multiply(llama, gemms, taken);
    for (size_t i = 0; i < n && !staged; i++) {
        if (fs_shards_trains(llama->shards, grads[i].param)) {
            fs_sink_end(llama, sink, grads[i].param);
        }
    }
}

void
fs_bias_grad(fs_llama *llama, const fs_sink *sink, int param, const void *dy, size_t ldy)
{
    fs_column_sum sum = {
        .rows = llama->at.rows, .stride = ldy, .dtype = llama->at.dtype, .x = dy};
    if (param < 0 || !fs_sink_begin(llama, sink, param, &sum.out, &sum.add)) {
        return;
    }
    sum.width = llama->layout->params[param].numel;
    llama->exec->device->model.column_sum(llama->exec, &sum);
    fs_sink_end(llama, sink, param);
}

void
fs_norm_backward(fs_llama *llama, const fs_sink *sink, int param, const void *x, const float *rstd,
                 const void *weight, bool dx_add)
{
    fs_norm_grad norm = {.rows = llama->at.rows,
                         .width = llama->config.hidden_size,
                         .dtype = llama->at.dtype,
                         .x = x,
                         .rstd = rstd,
                         .weight = weight,
                         .dy = llama->at.branch,
                         .dx = llama->at.dx,
                         .dx_add = dx_add,
                         .partial = llama->at.norm_partial};
    bool wanted = fs_sink_begin(llama, sink, param, &norm.dweight, &norm.dweight_add);
    llama->exec->device->model.norm_grad(llama->exec, &norm);
    if (wanted) {
        fs_sink_end(llama, sink, param);
    }
}

// ---- gradients ----------------------------------------------------------------------------------

fs_status
fs_sink_open(fs_llama *llama, int unit, fs_sink *out)
{
    *out = (fs_sink){.unit = unit,
                     .open = llama->layout->units[unit].slot >= 0,
                     .staged = llama->precision.reduce != FS_F32};
    return out->open ? fs_grad_open(llama->shards, unit, &out->slot, &out->add) : FS_OK;
}

bool
fs_sink_begin(fs_llama *llama, const fs_sink *sink, int param, float **out, bool *out_add)
{
    *out = NULL;
    *out_add = false;
    if (!fs_shards_trains(llama->shards, param)) {
        return false;
    }
    if (sink->staged) {
        *out = llama->at.staged;
        return true;
    }
    *out = (float *)sink->slot + llama->layout->params[param].grad_n;
    *out_add = sink->add;
    return true;
}

/* From at.staged into the slot, rounded to its dtype; sums are taken in fp32. */
static void
unstage(const fs_llama *llama, const fs_sink *sink, int param)
{
    const fs_param *p = &llama->layout->params[param];
    const fs_exec *exec = llama->exec;
    fs_dtype dtype = llama->precision.reduce;
    void *to = (char *)sink->slot + p->grad_n * fs_dtype_nbytes(dtype);
    const void *sources[] = {llama->at.staged};
    if (!sink->add) {
        exec->device->convert(exec, to, dtype, sources[0], FS_F32, p->numel);
        return;
    }
    fs_sum sum = {.src = sources,
                  .src_n = 1,
                  .src_dtype = FS_F32,
                  .acc = to,
                  .acc_dtype = dtype,
                  .accumulate = true,
                  .n = p->numel};
    exec->device->sum(exec, &sum);
}

void
fs_sink_end(fs_llama *llama, const fs_sink *sink, int param)
{
    if (sink->staged) {
        unstage(llama, sink, param);
    }
    fs_grad_mark(llama->shards, sink->unit, param);
}

fs_status
fs_sink_publish(fs_llama *llama, const fs_sink *sink, bool keep_local)
{
    return sink->open ? fs_grad_publish(llama->shards, sink->unit, keep_local) : FS_OK;
}
