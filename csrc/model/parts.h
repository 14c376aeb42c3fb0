/* What the files of the model share: where parameters are, what a micro-batch holds, and the small
 * steps that forward and backward are made of. Private to this folder. */
#ifndef FS_MODEL_PARTS_H
#define FS_MODEL_PARTS_H

#include "llama.h"

// ---- parameters ---------------------------------------------------------------------------------

/* Parameters of a layer in the order of its unit. q, k, v and gate, up lie side by side. */
typedef enum fs_role {
    FS_ROLE_NORM1 = 0, FS_ROLE_Q, FS_ROLE_K, FS_ROLE_V, FS_ROLE_Q_BIAS, FS_ROLE_K_BIAS,
    FS_ROLE_V_BIAS, FS_ROLE_O, FS_ROLE_O_BIAS, FS_ROLE_NORM2, FS_ROLE_GATE, FS_ROLE_UP,
    FS_ROLE_GATE_BIAS, FS_ROLE_UP_BIAS, FS_ROLE_DOWN, FS_ROLE_DOWN_BIAS, FS_ROLE_COUNT
} fs_role;

/* Index of a layer's parameter in the layout; -1 when the configuration has none. */
int fs_llama_param(const fs_llama_config *config, size_t layer, fs_role role);
/* The embedding is parameter 0; the final norm follows the layers, then an untied head. */
int fs_llama_final_norm(const fs_llama_config *config);
int fs_llama_lm_head(const fs_llama_config *config);

/* Units in layout order. */
static inline int
fs_llama_layer_unit(size_t layer)
{
    return 1 + (int)layer;
}

static inline int
fs_llama_head_unit(const fs_llama_config *config)
{
    return 1 + (int)config->num_hidden_layers;
}

// ---- activations --------------------------------------------------------------------------------

/* Activations are fp32 on the CPU, and of the compute dtype on a device, which then needs no
 * widened image of weights. Pointers without a type are to elements of that dtype; see fs_act. */

/* What forward keeps of one layer for its backward. Rows are batch * length. */
typedef struct fs_layer_saved {
    void *x;         /* (rows, hidden): input, the residual stream */
    float *rstd1;    /* (rows) */
    void *q, *k, *v; /* packed, rotated, q scaled */
    void *attended;  /* (rows, q_heads * head_dim) */
    float *lse;      /* (batch, q_heads, length) */
    void *middle;    /* (rows, hidden): residual stream after attention */
    float *rstd2;    /* (rows) */
    void *gate, *up; /* (rows, intermediate), without biases */
} fs_layer_saved;

typedef enum fs_mode { FS_MODE_FORWARD = 0, FS_MODE_TRAIN } fs_mode;

/* What decides how micro-batches are placed. */
typedef struct fs_form {
    const fs_llama_config *config;
    const fs_layout *layout;
    fs_precision precision;
    bool checkpointing;
    bool device;
} fs_form;

/* Token ids and rows by id, as operations read them. first and sorted: see fs_embed_grad. */
typedef struct fs_ids {
    int32_t *tokens, *targets; /* (rows) */
    int32_t *first, *sorted;
} fs_ids;

/* Every buffer of one micro-batch, placed by fs_llama_place. */
typedef struct fs_batch {
    fs_dtype dtype;    /* of activations */
    fs_dtype rounding; /* what products may round activations, gradients and weights to */
    size_t batch, length, rows;
    size_t past, kv_rows; /* of attention: 0 and length, unless keys are cached */
    size_t padded_dim, padded_length;
    size_t slice;  /* rows of one slice of the head */
    fs_layer_saved *layers; /* [num_hidden_layers], of fs_llama */
    void *last;         /* (rows, hidden): residual stream after the layers */
    float *rstd_last;   /* (rows) */
    void *normed;       /* (rows, hidden) */
    void *branch;       /* (rows, hidden): output of a projection into the stream; its gradient */
    void *branch_bias;  /* (hidden): copy of the bias that waits to be added with branch */
    void *wide;         /* (rows, intermediate) */
    void *projected;    /* (rows, (q_heads + 2 kv_heads) * head_dim) */
    float *k_turned, *v_turned; /* CPU */
    float *logits;      /* (slice, vocab) */
    fs_ids ids;         /* on the CPU the caller's tokens and targets */
    double *losses;     /* (rows); the host reads them */
    /* Of a device, in memory that the host writes and reads. */
    fs_ids host_ids;
    float *landing;     /* (slice, vocab): logits on their way to the caller; forward alone */
    /* Backward alone. */
    void *dlogits;      /* (slice, vocab); logits where activations are fp32 */
    void *dx;           /* (rows, hidden): gradient of the residual stream */
    void *scaled;       /* (rows, hidden): dx times the residual multiplier; dx where that is 1 */
    void *dattended;    /* (rows, q_heads * head_dim) */
    float *dattended_packed; /* CPU */
    float *delta;       /* (batch, q_heads, length) */
    void *dq, *dk, *dv; /* packed */
    float *norm_partial;
    /* Weights. */
    float *widened;     /* CPU: fp32 image of what is gathered; NULL when weights are fp32 */
    float *staged;      /* a parameter's gradient on its way to a slot that is not fp32, or NULL */
} fs_batch;

/* Places all buffers of a micro-batch in arena, and what a device exchanges with the host in host
 * (the CPU has no use for it); run on counting arenas it is the plan. keys: the most keys that
 * attention sees, at least length. */
FS_NODISCARD fs_status
fs_llama_place(const fs_form *form, fs_mode mode, size_t batch, size_t length, size_t keys,
               fs_layer_saved *layers, fs_arena *arena, fs_arena *host, fs_batch *out);

/* Rotary tables (length, head_dim / 2). */
FS_NODISCARD fs_status
fs_rope_place(const fs_llama_config *config, size_t length, fs_arena *arena, float **out_cosines,
              float **out_sines);
/* In memory of the host. */
void fs_rope_fill(const fs_llama_config *config, size_t length, float *cosines, float *sines);

/* Memory of the model, and the arena over it: this process's on the CPU, else the device's or,
 * pinned, the host's. */
typedef struct fs_room {
    fs_arena arena;
    void *memory; /* of the runtime; NULL: the arena's own */
    size_t nbytes;
    bool pinned;
} fs_room;

/* Keys and values of tokens that generation has seen. */
typedef struct fs_cache {
    fs_room room;
    size_t batch, capacity; /* sequences, tokens of each; 0: none open */
    size_t length;          /* tokens held */
    size_t layer_n;         /* elements of one layer's k, and of its v */
    void *k, *v;            /* (layers, batch, kv_heads, capacity, padded_dim) */
} fs_cache;

// ---- the model ----------------------------------------------------------------------------------

/* Owner: whoever opened it; the shards outlive it. */
struct fs_llama {
    fs_llama_config config;
    fs_shards *shards;
    const fs_layout *layout;
    fs_precision precision;
    fs_world *world;
    const fs_exec *exec;
    const fs_runtime *runtime; /* of the device; NULL on the CPU */
    fs_event *event; /* of a device: what the host last gave it, or waits for */
    bool checkpointing;
    fs_room room; /* buffers of the largest micro-batch so far */
    fs_room host_room;
    fs_room rope_room;
    size_t rope_length;
    float *cosines, *sines;
    fs_layer_saved *layers;
    fs_cache cache;
    fs_payload *payloads; /* [world size], for fs_llama_loss_sum */
    fs_batch at;          /* the current micro-batch */
};

/* Places the buffers of a micro-batch and fills the rotary tables; maps memory only when they need
 * more than any before. */
FS_NODISCARD fs_status
fs_llama_make_room(fs_llama *llama, fs_mode mode, size_t batch, size_t length, size_t keys);

/* fs_form of the model. */
fs_form fs_llama_form(const fs_llama *llama);

/* Element n of an array of activations. */
static inline void *
fs_act(const fs_llama *llama, const void *array, size_t n)
{
    return (char *)(uintptr_t)array + n * fs_dtype_nbytes(llama->at.dtype);
}

/* Every id of (n / length, length) is below vocab_size, or -100 where may_ignore. */
FS_NODISCARD fs_status
fs_llama_check_ids(const fs_llama *llama, const char *what, const int32_t *ids, size_t n,
                   size_t length, bool may_ignore);

/* A unit's weights in the dtype of activations: element offset of a parameter. */
typedef struct fs_unit_weights {
    int unit;
    const void *weights;
} fs_unit_weights;

/* Gathers (and on the CPU widens) a unit; widened_at_n: where in the widened image, elements. */
FS_NODISCARD fs_status
fs_llama_gather(fs_llama *llama, int unit, size_t widened_at_n, fs_unit_weights *out);
FS_NODISCARD fs_status
fs_llama_release(fs_llama *llama, const fs_unit_weights *weights);

/* A layer's parameter among its weights; NULL for a bias it does not have. */
const void *fs_layer_weight(const fs_llama *llama, const fs_unit_weights *weights, size_t layer,
                            fs_role role);
/* The arrays of a layer's SwiGLU, for it and for its gradient. */
fs_swiglu fs_layer_swiglu(const fs_llama *llama, const fs_unit_weights *weights, size_t layer);
static inline const void *
fs_param_weight(const fs_llama *llama, const fs_unit_weights *weights, int param)
{
    return fs_act(llama, weights->weights, llama->layout->params[param].offset_n);
}

/* y = x W', dx (+)= dy W; W is (out, in); ld of x and dx is in. Made here, run by fs_multiply:
 * several at once where none needs another's result, so that threads share their tiles. */
fs_gemm fs_linear(const fs_llama *llama, void *y, size_t ldy, const void *x, const void *weight,
                  size_t rows, size_t in, size_t out);
fs_gemm fs_linear_input_grad(const fs_llama *llama, void *dx, const void *dy, size_t ldy,
                             const void *weight, size_t rows, size_t in, size_t out, bool add);
void fs_multiply(const fs_llama *llama, const fs_gemm *gemms, size_t n);

/* Forward of one layer, from its saved input on; stops before the output projection of the MLP
 * when again (checkpointing: the rest is not needed). at->branch then waits to be added to
 * saved->middle. */
void fs_llama_layer_forward(fs_llama *llama, size_t layer, const fs_unit_weights *weights,
                            const fs_norm *norm1, bool again);

/* Embedding and layers; leaves the last layer's branch waiting in at.branch. */
FS_NODISCARD fs_status
fs_llama_body_forward(fs_llama *llama);

/* Operations of a layer with what they share filled in. */
fs_heads fs_llama_heads(const fs_llama *llama);
fs_attention fs_llama_attention(const fs_llama *llama, const fs_layer_saved *saved);

// ---- host and device (host.c) -------------------------------------------------------------------

/* On the CPU memory of this process, whatever pinned says. */
FS_NODISCARD fs_status
fs_room_open(const fs_llama *llama, const char *what, bool pinned, size_t nbytes, fs_room *out);
/* Waits for a device. Fine on a zeroed room. */
void fs_room_close(const fs_llama *llama, fs_room *room);

/* Makes tokens and targets (or NULL) of the micro-batch at.ids; with rows by id where the embedding
 * trains and train is set. */
FS_NODISCARD fs_status
fs_llama_ids(fs_llama *llama, const int32_t *tokens, const int32_t *targets, bool train);
/* n elements of at.logits to an array of the caller's; waits for the device. */
FS_NODISCARD fs_status
fs_llama_logits(fs_llama *llama, size_t n, float *out);
/* Sum of at.losses, in index order; waits for the device. */
FS_NODISCARD fs_status
fs_llama_losses(fs_llama *llama, double *out);

// ---- gradients ----------------------------------------------------------------------------------

/* Where a unit's gradients of this micro-batch go: its slot, straight where that is fp32, else one
 * by one by way of at.staged. */
typedef struct fs_sink {
    int unit;
    void *slot;  /* of precision.reduce; NULL: nothing trainable */
    bool open;   /* the unit takes part */
    bool staged;
    bool add;    /* the slot holds this round's sum already */
} fs_sink;

FS_NODISCARD fs_status
fs_sink_open(fs_llama *llama, int unit, fs_sink *out);
/* The target of a parameter's gradient, or false when it is frozen. */
bool fs_sink_begin(fs_llama *llama, const fs_sink *sink, int param, float **out, bool *out_add);
/* The parameter's gradient is complete. */
void fs_sink_end(fs_llama *llama, const fs_sink *sink, int param);
FS_NODISCARD fs_status
fs_sink_publish(fs_llama *llama, const fs_sink *sink, bool keep_local);

/* dW (+)= dy' x of n parameters into the sink, frozen ones left out; W is (out, in). beside:
 * another product that may run at the same time, or NULL. */
typedef struct fs_weight_grad {
    int param;
    const void *dy; /* (rows, out) with stride ldy */
    size_t ldy;
    const void *x; /* (rows, in) */
} fs_weight_grad;
#define FS_WEIGHT_GRADS_MAX 3
void
fs_weight_grads(fs_llama *llama, const fs_sink *sink, const fs_weight_grad *grads, size_t n,
                const fs_gemm *beside);
/* Column sums of dy into the sink, unless there is no such bias (param -1) or it is frozen. */
void
fs_bias_grad(fs_llama *llama, const fs_sink *sink, int param, const void *dy, size_t ldy);
/* Backward of a norm: at.branch holds the gradient of its output, then its output; at.dx is
 * written, or added to. */
void
fs_norm_backward(fs_llama *llama, const fs_sink *sink, int param, const void *x, const float *rstd,
                 const void *weight, bool dx_add);

/* Final norm and head, in slices of tokens; gathers and releases their unit (and the table of a
 * tied head). Gradients of the head and the norm are written when there is a sink. */
typedef struct fs_head_call {
    bool losses;            /* at.losses are wanted */
    float *logits;          /* (rows, vocab) of the caller or NULL */
    bool last_only;         /* logits of each sequence's last token alone */
    fs_sink *sink;          /* of the head unit; NULL: no gradients */
    fs_sink *tied;          /* of the embedding, where the head is tied */
    bool input_grad;        /* the gradient of the stream is wanted in at.dx */
    bool normed_grad;       /* set by the call: the gradient of the normed rows is needed */
} fs_head_call;
FS_NODISCARD fs_status
fs_llama_head(fs_llama *llama, fs_head_call *call);

/* Backward of one layer: at.dx in and out. next: the unit that is gathered after it, or -1. */
FS_NODISCARD fs_status
fs_llama_layer_backward(fs_llama *llama, size_t layer, int next, bool keep_local);

#endif
