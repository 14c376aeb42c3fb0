/* Where the buffers of a micro-batch lie: one function, run on a counting arena for the plan and on
 * memory for the call. */
#include <math.h>

#include "../base/checked.h"
#include "parts.h"

/* Takes a x b x c elements of element_nbytes; out is a pointer to a pointer. */
static fs_status
take(fs_arena *arena, fs_mem_class memory_class, size_t a, size_t b, size_t c,
     size_t element_nbytes, void *out)
{
    size_t nbytes;
    FS_TRY(fs_mul_size(a, b, &nbytes));
    FS_TRY(fs_mul_size(nbytes, c, &nbytes));
    FS_TRY(fs_mul_size(nbytes, element_nbytes, &nbytes));
    return fs_arena_take(arena, memory_class, nbytes, out);
}

static fs_status
take_floats(fs_arena *arena, fs_mem_class memory_class, size_t a, size_t b, size_t c, float **out)
{
    return take(arena, memory_class, a, b, c, sizeof(float), out);
}

/* Elements of activations. */
static fs_status
take_acts(fs_arena *arena, fs_mem_class memory_class, const fs_batch *at, size_t a, size_t b,
          void **out)
{
    return take(arena, memory_class, a, b, 1, fs_dtype_nbytes(at->dtype), out);
}

static fs_status
take_ids(fs_arena *arena, size_t n, int32_t **out)
{
    return take(arena, FS_MEM_WORKSPACE, n, 1, 1, sizeof(int32_t), out);
}

// ---- head slices --------------------------------------------------------------------------------

/* Below 256 rows the head's GEMMs slow down; a slice of logits should stay near 16 MiB. A device
 * wants larger products, and has no cache of that size. */
#define SLICE_MIN ((size_t)256)
#define SLICE_MAX ((size_t)1024)
#define SLICE_NBYTES ((size_t)16 << 20)
#define DEVICE_TIMES 8

static size_t
slice_rows(size_t rows, size_t vocab, bool device)
{
    size_t times = device ? DEVICE_TIMES : 1;
    size_t wanted = times * SLICE_NBYTES / sizeof(float) / vocab / SLICE_MIN * SLICE_MIN;
    return fs_min_size(rows, fs_min_size(fs_max_size(wanted, SLICE_MIN), times * SLICE_MAX));
}

// ---- activations --------------------------------------------------------------------------------

/* What one layer keeps beside its input. */
static fs_status
place_layer(const fs_llama_config *config, const fs_batch *at, fs_arena *arena, fs_layer_saved *out)
{
    const fs_mem_class kind = FS_MEM_ACTIVATIONS;
    size_t q_heads = config->num_attention_heads, kv_heads = config->num_key_value_heads;
    FS_TRY(take_floats(arena, kind, at->rows, 1, 1, &out->rstd1));
    FS_TRY(take_acts(arena, kind, at, at->rows, q_heads * at->padded_dim, &out->q));
    FS_TRY(take_acts(arena, kind, at, at->rows, kv_heads * at->padded_dim, &out->k));
    FS_TRY(take_acts(arena, kind, at, at->rows, kv_heads * at->padded_dim, &out->v));
    FS_TRY(take_acts(arena, kind, at, at->rows, q_heads * config->head_dim, &out->attended));
    FS_TRY(take_floats(arena, kind, at->rows, q_heads, 1, &out->lse));
    FS_TRY(take_floats(arena, kind, at->rows, 1, 1, &out->rstd2));
    FS_TRY(take_acts(arena, kind, at, at->rows, config->intermediate_size, &out->gate));
    return take_acts(arena, kind, at, at->rows, config->intermediate_size, &out->up);
}

/* Training keeps the input of every layer, and the rest of every layer or, with checkpointing,
 * one set that all layers share. Forward alone has one stream that is added to in place. */
static fs_status
place_layers(const fs_form *form, fs_mode mode, fs_layer_saved *layers, fs_arena *arena,
             fs_batch *out)
{
    const fs_llama_config *config = form->config;
    const fs_mem_class kind = FS_MEM_ACTIVATIONS;
    size_t hidden = config->hidden_size;
    bool checkpointing = form->checkpointing;
    for (size_t layer = 0; layer < config->num_hidden_layers; layer++) {
        fs_layer_saved saved = layer == 0 ? (fs_layer_saved){0} : layers[layer - 1];
        if (layer == 0 || (mode == FS_MODE_TRAIN && !checkpointing)) {
            FS_TRY(place_layer(config, out, arena, &saved));
        }
        if (layer == 0 || mode == FS_MODE_TRAIN) {
            FS_TRY(take_acts(arena, kind, out, out->rows, hidden, &saved.x));
        }
        if (mode == FS_MODE_FORWARD) {
            saved.middle = saved.x;
        } else if (layer == 0 || !checkpointing) {
            FS_TRY(take_acts(arena, kind, out, out->rows, hidden, &saved.middle));
        }
        layers[layer] = saved;
    }
    if (mode == FS_MODE_FORWARD) {
        out->last = layers[0].x;
    } else {
        FS_TRY(take_acts(arena, kind, out, out->rows, hidden, &out->last));
    }
    return take_floats(arena, kind, out->rows, 1, 1, &out->rstd_last);
}

static fs_status
place_forward_scratch(const fs_form *form, fs_arena *arena, fs_batch *out)
{
    const fs_llama_config *config = form->config;
    const fs_mem_class kind = FS_MEM_WORKSPACE;
    size_t hidden = config->hidden_size, kv_heads = config->num_key_value_heads;
    size_t heads = config->num_attention_heads + 2 * kv_heads;
    FS_TRY(take_acts(arena, kind, out, out->rows, hidden, &out->normed));
    FS_TRY(take_acts(arena, kind, out, out->rows, hidden, &out->branch));
    FS_TRY(take_acts(arena, kind, out, hidden, 1, &out->branch_bias));
    FS_TRY(take_acts(arena, kind, out, out->rows, config->intermediate_size, &out->wide));
    FS_TRY(take_acts(arena, kind, out, out->rows, heads * config->head_dim, &out->projected));
    if (!form->device) {
        FS_TRY(take_floats(arena, kind, out->batch * kv_heads, out->padded_dim, out->padded_length,
                           &out->k_turned));
    }
    return take_floats(arena, kind, out->slice, config->vocab_size, 1, &out->logits);
}

static fs_status
place_backward_scratch(const fs_form *form, fs_arena *arena, fs_batch *out)
{
    const fs_llama_config *config = form->config;
    const fs_mem_class kind = FS_MEM_WORKSPACE;
    size_t hidden = config->hidden_size;
    size_t q_heads = config->num_attention_heads, kv_heads = config->num_key_value_heads;
    out->dlogits = out->logits;
    if (out->dtype != FS_F32) {
        FS_TRY(take_acts(arena, kind, out, out->slice, config->vocab_size, &out->dlogits));
    }
    FS_TRY(take_acts(arena, kind, out, out->rows, hidden, &out->dx));
    out->scaled = out->dx;
    if (config->residual_multiplier != 1.0) {
        FS_TRY(take_acts(arena, kind, out, out->rows, hidden, &out->scaled));
    }
    FS_TRY(take_acts(arena, kind, out, out->rows, q_heads * config->head_dim, &out->dattended));
    FS_TRY(take_floats(arena, kind, out->rows, q_heads, 1, &out->delta));
    FS_TRY(take_acts(arena, kind, out, out->rows, q_heads * out->padded_dim, &out->dq));
    FS_TRY(take_acts(arena, kind, out, out->rows, kv_heads * out->padded_dim, &out->dk));
    FS_TRY(take_acts(arena, kind, out, out->rows, kv_heads * out->padded_dim, &out->dv));
    if (!form->device) {
        FS_TRY(take_floats(arena, kind, out->rows, q_heads, out->padded_dim,
                           &out->dattended_packed));
        FS_TRY(take_floats(arena, kind, out->batch * kv_heads, out->padded_dim, out->padded_length,
                           &out->v_turned));
    }
    return take_floats(arena, kind, FS_NORM_CHUNKS, hidden, 1, &out->norm_partial);
}

/* Ids, and on the CPU no more than the rows by id: tokens and targets are the caller's. */
static fs_status
place_ids(const fs_form *form, fs_mode mode, bool device, fs_arena *arena, size_t rows, fs_ids *out)
{
    if (device) {
        FS_TRY(take_ids(arena, rows, &out->tokens));
        FS_TRY(take_ids(arena, rows, &out->targets));
    }
    if (mode != FS_MODE_TRAIN) {
        return FS_OK;
    }
    FS_TRY(take_ids(arena, form->config->vocab_size + 1, &out->first));
    return take_ids(arena, rows, &out->sorted);
}

/* What the host gives, and what it is given. */
static fs_status
place_exchange(const fs_form *form, fs_mode mode, fs_arena *arena, fs_arena *host, fs_batch *out)
{
    FS_TRY(place_ids(form, mode, form->device, arena, out->rows, &out->ids));
    if (!form->device) {
        return take(arena, FS_MEM_WORKSPACE, out->rows, 1, 1, sizeof(double), &out->losses);
    }
    FS_TRY(place_ids(form, mode, true, host, out->rows, &out->host_ids));
    FS_TRY(take(host, FS_MEM_WORKSPACE, out->rows, 1, 1, sizeof(double), &out->losses));
    return mode == FS_MODE_TRAIN ? FS_OK
                                 : take_floats(host, FS_MEM_WORKSPACE, out->slice,
                                               form->config->vocab_size, 1, &out->landing);
}

/* Elements of the widened image: the largest unit, or a tied head with the table behind it. */
static size_t
widened_n(const fs_llama_config *config, const fs_layout *layout)
{
    size_t n = layout->units[fs_llama_head_unit(config)].numel;
    if (config->tie_word_embeddings) {
        n += layout->units[0].numel;
    }
    for (size_t layer = 0; layer < config->num_hidden_layers; layer++) {
        n = fs_max_size(n, layout->units[fs_llama_layer_unit(layer)].numel);
    }
    return n;
}

static size_t
largest_trainable(const fs_layout *layout)
{
    size_t n = 0;
    for (int p = 0; p < layout->params_n; p++) {
        n = layout->params[p].trainable ? fs_max_size(n, layout->params[p].numel) : n;
    }
    return n;
}

fs_status
fs_llama_place(const fs_form *form, fs_mode mode, size_t batch, size_t length, size_t keys,
               fs_layer_saved *layers, fs_arena *arena, fs_arena *host, fs_batch *out)
{
    const fs_llama_config *config = form->config;
    const fs_precision *precision = &form->precision;
    *out = (fs_batch){.dtype = form->device ? precision->param : FS_F32,
                      .rounding = precision->param,
                      .batch = batch,
                      .length = length,
                      .kv_rows = length,
                      .layers = layers};
    size_t padded;
    FS_TRY(fs_mul_size(batch, length, &out->rows));
    FS_TRY(fs_mul_size(batch * config->num_key_value_heads, fs_padded_length(keys), &padded));
    if (out->rows == 0 || out->rows > INT32_MAX || padded > INT32_MAX) {
        return FS_FAIL(FS_EINVAL,
                       "a micro-batch of %zu x %zu tokens: it needs between 1 and %d "
                       "tokens",
                       batch, length, INT32_MAX);
    }
    out->padded_dim = fs_padded_dim(config->head_dim);
    out->padded_length = fs_padded_length(keys);
    out->slice = slice_rows(out->rows, config->vocab_size, form->device);
    FS_TRY(place_layers(form, mode, layers, arena, out));
    FS_TRY(place_forward_scratch(form, arena, out));
    FS_TRY(place_exchange(form, mode, arena, host, out));
    if (mode == FS_MODE_TRAIN) {
        FS_TRY(place_backward_scratch(form, arena, out));
        if (precision->reduce != FS_F32) {
            FS_TRY(take_floats(arena, FS_MEM_WORKSPACE, largest_trainable(form->layout), 1, 1,
                               &out->staged));
        }
    }
    if (precision->param != out->dtype) {
        FS_TRY(take_floats(arena, FS_MEM_WIDENED, widened_n(config, form->layout), 1, 1,
                           &out->widened));
    }
    return FS_OK;
}

// ---- rotary tables ------------------------------------------------------------------------------

fs_status
fs_rope_place(const fs_llama_config *config, size_t length, fs_arena *arena, float **out_cosines,
              float **out_sines)
{
    FS_TRY(take_floats(arena, FS_MEM_WORKSPACE, length, config->head_dim / 2, 1, out_cosines));
    return take_floats(arena, FS_MEM_WORKSPACE, length, config->head_dim / 2, 1, out_sines);
}

#define TWO_PI 6.283185307179586

/* Angle per position of pair i (Su et al. 2021), stretched for long contexts. llama3: pairs that
 * turn slowly are stretched by factor, those that turn fast are kept, and between the two it is
 * blended. */
static double
rope_frequency(const fs_llama_config *config, size_t pair)
{
    double exponent = -2.0 * (double)pair / (double)config->head_dim;
    double frequency = pow(config->rope_theta, exponent);
    if (config->rope_kind == FS_ROPE_LINEAR) {
        return frequency / config->rope_factor;
    }
    if (config->rope_kind == FS_ROPE_LLAMA3) {
        double low = config->rope_low_freq_factor, high = config->rope_high_freq_factor;
        double turns = (double)config->rope_original_max_position * frequency / TWO_PI;
        double kept = (turns - low) / (high - low);
        kept = kept < 0.0 ? 0.0 : kept > 1.0 ? 1.0 : kept;
        return (1.0 - kept) * frequency / config->rope_factor + kept * frequency;
    }
    return frequency;
}

/* In fp64, rounded once: a table made in low precision is off by whole turns at large positions. */
void
fs_rope_fill(const fs_llama_config *config, size_t length, float *cosines, float *sines)
{
    size_t pairs = config->head_dim / 2;
    for (size_t pair = 0; pair < pairs; pair++) {
        double frequency = rope_frequency(config, pair);
        for (size_t t = 0; t < length; t++) {
            cosines[t * pairs + pair] = (float)cos((double)t * frequency);
            sines[t * pairs + pair] = (float)sin((double)t * frequency);
        }
    }
}

// ---- plan ---------------------------------------------------------------------------------------

fs_status
fs_llama_plan(const fs_llama_config *config, const fs_layout *layout, const fs_policy *policy,
              bool checkpointing, bool device, size_t batch, size_t length, fs_ledger *plan)
{
    FS_TRY(fs_llama_check(config));
    fs_layer_saved *layers = NULL;
    FS_TRY(fs_calloc(config->num_hidden_layers, sizeof *layers, &layers));
    const fs_form form = {.config = config,
                          .layout = layout,
                          .precision = policy->precision,
                          .checkpointing = checkpointing,
                          .device = device};
    fs_arena arena, host;
    fs_batch at;
    float *cosines, *sines;
    fs_arena_init_counting(&arena, plan, device ? FS_HOME_DEVICE : FS_HOME_PRIVATE);
    fs_arena_init_counting(&host, plan, FS_HOME_PRIVATE);
    fs_status st = fs_rope_place(config, length, &arena, &cosines, &sines);
    if (st == FS_OK) {
        st = fs_llama_place(&form, FS_MODE_TRAIN, batch, length, length, layers, &arena, &host,
                            &at);
    }
    size_t scratch = fs_shards_scratch_nbytes(layout); /* which is in the plan of the shards */
    if (device && scratch < FS_GEMM_SCRATCH_NBYTES) {
        fs_ledger_charge(plan, FS_MEM_SCRATCH, FS_HOME_DEVICE, FS_GEMM_SCRATCH_NBYTES - scratch);
    }
    fs_free(layers);
    return st;
}
