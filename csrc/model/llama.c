/* Open, close, and the calls: check everything, make room, then forward and backward. */
#include "llama.h"

#include <string.h>

#include "../base/checked.h"
#include "parts.h"

// ---- open and close -----------------------------------------------------------------------------

/* The layout must be the one that the configuration defines. */
static fs_status
check_layout(const fs_llama_config *config, const fs_layout *layout)
{
    fs_llama_defs defs;
    FS_TRY(fs_llama_define(config, &defs));
    fs_status st = FS_OK;
    if (layout->params_n != defs.params_n || layout->units_n != defs.units_n) {
        st = FS_FAIL(FS_EINVAL,
                     "the shards hold %d parameters in %d units, the configuration "
                     "defines %d in %d",
                     layout->params_n, layout->units_n, defs.params_n, defs.units_n);
    }
    for (int p = 0; st == FS_OK && p < defs.params_n; p++) {
        const fs_param *got = &layout->params[p];
        const fs_param_def *want = &defs.params[p];
        if (strcmp(got->name, want->name) != 0 || got->dims_n != want->dims_n ||
            got->dims[0] != want->dims[0] || (want->dims_n == 2 && got->dims[1] != want->dims[1]) ||
            got->unit != want->unit) {
            st = FS_FAIL(FS_EINVAL,
                         "parameter %d of the shards is %s, the configuration defines %s "
                         "(%zu x %zu)",
                         p, got->name, want->name, want->dims[0],
                         want->dims_n == 2 ? want->dims[1] : 1);
        }
    }
    fs_llama_defs_free(&defs);
    return st;
}

fs_status
fs_llama_open(const fs_llama_config *config, fs_shards *shards, bool checkpointing, fs_llama **out)
{
    const fs_layout *layout = fs_shards_layout(shards);
    FS_TRY(check_layout(config, layout));
    fs_precision precision = fs_shards_policy(shards)->precision;
    if (precision.param != FS_F32 && precision.param != FS_BF16 && precision.param != FS_F16) {
        return FS_FAIL(FS_EUNSUPPORTED,
                       "the native model computes with float32, bfloat16 or float16 "
                       "weights, not %s",
                       fs_dtype_name(precision.param));
    }
    fs_llama *llama;
    FS_TRY(fs_calloc(1, sizeof *llama, &llama));
    llama->config = *config;
    llama->shards = shards;
    llama->layout = layout;
    llama->precision = precision;
    llama->world = fs_shards_world(shards); /* its ledger must outlive our memory */
    fs_world_retain(llama->world);
    llama->exec = fs_world_exec(llama->world);
    llama->runtime = llama->exec->device->runtime;
    llama->checkpointing = checkpointing;
    fs_status st;
    if (llama->runtime != NULL) {
        fs_context *context = llama->exec->context;
        FS_TRY_GOTO(llama->runtime->event_open(context, &llama->event), st, fail);
        FS_TRY_GOTO(fs_world_reserve(llama->world, llama->exec->stream, FS_GEMM_SCRATCH_NBYTES),
                    st, fail);
        /* No products: what does them is loaded, and told now if it is missing, not amid a step. */
        llama->exec->device->gemms(llama->exec, NULL, 0);
        FS_TRY_GOTO(llama->runtime->check(context), st, fail);
    }
    size_t size = (size_t)fs_world_size(llama->world);
    FS_TRY_GOTO(fs_calloc(config->num_hidden_layers, sizeof *llama->layers, &llama->layers), st,
                fail);
    FS_TRY_GOTO(fs_calloc(size, sizeof *llama->payloads, &llama->payloads), st, fail);
    if (precision.reduce == FS_F16 || (llama->runtime != NULL && precision.param == FS_F16)) {
        /* Gradients of sums over thousands of tokens pass 65,504 at any loss scale above 1; and on
         * a device that of one logit does, at the scale that training begins with. */
        fs_shards_set_prescale(shards, 0x1p-10);
    }
    *out = llama;
    return FS_OK;
fail:
    fs_llama_close(llama);
    return st;
}

void
fs_llama_close(fs_llama *llama)
{
    if (llama == NULL) {
        return;
    }
    fs_llama_cache_end(llama);
    fs_room_close(llama, &llama->room);
    fs_room_close(llama, &llama->host_room);
    fs_room_close(llama, &llama->rope_room);
    if (llama->event != NULL) {
        llama->runtime->event_close(llama->exec->context, llama->event);
    }
    fs_free(llama->layers);
    fs_free(llama->payloads);
    fs_world_release(llama->world);
    fs_free(llama);
}

// ---- room ---------------------------------------------------------------------------------------

/* The rotary tables, filled: on a device by way of memory of the host. */
static fs_status
fill_rope(fs_llama *llama, size_t length)
{
    size_t n = length * (llama->config.head_dim / 2);
    if (llama->runtime == NULL) {
        fs_rope_fill(&llama->config, length, llama->cosines, llama->sines);
        return FS_OK;
    }
    float *filled;
    FS_TRY(fs_calloc(2 * n, sizeof *filled, &filled));
    fs_rope_fill(&llama->config, length, filled, filled + n);
    llama->runtime->copy(llama->exec, llama->cosines, filled, n * sizeof *filled);
    llama->runtime->copy(llama->exec, llama->sines, filled + n, n * sizeof *filled);
    fs_free(filled); /* pageable memory: read before the copy returns */
    return FS_OK;
}

static fs_status
make_rope(fs_llama *llama, size_t length)
{
    if (length <= llama->rope_length) {
        return FS_OK;
    }
    fs_arena counting;
    fs_arena_init_counting(&counting, NULL, FS_HOME_PRIVATE);
    FS_TRY(fs_rope_place(&llama->config, length, &counting, &llama->cosines, &llama->sines));
    llama->rope_length = 0;
    fs_room_close(llama, &llama->rope_room);
    FS_TRY(fs_room_open(llama, "rotary tables", false, counting.used, &llama->rope_room));
    FS_TRY(fs_rope_place(&llama->config, length, &llama->rope_room.arena, &llama->cosines,
                         &llama->sines));
    FS_TRY(fill_rope(llama, length));
    llama->rope_length = length;
    return FS_OK;
}

fs_form
fs_llama_form(const fs_llama *llama)
{
    return (fs_form){.config = &llama->config,
                     .layout = llama->layout,
                     .precision = llama->precision,
                     .checkpointing = llama->checkpointing,
                     .device = llama->runtime != NULL};
}

/* Opens the room anew where it is too small. Else what is placed stands over it, uncounted: the
 * ledger keeps the rows of the largest micro-batch. */
static fs_status
grow_room(fs_llama *llama, const char *what, bool pinned, size_t nbytes, fs_room *room,
          fs_arena *over, fs_arena **out)
{
    if (nbytes <= room->arena.capacity) {
        fs_arena_init_over(over, NULL, room->arena.home, room->arena.base, room->arena.capacity);
        *out = over;
        return FS_OK;
    }
    fs_room_close(llama, room);
    *out = &room->arena;
    return fs_room_open(llama, what, pinned, nbytes, room);
}

fs_status
fs_llama_make_room(fs_llama *llama, fs_mode mode, size_t batch, size_t length, size_t keys)
{
    fs_arena counting, host_counting, over, host_over, *arena, *host;
    fs_form form = fs_llama_form(llama);
    fs_arena_init_counting(&counting, NULL, FS_HOME_PRIVATE);
    fs_arena_init_counting(&host_counting, NULL, FS_HOME_PRIVATE);
    FS_TRY(fs_llama_place(&form, mode, batch, length, keys, llama->layers, &counting,
                          &host_counting, &llama->at));
    FS_TRY(make_rope(llama, keys));
    FS_TRY(grow_room(llama, "activations", false, counting.used, &llama->room, &over, &arena));
    FS_TRY(grow_room(llama, "ids and losses", true, host_counting.used, &llama->host_room,
                     &host_over, &host));
    return fs_llama_place(&form, mode, batch, length, keys, llama->layers, arena, host, &llama->at);
}

// ---- checks -------------------------------------------------------------------------------------

fs_status
fs_llama_check_ids(const fs_llama *llama, const char *what, const int32_t *ids, size_t n,
                   size_t length, bool may_ignore)
{
    size_t vocab = llama->config.vocab_size;
    for (size_t i = 0; i < n; i++) {
        bool fine = ids[i] >= 0 && (size_t)ids[i] < vocab;
        if (!fine && !(may_ignore && ids[i] == FS_TARGET_IGNORED)) {
            return FS_FAIL(FS_EINVAL, "%s[%zu, %zu] is %d: ids are between 0 and %zu%s (rank %d)",
                           what, i / length, i % length, (int)ids[i], vocab - 1,
                           may_ignore ? ", or -100 to be ignored" : "",
                           fs_world_rank(llama->world));
        }
    }
    return FS_OK;
}

static fs_status
check_call(const fs_llama *llama, const int32_t *tokens, const int32_t *targets, size_t batch,
           size_t length)
{
    size_t rows;
    FS_TRY(fs_mul_size(batch, length, &rows));
    if (rows == 0) {
        return FS_FAIL(FS_EINVAL, "a micro-batch of %zu x %zu tokens is empty (rank %d)", batch,
                       length, fs_world_rank(llama->world));
    }
    if (length > llama->config.max_position_embeddings) {
        return FS_FAIL(FS_EINVAL,
                       "sequences of %zu tokens: the model has %zu positions "
                       "(max_position_embeddings)",
                       length, llama->config.max_position_embeddings);
    }
    FS_TRY(fs_world_usable(llama->world));
    FS_TRY(fs_llama_check_ids(llama, "inputs", tokens, rows, length, false));
    return targets == NULL ? FS_OK
                           : fs_llama_check_ids(llama, "targets", targets, rows, length, true);
}

// ---- calls --------------------------------------------------------------------------------------

/* The first unit with something to train: backward need not go below it. */
static int
first_trainable_unit(const fs_llama *llama)
{
    const fs_layout *layout = llama->layout;
    int first = layout->units_n;
    for (int p = 0; p < layout->params_n; p++) {
        if (fs_shards_trains(llama->shards, p) && layout->params[p].unit < first) {
            first = layout->params[p].unit;
        }
    }
    return first;
}

/* The embedding's share, on top of a tied head's; published last. */
static fs_status
embed_backward(fs_llama *llama, fs_sink *sink, bool keep_local)
{
    fs_batch *at = &llama->at;
    fs_embed_grad embed = {.rows = at->rows,
                           .width = llama->config.hidden_size,
                           .vocab = llama->config.vocab_size,
                           .scale = (float)llama->config.embedding_multiplier,
                           .dtype = at->dtype,
                           .dy = at->dx,
                           .first = at->ids.first,
                           .sorted = at->ids.sorted};
    if (fs_sink_begin(llama, sink, 0, &embed.dtable, &embed.add)) {
        llama->exec->device->model.embed_grad(llama->exec, &embed);
        fs_sink_end(llama, sink, 0);
    }
    return fs_sink_publish(llama, sink, keep_local);
}

static fs_status
backward(fs_llama *llama, bool keep_local)
{
    int first = first_trainable_unit(llama);
    int head_unit = fs_llama_head_unit(&llama->config);
    bool tied = llama->config.tie_word_embeddings;
    fs_sink head, embed = {0};
    FS_TRY(fs_sink_open(llama, head_unit, &head));
    if (tied) {
        FS_TRY(fs_sink_open(llama, 0, &embed));
    }
    fs_head_call call = {
        .losses = true, .sink = &head, .tied = &embed, .input_grad = first < head_unit};
    FS_TRY(fs_llama_head(llama, &call));
    FS_TRY(fs_sink_publish(llama, &head, keep_local));
    for (size_t layer = llama->config.num_hidden_layers; layer-- > 0;) {
        int unit = fs_llama_layer_unit(layer);
        if (unit >= first) {
            int next = layer > 0 && unit - 1 >= first ? unit - 1 : -1;
            FS_TRY(fs_llama_layer_backward(llama, layer, next, keep_local));
        }
    }
    if (first > 0) {
        return FS_OK;
    }
    if (!tied) {
        FS_TRY(fs_sink_open(llama, 0, &embed));
    }
    return embed_backward(llama, &embed, keep_local);
}

static int64_t
count_targets(const int32_t *targets, size_t n)
{
    int64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += targets[i] != FS_TARGET_IGNORED;
    }
    return count;
}

fs_status
fs_llama_forward_backward(fs_llama *llama, const int32_t *tokens, const int32_t *targets,
                          size_t batch, size_t length, int64_t count, bool keep_local, fs_loss *out)
{
    FS_TRY(check_call(llama, tokens, targets, batch, length));
    FS_TRY(fs_llama_make_room(llama, FS_MODE_TRAIN, batch, length, length));
    FS_TRY(fs_llama_ids(llama, tokens, targets, true));
    fs_loss loss = {.tokens = count_targets(targets, llama->at.rows)};
    FS_TRY(fs_llama_body_forward(llama));
    FS_TRY(backward(llama, keep_local));
    FS_TRY(fs_round_end(llama->shards, count < 0 ? loss.tokens : count, keep_local));
    FS_TRY(fs_llama_losses(llama, &loss.sum));
    *out = loss;
    return FS_OK;
}

fs_status
fs_llama_forward(fs_llama *llama, const int32_t *tokens, const int32_t *targets, size_t batch,
                 size_t length, bool last_only, float *logits, fs_loss *out)
{
    if (last_only && (targets != NULL || logits == NULL)) {
        return FS_FAIL(FS_EINVAL, "logits of last tokens alone come without a loss");
    }
    FS_TRY(check_call(llama, tokens, targets, batch, length));
    FS_TRY(fs_llama_make_room(llama, FS_MODE_FORWARD, batch, length, length));
    FS_TRY(fs_llama_ids(llama, tokens, targets, false));
    FS_TRY(fs_llama_body_forward(llama));
    fs_head_call call = {.losses = targets != NULL, .logits = logits, .last_only = last_only};
    FS_TRY(fs_llama_head(llama, &call));
    if (targets == NULL) {
        return FS_OK;
    }
    out->tokens = count_targets(targets, llama->at.rows);
    return fs_llama_losses(llama, &out->sum);
}

fs_status
fs_llama_loss_sum(fs_llama *llama, const fs_loss *mine, fs_loss *out)
{
    fs_payload payload = {.d = {mine->sum}};
    payload.i[1] = mine->tokens;
    payload.u[FS_PAYLOAD_OP] = FS_OP_LOSS; /* a rank that skips goes with us, and adds nothing */
    fs_what what = {.op = FS_OP_LOSS, .dtype = -1, .root = -1};
    FS_TRY(fs_meet(llama->world, &what, &payload, llama->payloads, 0));
    *out = (fs_loss){0};
    for (int rank = 0; rank < fs_world_size(llama->world); rank++) {
        out->sum += llama->payloads[rank].d[0];
        out->tokens += llama->payloads[rank].i[1];
    }
    return FS_OK;
}
