/* Forward: embedding, layers, and the head in slices (with its backward, when asked). */
#include "parts.h"

// ---- layers -------------------------------------------------------------------------------------

fs_heads
fs_llama_heads(const fs_llama *llama)
{
    const fs_llama_config *config = &llama->config;
    return (fs_heads){.batch = llama->at.batch,
                      .length = llama->at.length,
                      .q_heads = config->num_attention_heads,
                      .kv_heads = config->num_key_value_heads,
                      .head_dim = config->head_dim,
                      .padded_dim = llama->at.padded_dim,
                      .kv_rows = llama->at.kv_rows,
                      .dtype = llama->at.dtype,
                      .cosines = llama->cosines + llama->at.past * config->head_dim / 2,
                      .sines = llama->sines + llama->at.past * config->head_dim / 2,
                      .q_scale = (float)config->attention_multiplier,
                      .rows = llama->at.projected};
}

fs_attention
fs_llama_attention(const fs_llama *llama, const fs_layer_saved *saved)
{
    const fs_llama_config *config = &llama->config;
    return (fs_attention){.batch = llama->at.batch,
                          .length = llama->at.length,
                          .q_heads = config->num_attention_heads,
                          .kv_heads = config->num_key_value_heads,
                          .head_dim = config->head_dim,
                          .padded_dim = llama->at.padded_dim,
                          .window = config->sliding_window,
                          .past = llama->at.past,
                          .kv_rows = llama->at.kv_rows,
                          .dtype = llama->at.dtype,
                          .q = saved->q,
                          .k = saved->k,
                          .v = saved->v,
                          .out = saved->attended,
                          .lse = saved->lse,
                          .k_turned = llama->at.k_turned};
}

/* Projections of the normed rows, rotation, attention; leaves the output projection in branch. */
static void
attention_forward(fs_llama *llama, size_t layer, const fs_unit_weights *weights,
                  const fs_layer_saved *saved)
{
    const fs_exec *exec = llama->exec;
    const fs_llama_config *config = &llama->config;
    fs_batch *at = &llama->at;
    size_t rows = at->rows, hidden = config->hidden_size;
    size_t q_n = config->num_attention_heads * config->head_dim;
    size_t kv_n = config->num_key_value_heads * config->head_dim, all_n = q_n + 2 * kv_n;
    const fs_gemm projections[] = {
        fs_linear(llama, at->projected, all_n, at->normed,
                  fs_layer_weight(llama, weights, layer, FS_ROLE_Q), rows, hidden, q_n),
        fs_linear(llama, fs_act(llama, at->projected, q_n), all_n, at->normed,
                  fs_layer_weight(llama, weights, layer, FS_ROLE_K), rows, hidden, kv_n),
        fs_linear(llama, fs_act(llama, at->projected, q_n + kv_n), all_n, at->normed,
                  fs_layer_weight(llama, weights, layer, FS_ROLE_V), rows, hidden, kv_n),
    };
    fs_multiply(llama, projections, 3);
    fs_heads heads = fs_llama_heads(llama);
    heads.q_bias = fs_layer_weight(llama, weights, layer, FS_ROLE_Q_BIAS);
    heads.k_bias = fs_layer_weight(llama, weights, layer, FS_ROLE_K_BIAS);
    heads.v_bias = fs_layer_weight(llama, weights, layer, FS_ROLE_V_BIAS);
    heads.q = saved->q;
    heads.k = fs_act(llama, saved->k, at->past * at->padded_dim);
    heads.v = fs_act(llama, saved->v, at->past * at->padded_dim);
    exec->device->model.heads(exec, &heads);
    fs_attention attention = fs_llama_attention(llama, saved);
    exec->device->model.attention(exec, &attention);
    fs_gemm output =
        fs_linear(llama, at->branch, hidden, saved->attended,
                  fs_layer_weight(llama, weights, layer, FS_ROLE_O), rows, q_n, hidden);
    fs_multiply(llama, &output, 1);
}

void
fs_llama_layer_forward(fs_llama *llama, size_t layer, const fs_unit_weights *weights,
                       const fs_norm *norm1, bool again)
{
    const fs_exec *exec = llama->exec;
    const fs_llama_config *config = &llama->config;
    fs_batch *at = &llama->at;
    const fs_layer_saved *saved = &at->layers[layer];
    size_t rows = at->rows, hidden = config->hidden_size, wide = config->intermediate_size;
    fs_norm norm = *norm1;
    norm.weight = fs_layer_weight(llama, weights, layer, FS_ROLE_NORM1);
    norm.out = at->normed;
    norm.rstd = saved->rstd1;
    exec->device->model.norm(exec, &norm);
    attention_forward(llama, layer, weights, saved);
    norm.x = saved->x;
    norm.branch = at->branch;
    norm.bias = fs_layer_weight(llama, weights, layer, FS_ROLE_O_BIAS);
    norm.sum = saved->middle;
    norm.weight = fs_layer_weight(llama, weights, layer, FS_ROLE_NORM2);
    norm.rstd = saved->rstd2;
    exec->device->model.norm(exec, &norm);
    const fs_gemm gate_up[] = {
        fs_linear(llama, saved->gate, wide, at->normed,
                  fs_layer_weight(llama, weights, layer, FS_ROLE_GATE), rows, hidden, wide),
        fs_linear(llama, saved->up, wide, at->normed,
                  fs_layer_weight(llama, weights, layer, FS_ROLE_UP), rows, hidden, wide),
    };
    fs_multiply(llama, gate_up, 2);
    if (again) {
        return;
    }
    fs_swiglu swiglu = fs_layer_swiglu(llama, weights, layer);
    exec->device->model.swiglu(exec, &swiglu);
    fs_gemm down =
        fs_linear(llama, at->branch, hidden, at->wide,
                  fs_layer_weight(llama, weights, layer, FS_ROLE_DOWN), rows, wide, hidden);
    fs_multiply(llama, &down, 1);
    const void *bias = fs_layer_weight(llama, weights, layer, FS_ROLE_DOWN_BIAS);
    if (bias != NULL) { /* added with the branch, after this unit is released */
        exec->device->copy(exec, at->branch_bias, bias, hidden * fs_dtype_nbytes(at->dtype));
    }
}

/* The norm at the start of layer (or of the head, where layer is their number): it first adds the
 * branch that the layer before left waiting. */
static fs_norm
norm_before(const fs_llama *llama, size_t layer, void *sum)
{
    const fs_batch *at = &llama->at;
    fs_norm norm = {.rows = at->rows,
                    .width = llama->config.hidden_size,
                    .dtype = at->dtype,
                    .alpha = (float)llama->config.residual_multiplier,
                    .eps = llama->config.rms_norm_eps};
    if (layer == 0) {
        norm.x = at->layers[0].x;
        return norm;
    }
    norm.x = at->layers[layer - 1].middle;
    norm.branch = at->branch;
    norm.bias = llama->config.mlp_bias ? at->branch_bias : NULL;
    norm.sum = sum;
    return norm;
}

fs_status
fs_llama_body_forward(fs_llama *llama)
{
    const fs_exec *exec = llama->exec;
    fs_batch *at = &llama->at;
    const void *table; /* read as it is: only a few of its rows are wanted */
    FS_TRY(fs_unit_gather(llama->shards, 0, &table));
    size_t at_n = llama->layout->params[0].offset_n;
    fs_embed embed = {.rows = at->rows,
                      .width = llama->config.hidden_size,
                      .vocab = llama->config.vocab_size,
                      .tokens = at->ids.tokens,
                      .scale = (float)llama->config.embedding_multiplier,
                      .table = (const char *)table + at_n * fs_dtype_nbytes(llama->precision.param),
                      .table_dtype = llama->precision.param,
                      .dtype = at->dtype,
                      .out = at->layers[0].x};
    exec->device->model.embed(exec, &embed);
    FS_TRY(fs_unit_release(llama->shards, 0));
    for (size_t layer = 0; layer < llama->config.num_hidden_layers; layer++) {
        fs_unit_weights weights;
        FS_TRY(fs_llama_gather(llama, fs_llama_layer_unit(layer), 0, &weights));
        FS_TRY(fs_unit_prefetch(llama->shards, fs_llama_layer_unit(layer) + 1)); /* or the head */
        fs_norm norm = norm_before(llama, layer, at->layers[layer].x);
        fs_llama_layer_forward(llama, layer, &weights, &norm, false);
        FS_TRY(fs_llama_release(llama, &weights));
    }
    return FS_OK;
}

// ---- head ---------------------------------------------------------------------------------------

/* Scaled logits of n rows of at.normed from begin on, into out: fp32 whatever the activations. */
static void
make_logits(const fs_llama *llama, const void *head, size_t begin, size_t n, bool scaled,
            float *out)
{
    const fs_exec *exec = llama->exec;
    size_t vocab = llama->config.vocab_size, hidden = llama->config.hidden_size;
    fs_gemm logits = fs_linear(llama, out, vocab, fs_act(llama, llama->at.normed, begin * hidden),
                               head, n, hidden, vocab);
    logits.c_dtype = FS_F32;
    fs_multiply(llama, &logits, 1);
    if (scaled && llama->config.logits_scaling != 1.0) {
        fs_scale scale = {.n = n * vocab,
                          .out = out,
                          .x = out,
                          .alpha = (float)(1.0 / llama->config.logits_scaling)};
        exec->device->model.scale(exec, &scale);
    }
}

/* Where n rows of logits for the caller are made, and how they come to row `to` of his: on the CPU
 * they are made there. */
static float *
logits_at(const fs_llama *llama, const fs_head_call *call, size_t to)
{
    return llama->runtime == NULL ? call->logits + to * llama->config.vocab_size : llama->at.logits;
}

static fs_status
logits_out(fs_llama *llama, const fs_head_call *call, size_t to, size_t n)
{
    size_t vocab = llama->config.vocab_size;
    return llama->runtime == NULL ? FS_OK
                                  : fs_llama_logits(llama, n * vocab, call->logits + to * vocab);
}

/* A (batch, vocab) array from the last row of each sequence. */
static fs_status
last_logits(fs_llama *llama, const fs_head_call *call, const void *head)
{
    const fs_batch *at = &llama->at;
    for (size_t begin = 0; begin < at->batch; begin += at->slice) {
        size_t n = at->batch - begin < at->slice ? at->batch - begin : at->slice;
        float *out = logits_at(llama, call, begin);
        for (size_t b = 0; b < n; b++) {
            make_logits(llama, head, (begin + b + 1) * at->length - 1, 1, true,
                        out + b * llama->config.vocab_size);
        }
        FS_TRY(logits_out(llama, call, begin, n));
    }
    return FS_OK;
}

static void
slice_loss(fs_llama *llama, const fs_head_call *call, const void *head, size_t begin, size_t n)
{
    fs_batch *at = &llama->at;
    make_logits(llama, head, begin, n, false, at->logits);
    fs_xent xent = {.rows = n,
                    .vocab = llama->config.vocab_size,
                    .logits = at->logits,
                    .targets = at->ids.targets + begin,
                    .scale = (float)(1.0 / llama->config.logits_scaling),
                    .dlogits = call->sink != NULL ? at->dlogits : NULL,
                    .dtype = at->dtype,
                    .factor = (float)fs_shards_gradient_factor(llama->shards),
                    .loss = at->losses + begin};
    llama->exec->device->model.xent(llama->exec, &xent);
}

/* From the gradient of a slice's logits: the head's, and that of its normed rows. */
static void
slice_backward(fs_llama *llama, const fs_head_call *call, const void *head, float *dhead,
               bool dhead_add, size_t begin, size_t n)
{
    fs_batch *at = &llama->at;
    size_t vocab = llama->config.vocab_size, hidden = llama->config.hidden_size;
    fs_gemm gemms[2];
    size_t taken = 0;
    if (dhead != NULL) {
        gemms[taken++] = (fs_gemm){.trans_a = true,
                                   .m = vocab,
                                   .n = hidden,
                                   .k = n,
                                   .dtype = at->dtype,
                                   .c_dtype = FS_F32,
                                   .rounding = at->rounding,
                                   .a = at->dlogits,
                                   .lda = vocab,
                                   .b = fs_act(llama, at->normed, begin * hidden),
                                   .ldb = hidden,
                                   .beta = dhead_add ? 1.0f : 0.0f,
                                   .c = dhead,
                                   .ldc = hidden};
    }
    if (call->normed_grad) {
        gemms[taken++] = fs_linear_input_grad(llama, fs_act(llama, at->branch, begin * hidden),
                                              at->dlogits, vocab, head, n, hidden, vocab, false);
    }
    fs_multiply(llama, gemms, taken);
}

static fs_status
head_slices(fs_llama *llama, fs_head_call *call, const void *head)
{
    fs_batch *at = &llama->at;
    if (call->last_only) {
        return last_logits(llama, call, head);
    }
    fs_sink *sink = llama->config.tie_word_embeddings ? call->tied : call->sink;
    int param = fs_llama_lm_head(&llama->config);
    float *dhead = NULL;
    bool add = false;
    bool wanted = sink != NULL && fs_sink_begin(llama, sink, param, &dhead, &add);
    for (size_t begin = 0; begin < at->rows; begin += at->slice) {
        size_t n = at->rows - begin < at->slice ? at->rows - begin : at->slice;
        if (call->logits != NULL) {
            make_logits(llama, head, begin, n, true, logits_at(llama, call, begin));
            FS_TRY(logits_out(llama, call, begin, n));
        }
        if (call->losses) {
            slice_loss(llama, call, head, begin, n);
        }
        if (call->sink != NULL) {
            slice_backward(llama, call, head, dhead, add || begin > 0, begin, n);
        }
    }
    if (wanted) {
        fs_sink_end(llama, sink, param);
        sink->add |= llama->config.tie_word_embeddings; /* the embedding's own share comes on top */
    }
    return FS_OK;
}

static fs_status
head_gathered(fs_llama *llama, fs_head_call *call, const fs_unit_weights *weights,
              const fs_unit_weights *table)
{
    const fs_llama_config *config = &llama->config;
    fs_batch *at = &llama->at;
    int norm_param = fs_llama_final_norm(config);
    const void *norm_weight = fs_param_weight(llama, weights, norm_param);
    const void *head = fs_param_weight(llama, config->tie_word_embeddings ? table : weights,
                                        fs_llama_lm_head(config));
    fs_norm norm = norm_before(llama, config->num_hidden_layers, at->last);
    norm.weight = norm_weight;
    norm.out = at->normed;
    norm.rstd = at->rstd_last;
    llama->exec->device->model.norm(llama->exec, &norm);
    call->normed_grad =
        call->sink != NULL && (call->input_grad || fs_shards_trains(llama->shards, norm_param));
    FS_TRY(head_slices(llama, call, head));
    if (call->normed_grad) {
        fs_norm_backward(llama, call->sink, norm_param, at->last, at->rstd_last, norm_weight,
                         false);
    }
    return FS_OK;
}

fs_status
fs_llama_head(fs_llama *llama, fs_head_call *call)
{
    int unit = fs_llama_head_unit(&llama->config);
    bool tied = llama->config.tie_word_embeddings;
    fs_unit_weights weights, table = {0};
    FS_TRY(fs_llama_gather(llama, unit, 0, &weights));
    fs_status st = FS_OK;
    if (tied) {
        st = fs_llama_gather(llama, 0, llama->layout->units[unit].numel, &table);
    }
    if (st == FS_OK) {
        /* Backward begins at the last layer. */
        st = call->sink != NULL && call->input_grad ? fs_unit_prefetch(llama->shards, unit - 1)
                                                    : FS_OK;
        st = st != FS_OK ? st : head_gathered(llama, call, &weights, &table);
        if (tied) {
            fs_status released = fs_llama_release(llama, &table);
            st = st == FS_OK ? released : st;
        }
    }
    fs_status released = fs_llama_release(llama, &weights);
    return st == FS_OK ? released : st;
}
