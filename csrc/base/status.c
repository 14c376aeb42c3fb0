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
