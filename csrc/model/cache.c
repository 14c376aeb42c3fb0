/* Generation with a cache of keys and values: each new token costs one pass over the weights and
 * its attention to what came before, instead of a forward over everything. */
#include "../base/checked.h"
#include "parts.h"

/* Places k and v of all layers; run on a counting arena first. */
static fs_status
place_cache(const fs_llama_config *config, fs_dtype dtype, fs_cache *cache, fs_arena *arena)
{
    size_t n, nbytes;
    FS_TRY(fs_mul_size(cache->batch * config->num_key_value_heads, cache->capacity, &n));
    FS_TRY(fs_mul_size(n, fs_padded_dim(config->head_dim), &cache->layer_n));
    FS_TRY(fs_mul_size(cache->layer_n, config->num_hidden_layers, &n));
    FS_TRY(fs_mul_size(n, fs_dtype_nbytes(dtype), &nbytes));
    FS_TRY(fs_arena_take(arena, FS_MEM_CACHE, nbytes, &cache->k));
    return fs_arena_take(arena, FS_MEM_CACHE, nbytes, &cache->v);
}

fs_status
fs_llama_cache_begin(fs_llama *llama, size_t batch, size_t capacity)
{
    fs_llama_cache_end(llama);
    if (batch == 0 || batch > INT32_MAX || capacity == 0 ||
        capacity > llama->config.max_position_embeddings) {
        return FS_FAIL(FS_EINVAL,
                       "a cache of %zu sequences of %zu tokens: the model has %zu positions "
                       "(max_position_embeddings)",
                       batch, capacity, llama->config.max_position_embeddings);
    }
    FS_TRY(fs_world_usable(llama->world));
    fs_cache cache = {.batch = batch, .capacity = capacity};
    fs_dtype dtype = llama->runtime != NULL ? llama->precision.param : FS_F32;
    fs_arena counting;
    fs_arena_init_counting(&counting, NULL, FS_HOME_PRIVATE);
    FS_TRY(place_cache(&llama->config, dtype, &cache, &counting));
    FS_TRY(fs_room_open(llama, "keys and values", false, counting.used, &cache.room));
    fs_status st = place_cache(&llama->config, dtype, &cache, &cache.room.arena);
    if (st != FS_OK) {
        fs_room_close(llama, &cache.room);
        return st;
    }
    llama->cache = cache;
    return FS_OK;
}

void
fs_llama_cache_end(fs_llama *llama)
{
    fs_room_close(llama, &llama->cache.room);
    llama->cache = (fs_cache){.batch = 0};
}

fs_status
fs_llama_cache_extend(fs_llama *llama, const int32_t *tokens, size_t length, float *logits)
{
    fs_cache *cache = &llama->cache;
    if (length == 0 || length > cache->capacity - cache->length) {
        return FS_FAIL(FS_EINVAL, "%zu more tokens for a cache that holds %zu of %zu", length,
                       cache->length, cache->capacity);
    }
    FS_TRY(fs_world_usable(llama->world));
    FS_TRY(fs_llama_check_ids(llama, "ids", tokens, cache->batch * length, length, false));
    FS_TRY(fs_llama_make_room(llama, FS_MODE_FORWARD, cache->batch, length, cache->capacity));
    llama->at.past = cache->length;
    llama->at.kv_rows = cache->capacity;
    for (size_t layer = 0; layer < llama->config.num_hidden_layers; layer++) {
        llama->at.layers[layer].k = fs_act(llama, cache->k, layer * cache->layer_n);
        llama->at.layers[layer].v = fs_act(llama, cache->v, layer * cache->layer_n);
    }
    FS_TRY(fs_llama_ids(llama, tokens, NULL, false));
    FS_TRY(fs_llama_body_forward(llama));
    fs_head_call call = {.logits = logits, .last_only = true};
    FS_TRY(fs_llama_head(llama, &call));
    cache->length += length;
    return FS_OK;
}
