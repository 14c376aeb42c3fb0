/* How processes of one host become a job.
 *
 * Rank 0 (or a launcher) makes two sealed memory files: one holds the shared state, the other
 * carries one lock per rank. The others get the descriptors by inheritance, or from rank 0
 * (rendezvous.c). Whoever gets them is on this host; equal host names prove nothing. */
#define _GNU_SOURCE
#include "shared.h"

#include <string.h>

#ifndef FS_THREADS_ONLY

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../base/checked.h"

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

static fs_status
take_lock(fs_job *job, int rank)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    if (fcntl(job->lock_fd, F_SETLK, &lock) == 0) {
        return FS_OK;
    }
    if (errno == EAGAIN || errno == EACCES) {
        return FS_FAIL(FS_ESTATE, "rank %d of this job is another process already: two processes "
                       "were started with the same rank", rank);
    }
    return FS_FAIL_ERRNO("could not lock byte %d of a memory file", rank);
}

// ---- files --------------------------------------------------------------------------------------

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

static int
memory_file(const char *name)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) {
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING); /* before Linux 6.3 */
    }
    return fd;
}

static fs_status
make_files(fs_job *job)
{
    uint64_t nonce;
    if (getrandom(&nonce, sizeof nonce, 0) != (ssize_t)sizeof nonce) {
        return FS_FAIL_ERRNO("could not get random bytes");
    }
    job->data_fd = memory_file("flatshard-data");
    job->lock_fd = memory_file("flatshard-locks");
    if (job->data_fd < 0 || job->lock_fd < 0) {
        return errno == ENOSYS ? FS_FAIL(FS_EUNSUPPORTED,
                                         "this kernel has no memory files (memfd_create), which "
                                         "worlds of processes need: Linux 3.17 or later; "
                                         "local_world works anywhere")
                               : FS_FAIL_ERRNO("could not make a memory file");
    }
    size_t nbytes = fs_job_page_nbytes(job->size);
    void *page;
    FS_TRY(fs_span_map(job, 0, nbytes, &page));
    fs_status st = fs_span_populate(job, 0, page, nbytes);
    if (st == FS_OK) {
        fs_job_page_init(page, job->size, nonce);
        /* It only grows: a mapping of a shrunk file would kill its readers. */
        if (fcntl(job->data_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) < 0) {
            st = FS_FAIL_ERRNO("could not seal a memory file");
        }
    }
    if (st == FS_OK) {
        job->page = page;
    } else {
        fs_span_unmap(job, page, nbytes);
    }
    return st;
}

/* Maps the shared state behind job's descriptors and becomes rank. */
static fs_status
attach(fs_job *job, int rank, uint64_t nonce)
{
    struct stat info;
    fs_job_page head;
    if (fstat(job->data_fd, &info) < 0) {
        return FS_FAIL(
            FS_ESTATE,
            "the job's data file (descriptor %d) is not there: was this process started by "
            "a rank, and not by the launcher?",
            job->data_fd);
    }
    int seals = fcntl(job->data_fd, F_GET_SEALS);
    ssize_t got = pread(job->data_fd, &head, sizeof head, 0);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || got != (ssize_t)sizeof head ||
        head.magic != FS_JOB_MAGIC || info.st_size < (off_t)head.nbytes) {
        return FS_FAIL(FS_ESTATE,
                       "descriptor %d is not the data file of a job: was this process started by a "
                       "rank, and not by the launcher?",
                       job->data_fd);
    }
    if (head.layout != FS_JOB_LAYOUT) {
        return FS_FAIL(FS_ESTATE,
                       "the ranks run different versions of flatshard: job layout %u, here %u",
                       head.layout, FS_JOB_LAYOUT);
    }
    if (head.size != (uint32_t)job->size || (nonce != 0 && head.nonce != nonce) ||
        head.nbytes != fs_job_page_nbytes(job->size) || head.root_at != fs_job_root_at(job->size)) {
        return FS_FAIL(FS_ESTATE,
                       "the job found has %u ranks, this rank was told %d: it is another job",
                       head.size, job->size);
    }
    FS_TRY(take_lock(job, rank));
    if (job->page == NULL) {
        void *page;
        FS_TRY(fs_span_map(job, 0, head.nbytes, &page));
        job->page = page;
    }
    job->self = rank;
    int64_t nobody = 0;
    if (!atomic_compare_exchange_strong(&job->page->slot[rank].pid, &nobody, (int64_t)getpid())) {
        return FS_FAIL(FS_ESTATE,
                       "rank %d has been in this job before; a new world needs a new job", rank);
    }
    return FS_OK;
}

// ---- join ---------------------------------------------------------------------------------------

fs_status
fs_job_create(int size, fs_job **out, int *out_data_fd, int *out_lock_fd)
{
    fs_job *job;
    FS_TRY(fs_job_new(size, &job));
    fs_status st = make_files(job);
    if (st != FS_OK) {
        fs_job_close(job);
        return st;
    }
    *out = job;
    *out_data_fd = job->data_fd;
    *out_lock_fd = job->lock_fd;
    return FS_OK;
}

/* Fills job's descriptors: inherited, made, or asked for. */
static fs_status
get_files(fs_job *job, const fs_join *join, uint64_t *out_nonce)
{
    *out_nonce = 0;
    if (join->data_fd >= 0) {
        job->data_fd = join->data_fd;
        job->lock_fd = join->lock_fd;
        (void)fcntl(job->data_fd, F_SETFD, FD_CLOEXEC);
        (void)fcntl(job->lock_fd, F_SETFD, FD_CLOEXEC);
        return FS_OK;
    }
    if (join->rank != 0) {
        return fs_rendezvous_ask(job, join, out_nonce);
    }
    FS_TRY(make_files(job));
    bool *came;
    FS_TRY(fs_calloc((size_t)join->size, sizeof *came, &came));
    fs_status st = fs_rendezvous_serve(job, join, came);
    fs_free(came);
    return st;
}

fs_status
fs_job_join(const fs_join *join, fs_job **out)
{
    fs_job *job;
    if (join->size < 1 || join->rank < 0 || join->rank >= join->size) {
        return FS_FAIL(FS_EINVAL, "rank %d does not exist in a world of %d", join->rank,
                       join->size);
    }
    FS_TRY(fs_job_new(join->size, &job));
    uint64_t nonce;
    fs_status st = get_files(job, join, &nonce);
    if (st == FS_OK) {
        st = attach(job, join->rank, nonce);
    }
    if (st != FS_OK) {
        fs_job_close(job);
        return st;
    }
    *out = job;
    return FS_OK;
}

#else

#define ONLY_THREADS                                                                           \
    "worlds of processes need Linux (memory files, futexes): this build has worlds of threads " \
    "alone; use flatshard.local_world(n)"

fs_status
fs_job_create(int size, fs_job **out, int *out_data_fd, int *out_lock_fd)
{
    (void)size;
    (void)out;
    (void)out_data_fd;
    (void)out_lock_fd;
    return FS_FAIL(FS_EUNSUPPORTED, "%s", ONLY_THREADS);
}

fs_status
fs_job_join(const fs_join *join, fs_job **out)
{
    if (join->size == 1) {
        return fs_job_threads(1, out); /* alone: nobody to share with */
    }
    return FS_FAIL(FS_EUNSUPPORTED, "%s", ONLY_THREADS);
}

bool
fs_job_holds_lock(fs_job *job, int rank, int64_t *out_pid)
{
    (void)job;
    (void)rank;
    *out_pid = 0;
    return true;
}

#endif
