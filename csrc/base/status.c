#define _GNU_SOURCE
#include "status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local fs_status_note own;

static fs_status_note *
own_note(void)
{
    return &own;
}

/* Set once, before the library that has this copy is used. */
static fs_status_note *(*note_of_thread)(void) = own_note;

fs_status_note *
fs_status_here(void)
{
    return note_of_thread();
}

void
fs_status_share(fs_status_note *(*theirs)(void))
{
    if (theirs != fs_status_here) {
        note_of_thread = theirs;
    }
}

fs_status
fs_status_fail(fs_status code, const char *format, ...)
{
    fs_status_note *note = note_of_thread();
    va_list args;
    va_start(args, format);
    (void)vsnprintf(note->message, sizeof note->message, format, args);
    va_end(args);
    return code;
}

fs_status
fs_status_fail_errno(const char *format, ...)
{
    int code = errno;
    fs_status_note *note = note_of_thread();
    note->saved_errno = code;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(note->message, sizeof note->message, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < sizeof note->message) {
        (void)snprintf(note->message + n, sizeof note->message - (size_t)n, ": %s", strerror(code));
    }
    return FS_ESYS;
}

const char *
fs_status_message(void)
{
    return note_of_thread()->message;
}

int
fs_status_errno(void)
{
    return note_of_thread()->saved_errno;
}

void
fs_status_keep(fs_status code, fs_kept *out)
{
    memset(out, 0, sizeof *out);
    out->status = (int)code;
    if (code == FS_OK) {
        return;
    }
    const fs_status_note *note = note_of_thread();
    const char *message = note->message;
    int saved_errno = note->saved_errno;
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
