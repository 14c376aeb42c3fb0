/* How the ranks of a host get the descriptors of their job from rank 0.
 *
 * Over a Unix socket that is tried on two addresses: an abstract name, and, when somebody has not
 * come after a second, a socket in a private folder (which crosses network namespaces). Both ends
 * check that the other belongs to the same user. Nothing here leaves a file behind, even when it is
 * killed, except a socket in the folder in its first seconds. These waits come before there is a
 * world to wait in: they look at the deadline and at Ctrl-C themselves.
 *
 * Two jobs that somebody starts by hand at one moment on one port have one name, and the name alone
 * would mix their ranks. Rank 0 therefore takes ranks of its own parent process at once, and others
 * only when none of its own has come for that rank in some time, and never once it has seen the
 * rank 0 of the other job. Who is put off asks again, and finds the rank 0 of its own job next. */
#define _GNU_SOURCE
#include "local_socket.h"

#ifndef FS_THREADS_ONLY

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

// ---- messages -----------------------------------------------------------------------------------

/* FNV-1a twice with different starts: 128 bits of the job's name. */
static void
hash_name(const char *name, uint64_t out[2])
{
    out[0] = 0xcbf29ce484222325u;
    out[1] = 0x6c62272e07bb0142u;
    for (const char *c = name; *c != '\0'; c++) {
        out[0] = (out[0] ^ (unsigned char)*c) * 0x100000001b3u;
        out[1] = (out[1] ^ (unsigned char)*c) * 0x100000001b3u + 0x9e3779b97f4a7c15u;
    }
}

#define HELLO_MAGIC 0x66736869u

typedef struct hello {
    uint32_t magic, layout;
    uint64_t name[2];
    int32_t size, rank;
    int64_t parent;
} hello;

typedef enum verdict {
    VERDICT_WELCOME = 1,
    VERDICT_TAKEN,
    VERDICT_SIZE,
    VERDICT_OTHER,
    VERDICT_LATER
} verdict;

typedef struct reply {
    uint32_t magic;
    int32_t verdict, size;
    uint64_t nonce;
} reply;

static hello
greeting_of(const fs_join *join, const uint64_t name[2])
{
    return (hello){HELLO_MAGIC, FS_JOB_LAYOUT, {name[0], name[1]}, join->size, join->rank,
                   join->parent};
}

// ---- rank 0 -------------------------------------------------------------------------------------

/* What rank 0 knows while it hands the descriptors out. */
typedef struct server {
    const fs_job *job;
    const fs_join *join;
    uint64_t name[2];
    bool *came;          /* by rank */
    int64_t stranger_ns; /* when a rank of another parent asked first; 0: none has */
    int64_t rival;       /* process that is rank 0 of another job of this name; 0: none was seen */
} server;

#define STRANGER_NS 2000000000 /* how long ranks of another parent are put off */

static bool
stranger(const server *serves, const hello *said)
{
    return said->parent != 0 && serves->join->parent != 0 && said->parent != serves->join->parent;
}

/* May a rank of another parent come in now? */
static bool
put_off(server *serves)
{
    int64_t now = fs_now_ns();
    if (serves->stranger_ns == 0) {
        serves->stranger_ns = now;
    }
    double seconds = STRANGER_NS * 1e-9;
    seconds = seconds < serves->join->timeout_s / 2 ? seconds : serves->join->timeout_s / 2;
    return serves->rival != 0 || (double)(now - serves->stranger_ns) * 1e-9 < seconds;
}

static verdict
judge(server *serves, const hello *said, int64_t pid)
{
    const fs_job *job = serves->job;
    if (said->layout != FS_JOB_LAYOUT || memcmp(said->name, serves->name, sizeof said->name) != 0) {
        return VERDICT_OTHER;
    }
    if (said->rank == 0 && stranger(serves, said)) {
        serves->rival = pid;
        return VERDICT_LATER;
    }
    if (said->size != job->size || said->rank <= 0 || said->rank >= job->size) {
        return VERDICT_SIZE;
    }
    if (serves->came[said->rank]) {
        return VERDICT_TAKEN;
    }
    return stranger(serves, said) && put_off(serves) ? VERDICT_LATER : VERDICT_WELCOME;
}

/* Answers one caller; true if a rank that was missing got its descriptors. */
static bool
answer(int fd, server *serves)
{
    const fs_job *job = serves->job;
    hello said;
    fs_socket_limit_silence(fd);
    if (!fs_socket_same_user(fd) || !fs_socket_receive(fd, &said, sizeof said) ||
        said.magic != HELLO_MAGIC) {
        return false;
    }
    reply back = {HELLO_MAGIC, (int32_t)judge(serves, &said, fs_socket_peer(fd)), job->size,
                  job->page->nonce};
    const int files[2] = {job->data_fd, job->lock_fd};
    if (!fs_socket_send(fd, &back, sizeof back) || back.verdict != VERDICT_WELCOME ||
        !fs_socket_send_files(fd, files)) {
        return false;
    }
    serves->came[said.rank] = true;
    return true;
}

#define OWN_NAME \
    "give each job an address and port (MASTER_ADDR, MASTER_PORT) or run id of its own"

static fs_status
say_missing(const server *serves)
{
    const fs_join *join = serves->join;
    char missing[256] = "", other[224] = "";
    size_t at = 0;
    for (int r = 1; r < join->size && at < sizeof missing - 16; r++) {
        if (!serves->came[r]) {
            at += (size_t)snprintf(missing + at, sizeof missing - at, "%s%d", at ? ", " : "", r);
        }
    }
    if (serves->rival != 0) {
        (void)snprintf(other, sizeof other, ". Another job began under the same name, its rank 0 "
                       "is process %lld: " OWN_NAME, (long long)serves->rival);
    }
    return FS_FAIL(FS_ABORTED,
                   "rank(s) %s of %d did not come within %.1f s (job %s). Are they on this "
                   "host, started, and of the same user?%s",
                   missing, join->size, join->timeout_s, join->name, other);
}

#define FOLDER_AFTER_NS 1000000000 /* the second address, when somebody has not come by then */
#define POLL_MS 50
#define NAME_WAIT_NS 2000000000 /* for a rank 0 of the same name to end */

static bool
stop_waiting(const fs_join *join)
{
    return join->interrupted != NULL && join->interrupted(join->interrupted_ctx);
}

/* Is it a rank 0 like us that listens there? Its process; 0: nobody, or a stranger. */
static int64_t
find_rank_0(const fs_address *where, const fs_join *join, const uint64_t name[2])
{
    hello mine = greeting_of(join, name);
    reply back;
    int fd = fs_socket_connect(where);
    if (fd < 0) {
        return 0;
    }
    bool known = fs_socket_send(fd, &mine, sizeof mine) &&
                 fs_socket_receive(fd, &back, sizeof back) &&
                 back.magic == HELLO_MAGIC;
    int64_t pid = known ? fs_socket_peer(fd) : 0;
    (void)close(fd);
    return pid;
}

/* The address of this job, *out_fd -1 when a stranger has taken it. A rank 0 of the same name that
 * is about to end (the job before this one) is waited for; one that stays is another job, whose
 * ranks would be mixed with ours. */
static fs_status
take_name(const fs_address *where, const fs_join *join, const uint64_t name[2], int *out_fd)
{
    int64_t end = fs_now_ns() + NAME_WAIT_NS;
    for (;;) {
        *out_fd = fs_socket_listen(where);
        if (*out_fd >= 0 || errno != EADDRINUSE) {
            return FS_OK;
        }
        int64_t pid = find_rank_0(where, join, name);
        if (pid == 0) {
            return FS_OK;
        }
        if (fs_now_ns() > end) {
            errno = EADDRINUSE;
            return FS_FAIL_ERRNO(
                "another job of this user begins under the same name (job %s): its rank 0 is "
                "process %lld; " OWN_NAME,
                join->name, (long long)pid);
        }
        if (stop_waiting(join)) {
            return FS_FAIL(FS_ABORTED, "interrupted while waiting for the other ranks");
        }
        (void)poll(NULL, 0, POLL_MS);
    }
}

/* Hands the descriptors to every other rank. */
fs_status
fs_rendezvous_serve(const fs_job *job, const fs_join *join, bool *came)
{
    server serves = {.job = job, .join = join, .came = came};
    hash_name(join->name, serves.name);
    fs_address first = fs_address_abstract(serves.name);
    fs_address second = fs_address_in_folder(join->folder, serves.name);
    int listeners[2] = {-1, -1};
    FS_TRY(take_name(&first, join, serves.name, &listeners[0]));
    bool tried_folder = false;
    int64_t start = fs_now_ns();
    fs_status st = FS_OK;
    for (int missing = job->size - 1; missing > 0 && st == FS_OK;) {
        int64_t now = fs_now_ns();
        if (!tried_folder && (listeners[0] < 0 || now - start > FOLDER_AFTER_NS)) {
            tried_folder = true;
            if (second.nbytes != 0 && fs_private_folder(join->folder)) {
                (void)unlink(
                    second.name.sun_path); /* of a job that was killed; ours has this name */
                listeners[1] = fs_socket_listen(&second);
            }
            if (listeners[0] < 0 && listeners[1] < 0) {
                st = FS_FAIL_ERRNO(
                    "could not listen for the other ranks, neither at an abstract socket "
                    "nor in %s",
                    join->folder != NULL ? join->folder : "a folder");
                break;
            }
        }
        struct pollfd ready[2] = {{listeners[0], POLLIN, 0}, {listeners[1], POLLIN, 0}};
        (void)poll(ready, 2, POLL_MS); /* EINTR and time-out alike: look around */
        for (int i = 0; i < 2; i++) {
            int fd = listeners[i] >= 0 ? accept4(listeners[i], NULL, NULL, SOCK_CLOEXEC) : -1;
            if (fd >= 0) {
                missing -= answer(fd, &serves) ? 1 : 0;
                (void)close(fd);
            }
        }
        if (missing > 0 && (double)(fs_now_ns() - start) * 1e-9 > join->timeout_s) {
            st = say_missing(&serves);
        } else if (missing > 0 && stop_waiting(join)) {
            st = FS_FAIL(FS_ABORTED, "interrupted while waiting for the other ranks");
        }
    }
    for (int i = 0; i < 2; i++) {
        if (listeners[i] >= 0) {
            (void)close(listeners[i]);
        }
    }
    if (listeners[1] >= 0) {
        (void)unlink(second.name.sun_path);
        (void)rmdir(join->folder); /* if nobody else uses it */
    }
    return st;
}

// ---- the others ---------------------------------------------------------------------------------

/* Says who this is, and takes what comes back. FS_OK with job->data_fd still -1: not now. */
static fs_status
ask_over(int fd, fs_job *job, const fs_join *join, const uint64_t name[2], uint64_t *out_nonce)
{
    hello mine = greeting_of(join, name);
    reply back;
    int files[2];
    fs_status st = FS_OK;
    if (fs_socket_send(fd, &mine, sizeof mine) && fs_socket_receive(fd, &back, sizeof back) &&
        back.magic == HELLO_MAGIC) {
        if (back.verdict == VERDICT_WELCOME && fs_socket_receive_files(fd, files)) {
            job->data_fd = files[0];
            job->lock_fd = files[1];
            *out_nonce = back.nonce;
        } else if (back.verdict == VERDICT_SIZE) {
            st = FS_FAIL(FS_EINVAL, "rank %d of %d: rank 0 was told that the world has %d ranks",
                         join->rank, join->size, back.size);
        } else if (back.verdict == VERDICT_OTHER) {
            st = FS_FAIL(FS_ESTATE, "rank %d runs another version of flatshard than rank 0",
                         join->rank);
        }
        /* TAKEN: rank 0 still serves the job that this process has left; LATER: perhaps it is
         * rank 0 of another job: ask again. */
    }
    return st;
}

/* Asks rank 0 once. FS_OK with job->data_fd still -1: nobody there yet. */
static fs_status
ask_once(fs_job *job, const fs_join *join, const fs_address *where, const uint64_t name[2],
         uint64_t *out_nonce)
{
    int fd = fs_socket_connect(where);
    if (fd < 0) {
        return FS_OK;
    }
    fs_status st = ask_over(fd, job, join, name, out_nonce);
    (void)close(fd);
    return st;
}

fs_status
fs_rendezvous_ask(fs_job *job, const fs_join *join, uint64_t *out_nonce)
{
    uint64_t name[2];
    hash_name(join->name, name);
    const fs_address where[2] = {fs_address_abstract(name),
                                 fs_address_in_folder(join->folder, name)};
    int64_t start = fs_now_ns();
    for (int pause_ms = 1;; pause_ms = pause_ms < POLL_MS ? pause_ms * 2 : POLL_MS) {
        for (int i = 0; i < 2 && job->data_fd < 0; i++) {
            FS_TRY(ask_once(job, join, &where[i], name, out_nonce));
        }
        if (job->data_fd >= 0) {
            return FS_OK;
        }
        if ((double)(fs_now_ns() - start) * 1e-9 > join->timeout_s) {
            return FS_FAIL(FS_ABORTED,
                           "rank %d of %d could not reach rank 0 within %.1f s (job %s). Is it "
                           "on this host, started, and of the same user?",
                           join->rank, join->size, join->timeout_s, join->name);
        }
        if (stop_waiting(join)) {
            return FS_FAIL(FS_ABORTED, "interrupted while waiting for rank 0");
        }
        (void)poll(NULL, 0, pause_ms);
    }
}

#else

/* A translation unit is not empty. */
typedef int fs_rendezvous_is_for_processes;

#endif
