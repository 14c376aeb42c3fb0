/* How processes of one host become a job. */
#define _GNU_SOURCE
#include "shared.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#ifndef FS_THREADS_ONLY

#include <fcntl.h>

// ---- liveness -----------------------------------------------------------------------------------

/* Rank r holds a write lock on byte r of the lock file for as long as its process lives. The kernel
 * lets it go with the process, whoever else (a forked child) still has the file open. */

bool
fs_job_holds_lock(fs_job *job, int rank, int64_t *out_pid)
{
    struct flock probe = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    *out_pid = 0;
    if (fcntl(job->lock_fd, F_GETLK, &probe) < 0) {
        return true; /* cannot tell: the deadline will */
    }
    if (probe.l_type == F_UNLCK) {
        return false;
    }
    *out_pid = probe.l_pid;
    return true;
}

#else

bool
fs_job_holds_lock(fs_job *job, int rank, int64_t *out_pid)
{
    (void)job;
    (void)rank;
    *out_pid = 0;
    return true;
}

#endif
