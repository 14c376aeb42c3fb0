#define _GNU_SOURCE
#include "status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[FS_MESSAGE_NBYTES];
static _Thread_local int saved_errno;

fs_status
fs_status_fail(fs_status code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return code;
}

fs_status
fs_status_fail_errno(const char *format, ...)
{
    saved_errno = errno;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < sizeof message) {
        (void)snprintf(message + n, sizeof message - (size_t)n, ": %s", strerror(saved_errno));
    }
    return FS_ESYS;
}

const char *
fs_status_message(void)
{
    return message;
}

int
fs_status_errno(void)
{
    return saved_errno;
}

void
fs_status_keep(fs_status code, fs_kept *out)
{
    memset(out, 0, sizeof *out);
    out->status = (int)code;
    if (code == FS_OK) {
        return;
    }
    size_t n = strlen(message);
    if (code == FS_ESYS) {
        /* ": " and the system's words are added again when it is told. */
        size_t words = strlen(strerror(saved_errno)) + 2;
        out->saved_errno = saved_errno;
        n = n > words && strcmp(message + n - words + 2, strerror(saved_errno)) == 0 ? n - words
                                                                                     : n;
    }
    n = n < sizeof out->text ? n : sizeof out->text - 1;
    memcpy(out->text, message, n);
}

fs_status
fs_status_tell(const fs_kept *kept, const char *prefix)
{
    if (kept->status == FS_OK) {
        return FS_OK;
    }
    int n = (int)strnlen(kept->text, sizeof kept->text - 1);
    if (kept->status == FS_ESYS) {
        errno = kept->saved_errno;
        return fs_status_fail_errno("%s%.*s", prefix, n, kept->text);
    }
    return fs_status_fail((fs_status)kept->status, "%s%.*s", prefix, n, kept->text);
}
