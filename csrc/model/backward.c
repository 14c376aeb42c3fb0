/* Backward of a layer. at.dx is the gradient of the residual stream, in and out; at.branch holds
 * the gradient of a norm's output and, after the norm's backward, that output itself for the
 * weight gradients. Each weight gradient goes straight into the unit's slot. */
#include "parts.h"

/* The gradient of a branch: dx times the residual multiplier. */
static const void *
branch_grad(fs_llama *llama)
{
    fs_batch *at = &llama->at;
    if (at->scaled != at->dx) {
        fs_scale scale = {.n = at->rows * llama->config.hidden_size,
                          .dtype = at->dtype,
                          .out = at->scaled,
                          .x = at->dx,
                          .alpha = (float)llama->config.residual_multiplier};
        llama->exec->device->model.scale(llama->exec, &scale);
    }
    return at->scaled;
}

static void
mlp_backward(fs_llama *llama, size_t layer, const fs_unit_weights *weights, const fs_sink *sink)
{
    const fs_exec *exec = llama->exec;
    const fs_llama_config *config = &llama->config;
    fs_batch *at = &llama->at;
    const fs_layer_saved *saved = &at->layers[layer];
    size_t rows = at->rows, hidden = config->hidden_size, wide = config->intermediate_size;
    const void *dy = branch_grad(llama);
    fs_bias_grad(llama, sink, fs_llama_param(config, layer, FS_ROLE_DOWN_BIAS), dy, hidden);
    fs_gemm input = fs_linear_input_grad(llama, at->wide, dy, hidden,
                                         fs_layer_weight(llama, weights, layer, FS_ROLE_DOWN), rows,
                                         wide, hidden, false);
    fs_multiply(llama, &input, 1);
    fs_swiglu swiglu = fs_layer_swiglu(llama, weights, layer);
    exec->device->model.swiglu_grad(exec, &swiglu);
    fs_bias_grad(llama, sink, fs_llama_param(config, layer, FS_ROLE_GATE_BIAS), saved->gate, wide);
    fs_bias_grad(llama, sink, fs_llama_param(config, layer, FS_ROLE_UP_BIAS), saved->up, wide);
    const fs_weight_grad down = {fs_llama_param(config, layer, FS_ROLE_DOWN), dy, hidden, at->wide};
    input = fs_linear_input_grad(llama, at->branch, saved->gate, wide,
                                 fs_layer_weight(llama, weights, layer, FS_ROLE_GATE), rows, hidden,
                                 wide, false);
    fs_weight_grads(llama, sink, &down, 1, &input);
    input = fs_linear_input_grad(llama, at->branch, saved->up, wide,
                                 fs_layer_weight(llama, weights, layer, FS_ROLE_UP), rows, hidden,
                                 wide, true);
    fs_multiply(llama, &input, 1);
    fs_norm_backward(llama, sink, fs_llama_param(config, layer, FS_ROLE_NORM2), saved->middle,
                     saved->rstd2, fs_layer_weight(llama, weights, layer, FS_ROLE_NORM2), true);
    const fs_weight_grad gate_up[] = {
        {fs_llama_param(config, layer, FS_ROLE_GATE), saved->gate, wide, at->branch},
        {fs_llama_param(config, layer, FS_ROLE_UP), saved->up, wide, at->branch},
    };
    fs_weight_grads(llama, sink, gate_up, 2, NULL);
}

/* Through the output projection and attention: leaves dq, dk, dv as rows in at.projected. */
static void
attention_backward(fs_llama *llama, size_t layer, const fs_unit_weights *weights,
                   const fs_sink *sink)
{
    const fs_exec *exec = llama->exec;
    const fs_llama_config *config = &llama->config;
    fs_batch *at = &llama->at;
    const fs_layer_saved *saved = &at->layers[layer];
    size_t rows = at->rows, hidden = config->hidden_size;
    size_t q_n = config->num_attention_heads * config->head_dim;
    const void *dy = branch_grad(llama);
    fs_bias_grad(llama, sink, fs_llama_param(config, layer, FS_ROLE_O_BIAS), dy, hidden);
    const fs_weight_grad output = {fs_llama_param(config, layer, FS_ROLE_O), dy, hidden,
                                   saved->attended};
    fs_gemm input = fs_linear_input_grad(llama, at->dattended, dy, hidden,
                                         fs_layer_weight(llama, weights, layer, FS_ROLE_O), rows,
                                         q_n, hidden, false);
    fs_weight_grads(llama, sink, &output, 1, &input);
    fs_attention attention = fs_llama_attention(llama, saved);
    attention.v_turned = at->v_turned;
    attention.dout = at->dattended;
    attention.dout_packed = at->dattended_packed;
    attention.delta = at->delta;
    attention.dq = at->dq;
    attention.dk = at->dk;
    attention.dv = at->dv;
    exec->device->model.attention_grad(exec, &attention);
    fs_heads heads = fs_llama_heads(llama);
    heads.q = at->dq;
    heads.k = at->dk;
    heads.v = at->dv;
    exec->device->model.heads_grad(exec, &heads);
}

/* Through the three projections and the norm before them. */
static void
projections_backward(fs_llama *llama, size_t layer, const fs_unit_weights *weights,
                     const fs_sink *sink)
{
    static const fs_role matrices[] = {FS_ROLE_Q, FS_ROLE_K, FS_ROLE_V};
    static const fs_role biases[] = {FS_ROLE_Q_BIAS, FS_ROLE_K_BIAS, FS_ROLE_V_BIAS};
    const fs_llama_config *config = &llama->config;
    fs_batch *at = &llama->at;
    const fs_layer_saved *saved = &at->layers[layer];
    size_t hidden = config->hidden_size;
    size_t q_n = config->num_attention_heads * config->head_dim;
    size_t kv_n = config->num_key_value_heads * config->head_dim, all_n = q_n + 2 * kv_n;
    const size_t begins[] = {0, q_n, q_n + kv_n}, widths[] = {q_n, kv_n, kv_n};
    fs_weight_grad grads[3];
    for (int i = 0; i < 3; i++) {
        const void *dy = fs_act(llama, at->projected, begins[i]);
        fs_bias_grad(llama, sink, fs_llama_param(config, layer, biases[i]), dy, all_n);
        fs_gemm input = fs_linear_input_grad(llama, at->branch, dy, all_n,
                                             fs_layer_weight(llama, weights, layer, matrices[i]),
                                             at->rows, hidden, widths[i], i > 0);
        fs_multiply(llama, &input, 1);
        grads[i] =
            (fs_weight_grad){fs_llama_param(config, layer, matrices[i]), dy, all_n, at->branch};
    }
    fs_norm_backward(llama, sink, fs_llama_param(config, layer, FS_ROLE_NORM1), saved->x,
                     saved->rstd1, fs_layer_weight(llama, weights, layer, FS_ROLE_NORM1), true);
    fs_weight_grads(llama, sink, grads, 3, NULL);
}

static fs_status
layer_gathered(fs_llama *llama, size_t layer, const fs_unit_weights *weights, bool keep_local)
{
    if (llama->checkpointing) {
        fs_norm norm = {.rows = llama->at.rows,
                        .width = llama->config.hidden_size,
                        .dtype = llama->at.dtype,
                        .x = llama->at.layers[layer].x,
                        .alpha = (float)llama->config.residual_multiplier,
                        .eps = llama->config.rms_norm_eps};
        fs_llama_layer_forward(llama, layer, weights, &norm, true);
    }
    fs_sink sink;
    FS_TRY(fs_sink_open(llama, fs_llama_layer_unit(layer), &sink));
    mlp_backward(llama, layer, weights, &sink);
    attention_backward(llama, layer, weights, &sink);
    projections_backward(llama, layer, weights, &sink);
    return fs_sink_publish(llama, &sink, keep_local);
}

fs_status
fs_llama_layer_backward(fs_llama *llama, size_t layer, int next, bool keep_local)
{
    fs_unit_weights weights;
    FS_TRY(fs_llama_gather(llama, fs_llama_layer_unit(layer), 0, &weights));
    fs_status st = next >= 0 ? fs_unit_prefetch(llama->shards, next) : FS_OK;
    st = st != FS_OK ? st : layer_gathered(llama, layer, &weights, keep_local);
    fs_status released = fs_llama_release(llama, &weights);
    return st == FS_OK ? released : st;
}
