/* What every function that can fail returns, and how it says why.
 *
 * A status is a code; the sentence that explains it lives in a buffer of the calling thread until
 * the next failure on that thread. Nothing in the library prints, exits or aborts: the binding
 * turns a status into a Python exception in one place (binding/raise.c). */
#ifndef FS_BASE_STATUS_H
#define FS_BASE_STATUS_H

#include <stddef.h>

/* Codes are pinned, with gaps: they cross the boundary to plugins. */
typedef enum fs_status {
    FS_OK = 0,
    FS_EINVAL = 1,        /* an argument is wrong: ValueError */
    FS_ETYPE = 2,         /* a dtype or kind of object is wrong: TypeError */
    FS_ENOMEM = 3,        /* memory could not be had: MemoryError */
    FS_EBUDGET = 4,       /* memory would not fit, found before taking any: MemoryBudgetError */
    FS_ESYS = 5,          /* the system refused; fs_status_errno() says why: OSError */
    FS_ABORTED = 10,      /* the job is over for everyone: read the job's cause (comm/comm.h) */
    FS_ECORRUPT = 20,     /* a file is damaged or not what it claims: CheckpointError */
    FS_EUNSUPPORTED = 30, /* a named thing this build does not do: NotImplementedError */
    FS_ENONFINITE = 31,   /* too many skipped steps in a row: NonFiniteError */
    FS_ESTATE = 32,       /* called out of order (closed, gathered, mid-step): RuntimeError */
    FS_EINTERNAL = 90     /* a fault of ours */
} fs_status;

#define FS_MESSAGE_NBYTES 4096
#define FS_NODISCARD __attribute__((warn_unused_result))

/* Stores a printf-style sentence for the calling thread and returns code. */
fs_status
fs_status_fail(fs_status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Like fs_status_fail with FS_ESYS: remembers errno and appends its text. */
fs_status
fs_status_fail_errno(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The sentence of the calling thread's last failure; empty before the first. Never NULL. */
const char *fs_status_message(void);

/* errno of the calling thread's last FS_ESYS failure. */
int fs_status_errno(void);

/* Where a thread's last failure lies. */
typedef struct fs_status_note {
    char message[FS_MESSAGE_NBYTES];
    int saved_errno;
} fs_status_note;

/* The calling thread's. Never NULL. */
fs_status_note *fs_status_here(void);

/* For a library that has these functions of its own and is called by another program part: its
 * failures lie where the caller reads them, theirs being the caller's fs_status_here. */
void fs_status_share(fs_status_note *(*theirs)(void));

/* A failure taken off its thread, to be told later or on another rank. Plain bytes. */
typedef struct fs_kept {
    int status;      /* fs_status */
    int saved_errno; /* of FS_ESYS; its words are not in text */
    char text[1016];
} fs_kept;

/* Takes the calling thread's last failure, which gave code (FS_OK: nothing happened). */
void fs_status_keep(fs_status code, fs_kept *out);

/* Fails with a kept failure again, its text behind prefix. FS_OK when nothing was kept. */
FS_NODISCARD fs_status
fs_status_tell(const fs_kept *kept, const char *prefix);

#define FS_FAIL(code, ...) fs_status_fail((code), __VA_ARGS__)
#define FS_FAIL_ERRNO(...) fs_status_fail_errno(__VA_ARGS__)

/* Forwards a failure to the caller. */
#define FS_TRY(expression)                       \
    do {                                         \
        fs_status fs_try_status_ = (expression); \
        if (fs_try_status_ != FS_OK)             \
            return fs_try_status_;               \
    } while (0)

/* Forwards a failure to the one cleanup label of the function; st is its status variable. */
#define FS_TRY_GOTO(expression, st, label) \
    do {                                   \
        (st) = (expression);               \
        if ((st) != FS_OK)                 \
            goto label;                    \
    } while (0)

#endif
