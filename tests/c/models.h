/* Small models for C tests: their configurations, a micro-batch, and products without a library. */
#ifndef FS_TESTS_MODELS_H
#define FS_TESTS_MODELS_H

#include "model/llama.h"

enum { BATCH = 2, LENGTH = 67, MODELS = 3 };

// ---- a table whose products need no library -----------------------------------------------------

static inline void
plain_gemm(const fs_exec *exec, const fs_gemm *g)
{
    (void)exec;
    const float *a = g->a, *b = g->b;
    float *c = g->c;
    for (size_t i = 0; i < g->m; i++) {
        for (size_t j = 0; j < g->n; j++) {
            float sum = g->beta == 0.0f ? 0.0f : c[i * g->ldc + j];
            for (size_t k = 0; k < g->k; k++) {
                sum += a[g->trans_a ? k * g->lda + i : i * g->lda + k] *
                       b[g->trans_b ? j * g->ldb + k : k * g->ldb + j];
            }
            c[i * g->ldc + j] = sum;
        }
    }
}

static inline void
plain_gemms(const fs_exec *exec, const fs_gemm *gemms, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        plain_gemm(exec, &gemms[i]);
    }
}

// ---- models -------------------------------------------------------------------------------------

static inline fs_llama_config
config_of(int model)
{
    fs_llama_config config = {.vocab_size = 53,
                              .hidden_size = 20,
                              .intermediate_size = 27,
                              .num_hidden_layers = 2,
                              .num_attention_heads = 4,
                              .num_key_value_heads = 2,
                              .head_dim = 6,
                              .max_position_embeddings = 80,
                              .rms_norm_eps = 1e-5,
                              .rope_theta = 1e4,
                              .embedding_multiplier = 1.0,
                              .residual_multiplier = 1.0,
                              .attention_multiplier = 0.4,
                              .logits_scaling = 1.0};
    if (model == 1) { /* Granite: multipliers, biases, a tied head */
        config.embedding_multiplier = 2.0;
        config.residual_multiplier = 0.5;
        config.logits_scaling = 1.5;
        config.attention_bias = config.mlp_bias = config.tie_word_embeddings = true;
    }
    if (model == 2) { /* Mistral, with long positions */
        config.sliding_window = 9;
        config.rope_kind = FS_ROPE_LLAMA3;
        config.rope_factor = 8.0;
        config.rope_low_freq_factor = 1.0;
        config.rope_high_freq_factor = 4.0;
        config.rope_original_max_position = 32;
    }
    return config;
}

/* Every position wants the token that follows it; the second rank's data differ. */
static inline void
fill(int32_t *tokens, int32_t *targets, int rank)
{
    for (int i = 0; i < BATCH * LENGTH; i++) {
        tokens[i] = (int32_t)((i * i + 3 * i + rank) % 53);
        int next = i + 1;
        targets[i] = i % 7 == 0 ? -100 : (int32_t)((next * next + 3 * next + rank) % 53);
    }
}

#endif
