#include "json.h"

#include <stdint.h>
#include <string.h>

#include "../base/checked.h"

static void
skip_space(fs_json *json)
{
    while (json->at < json->end &&
           (*json->at == ' ' || *json->at == '\t' || *json->at == '\n' || *json->at == '\r')) {
        json->at++;
    }
}

static size_t
place(const fs_json *json)
{
    return (size_t)(json->at - json->begin);
}

static fs_status
wrong(const fs_json *json, const char *expected)
{
    if (json->at == json->end) {
        return FS_FAIL(FS_ECORRUPT, "%s: the header ends where %s was expected", json->path,
                       expected);
    }
    return FS_FAIL(FS_ECORRUPT, "%s: header byte %zu: expected %s, got byte 0x%02x", json->path,
                   place(json), expected, (unsigned)(unsigned char)*json->at);
}

fs_status
fs_json_take(fs_json *json, char expected)
{
    skip_space(json);
    if (json->at == json->end || *json->at != expected) {
        const char text[] = {'\'', expected, '\'', '\0'};
        return wrong(json, text);
    }
    json->at++;
    return FS_OK;
}

bool
fs_json_try(fs_json *json, char wanted)
{
    skip_space(json);
    if (json->at < json->end && *json->at == wanted) {
        json->at++;
        return true;
    }
    return false;
}

fs_status
fs_json_end(fs_json *json)
{
    skip_space(json);
    return json->at == json->end ? FS_OK : wrong(json, "the end of the header");
}

fs_status
fs_json_size(fs_json *json, size_t *out)
{
    skip_space(json);
    if (json->at == json->end || *json->at < '0' || *json->at > '9') {
        return wrong(json, "a whole number");
    }
    const char *first = json->at;
    size_t value = 0;
    for (; json->at < json->end && *json->at >= '0' && *json->at <= '9'; json->at++) {
        if (!fs_mul_fits(value, 10, &value) ||
            !fs_add_fits(value, (size_t)(*json->at - '0'), &value)) {
            return FS_FAIL(FS_ECORRUPT, "%s: header byte %zu: a number beyond 64 bits", json->path,
                           place(json));
        }
    }
    if (*first == '0' && json->at - first > 1) {
        json->at = json->begin + (first - json->begin);
        return wrong(json, "a number without leading zeros");
    }
    if (json->at < json->end &&
        (*json->at == '.' || *json->at == 'e' || *json->at == 'E' || *json->at == '-')) {
        return wrong(json, "a whole number");
    }
    *out = value;
    return FS_OK;
}

// ---- strings ------------------------------------------------------------------------------------

/* Bytes of the valid UTF-8 sequence at at, or 0. */
static size_t
utf8_sequence(const unsigned char *at, size_t left)
{
    if (at[0] < 0x80) {
        return 1;
    }
    size_t n = at[0] >= 0xf0 ? 4 : at[0] >= 0xe0 ? 3 : 2;
    if (at[0] < 0xc2 || at[0] > 0xf4 || n > left) {
        return 0;
    }
    for (size_t i = 1; i < n; i++) {
        if ((at[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    if ((at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xed && at[1] > 0x9f) ||
        (at[0] == 0xf0 && at[1] < 0x90) || (at[0] == 0xf4 && at[1] > 0x8f)) {
        return 0;
    }
    return n;
}

bool
fs_utf8_is_valid(const char *bytes, size_t nbytes)
{
    const unsigned char *at = (const unsigned char *)bytes;
    while (nbytes > 0) {
        size_t n = utf8_sequence(at, nbytes);
        if (n == 0) {
            return false;
        }
        at += n;
        nbytes -= n;
    }
    return true;
}

/* The four hex digits at at. */
static fs_status
hex4(fs_json *json, uint32_t *out)
{
    uint32_t value = 0;
    for (int i = 0; i < 4; i++, json->at++) {
        if (json->at == json->end) {
            return wrong(json, "a hex digit");
        }
        char c = *json->at;
        uint32_t digit;
        if (c >= '0' && c <= '9') {
            digit = (uint32_t)(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            digit = (uint32_t)(c - 'a') + 10;
        } else if (c >= 'A' && c <= 'F') {
            digit = (uint32_t)(c - 'A') + 10;
        } else {
            return wrong(json, "a hex digit");
        }
        value = value << 4 | digit;
    }
    *out = value;
    return FS_OK;
}

/* After \u: decodes one code point (a surrogate pair is one) to UTF-8 at *to. It needs at most as
 * many bytes as its escape had, so writing never overtakes reading. */
static fs_status
escape_u(fs_json *json, char **to)
{
    uint32_t code = 0;
    FS_TRY(hex4(json, &code));
    if (code >= 0xdc00 && code <= 0xdfff) {
        return FS_FAIL(FS_ECORRUPT, "%s: header byte %zu: half of a surrogate pair", json->path,
                       place(json));
    }
    if (code >= 0xd800 && code <= 0xdbff) {
        uint32_t low = 0;
        if (json->end - json->at < 2 || json->at[0] != '\\' || json->at[1] != 'u') {
            return wrong(json, "the other half of a surrogate pair");
        }
        json->at += 2;
        FS_TRY(hex4(json, &low));
        if (low < 0xdc00 || low > 0xdfff) {
            return FS_FAIL(FS_ECORRUPT, "%s: header byte %zu: half of a surrogate pair", json->path,
                           place(json));
        }
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    unsigned char bytes[4];
    size_t n;
    if (code < 0x80) {
        bytes[0] = (unsigned char)code;
        n = 1;
    } else if (code < 0x800) {
        bytes[0] = (unsigned char)(0xc0 | code >> 6);
        bytes[1] = (unsigned char)(0x80 | (code & 0x3f));
        n = 2;
    } else if (code < 0x10000) {
        bytes[0] = (unsigned char)(0xe0 | code >> 12);
        bytes[1] = (unsigned char)(0x80 | (code >> 6 & 0x3f));
        bytes[2] = (unsigned char)(0x80 | (code & 0x3f));
        n = 3;
    } else {
        bytes[0] = (unsigned char)(0xf0 | code >> 18);
        bytes[1] = (unsigned char)(0x80 | (code >> 12 & 0x3f));
        bytes[2] = (unsigned char)(0x80 | (code >> 6 & 0x3f));
        bytes[3] = (unsigned char)(0x80 | (code & 0x3f));
        n = 4;
    }
    memcpy(*to, bytes, n);
    *to += n;
    return FS_OK;
}

static fs_status
escape(fs_json *json, char **to)
{
    static const char from[] = "\"\\/bfnrt", meaning[] = "\"\\/\b\f\n\r\t";
    if (json->at == json->end) {
        return wrong(json, "an escape");
    }
    if (*json->at == 'u') {
        json->at++;
        return escape_u(json, to);
    }
    const char *found = *json->at == '\0' ? NULL : strchr(from, *json->at);
    if (found == NULL) {
        return wrong(json, "an escape");
    }
    json->at++;
    *(*to)++ = meaning[found - from];
    return FS_OK;
}

fs_status
fs_json_string(fs_json *json, char **out, size_t *out_nbytes)
{
    FS_TRY(fs_json_take(json, '"'));
    char *first = json->at, *to = json->at;
    for (;;) {
        if (json->at == json->end) {
            return wrong(json, "the end of a string");
        }
        unsigned char c = (unsigned char)*json->at;
        if (c == '"') {
            json->at++;
            *to = '\0'; /* at the quote or before it */
            *out = first;
            *out_nbytes = (size_t)(to - first);
            return FS_OK;
        }
        if (c < 0x20) {
            return wrong(json, "a character of a string");
        }
        if (c == '\\') {
            json->at++;
            FS_TRY(escape(json, &to));
            continue;
        }
        size_t n = utf8_sequence((const unsigned char *)json->at, (size_t)(json->end - json->at));
        if (n == 0) {
            return wrong(json, "valid UTF-8");
        }
        memmove(to, json->at, n);
        to += n;
        json->at += n;
    }
}
