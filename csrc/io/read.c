/* Pieces of files into shards. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/checked.h"
#include "commit.h"
#include "pieces.h"

// ---- ranges of pieces ---------------------------------------------------------------------------

void
fs_fetcher_close(fs_fetcher *fetcher)
{
    if (fetcher->open) {
        fs_reader_close(&fetcher->reader);
    }
    fs_arena_close(&fetcher->arena);
    *fetcher = (fs_fetcher){0};
}

static fs_status
open_file(fs_fetcher *fetcher, int file)
{
    const fs_catalog *catalog = fetcher->catalog;
    if (fetcher->open && fetcher->file == file) {
        return FS_OK;
    }
    if (fetcher->open) {
        fs_reader_close(&fetcher->reader);
        fetcher->open = false;
    }
    FS_TRY(fs_reader_open(catalog->folder, catalog->files[file], catalog->blocks[file],
                          fetcher->ledger, &fetcher->reader));
    fetcher->open = true;
    fetcher->file = file;
    return FS_OK;
}

size_t
fs_fetcher_max(const fs_piece *piece)
{
    return piece->dtype < 0 ? 0 : FS_READER_NBYTES / fs_dtype_nbytes((fs_dtype)piece->dtype);
}

fs_status
fs_fetch(fs_fetcher *fetcher, const fs_piece *piece, size_t begin, size_t end, const void **out)
{
    const fs_catalog *catalog = fetcher->catalog;
    if (piece->dtype < 0) {
        return FS_FAIL(FS_ECORRUPT, "%s/%s: \"%s\" is %s, which is not read here", catalog->folder,
                       catalog->files[piece->file], piece->name, piece->dtype_name);
    }
    FS_TRY(open_file(fetcher, piece->file));
    size_t nbytes = fs_dtype_nbytes((fs_dtype)piece->dtype);
    size_t from = piece->at + (begin - piece->begin) * nbytes, to = from + (end - begin) * nbytes;
    const unsigned char *bytes;
    fs_status st = fs_reader_get(&fetcher->reader, from, to, &bytes);
    if (st == FS_ECORRUPT && fetcher->reader.bad_block != SIZE_MAX) {
        char what[1024];
        fs_catalog_describe(catalog, piece->file, fetcher->reader.bad_block, what, sizeof what);
        return FS_FAIL(FS_ECORRUPT, "%s: block %zu is damaged: %s", fetcher->reader.file.path,
                       fetcher->reader.bad_block, what);
    }
    FS_TRY(st);
    if ((uintptr_t)bytes % nbytes != 0) {
        if (fetcher->aligned == NULL) {
            FS_TRY(fs_arena_open(&fetcher->arena, fetcher->ledger, FS_READER_NBYTES));
            FS_TRY(fs_arena_take(&fetcher->arena, FS_MEM_CHECKPOINT, FS_READER_NBYTES,
                                 &fetcher->aligned));
        }
        memcpy(fetcher->aligned, bytes, to - from);
        *out = fetcher->aligned;
        return FS_OK;
    }
    *out = bytes;
    return FS_OK;
}

/* Calls for each part of [begin, end) that a piece holds. */
typedef fs_status (*part_of)(void *ctx, const fs_piece *piece, size_t begin, size_t end);

/* Walks the pieces of a state over [begin, end); what no piece holds is FS_ECORRUPT. */
static fs_status
walk(const fs_catalog *catalog, const char *name, fs_array state, size_t begin, size_t end,
     part_of call, void *ctx)
{
    size_t low, high;
    fs_catalog_find(catalog, name, state, &low, &high);
    size_t last = high;
    while (low < high) { /* the first piece that ends behind begin: they do not overlap */
        size_t middle = low + (high - low) / 2;
        if (catalog->pieces[middle].end <= begin) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (size_t p = low; begin < end; p++) {
        const fs_piece *piece = &catalog->pieces[p];
        if (p == last || piece->begin > begin) {
            return FS_FAIL(FS_ECORRUPT, "%s: no file holds elements %zu to %zu of \"%s\" (%s)",
                           catalog->folder, begin, p == last ? end : fs_min_size(end, piece->begin),
                           name, fs_state_name(state));
        }
        size_t stop = fs_min_size(end, piece->end);
        FS_TRY(call(ctx, piece, begin, stop));
        begin = stop;
    }
    return FS_OK;
}

/* A destination of fs_fetch_range. */
typedef struct range_to {
    fs_fetcher *fetcher;
    unsigned char *dst;
    fs_dtype dtype;
} range_to;

static fs_status
fetch_part(void *ctx, const fs_piece *piece, size_t begin, size_t end)
{
    range_to *to = ctx;
    const fs_exec exec = {.device = to->fetcher->device};
    size_t step = fs_fetcher_max(piece);
    while (begin < end) {
        const void *from;
        size_t stop = step == 0 ? end : fs_min_size(end, begin + step);
        FS_TRY(fs_fetch(to->fetcher, piece, begin, stop, &from));
        size_t nbytes = (stop - begin) * fs_dtype_nbytes(to->dtype);
        if (piece->dtype == (int)to->dtype) {
            memcpy(to->dst, from, nbytes);
        } else if (!fs_dtype_is_float((fs_dtype)piece->dtype) || !fs_dtype_is_float(to->dtype)) {
            return FS_FAIL(FS_ETYPE, "\"%s\" is %s and cannot become %s", piece->name,
                           piece->dtype_name, fs_dtype_name(to->dtype));
        } else {
            to->fetcher->device->convert(&exec, to->dst, to->dtype, from, (fs_dtype)piece->dtype,
                                         stop - begin);
        }
        to->dst += nbytes;
        begin = stop;
    }
    return FS_OK;
}

fs_status
fs_fetch_range(fs_fetcher *fetcher, const char *name, fs_array state, size_t begin, size_t end,
               void *dst, fs_dtype dtype)
{
    range_to to = {fetcher, dst, dtype};
    return walk(fetcher->catalog, name, state, begin, end, fetch_part, &to);
}

// ---- into shards --------------------------------------------------------------------------------

/* Part of a piece that this rank keeps. */
typedef struct want {
    const fs_piece *piece;
    size_t begin, end;
    int param;
    fs_array array;
} want;

typedef struct wants {
    want *at;
    size_t n, capacity;
    int param;       /* of the walk in progress */
    fs_array array;
} wants;

static fs_status
add_want(void *ctx, const fs_piece *piece, size_t begin, size_t end)
{
    wants *list = ctx;
    if (piece->dtype < 0 || !fs_dtype_is_float((fs_dtype)piece->dtype)) {
        return FS_FAIL(FS_ECORRUPT, "\"%s\" is %s, not a floating-point type", piece->name,
                       piece->dtype_name);
    }
    if (list->n == list->capacity) {
        size_t capacity = fs_max_size(64, 2 * list->capacity);
        FS_TRY(fs_grow(&list->at, capacity, sizeof(want)));
        list->capacity = capacity;
    }
    list->at[list->n++] = (want){piece, begin, end, list->param, list->array};
    return FS_OK;
}

static fs_status
want_segment(const fs_catalog *catalog, const fs_read_def *def, const fs_param *param,
             const fs_seg *seg, wants *list)
{
    const char *name = def->names[seg->param];
    size_t first, end;
    fs_catalog_find(catalog, name, FS_WEIGHT, &first, &end);
    if (first < end) {
        /* Equal shapes, not only equal sizes: [2, 3] is not [3, 2]. */
        const fs_piece *piece = &catalog->pieces[first];
        if (piece->dims_n != param->dims_n ||
            (param->dims_n > 0 &&
             memcmp(piece->dims, param->dims, param->dims_n * sizeof(size_t)) != 0)) {
            return FS_FAIL(FS_ECORRUPT, "%s: \"%s\" has another shape than the model's",
                           catalog->folder, name);
        }
    }
    list->param = seg->param;
    list->array = FS_MASTER;
    FS_TRY(walk(catalog, name, FS_WEIGHT, seg->begin, seg->end, add_want, list));
    if (def->skip != NULL && def->skip[seg->param] == FS_SKIP_MOMENTS) {
        return FS_OK;
    }
    for (int m = 0; m < def->moments_n && seg->pos_n != FS_FROZEN; m++) {
        list->array = (fs_array)(FS_MOMENT1 + m);
        FS_TRY(walk(catalog, name, list->array, seg->begin, seg->end, add_want, list));
    }
    return FS_OK;
}

static int
want_by_place(const void *left, const void *right)
{
    const want *a = left, *b = right;
    if (a->piece->file != b->piece->file) {
        return a->piece->file < b->piece->file ? -1 : 1;
    }
    if (a->piece->at != b->piece->at) {
        return a->piece->at < b->piece->at ? -1 : 1;
    }
    return (a->begin > b->begin) - (a->begin < b->begin);
}

/* Everything this rank keeps, in the order in which it lies in the files. */
static fs_status
list_wants(const fs_catalog *catalog, fs_shards *shards, const fs_read_def *def, wants *list)
{
    const fs_layout *layout = fs_shards_layout(shards);
    int keep = fs_shards_policy(shards)->keep;
    int first = fs_world_rank(fs_shards_world(shards)) / keep * keep;
    for (int cut = first; cut < first + keep; cut++) {
        for (fs_seg_range s = fs_segs(layout, cut, -1); s.seg < s.end; s.seg++) {
            if (def->skip == NULL || def->skip[s.seg->param] != FS_SKIP_ALL) {
                FS_TRY(want_segment(catalog, def, &layout->params[s.seg->param], s.seg, list));
            }
        }
    }
    if (list->n > 0) {
        qsort(list->at, list->n, sizeof(want), want_by_place);
    }
    return FS_OK;
}

/* Reads everything on the list, and stores it if asked to. Without, files that carry no checksums
 * are left out: reading them would prove nothing. */
static fs_status
read_wants(const fs_catalog *catalog, fs_shards *shards, const wants *list, bool store)
{
    fs_fetcher fetcher = {.catalog = catalog, .ledger = fs_world_ledger(fs_shards_world(shards))};
    fs_status st = FS_OK;
    for (size_t w = 0; w < list->n && st == FS_OK; w++) {
        const want *item = &list->at[w];
        size_t step = fs_fetcher_max(item->piece);
        if (!store && catalog->blocks[item->piece->file] == NULL) {
            continue;
        }
        for (size_t begin = item->begin; begin < item->end && st == FS_OK; begin += step) {
            const void *from = NULL;
            size_t end = fs_min_size(item->end, begin + step);
            if (!store) { /* nothing is changed yet: Ctrl-C may end it */
                FS_TRY_GOTO(fs_world_pause(fs_shards_world(shards)), st, done);
            }
            st = fs_fetch(&fetcher, item->piece, begin, end, &from);
            if (st == FS_OK && store) {
                st = fs_store(shards, item->param, item->array, begin, end, from,
                              (fs_dtype)item->piece->dtype);
            }
        }
    }
done:
    fs_fetcher_close(&fetcher);
    return st;
}

fs_status
fs_read(const fs_catalog *catalog, fs_status local, fs_shards *shards, const fs_read_def *def)
{
    fs_world *world = fs_shards_world(shards);
    wants list = {0};
    fs_status st = local;
    if (st == FS_OK) {
        st = list_wants(catalog, shards, def, &list);
    }
    if (st == FS_OK) {
        /* Once before anything is written: damage must not leave weights that are part old, part
         * new. The second time the bytes come from the system's cache. */
        st = read_wants(catalog, shards, &list, false);
    }
    FS_TRY_GOTO(fs_agree(world, FS_OP_LOAD, st, 0, NULL), st, done);
    FS_TRY_GOTO(fs_store_begin(shards), st, done);
    st = fs_agree(world, FS_OP_LOAD, read_wants(catalog, shards, &list, true), 0, NULL);
    if (st == FS_OK) {
        st = fs_store_end(shards);
    } else if (st != FS_ABORTED) {
        /* All ranks are here: the fence lets go of the weights, the reason stays the first
         * one's. */
        fs_kept kept;
        fs_status_keep(st, &kept);
        fs_status ended = fs_store_end(shards);
        st = ended == FS_OK ? fs_status_tell(&kept, "") : ended;
    }
done:
    fs_free(list.at);
    return st;
}
