/* Shards, or anything that gives elements, into files. */
#include <stdio.h>
#include <string.h>

#include "../base/checked.h"
#include "commit.h"
#include "pieces.h"

// ---- streaming ----------------------------------------------------------------------------------

static fs_status
stream_tensor(fs_writer *writer, const fs_tensor_def *def, size_t index, fs_source source,
              void *ctx)
{
    size_t nbytes = fs_dtype_nbytes(def->dtype), numel = 1;
    for (size_t d = 0; d < def->dims_n; d++) {
        FS_TRY(fs_mul_size(numel, def->dims[d], &numel));
    }
    for (size_t begin = 0; begin < numel;) {
        unsigned char *to;
        size_t room;
        FS_TRY(fs_writer_room(writer, &to, &room));
        size_t end = begin + fs_min_size(room / nbytes, numel - begin);
        FS_TRY(source(ctx, index, begin, end, to, def->dtype));
        fs_writer_advance(writer, (end - begin) * nbytes);
        begin = end;
    }
    return FS_OK;
}

static fs_status
stream(const char *folder, const char *name, const fs_header *header, const fs_tensor_def *defs,
       size_t defs_n, fs_source source, void *ctx, fs_ledger *ledger, fs_blocks *out_blocks)
{
    fs_writer writer;
    fs_status st;
    FS_TRY(fs_writer_open(folder, name, ledger, &writer));
    FS_TRY_GOTO(fs_writer_put(&writer, header->bytes, header->nbytes), st, done);
    for (size_t d = 0; d < defs_n; d++) {
        FS_TRY_GOTO(stream_tensor(&writer, &defs[d], d, source, ctx), st, done);
    }
    st = fs_writer_finish(&writer, out_blocks);
done:
    fs_writer_discard(&writer);
    return st;
}

fs_status
fs_stream(const char *folder, const char *name, const fs_tensor_def *defs, size_t defs_n,
          const fs_text_pair *metadata, size_t metadata_n, fs_source source, void *ctx,
          fs_ledger *ledger, fs_blocks *out_blocks)
{
    fs_header header;
    FS_TRY(fs_header_make(defs, defs_n, metadata, metadata_n, &header));
    fs_status st = stream(folder, name, &header, defs, defs_n, source, ctx, ledger, out_blocks);
    fs_header_free(&header);
    return st;
}

// ---- a rank's file ------------------------------------------------------------------------------

void
fs_rank_file_name(int rank, int size, char *buffer)
{
    (void)snprintf(buffer, 64, "rank-%05d-of-%05d.safetensors", rank, size);
}

/* One tensor of a rank's file. */
typedef struct item {
    const fs_seg *seg;
    fs_array array;
    size_t numel;
} item;

typedef struct save {
    fs_shards *shards; /* NULL: only what would be written */
    item *items;
    fs_tensor_def *defs;
    char **names;
    size_t n, capacity;
} save;

static void
save_close(save *call)
{
    for (size_t i = 0; i < call->n; i++) {
        fs_free(call->names[i]);
    }
    fs_free(call->names);
    fs_free(call->items);
    fs_free(call->defs);
}

/* The state array of a segment that is written, and its dtype: masters stand for their weights. */
static fs_dtype
dtype_of(const fs_policy *policy, const fs_seg *seg, fs_array array)
{
    const fs_precision *precision = &policy->precision;
    if (array != FS_MASTER) {
        return precision->moments;
    }
    return precision->master && seg->pos_n != FS_FROZEN ? FS_F32 : precision->param;
}

static fs_status
add_item(save *call, const fs_layout *layout, const fs_seg *seg, fs_array array, fs_dtype dtype)
{
    const char *param = layout->params[seg->param].name;
    char *name;
    size_t nbytes = strlen(param) + 64;
    FS_TRY(fs_calloc(nbytes, 1, &name));
    (void)snprintf(name, nbytes, "%s:%s:%zu", param, fs_state_name(array), seg->begin);
    item *to = &call->items[call->n];
    *to = (item){seg, array, seg->end - seg->begin};
    call->defs[call->n] = (fs_tensor_def){name, dtype, 1, &to->numel};
    call->names[call->n] = name;
    call->n++;
    return FS_OK;
}

/* Lists what a rank speaks for, wider dtypes first so that everything lies aligned. */
static fs_status
list_items(save *call, const fs_layout *layout, const fs_policy *policy, int rank, int moments_n)
{
    static const fs_array arrays[1 + FS_MOMENTS_MAX] = {FS_MASTER, FS_MOMENT1, FS_MOMENT2,
                                                        FS_MOMENT3};
    fs_seg_range all = fs_segs(layout, rank, -1);
    call->capacity = (size_t)(all.end - all.seg) * (size_t)(1 + moments_n);
    FS_TRY(fs_calloc(call->capacity, sizeof *call->items, &call->items));
    FS_TRY(fs_calloc(call->capacity, sizeof *call->defs, &call->defs));
    FS_TRY(fs_calloc(call->capacity, sizeof *call->names, &call->names));
    for (size_t width = 8; width > 0; width /= 2) {
        for (fs_seg_range s = all; s.seg < s.end; s.seg++) {
            for (int a = 0; a <= moments_n && (a == 0 || s.seg->pos_n != FS_FROZEN); a++) {
                fs_dtype dtype = dtype_of(policy, s.seg, arrays[a]);
                if (fs_dtype_nbytes(dtype) == width) {
                    FS_TRY(add_item(call, layout, s.seg, arrays[a], dtype));
                }
            }
        }
    }
    return FS_OK;
}

static fs_status
from_shards(void *ctx, size_t index, size_t begin, size_t end, void *dst, fs_dtype dtype)
{
    const save *call = ctx;
    const item *it = &call->items[index];
    FS_TRY(fs_world_pause(fs_shards_world(call->shards)));
    return fs_load_kept(call->shards, it->seg->param, it->array, it->seg->begin + begin,
                        it->seg->begin + end, dst, dtype);
}

/* Every rank's checksums; blocks[rank] is ours already. */
static fs_status
share_blocks(fs_world *world, const uint64_t *nbytes, fs_blocks *blocks)
{
    int size = fs_world_size(world), rank = fs_world_rank(world);
    char *all;
    size_t *counts;
    FS_TRY(fs_share(world, FS_OP_SAVE, FS_OK, blocks[rank].crc, blocks[rank].n * sizeof(uint32_t),
                    &all, &counts));
    const char *from = all;
    fs_status st = FS_OK;
    for (int r = 0; r < size && st == FS_OK; from += counts[r], r++) {
        if (r != rank) {
            st = fs_calloc(counts[r], 1, &blocks[r].crc);
        }
        if (r != rank && st == FS_OK) {
            memcpy(blocks[r].crc, from, counts[r]);
            blocks[r].n = counts[r] / sizeof(uint32_t);
            blocks[r].nbytes = (size_t)nbytes[r];
        }
    }
    fs_free(all);
    fs_free(counts);
    return st;
}

/* Collective: lists what this rank writes, and looks whether folder has room for what all ranks
 * write. Fails on all ranks if it fails on one. nbytes: world size entries, of every rank's
 * file. */
static fs_status
prepare(save *call, const char *folder, int moments_n, fs_header *header, uint64_t *nbytes)
{
    fs_shards *shards = call->shards;
    fs_world *world = fs_shards_world(shards);
    int size = fs_world_size(world), rank = fs_world_rank(world);
    char rank_text[16], size_text[16];
    (void)snprintf(rank_text, sizeof rank_text, "%d", rank);
    (void)snprintf(size_text, sizeof size_text, "%d", size);
    const fs_text_pair metadata[] = {{"format", "flatshard 1"}, {"rank", rank_text},
                                     {"world_size", size_text}};
    fs_status st = fs_shards_whole(shards);
    if (st == FS_OK && (moments_n < 0 || moments_n > fs_shards_moments_n(shards))) {
        st = FS_FAIL(FS_EINVAL, "%d moments are to be saved, the optimizer keeps %d", moments_n,
                     fs_shards_moments_n(shards));
    }
    if (st == FS_OK) {
        st = list_items(call, fs_shards_layout(shards), fs_shards_policy(shards), rank, moments_n);
    }
    st = st == FS_OK ? fs_header_make(call->defs, call->n, metadata, 3, header) : st;
    FS_TRY(fs_agree(world, FS_OP_SAVE, st, header->nbytes + header->data_nbytes, nbytes));
    size_t total = 0;
    for (int r = 0; r < size && st == FS_OK; r++) {
        st = fs_add_size(total, (size_t)nbytes[r], &total);
    }
    st = st == FS_OK ? fs_room_check(folder, total) : st;
    return fs_agree(world, FS_OP_SAVE, st, 0, NULL);
}

fs_status
fs_save(fs_shards *shards, const char *folder, int moments_n, fs_blocks **out_blocks)
{
    fs_world *world = fs_shards_world(shards);
    int size = fs_world_size(world), rank = fs_world_rank(world);
    save call = {.shards = shards};
    fs_header header = {0};
    fs_blocks *blocks = NULL;
    uint64_t nbytes[FS_RANKS_MAX];
    char name[64];
    fs_rank_file_name(rank, size, name);
    fs_status st;
    FS_TRY_GOTO(prepare(&call, folder, moments_n, &header, nbytes), st, done);
    st = fs_calloc((size_t)size, sizeof *blocks, &blocks);
    if (st == FS_OK) {
        st = stream(folder, name, &header, call.defs, call.n, from_shards, &call,
                    fs_world_ledger(world), &blocks[rank]);
    }
    FS_TRY_GOTO(fs_agree(world, FS_OP_SAVE, st, 0, NULL), st, done);
    st = share_blocks(world, nbytes, blocks);
    FS_TRY_GOTO(fs_agree(world, FS_OP_SAVE, st, 0, NULL), st, done);
    *out_blocks = blocks;
    blocks = NULL;
done:
    for (int r = 0; blocks != NULL && r < size; r++) {
        fs_blocks_free(&blocks[r]);
    }
    fs_free(blocks);
    fs_header_free(&header);
    save_close(&call);
    return st;
}

// ---- behind the training ------------------------------------------------------------------------

struct fs_snapshot {
    save call;
    fs_header header;
    char name[64];
    fs_arena arena;
    unsigned char **data; /* of each item */
    fs_ledger *ledger;
};

/* Takes memory for a copy of each item; data (call->n entries) may be NULL where arena counts. */
static fs_status
place_items(const save *call, fs_arena *arena, unsigned char **data)
{
    for (size_t i = 0; i < call->n; i++) {
        size_t nbytes = call->items[i].numel * fs_dtype_nbytes(call->defs[i].dtype);
        unsigned char *counted;
        FS_TRY(fs_arena_take(arena, FS_MEM_CHECKPOINT, nbytes, data != NULL ? &data[i] : &counted));
    }
    return FS_OK;
}

static fs_status
copy_items(fs_snapshot *snapshot)
{
    save *call = &snapshot->call;
    fs_arena counting;
    fs_arena_init_counting(&counting, NULL, FS_HOME_PRIVATE);
    FS_TRY(place_items(call, &counting, NULL));
    FS_TRY(fs_calloc(call->n, sizeof *snapshot->data, &snapshot->data));
    FS_TRY(fs_arena_open(&snapshot->arena, snapshot->ledger, counting.used));
    FS_TRY(place_items(call, &snapshot->arena, snapshot->data));
    for (size_t i = 0; i < call->n; i++) {
        FS_TRY(from_shards(call, i, 0, call->items[i].numel, snapshot->data[i],
                           call->defs[i].dtype));
    }
    return FS_OK;
}

fs_status
fs_snapshot_plan(const fs_layout *layout, const fs_policy *policy, int moments_n, int rank,
                 fs_ledger *plan)
{
    save call = {0};
    fs_arena copy, buffer;
    void *ignored;
    fs_ledger shards = {0};
    /* Checks all of them. */
    FS_TRY(fs_shards_plan(layout, policy, moments_n, rank, false, &shards));
    fs_arena_init_counting(&copy, plan, FS_HOME_PRIVATE);
    fs_arena_init_counting(&buffer, plan, FS_HOME_PRIVATE);
    fs_status st = list_items(&call, layout, policy, rank, moments_n);
    st = st == FS_OK ? place_items(&call, &copy, NULL) : st;
    st = st == FS_OK
             ? fs_arena_take(&buffer, FS_MEM_CHECKPOINT, FS_WRITER_NBYTES, &ignored)
             : st;
    save_close(&call);
    return st;
}

static fs_status
from_memory(void *ctx, size_t index, size_t begin, size_t end, void *dst, fs_dtype dtype)
{
    const fs_snapshot *snapshot = ctx;
    size_t nbytes = fs_dtype_nbytes(dtype);
    memcpy(dst, snapshot->data[index] + begin * nbytes, (end - begin) * nbytes);
    return FS_OK;
}

fs_status
fs_snapshot_open(fs_shards *shards, const char *folder, int moments_n, fs_snapshot **out)
{
    fs_world *world = fs_shards_world(shards);
    uint64_t nbytes[FS_RANKS_MAX];
    fs_snapshot *snapshot = NULL;
    fs_status st = fs_calloc(1, sizeof *snapshot, &snapshot);
    FS_TRY_GOTO(fs_agree(world, FS_OP_SAVE, st, 0, NULL), st, fail);
    snapshot->call.shards = shards;
    snapshot->ledger = fs_world_ledger(world);
    fs_rank_file_name(fs_world_rank(world), fs_world_size(world), snapshot->name);
    FS_TRY_GOTO(prepare(&snapshot->call, folder, moments_n, &snapshot->header, nbytes), st, fail);
    FS_TRY_GOTO(fs_agree(world, FS_OP_SAVE, copy_items(snapshot), 0, NULL), st, fail);
    snapshot->call.shards = NULL; /* they may move on, or close */
    *out = snapshot;
    return FS_OK;
fail:
    fs_snapshot_close(snapshot);
    return st;
}

fs_status
fs_snapshot_write(fs_snapshot *snapshot, const char *folder, fs_blocks *out_blocks)
{
    return stream(folder, snapshot->name, &snapshot->header, snapshot->call.defs, snapshot->call.n,
                  from_memory, snapshot, snapshot->ledger, out_blocks);
}

void
fs_snapshot_close(fs_snapshot *snapshot)
{
    if (snapshot == NULL) {
        return;
    }
    fs_arena_close(&snapshot->arena);
    fs_free(snapshot->data);
    fs_header_free(&snapshot->header);
    save_close(&snapshot->call);
    fs_free(snapshot);
}
