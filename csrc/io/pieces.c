#include "pieces.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/checked.h"

static const struct {
    fs_array state;
    const char *name;
} states[] = {{FS_WEIGHT, "weight"}, {FS_MOMENT1, "moment1"}, {FS_MOMENT2, "moment2"},
            {FS_MOMENT3, "moment3"}};

const char *
fs_state_name(fs_array state)
{
    for (size_t s = 0; s < sizeof states / sizeof states[0]; s++) {
        if (states[s].state == state) {
            return states[s].name;
        }
    }
    return "weight"; /* a master is the weight, logically */
}

// ---- one tensor ---------------------------------------------------------------------------------

static int
shape_by_name(const void *left, const void *right)
{
    return strcmp(((const fs_shape_def *)left)->name, ((const fs_shape_def *)right)->name);
}

/* Splits "NAME:STATE:BEGIN" in place (the text is the header's, ours to write). */
static bool
split_name(char *name, fs_array *out_state, size_t *out_begin)
{
    char *last = strrchr(name, ':');
    if (last == NULL || last[1] == '\0') {
        return false;
    }
    size_t begin = 0;
    for (const char *digit = last + 1; *digit != '\0'; digit++) {
        if (*digit < '0' || *digit > '9' || !fs_mul_fits(begin, 10, &begin) ||
            !fs_add_fits(begin, (size_t)(*digit - '0'), &begin)) {
            return false;
        }
    }
    *last = '\0';
    char *middle = strrchr(name, ':');
    for (size_t s = 0; middle != NULL && s < sizeof states / sizeof states[0]; s++) {
        if (strcmp(middle + 1, states[s].name) == 0) {
            *middle = '\0';
            *out_state = states[s].state;
            *out_begin = begin;
            return true;
        }
    }
    return false;
}

/* A tensor of one of our files: checked against the shape that the index gives its parameter. */
static fs_status
take_ours(const fs_catalog *catalog, int file, const fs_tensor *tensor, fs_piece *piece)
{
    const char *path = catalog->files[file];
    /* The header's text is in our arena; const only to its other readers. */
    char *name = (char *)(uintptr_t)tensor->name;
    if (!split_name(name, &piece->state, &piece->begin)) {
        return FS_FAIL(FS_ECORRUPT, "%s/%s: \"%s\" is not the name of a piece", catalog->folder,
                       path, name);
    }
    piece->name = name;
    const fs_shape_def key = {.name = name};
    const fs_shape_def *shape =
        catalog->shapes_n == 0
            ? NULL
            : bsearch(&key, catalog->shapes, catalog->shapes_n, sizeof key, shape_by_name);
    if (shape == NULL) {
        return FS_FAIL(FS_ECORRUPT, "%s/%s: holds a piece of \"%s\", which its index does not list",
                       catalog->folder, path, name);
    }
    size_t numel = 1;
    for (size_t d = 0; d < shape->dims_n; d++) {
        FS_TRY(fs_mul_size(numel, shape->dims[d], &numel));
    }
    if (!fs_add_fits(piece->begin, tensor->numel, &piece->end) || piece->end > numel) {
        return FS_FAIL(FS_ECORRUPT, "%s/%s: a piece of \"%s\" with elements %zu + %zu of %zu",
                       catalog->folder, path, name, piece->begin, tensor->numel, numel);
    }
    piece->dims_n = shape->dims_n;
    piece->dims = shape->dims;
    return FS_OK;
}

static fs_status
take_file(fs_catalog *catalog, int file)
{
    const fs_safetensors *header = &catalog->headers[file];
    for (size_t t = 0; t < header->tensors_n; t++) {
        const fs_tensor *tensor = &header->tensors[t];
        fs_piece piece = {.name = tensor->name,
                          .state = FS_WEIGHT,
                          .dtype = tensor->dtype,
                          .dtype_name = tensor->dtype_name,
                          .end = tensor->numel,
                          .at = tensor->begin,
                          .file = file,
                          .dims_n = tensor->dims_n,
                          .dims = tensor->dims};
        if (catalog->ours) {
            FS_TRY(take_ours(catalog, file, tensor, &piece));
        }
        catalog->pieces[catalog->pieces_n++] = piece;
    }
    return FS_OK;
}

// ---- the folder ---------------------------------------------------------------------------------

static int
by_place(const void *left, const void *right)
{
    const fs_piece *a = left, *b = right;
    int order = strcmp(a->name, b->name);
    if (order != 0) {
        return order;
    }
    if (a->state != b->state) {
        return a->state < b->state ? -1 : 1;
    }
    return (a->begin > b->begin) - (a->begin < b->begin);
}

static fs_status
check_overlap(const fs_catalog *catalog)
{
    for (size_t p = 1; p < catalog->pieces_n; p++) {
        const fs_piece *before = &catalog->pieces[p - 1], *piece = &catalog->pieces[p];
        if (strcmp(before->name, piece->name) == 0 && before->state == piece->state &&
            (piece->begin < before->end || !catalog->ours)) {
            return FS_FAIL(FS_ECORRUPT, "%s: \"%s\" is both in %s and in %s", catalog->folder,
                           piece->name, catalog->files[before->file], catalog->files[piece->file]);
        }
    }
    return FS_OK;
}

/* A block that holds (part of) file's header is damaged. What else lies in it is read unchecked, to
 * name it: the damage may be anywhere in the block. */
static fs_status
damaged_header(const fs_catalog *catalog, int file, size_t block, fs_ledger *ledger)
{
    char what[1024] = "header";
    const fs_file_def def = {.name = catalog->files[file]};
    fs_catalog *unchecked;
    if (fs_catalog_open(catalog->folder, &def, 1, catalog->ours, catalog->shapes, catalog->shapes_n,
                        ledger, &unchecked) == FS_OK) {
        unchecked->first_rank = file;
        fs_catalog_describe(unchecked, 0, block, what, sizeof what);
        fs_catalog_close(unchecked);
    } else if (catalog->ours) {
        (void)snprintf(what, sizeof what, "header, rank %d", file);
    }
    return FS_FAIL(FS_ECORRUPT, "%s/%s: block %zu is damaged: %s", catalog->folder,
                   catalog->files[file], block, what);
}

static fs_status
read_headers(fs_catalog *catalog, fs_ledger *ledger)
{
    size_t pieces_n = 0;
    for (int f = 0; f < catalog->files_n; f++) {
        fs_reader reader;
        FS_TRY(fs_reader_open(catalog->folder, catalog->files[f], catalog->blocks[f], ledger,
                              &reader));
        fs_status st = fs_safetensors_open(&reader, ledger, &catalog->headers[f]);
        size_t bad_block = reader.bad_block;
        fs_reader_close(&reader);
        if (st == FS_ECORRUPT && bad_block != SIZE_MAX) {
            return damaged_header(catalog, f, bad_block, ledger);
        }
        FS_TRY(st);
        pieces_n += catalog->headers[f].tensors_n;
    }
    FS_TRY(fs_calloc(pieces_n, sizeof *catalog->pieces, &catalog->pieces));
    for (int f = 0; f < catalog->files_n; f++) {
        FS_TRY(take_file(catalog, f));
    }
    return FS_OK;
}

static fs_status
copy_shapes(fs_catalog *catalog, const fs_shape_def *shapes, size_t shapes_n)
{
    FS_TRY(fs_calloc(shapes_n, sizeof *catalog->shapes, &catalog->shapes));
    for (size_t s = 0; s < shapes_n; s++) {
        char *name;
        FS_TRY(fs_strdup(shapes[s].name, &name));
        catalog->shapes[s] = shapes[s];
        catalog->shapes[s].name = name;
        catalog->shapes_n = s + 1;
    }
    if (shapes_n > 0) {
        qsort(catalog->shapes, shapes_n, sizeof *shapes, shape_by_name);
    }
    for (size_t s = 1; s < shapes_n; s++) {
        if (strcmp(catalog->shapes[s - 1].name, catalog->shapes[s].name) == 0) {
            return FS_FAIL(FS_ECORRUPT, "%s: the index lists \"%s\" twice", catalog->folder,
                           catalog->shapes[s].name);
        }
    }
    return FS_OK;
}

fs_status
fs_catalog_open(const char *folder, const fs_file_def *files, int files_n, bool ours,
                const fs_shape_def *shapes, size_t shapes_n, fs_ledger *ledger, fs_catalog **out)
{
    fs_catalog *catalog;
    fs_status st;
    FS_TRY(fs_calloc(1, sizeof *catalog, &catalog));
    catalog->ours = ours;
    FS_TRY_GOTO(fs_strdup(folder, &catalog->folder), st, fail);
    FS_TRY_GOTO(fs_calloc((size_t)files_n, sizeof *catalog->files, &catalog->files), st, fail);
    FS_TRY_GOTO(fs_calloc((size_t)files_n, sizeof *catalog->blocks, &catalog->blocks), st, fail);
    FS_TRY_GOTO(fs_calloc((size_t)files_n, sizeof *catalog->headers, &catalog->headers), st, fail);
    for (int f = 0; f < files_n; f++) {
        FS_TRY_GOTO(fs_name_check(folder, files[f].name), st, fail);
        FS_TRY_GOTO(fs_strdup(files[f].name, &catalog->files[f]), st, fail);
        catalog->blocks[f] = files[f].blocks;
        catalog->files_n = f + 1;
    }
    if (ours) {
        FS_TRY_GOTO(copy_shapes(catalog, shapes, shapes_n), st, fail);
    }
    FS_TRY_GOTO(read_headers(catalog, ledger), st, fail);
    if (catalog->pieces_n > 0) {
        qsort(catalog->pieces, catalog->pieces_n, sizeof *catalog->pieces, by_place);
    }
    FS_TRY_GOTO(check_overlap(catalog), st, fail);
    *out = catalog;
    return FS_OK;
fail:
    fs_catalog_close(catalog);
    return st;
}

void
fs_catalog_close(fs_catalog *catalog)
{
    if (catalog == NULL) {
        return;
    }
    for (int f = 0; f < catalog->files_n; f++) {
        fs_free(catalog->files[f]);
        fs_safetensors_close(&catalog->headers[f]);
    }
    for (size_t s = 0; s < catalog->shapes_n; s++) {
        fs_free((void *)(uintptr_t)catalog->shapes[s].name);
    }
    fs_free(catalog->shapes);
    fs_free(catalog->pieces);
    fs_free(catalog->headers);
    fs_free(catalog->blocks);
    fs_free(catalog->files);
    fs_free(catalog->folder);
    fs_free(catalog);
}

/* The first piece that is not before (name, state). */
static size_t
lower_bound(const fs_catalog *catalog, const char *name, fs_array state)
{
    const fs_piece key = {.name = name, .state = state};
    size_t low = 0, high = catalog->pieces_n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (by_place(&catalog->pieces[middle], &key) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

void
fs_catalog_find(const fs_catalog *catalog, const char *name, fs_array state, size_t *out_first,
                size_t *out_end)
{
    size_t first = lower_bound(catalog, name, state), end = first;
    while (end < catalog->pieces_n && catalog->pieces[end].state == state &&
           strcmp(catalog->pieces[end].name, name) == 0) {
        end++;
    }
    *out_first = first;
    *out_end = end;
}

// ---- damage -------------------------------------------------------------------------------------

bool
fs_piece_in_block(const fs_piece *piece, size_t block, fs_piece *out)
{
    size_t nbytes = piece->dtype < 0 ? 1 : fs_dtype_nbytes((fs_dtype)piece->dtype);
    size_t from = block * FS_BLOCK_NBYTES, to = from + FS_BLOCK_NBYTES;
    size_t last = piece->at + (piece->end - piece->begin) * nbytes;
    if (to <= piece->at || from >= last || piece->begin == piece->end) {
        return false;
    }
    *out = *piece;
    if (from > piece->at) {
        out->begin += (from - piece->at) / nbytes;
    }
    if (to < last) {
        out->end = piece->begin + (to - piece->at + nbytes - 1) / nbytes;
    }
    return true;
}

/* Text that is appended to a buffer and cut at its end. */
typedef struct words {
    char *at;
    size_t n, used;
} words;

__attribute__((format(printf, 2, 3))) static void
say(words *to, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = to->used < to->n ? vsnprintf(to->at + to->used, to->n - to->used, format, args) : 0;
    va_end(args);
    to->used += n > 0 ? (size_t)n : 0;
}

void
fs_catalog_describe(const fs_catalog *catalog, int file, size_t block, char *buffer, size_t nbytes)
{
    words to = {.at = buffer, .n = nbytes};
    size_t shown = 0, more = 0;
    buffer[0] = '\0';
    if (block * FS_BLOCK_NBYTES < catalog->headers[file].data_begin) {
        say(&to, "header, ");
    }
    for (size_t p = 0; p < catalog->pieces_n; p++) {
        fs_piece part;
        if (catalog->pieces[p].file != file ||
            !fs_piece_in_block(&catalog->pieces[p], block, &part)) {
            continue;
        }
        if (shown == 4 || to.used + 200 > nbytes) {
            more++;
            continue;
        }
        size_t row = 1;
        for (size_t d = 1; d < part.dims_n; d++) {
            row *= part.dims[d] != 0 ? part.dims[d] : 1;
        }
        say(&to, "%.120s%s%s rows %zu-%zu, ", part.name, part.state == FS_WEIGHT ? "" : " ",
            part.state == FS_WEIGHT ? "" : fs_state_name(part.state), part.begin / row,
            (part.end - 1) / row);
        shown++;
    }
    if (more > 0) {
        say(&to, "%zu more, ", more);
    }
    if (catalog->ours) {
        say(&to, "rank %d", catalog->first_rank + file);
    } else if (to.used >= 2 && to.used < nbytes) {
        buffer[to.used - 2] = '\0'; /* the last ", " */
    }
}
