/* Writing a safetensors header. Reading it is in safetensors.c. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/checked.h"
#include "json.h"
#include "safetensors.h"

#define HEADER_ALIGN 64

/* Text that grows. */
typedef struct text {
    char *at;
    size_t n, capacity;
} text;

static fs_status
put(text *to, const char *bytes, size_t nbytes)
{
    size_t total;
    FS_TRY(fs_add_size(to->n, nbytes, &total));
    if (total > to->capacity) {
        size_t capacity = fs_max_size(fs_max_size(total, 4096), 2 * to->capacity);
        FS_TRY(fs_grow(&to->at, capacity, 1));
        to->capacity = capacity;
    }
    memcpy(to->at + to->n, bytes, nbytes);
    to->n = total;
    return FS_OK;
}

static fs_status
put_text(text *to, const char *string)
{
    return put(to, string, strlen(string));
}

static fs_status
put_size(text *to, size_t value)
{
    char digits[32];
    int n = snprintf(digits, sizeof digits, "%zu", value);
    return put(to, digits, (size_t)n);
}

/* A JSON string. Names may not hold control characters, metadata may. */
static fs_status
put_string(text *to, const char *string, bool is_name)
{
    size_t n = strlen(string);
    if (!fs_utf8_is_valid(string, n)) {
        return FS_FAIL(FS_EINVAL, "a tensor name or its metadata is not valid UTF-8");
    }
    FS_TRY(put(to, "\"", 1));
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)string[i];
        if (c < 0x20 || c == 0x7f) {
            if (is_name) {
                return FS_FAIL(FS_EINVAL, "a tensor name holds control character 0x%02x",
                               (unsigned)c);
            }
            char escape[8];
            int m = snprintf(escape, sizeof escape, "\\u%04x", (unsigned)c);
            FS_TRY(put(to, escape, (size_t)m));
        } else {
            if (c == '"' || c == '\\') {
                FS_TRY(put(to, "\\", 1));
            }
            FS_TRY(put(to, &string[i], 1));
        }
    }
    return put(to, "\"", 1);
}

static fs_status
put_metadata(text *to, const fs_text_pair *metadata, size_t metadata_n)
{
    FS_TRY(put_text(to, "\"__metadata__\":{"));
    for (size_t m = 0; m < metadata_n; m++) {
        if (m > 0) {
            FS_TRY(put(to, ",", 1));
        }
        FS_TRY(put_string(to, metadata[m].key, false));
        FS_TRY(put(to, ":", 1));
        FS_TRY(put_string(to, metadata[m].value, false));
    }
    return put(to, "}", 1);
}

/* One entry; *at moves over the tensor's bytes. */
static fs_status
put_tensor(text *to, const fs_tensor_def *def, size_t *at)
{
    size_t nbytes = fs_dtype_nbytes(def->dtype), end;
    if (def->dims_n > FS_SAFETENSORS_DIMS_MAX) {
        return FS_FAIL(FS_EINVAL, "tensor \"%s\" has more than %d dimensions", def->name,
                       FS_SAFETENSORS_DIMS_MAX);
    }
    if (*at % nbytes != 0) {
        return FS_FAIL(FS_EINVAL,
                       "tensor \"%s\" of %s would begin at byte %zu: wider dtypes come first",
                       def->name, fs_dtype_name(def->dtype), *at);
    }
    if (strcmp(def->name, "__metadata__") == 0) {
        return FS_FAIL(FS_EINVAL, "a tensor cannot be named __metadata__");
    }
    FS_TRY(put_string(to, def->name, true));
    FS_TRY(put_text(to, ":{\"dtype\":\""));
    FS_TRY(put_text(to, fs_dtype_safetensors(def->dtype)));
    FS_TRY(put_text(to, "\",\"shape\":["));
    for (size_t d = 0; d < def->dims_n; d++) {
        if (d > 0) {
            FS_TRY(put(to, ",", 1));
        }
        FS_TRY(put_size(to, def->dims[d]));
        FS_TRY(fs_mul_size(nbytes, def->dims[d], &nbytes));
    }
    FS_TRY(fs_add_size(*at, nbytes, &end));
    FS_TRY(put_text(to, "],\"data_offsets\":["));
    FS_TRY(put_size(to, *at));
    FS_TRY(put(to, ",", 1));
    FS_TRY(put_size(to, end));
    FS_TRY(put_text(to, "]}"));
    *at = end;
    return FS_OK;
}

static int
by_name(const void *left, const void *right)
{
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static fs_status
check_names(const fs_tensor_def *defs, size_t defs_n)
{
    const char **names;
    FS_TRY(fs_calloc(defs_n, sizeof *names, &names));
    for (size_t d = 0; d < defs_n; d++) {
        names[d] = defs[d].name;
    }
    if (defs_n > 0) {
        qsort(names, defs_n, sizeof *names, by_name);
    }
    fs_status st = FS_OK;
    for (size_t d = 1; d < defs_n && st == FS_OK; d++) {
        if (strcmp(names[d - 1], names[d]) == 0) {
            st = FS_FAIL(FS_EINVAL, "two tensors named \"%s\"", names[d]);
        }
    }
    fs_free(names);
    return st;
}

fs_status
fs_header_make(const fs_tensor_def *defs, size_t defs_n, const fs_text_pair *metadata,
               size_t metadata_n, fs_header *out)
{
    text to = {0};
    size_t at = 0;
    fs_status st;
    FS_TRY(check_names(defs, defs_n));
    FS_TRY_GOTO(put(&to, "\0\0\0\0\0\0\0\0{", 9), st, fail);
    if (metadata_n > 0) {
        FS_TRY_GOTO(put_metadata(&to, metadata, metadata_n), st, fail);
    }
    for (size_t d = 0; d < defs_n; d++) {
        if (d > 0 || metadata_n > 0) {
            FS_TRY_GOTO(put(&to, ",", 1), st, fail);
        }
        FS_TRY_GOTO(put_tensor(&to, &defs[d], &at), st, fail);
    }
    FS_TRY_GOTO(put(&to, "}", 1), st, fail);
    while (to.n % HEADER_ALIGN != 0) {
        FS_TRY_GOTO(put(&to, " ", 1), st, fail);
    }
    if (to.n - 8 > FS_SAFETENSORS_HEADER_MAX) {
        st = FS_FAIL(FS_EINVAL, "a header of %zu bytes; the format allows %u: write several files",
                     to.n - 8, FS_SAFETENSORS_HEADER_MAX);
        goto fail;
    }
    for (int i = 0; i < 8; i++) {
        to.at[i] = (char)((uint64_t)(to.n - 8) >> (8 * i) & 0xff);
    }
    *out = (fs_header){.bytes = (unsigned char *)to.at, .nbytes = to.n, .data_nbytes = at};
    return FS_OK;
fail:
    fs_free(to.at);
    return st;
}

void
fs_header_free(fs_header *header)
{
    fs_free(header->bytes);
    *header = (fs_header){0};
}
