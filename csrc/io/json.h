/* A strict reader of the little JSON that a safetensors header is made of: objects, arrays, strings
 * and sizes (whole numbers from 0). The text may come from a stranger: every byte is checked before
 * it is used, nothing recurses, nothing is allocated. Strings are decoded in place. */
#ifndef FS_IO_JSON_H
#define FS_IO_JSON_H

#include <stdbool.h>
#include <stddef.h>

#include "../base/status.h"

typedef struct fs_json {
    char *begin, *at, *end; /* the text and the next unread byte; the text is written to */
    const char *path;       /* for messages */
} fs_json;

/* Skips white space, then takes exactly this character. */
FS_NODISCARD fs_status
fs_json_take(fs_json *json, char expected);

/* Skips white space, then takes this character if it is next. */
bool fs_json_try(fs_json *json, char wanted);

/* A string: escapes decoded, valid UTF-8, no raw control characters, NUL ended in place (the text
 * itself may hold NUL only as \u0000). *out points into the text. */
FS_NODISCARD fs_status
fs_json_string(fs_json *json, char **out, size_t *out_nbytes);

/* A whole number that fits size_t: no sign, fraction, exponent or leading zero. */
FS_NODISCARD fs_status
fs_json_size(fs_json *json, size_t *out);

/* FS_ECORRUPT unless only white space is left. */
FS_NODISCARD fs_status
fs_json_end(fs_json *json);

/* True if the bytes are valid UTF-8 (no overlong forms, no surrogates). */
bool fs_utf8_is_valid(const char *bytes, size_t nbytes);

#endif
