/* Llama-family models (Llama, Mistral, Granite) over shards: forward, backward, loss.
 * One call per micro-batch does all computing and all unit traffic. */
#ifndef FS_MODEL_LLAMA_H
#define FS_MODEL_LLAMA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../shard/shard.h"

typedef enum fs_rope_kind { FS_ROPE_PLAIN = 0, FS_ROPE_LINEAR, FS_ROPE_LLAMA3 } fs_rope_kind;

/* A checked configuration; the names are those of Hugging Face's config.json where it has one. */
typedef struct fs_llama_config {
    size_t vocab_size, hidden_size, intermediate_size;
    size_t num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim;
    size_t max_position_embeddings;
    size_t sliding_window; /* 0: none (Mistral) */
    double rms_norm_eps, rope_theta;
    fs_rope_kind rope_kind;
    double rope_factor, rope_low_freq_factor, rope_high_freq_factor;
    size_t rope_original_max_position;
    bool attention_bias, mlp_bias, tie_word_embeddings;
    /* Granite's multipliers; 1 and 1/sqrt(head_dim) for the others. */
    double embedding_multiplier, residual_multiplier, attention_multiplier, logits_scaling;
} fs_llama_config;

/* Ranges that forward relies on; FS_EINVAL names the field, what it is, and what it may be. */
FS_NODISCARD fs_status
fs_llama_check(const fs_llama_config *config);

/* Definitions for fs_layout_make: units embed, layers.0 .. layers.L-1, head; Hugging Face names.
 * Order of publishing: head, layers from the last to the first, embed. A tied head is the
 * embedding's parameter, whose gradient opens with the head. Everything is trainable and of
 * group 0 until the caller says otherwise. Owner: the caller, who frees it. */
typedef struct fs_llama_defs {
    fs_param_def *params;
    int params_n;
    fs_unit_def *units;
    int units_n;
    char *names; /* storage of the strings above */
} fs_llama_defs;
FS_NODISCARD fs_status
fs_llama_define(const fs_llama_config *config, fs_llama_defs *out);
void fs_llama_defs_free(fs_llama_defs *defs);

typedef struct fs_llama fs_llama;

/* shards must come from fs_llama_define of the same config (FS_EINVAL names the first difference);
 * kept by pointer, not owned. The compute dtype is fp32, bf16 or fp16. checkpointing keeps only the
 * input of each layer and computes the rest again in backward, with the same bits. */
FS_NODISCARD fs_status
fs_llama_open(const fs_llama_config *config, fs_shards *shards, bool checkpointing, fs_llama **out);
void fs_llama_close(fs_llama *llama);

/* Adds what forward_backward of (batch, length) will hold to plan, on a device or on the CPU. */
FS_NODISCARD fs_status
fs_llama_plan(const fs_llama_config *config, const fs_layout *layout, const fs_policy *policy,
              bool checkpointing, bool device, size_t batch, size_t length, fs_ledger *plan);

/* Initial weights by a counter-based generator: element i of parameter p depends on (seed, p, i)
 * alone, whatever the world and the instruction set. Norms 1, biases 0, linear and embedding
 * weights normal with std, projections into the residual stream with std / sqrt(2 * layers).
 * Each rank makes what it keeps. Collective. */
FS_NODISCARD fs_status
fs_llama_init(fs_llama *llama, uint64_t seed, double std);

typedef struct fs_loss {
    double sum;     /* of token losses of this rank, nats */
    int64_t tokens; /* targets that are not -100 */
} fs_loss;

/* tokens, targets: (batch, length) int32, ids below vocab_size, targets -100 = ignored; checked
 * before anything else happens. Gradients of the token SUM are published unit by unit;
 * keep_local as in fs_grad_publish; count < 0 = tokens. The first call of a larger (batch,
 * length) allocates. */
FS_NODISCARD fs_status
fs_llama_forward_backward(fs_llama *llama, const int32_t *tokens, const int32_t *targets,
                          size_t batch, size_t length, int64_t count, bool keep_local,
                          fs_loss *out);

/* Forward only. targets may be NULL: no loss, and out is not touched. logits may be NULL, else
 * (batch, length, vocab_size) fp32, or (batch, vocab_size) of each sequence's last token when
 * last_only (which excludes targets). */
FS_NODISCARD fs_status
fs_llama_forward(fs_llama *llama, const int32_t *tokens, const int32_t *targets, size_t batch,
                 size_t length, bool last_only, float *logits, fs_loss *out);

/* Generation: begin makes room for keys and values of batch sequences of up to capacity tokens
 * (closing what was open); each extend takes the next length tokens of every sequence, (batch,
 * length), and gives the logits of the last ones, (batch, vocab_size). FS_EINVAL when they do
 * not fit, or capacity is over max_position_embeddings. The cache is of the weights it was
 * filled with: a caller that changes them begins again. Gathers as forward does. end gives the
 * memory back; close does too. */
FS_NODISCARD fs_status
fs_llama_cache_begin(fs_llama *llama, size_t batch, size_t capacity);
FS_NODISCARD fs_status
fs_llama_cache_extend(fs_llama *llama, const int32_t *tokens, size_t length, float *logits);
void fs_llama_cache_end(fs_llama *llama);

/* Sums of all ranks' losses, in rank order. Collective: one fence. */
FS_NODISCARD fs_status
fs_llama_loss_sum(fs_llama *llama, const fs_loss *mine, fs_loss *out);

#endif
