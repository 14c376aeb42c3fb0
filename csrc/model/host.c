/* What host and device exchange: memory for both, ids in, losses and logits out. On the CPU arrays
 * are where they are, and there is nobody to wait for. */
#include <string.h>

#include "parts.h"

// ---- memory -------------------------------------------------------------------------------------

fs_status
fs_room_open(const fs_llama *llama, const char *what, bool pinned, size_t nbytes, fs_room *out)
{
    fs_ledger *ledger = fs_world_ledger(llama->world);
    const fs_runtime *runtime = llama->runtime;
    *out = (fs_room){.nbytes = nbytes, .pinned = pinned};
    if (runtime == NULL) {
        return fs_arena_open(&out->arena, ledger, nbytes);
    }
    fs_context *context = llama->exec->context;
    FS_TRY(pinned ? runtime->pinned_open(context, nbytes, &out->memory)
                  : runtime->memory_open(context, what, nbytes, &out->memory));
    fs_arena_init_over(&out->arena, ledger, pinned ? FS_HOME_PRIVATE : FS_HOME_DEVICE, out->memory,
                       nbytes);
    return FS_OK;
}

void
fs_room_close(const fs_llama *llama, fs_room *room)
{
    fs_arena_close(&room->arena);
    if (room->memory != NULL && room->pinned) {
        llama->runtime->pinned_close(llama->exec->context, room->memory);
    } else if (room->memory != NULL) {
        llama->runtime->memory_close(llama->exec->context, room->memory, room->nbytes);
    }
    *room = (fs_room){.nbytes = 0};
}

// ---- waiting ------------------------------------------------------------------------------------

/* Until the device has come past the event. */
static fs_status
wait_for_event(fs_llama *llama)
{
    FS_TRY(fs_world_await(llama->world, llama->event, 0));
    return llama->runtime->check(llama->exec->context);
}

static fs_status
wait_for_all(fs_llama *llama)
{
    llama->runtime->record(llama->exec, llama->event);
    return wait_for_event(llama);
}

// ---- ids ----------------------------------------------------------------------------------------

static void
send(fs_llama *llama, int32_t *to, const int32_t *from, size_t n)
{
    llama->runtime->copy(llama->exec, to, from, n * sizeof *to);
}

fs_status
fs_llama_ids(fs_llama *llama, const int32_t *tokens, const int32_t *targets, bool train)
{
    fs_batch *at = &llama->at;
    size_t vocab = llama->config.vocab_size;
    bool sorted = train && fs_shards_trains(llama->shards, 0);
    if (llama->runtime == NULL) {
        at->ids.tokens = (int32_t *)(uintptr_t)tokens; /* read alone */
        at->ids.targets = (int32_t *)(uintptr_t)targets;
        if (sorted) {
            fs_sort_rows(tokens, at->rows, vocab, at->ids.first, at->ids.sorted);
        }
        return FS_OK;
    }
    /* A call that failed half way may have left the device behind. */
    FS_TRY(wait_for_event(llama));
    memcpy(at->host_ids.tokens, tokens, at->rows * sizeof *tokens);
    send(llama, at->ids.tokens, at->host_ids.tokens, at->rows);
    if (targets != NULL) {
        memcpy(at->host_ids.targets, targets, at->rows * sizeof *targets);
        send(llama, at->ids.targets, at->host_ids.targets, at->rows);
    }
    if (sorted) {
        fs_sort_rows(tokens, at->rows, vocab, at->host_ids.first, at->host_ids.sorted);
        send(llama, at->ids.first, at->host_ids.first, vocab + 1);
        send(llama, at->ids.sorted, at->host_ids.sorted, at->rows);
    }
    llama->runtime->record(llama->exec, llama->event);
    return FS_OK;
}

// ---- results ------------------------------------------------------------------------------------

fs_status
fs_llama_logits(fs_llama *llama, size_t n, float *out)
{
    const fs_batch *at = &llama->at;
    llama->runtime->copy(llama->exec, at->landing, at->logits, n * sizeof *out);
    FS_TRY(wait_for_all(llama));
    memcpy(out, at->landing, n * sizeof *out);
    return FS_OK;
}

fs_status
fs_llama_losses(fs_llama *llama, double *out)
{
    if (llama->runtime != NULL) {
        FS_TRY(wait_for_all(llama));
    }
    double sum = 0.0;
    for (size_t r = 0; r < llama->at.rows; r++) {
        sum += llama->at.losses[r];
    }
    *out = sum;
    return FS_OK;
}
