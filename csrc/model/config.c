/* A configuration: what it must fulfil, and the parameters and units that follow from it. */
#include <stdio.h>
#include <string.h>

#include "../base/checked.h"
#include "parts.h"

// ---- checks -------------------------------------------------------------------------------------

/* Matrix sides are ints of the BLAS library, ids are int32. */
#define SIDE_MAX ((size_t)INT32_MAX)

static fs_status
check_side(const char *name, size_t value)
{
    if (value < 1 || value > SIDE_MAX) {
        return FS_FAIL(FS_EINVAL, "%s is %zu: it must be between 1 and %zu", name, value, SIDE_MAX);
    }
    return FS_OK;
}

/* Finite and at least low; positive says that low itself is too small. NaN fails every
 * comparison. */
static fs_status
check_number(const char *name, double value, double low, bool above)
{
    if (!(above ? value > low : value >= low) || !(value < 1e300)) {
        return FS_FAIL(FS_EINVAL, "%s is %g: it must be finite and %s %g", name, value,
                       above ? "above" : "at least", low);
    }
    return FS_OK;
}

static fs_status
check_rope(const fs_llama_config *config)
{
    if (config->rope_kind == FS_ROPE_PLAIN) {
        return FS_OK;
    }
    FS_TRY(check_number("rope factor", config->rope_factor, 1.0, false));
    if (config->rope_kind == FS_ROPE_LLAMA3) {
        FS_TRY(check_number("rope low_freq_factor", config->rope_low_freq_factor, 0.0, true));
        FS_TRY(check_number("rope high_freq_factor", config->rope_high_freq_factor,
                            config->rope_low_freq_factor, true));
        FS_TRY(check_side("rope original_max_position_embeddings",
                          config->rope_original_max_position));
    }
    return FS_OK;
}

fs_status
fs_llama_check(const fs_llama_config *config)
{
    FS_TRY(check_side("vocab_size", config->vocab_size));
    FS_TRY(check_side("hidden_size", config->hidden_size));
    FS_TRY(check_side("intermediate_size", config->intermediate_size));
    FS_TRY(check_side("num_hidden_layers", config->num_hidden_layers));
    FS_TRY(check_side("num_attention_heads", config->num_attention_heads));
    FS_TRY(check_side("num_key_value_heads", config->num_key_value_heads));
    FS_TRY(check_side("max_position_embeddings", config->max_position_embeddings));
    /* The number of parameters is an int, and every name has a fixed room. */
    if (config->num_hidden_layers > 100000) {
        return FS_FAIL(FS_EINVAL, "num_hidden_layers is %zu: at most 100000",
                       config->num_hidden_layers);
    }
    if (config->head_dim < 2 || config->head_dim % 2 != 0 || config->head_dim > FS_HEAD_DIM_MAX) {
        return FS_FAIL(FS_EINVAL,
                       "head_dim is %zu: it must be even (rotary positions turn pairs) and "
                       "between 2 and %d",
                       config->head_dim, FS_HEAD_DIM_MAX);
    }
    if (config->num_attention_heads % config->num_key_value_heads != 0) {
        return FS_FAIL(FS_EINVAL,
                       "num_attention_heads (%zu) is not a multiple of "
                       "num_key_value_heads (%zu)",
                       config->num_attention_heads, config->num_key_value_heads);
    }
    size_t heads, projected;
    FS_TRY(fs_add_size(config->num_attention_heads, 2 * config->num_key_value_heads, &heads));
    FS_TRY(fs_mul_size(heads, config->head_dim, &projected));
    FS_TRY(check_side("(num_attention_heads + 2 num_key_value_heads) * head_dim", projected));
    FS_TRY(check_number("rms_norm_eps", config->rms_norm_eps, 0.0, false));
    FS_TRY(check_number("rope_theta", config->rope_theta, 0.0, true));
    FS_TRY(check_rope(config));
    FS_TRY(check_number("embedding_multiplier", config->embedding_multiplier, -1e30, true));
    FS_TRY(check_number("residual_multiplier", config->residual_multiplier, -1e30, true));
    FS_TRY(check_number("attention_multiplier", config->attention_multiplier, -1e30, true));
    return check_number("logits_scaling", config->logits_scaling, 0.0, true);
}

// ---- roles --------------------------------------------------------------------------------------

static bool
has_role(const fs_llama_config *config, fs_role role)
{
    switch (role) {
    case FS_ROLE_Q_BIAS:
    case FS_ROLE_K_BIAS:
    case FS_ROLE_V_BIAS:
    case FS_ROLE_O_BIAS:
        return config->attention_bias;
    case FS_ROLE_GATE_BIAS:
    case FS_ROLE_UP_BIAS:
    case FS_ROLE_DOWN_BIAS:
        return config->mlp_bias;
    default:
        return true;
    }
}

static int
roles_before(const fs_llama_config *config, fs_role end)
{
    int n = 0;
    for (int role = 0; role < (int)end; role++) {
        n += has_role(config, (fs_role)role);
    }
    return n;
}

int
fs_llama_param(const fs_llama_config *config, size_t layer, fs_role role)
{
    if (!has_role(config, role)) {
        return -1;
    }
    int layer_n = roles_before(config, FS_ROLE_COUNT);
    return 1 + (int)layer * layer_n + roles_before(config, role);
}

int
fs_llama_final_norm(const fs_llama_config *config)
{
    return 1 + (int)config->num_hidden_layers * roles_before(config, FS_ROLE_COUNT);
}

int
fs_llama_lm_head(const fs_llama_config *config)
{
    return config->tie_word_embeddings ? 0 : fs_llama_final_norm(config) + 1;
}

// ---- definitions --------------------------------------------------------------------------------

typedef struct role_text {
    const char *name;
    size_t rows, columns; /* columns 0: a vector */
} role_text;

static role_text
describe_role(const fs_llama_config *config, fs_role role)
{
    size_t hidden = config->hidden_size, wide = config->intermediate_size;
    size_t q = config->num_attention_heads * config->head_dim;
    size_t kv = config->num_key_value_heads * config->head_dim;
    switch (role) {
    case FS_ROLE_NORM1:
        return (role_text){"input_layernorm.weight", hidden, 0};
    case FS_ROLE_Q:
        return (role_text){"self_attn.q_proj.weight", q, hidden};
    case FS_ROLE_K:
        return (role_text){"self_attn.k_proj.weight", kv, hidden};
    case FS_ROLE_V:
        return (role_text){"self_attn.v_proj.weight", kv, hidden};
    case FS_ROLE_Q_BIAS:
        return (role_text){"self_attn.q_proj.bias", q, 0};
    case FS_ROLE_K_BIAS:
        return (role_text){"self_attn.k_proj.bias", kv, 0};
    case FS_ROLE_V_BIAS:
        return (role_text){"self_attn.v_proj.bias", kv, 0};
    case FS_ROLE_O:
        return (role_text){"self_attn.o_proj.weight", hidden, q};
    case FS_ROLE_O_BIAS:
        return (role_text){"self_attn.o_proj.bias", hidden, 0};
    case FS_ROLE_NORM2:
        return (role_text){"post_attention_layernorm.weight", hidden, 0};
    case FS_ROLE_GATE:
        return (role_text){"mlp.gate_proj.weight", wide, hidden};
    case FS_ROLE_UP:
        return (role_text){"mlp.up_proj.weight", wide, hidden};
    case FS_ROLE_GATE_BIAS:
        return (role_text){"mlp.gate_proj.bias", wide, 0};
    case FS_ROLE_UP_BIAS:
        return (role_text){"mlp.up_proj.bias", wide, 0};
    case FS_ROLE_DOWN:
        return (role_text){"mlp.down_proj.weight", hidden, wide};
    case FS_ROLE_DOWN_BIAS:
    default:
        return (role_text){"mlp.down_proj.bias", hidden, 0};
    }
}

/* Room for any name above, with its NUL. */
#define NAME_NBYTES 96

static fs_param_def
param_def(const char *name, size_t rows, size_t columns, int unit)
{
    return (fs_param_def){.name = name,
                          .dims_n = columns == 0 ? 1 : 2,
                          .dims = {rows, columns},
                          .unit = unit,
                          .trainable = true};
}

static void
define_params(const fs_llama_config *config, fs_llama_defs *defs)
{
    char *text = defs->names;
    int p = 0;
    size_t vocab = config->vocab_size, hidden = config->hidden_size;
    int head = fs_llama_head_unit(config);
    defs->params[p] = param_def("model.embed_tokens.weight", vocab, hidden, 0);
    defs->params[p++].tied_name = config->tie_word_embeddings ? "lm_head.weight" : NULL;
    for (size_t layer = 0; layer < config->num_hidden_layers; layer++) {
        for (int role = 0; role < FS_ROLE_COUNT; role++) {
            if (has_role(config, (fs_role)role)) {
                role_text what = describe_role(config, (fs_role)role);
                (void)snprintf(text, NAME_NBYTES, "model.layers.%zu.%s", layer, what.name);
                defs->params[p++] =
                    param_def(text, what.rows, what.columns, fs_llama_layer_unit(layer));
                text += NAME_NBYTES;
            }
        }
    }
    defs->params[p++] = param_def("model.norm.weight", hidden, 0, head);
    if (!config->tie_word_embeddings) {
        defs->params[p] = param_def("lm_head.weight", vocab, hidden, head);
    }
}

static void
define_units(const fs_llama_config *config, fs_llama_defs *defs)
{
    int layers = (int)config->num_hidden_layers, last = layers + 1;
    char *text = defs->names + (size_t)(defs->params_n * NAME_NBYTES);
    defs->units[0] = (fs_unit_def){
        .name = "embed", .opens = config->tie_word_embeddings ? 0 : last, .publishes = last};
    for (int layer = 0; layer < layers; layer++) {
        (void)snprintf(text, NAME_NBYTES, "layers.%d", layer);
        int place = layers - layer;
        defs->units[1 + layer] = (fs_unit_def){.name = text, .opens = place, .publishes = place};
        text += NAME_NBYTES;
    }
    defs->units[last] = (fs_unit_def){.name = "head"};
}

fs_status
fs_llama_define(const fs_llama_config *config, fs_llama_defs *out)
{
    *out = (fs_llama_defs){0};
    FS_TRY(fs_llama_check(config));
    out->params_n = fs_llama_final_norm(config) + (config->tie_word_embeddings ? 1 : 2);
    out->units_n = (int)config->num_hidden_layers + 2;
    fs_status st;
    size_t names = (size_t)out->params_n + (size_t)out->units_n;
    FS_TRY_GOTO(fs_calloc((size_t)out->params_n, sizeof *out->params, &out->params), st, fail);
    FS_TRY_GOTO(fs_calloc((size_t)out->units_n, sizeof *out->units, &out->units), st, fail);
    FS_TRY_GOTO(fs_calloc(names, NAME_NBYTES, &out->names), st, fail);
    define_params(config, out);
    define_units(config, out);
    return FS_OK;
fail:
    fs_llama_defs_free(out);
    return st;
}

void
fs_llama_defs_free(fs_llama_defs *defs)
{
    fs_free(defs->params);
    fs_free(defs->units);
    fs_free(defs->names);
    *defs = (fs_llama_defs){0};
}
