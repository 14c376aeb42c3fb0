#include "safetensors.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/checked.h"
#include "json.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors holds little-endian numbers; this code reads them as they are"
#endif

/* Every type of the format and its bits; narrower ones than a byte pack. */
static const struct {
    const char *name;
    size_t nbits;
} dtypes[] = {
    {"F4", 4},       {"F6_E2M3", 6},  {"F6_E3M2", 6},      {"BOOL", 8},         {"U8", 8},
    {"I8", 8},       {"F8_E5M2", 8},  {"F8_E4M3", 8},      {"F8_E8M0", 8},      {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},  {"U16", 16},         {"F16", 16},         {"BF16", 16},
    {"I32", 32},     {"U32", 32},     {"F32", 32},         {"C64", 64},         {"F64", 64},
    {"I64", 64},     {"U64", 64},
};

/* What grows while a header is read. */
typedef struct parse {
    fs_json json;
    fs_safetensors out;
    size_t tensors_capacity, metadata_capacity;
    size_t dims_n, dims_capacity;
    bool metadata_seen;
} parse;

/* Room for one more entry of *array. */
static fs_status
grow(void *array, size_t n, size_t *capacity, size_t nbytes)
{
    if (n < *capacity) {
        return FS_OK;
    }
    size_t wanted = fs_max_size(16, 2 * *capacity);
    FS_TRY(fs_grow(array, wanted, nbytes));
    *capacity = wanted;
    return FS_OK;
}

// ---- one entry ----------------------------------------------------------------------------------

/* The place where a tensor's numbers are checked against each other and against the file. dims are
 * out.dims[dims_at ...]; offsets count from the end of the header. */
static fs_status
check_tensor(const parse *p, fs_tensor *tensor, size_t dims_at, size_t data_nbytes)
{
    const char *path = p->json.path;
    size_t nbits = 0;
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        if (strcmp(dtypes[d].name, tensor->dtype_name) == 0) {
            nbits = dtypes[d].nbits;
        }
    }
    if (nbits == 0) {
        return FS_FAIL(FS_ECORRUPT, "%s: tensor \"%s\": dtype \"%s\" is not one of the format",
                       path, tensor->name, tensor->dtype_name);
    }
    fs_dtype dtype;
    tensor->dtype = fs_dtype_parse(tensor->dtype_name, &dtype) ? (int)dtype : -1;
    size_t numel = 1, total;
    for (size_t d = 0; d < tensor->dims_n; d++) {
        if (!fs_mul_fits(numel, p->out.dims[dims_at + d], &numel)) {
            return FS_FAIL(FS_ECORRUPT, "%s: tensor \"%s\": its shape overflows", path,
                           tensor->name);
        }
    }
    if (!fs_mul_fits(numel, nbits, &total) || total % 8 != 0) {
        return FS_FAIL(FS_ECORRUPT, "%s: tensor \"%s\": %zu elements of %s are no number of bytes",
                       path, tensor->name, numel, tensor->dtype_name);
    }
    if (tensor->begin > tensor->end || tensor->end > data_nbytes) {
        return FS_FAIL(
            FS_ECORRUPT,
            "%s: tensor \"%s\": offsets %zu to %zu do not lie in the %zu bytes behind the "
            "header: the file is cut short or damaged",
            path, tensor->name, tensor->begin, tensor->end, data_nbytes);
    }
    if (tensor->end - tensor->begin != total / 8) {
        return FS_FAIL(FS_ECORRUPT,
                       "%s: tensor \"%s\": offsets span %zu bytes, its shape and dtype %s "
                       "need %zu",
                       path, tensor->name, tensor->end - tensor->begin, tensor->dtype_name,
                       total / 8);
    }
    tensor->numel = numel;
    return FS_OK;
}

static fs_status
read_shape(parse *p, fs_tensor *tensor)
{
    FS_TRY(fs_json_take(&p->json, '['));
    if (fs_json_try(&p->json, ']')) {
        return FS_OK;
    }
    do {
        if (tensor->dims_n == FS_SAFETENSORS_DIMS_MAX) {
            return FS_FAIL(FS_ECORRUPT, "%s: tensor \"%s\" has more than %d dimensions",
                           p->json.path, tensor->name, FS_SAFETENSORS_DIMS_MAX);
        }
        FS_TRY(grow(&p->out.dims, p->dims_n, &p->dims_capacity, sizeof(size_t)));
        FS_TRY(fs_json_size(&p->json, &p->out.dims[p->dims_n]));
        p->dims_n++;
        tensor->dims_n++;
    } while (fs_json_try(&p->json, ','));
    return fs_json_take(&p->json, ']');
}

static fs_status
read_offsets(parse *p, fs_tensor *tensor)
{
    FS_TRY(fs_json_take(&p->json, '['));
    FS_TRY(fs_json_size(&p->json, &tensor->begin));
    FS_TRY(fs_json_take(&p->json, ','));
    FS_TRY(fs_json_size(&p->json, &tensor->end));
    return fs_json_take(&p->json, ']');
}

static bool
text_is(const char *text, size_t n, const char *wanted)
{
    return strlen(wanted) == n && memcmp(text, wanted, n) == 0;
}

/* Text of a stranger, fit for a message. */
static const char *
shown(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f) {
            return "(not printable)";
        }
    }
    return text;
}

/* {"dtype": text, "shape": [...], "data_offsets": [begin, end]}, each once, in any order. */
static fs_status
read_tensor(parse *p, char *name, size_t data_nbytes)
{
    fs_tensor tensor = {.name = name};
    size_t dims_at = p->dims_n;
    bool shape = false, offsets = false;
    FS_TRY(fs_json_take(&p->json, '{'));
    do {
        char *key, *text;
        size_t key_n, text_n;
        FS_TRY(fs_json_string(&p->json, &key, &key_n));
        FS_TRY(fs_json_take(&p->json, ':'));
        if (text_is(key, key_n, "dtype") && tensor.dtype_name == NULL) {
            FS_TRY(fs_json_string(&p->json, &text, &text_n));
            tensor.dtype_name = shown(text, text_n);
        } else if (text_is(key, key_n, "shape") && !shape) {
            shape = true;
            FS_TRY(read_shape(p, &tensor));
        } else if (text_is(key, key_n, "data_offsets") && !offsets) {
            offsets = true;
            FS_TRY(read_offsets(p, &tensor));
        } else {
            return FS_FAIL(FS_ECORRUPT, "%s: tensor \"%s\": unexpected or repeated key \"%s\"",
                           p->json.path, name, shown(key, key_n));
        }
    } while (fs_json_try(&p->json, ','));
    FS_TRY(fs_json_take(&p->json, '}'));
    if (tensor.dtype_name == NULL || !shape || !offsets) {
        return FS_FAIL(FS_ECORRUPT, "%s: tensor \"%s\" lacks its %s", p->json.path, name,
                       tensor.dtype_name == NULL ? "dtype" : shape ? "data_offsets" : "shape");
    }
    FS_TRY(check_tensor(p, &tensor, dims_at, data_nbytes));
    /* dims may still move while it grows: an index now, a pointer at the end. */
    tensor.dims = (const size_t *)(uintptr_t)dims_at;
    FS_TRY(grow(&p->out.tensors, p->out.tensors_n, &p->tensors_capacity, sizeof tensor));
    p->out.tensors[p->out.tensors_n++] = tensor;
    return FS_OK;
}

static fs_status
read_metadata(parse *p)
{
    if (p->metadata_seen) {
        return FS_FAIL(FS_ECORRUPT, "%s: __metadata__ twice", p->json.path);
    }
    p->metadata_seen = true;
    FS_TRY(fs_json_take(&p->json, '{'));
    if (fs_json_try(&p->json, '}')) {
        return FS_OK;
    }
    do {
        char *key, *value;
        size_t key_n, value_n;
        FS_TRY(fs_json_string(&p->json, &key, &key_n));
        FS_TRY(fs_json_take(&p->json, ':'));
        FS_TRY(fs_json_string(&p->json, &value, &value_n));
        if (strlen(key) != key_n || strlen(value) != value_n) {
            return FS_FAIL(FS_ECORRUPT, "%s: __metadata__ holds a NUL", p->json.path);
        }
        FS_TRY(grow(&p->out.metadata, p->out.metadata_n, &p->metadata_capacity,
                    sizeof(fs_text_pair)));
        p->out.metadata[p->out.metadata_n++] = (fs_text_pair){key, value};
    } while (fs_json_try(&p->json, ','));
    return fs_json_take(&p->json, '}');
}

static fs_status
read_entries(parse *p, size_t data_nbytes)
{
    FS_TRY(fs_json_take(&p->json, '{'));
    if (fs_json_try(&p->json, '}')) {
        return fs_json_end(&p->json);
    }
    do {
        char *name;
        size_t name_n;
        FS_TRY(fs_json_string(&p->json, &name, &name_n));
        for (size_t i = 0; i < name_n; i++) {
            if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f) {
                return FS_FAIL(FS_ECORRUPT, "%s: a tensor name with a control character",
                               p->json.path);
            }
        }
        FS_TRY(fs_json_take(&p->json, ':'));
        if (strcmp(name, "__metadata__") == 0) {
            FS_TRY(read_metadata(p));
        } else {
            FS_TRY(read_tensor(p, name, data_nbytes));
        }
    } while (fs_json_try(&p->json, ','));
    FS_TRY(fs_json_take(&p->json, '}'));
    return fs_json_end(&p->json);
}

// ---- the whole ----------------------------------------------------------------------------------

static int
by_place(const void *left, const void *right)
{
    const fs_tensor *a = left, *b = right;
    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    return (a->end > b->end) - (a->end < b->end);
}

static int
by_name(const void *left, const void *right)
{
    return strcmp(((const fs_tensor *)left)->name, ((const fs_tensor *)right)->name);
}

static int
by_key(const void *left, const void *right)
{
    return strcmp(((const fs_text_pair *)left)->key, ((const fs_text_pair *)right)->key);
}

/* Tensors must fill the data without hole or overlap, and no name may come twice. */
static fs_status
check_all(const char *path, fs_safetensors *all, size_t data_nbytes)
{
    size_t at = 0;
    if (all->tensors_n > 0) {
        qsort(all->tensors, all->tensors_n, sizeof(fs_tensor), by_place);
    }
    for (size_t t = 0; t < all->tensors_n; t++) {
        const fs_tensor *tensor = &all->tensors[t];
        if (tensor->begin != at) {
            return FS_FAIL(
                FS_ECORRUPT, "%s: tensor \"%s\" begins at byte %zu of the data, %s %zu", path,
                tensor->name, tensor->begin,
                tensor->begin < at ? "inside another that ends at" : "leaving a hole from", at);
        }
        at = tensor->end;
    }
    if (at != data_nbytes) {
        return FS_FAIL(FS_ECORRUPT, "%s: %zu bytes behind the header, but its tensors fill %zu",
                       path, data_nbytes, at);
    }
    if (all->tensors_n > 0) {
        qsort(all->tensors, all->tensors_n, sizeof(fs_tensor), by_name);
    }
    for (size_t t = 1; t < all->tensors_n; t++) {
        if (strcmp(all->tensors[t - 1].name, all->tensors[t].name) == 0) {
            return FS_FAIL(FS_ECORRUPT, "%s: two tensors named \"%s\"", path, all->tensors[t].name);
        }
    }
    if (all->metadata_n > 0) {
        qsort(all->metadata, all->metadata_n, sizeof(fs_text_pair), by_key);
    }
    for (size_t m = 1; m < all->metadata_n; m++) {
        if (strcmp(all->metadata[m - 1].key, all->metadata[m].key) == 0) {
            return FS_FAIL(FS_ECORRUPT, "%s: __metadata__ holds \"%s\" twice", path,
                           shown(all->metadata[m].key, strlen(all->metadata[m].key)));
        }
    }
    return FS_OK;
}

fs_status
fs_safetensors_parse(const char *path, char *text, size_t header_nbytes, size_t data_nbytes,
                     fs_safetensors *out)
{
    parse p = {.json = {.begin = text, .at = text, .end = text + header_nbytes, .path = path}};
    fs_status st;
    if (header_nbytes == 0 || text[0] != '{') {
        return FS_FAIL(FS_ECORRUPT,
                       "%s: the header does not begin with '{': not a safetensors file", path);
    }
    FS_TRY_GOTO(read_entries(&p, data_nbytes), st, fail);
    FS_TRY_GOTO(check_all(path, &p.out, data_nbytes), st, fail);
    p.out.data_begin = 8 + header_nbytes;
    for (size_t t = 0; t < p.out.tensors_n; t++) {
        fs_tensor *tensor = &p.out.tensors[t];
        tensor->dims = tensor->dims_n > 0 ? p.out.dims + (uintptr_t)tensor->dims : NULL;
        tensor->begin += p.out.data_begin;
        tensor->end += p.out.data_begin;
    }
    *out = p.out;
    return FS_OK;
fail:
    fs_safetensors_close(&p.out);
    return st;
}

/* Copies header bytes to text in pieces that a reader gives. */
static fs_status
read_text(fs_reader *reader, size_t nbytes, char *text)
{
    for (size_t at = 0; at < nbytes; at += FS_READER_NBYTES) {
        const unsigned char *bytes;
        size_t n = fs_min_size(FS_READER_NBYTES, nbytes - at);
        FS_TRY(fs_reader_get(reader, 8 + at, 8 + at + n, &bytes));
        memcpy(text + at, bytes, n);
    }
    return FS_OK;
}

fs_status
fs_safetensors_open(fs_reader *reader, fs_ledger *ledger, fs_safetensors *out)
{
    const char *path = reader->file.path;
    const unsigned char *bytes;
    size_t nbytes = reader->file.nbytes;
    if (nbytes < 8) {
        return FS_FAIL(FS_ECORRUPT, "%s: %zu bytes, too short for a safetensors file", path,
                       nbytes);
    }
    FS_TRY(fs_reader_get(reader, 0, 8, &bytes));
    uint64_t stated = 0;
    for (int i = 7; i >= 0; i--) {
        stated = stated << 8 | bytes[i];
    }
    if (stated > FS_SAFETENSORS_HEADER_MAX) {
        return FS_FAIL(FS_ECORRUPT, "%s: states a header of %llu bytes; the format allows %u", path,
                       (unsigned long long)stated, FS_SAFETENSORS_HEADER_MAX);
    }
    if (stated > nbytes - 8) {
        return FS_FAIL(FS_ECORRUPT,
                       "%s: states a header of %llu bytes, but only %zu follow: the file "
                       "is cut short",
                       path, (unsigned long long)stated, nbytes - 8);
    }
    size_t header_nbytes = (size_t)stated;
    fs_arena arena;
    fs_status st;
    char *text;
    FS_TRY(fs_arena_open(&arena, ledger, header_nbytes + 1));
    FS_TRY_GOTO(fs_arena_take(&arena, FS_MEM_CHECKPOINT, header_nbytes + 1, &text), st, fail);
    FS_TRY_GOTO(read_text(reader, header_nbytes, text), st, fail);
    FS_TRY_GOTO(fs_safetensors_parse(path, text, header_nbytes, nbytes - 8 - header_nbytes, out),
                st, fail);
    out->text = arena;
    return FS_OK;
fail:
    fs_arena_close(&arena);
    return st;
}

void
fs_safetensors_close(fs_safetensors *safetensors)
{
    fs_free(safetensors->tensors);
    fs_free(safetensors->metadata);
    fs_free(safetensors->dims);
    fs_arena_close(&safetensors->text);
    *safetensors = (fs_safetensors){0};
}

const fs_tensor *
fs_safetensors_find(const fs_safetensors *safetensors, const char *name)
{
    size_t low = 0, high = safetensors->tensors_n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(safetensors->tensors[middle].name, name);
        if (order == 0) {
            return &safetensors->tensors[middle];
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}
