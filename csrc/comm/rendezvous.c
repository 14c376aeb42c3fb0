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
#include "shared.h"

#ifndef FS_THREADS_ONLY

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

// ---- addresses ----------------------------------------------------------------------------------

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

typedef struct address {
    struct sockaddr_un name;
    socklen_t nbytes; /* 0: this address cannot be used */
} address;

static address
abstract_address(const uint64_t hash[2])
{
    address a = {.name = {.sun_family = AF_UNIX}};
    int n = snprintf(a.name.sun_path + 1, sizeof a.name.sun_path - 1, "flatshard-%u-%016llx%016llx",
                     (unsigned)getuid(), (unsigned long long)hash[0], (unsigned long long)hash[1]);
    a.nbytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    return a;
}

/* A folder that only this user can enter; made if it is not there. */
static bool
private_folder(const char *path)
{
    struct stat info;
    if (mkdir(path, 0700) < 0 && errno != EEXIST) {
        return false;
    }
    return lstat(path, &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == getuid() &&
           (info.st_mode & 077) == 0;
}

static address
folder_address(const char *folder, const uint64_t hash[2])
{
    address a = {.name = {.sun_family = AF_UNIX}};
    if (folder == NULL) {
        return a;
    }
    int n = snprintf(a.name.sun_path, sizeof a.name.sun_path, "%s/%016llx%016llx", folder,
                     (unsigned long long)hash[0], (unsigned long long)hash[1]);
    if (n > 0 && (size_t)n < sizeof a.name.sun_path) {
        a.nbytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)n + 1);
    }
    return a;
}

static bool
same_user(int fd)
{
    struct ucred peer;
    socklen_t nbytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) == 0 && peer.uid == getuid();
}

// ---- messages -----------------------------------------------------------------------------------

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

/* A peer that says nothing does not hold up the others for longer than this. */
static void
limit_silence(int fd)
{
    const struct timeval limit = {1, 0};
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

static bool
send_all(int fd, const void *data, size_t nbytes)
{
    const unsigned char *at = data;
    while (nbytes > 0) {
        ssize_t n = send(fd, at, nbytes, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        at += n;
        nbytes -= (size_t)n;
    }
    return true;
}

static bool
receive_all(int fd, void *data, size_t nbytes)
{
    unsigned char *at = data;
    while (nbytes > 0) {
        ssize_t n = recv(fd, at, nbytes, 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        at += n;
        nbytes -= (size_t)n;
    }
    return true;
}

/* One byte that carries both descriptors. */
static bool
send_files(int fd, const int files[2])
{
    char byte = 0;
    struct iovec data = {&byte, 1};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    struct cmsghdr *part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(2 * sizeof(int));
    memcpy(CMSG_DATA(part), files, 2 * sizeof(int));
    ssize_t n;
    do {
        n = sendmsg(fd, &message, MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    return n == 1;
}

static bool
receive_files(int fd, int files[2])
{
    char byte;
    struct iovec data = {&byte, 1};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    ssize_t n;
    do {
        n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    struct cmsghdr *part = n == 1 ? CMSG_FIRSTHDR(&message) : NULL;
    if (part == NULL || part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) {
        return false;
    }
    size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    if (count != 2 || (message.msg_flags & MSG_CTRUNC)) {
        for (size_t i = 0; i < count; i++) {
            int extra;
            memcpy(&extra, CMSG_DATA(part) + i * sizeof(int), sizeof extra);
            (void)close(extra);
        }
        return false;
    }
    memcpy(files, CMSG_DATA(part), 2 * sizeof(int));
    return true;
}

static int
connect_to(const address *where)
{
    if (where->nbytes == 0) {
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        limit_silence(fd);
        if (connect(fd, (const struct sockaddr *)&where->name, where->nbytes) == 0 &&
            same_user(fd)) {
            return fd;
        }
        (void)close(fd);
    }
    return -1;
}

// ---- rank 0 -------------------------------------------------------------------------------------

static int
listen_at(const address *where)
{
    if (where->nbytes == 0) {
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && (bind(fd, (const struct sockaddr *)&where->name, where->nbytes) < 0 ||
                    listen(fd, 128) < 0)) {
        int why = errno;
        (void)close(fd);
        errno = why;
        return -1;
    }
    return fd;
}

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

static int64_t
pid_of_peer(int fd)
{
    struct ucred peer = {0};
    socklen_t nbytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) == 0 ? peer.pid : 0;
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
    limit_silence(fd);
    if (!same_user(fd) || !receive_all(fd, &said, sizeof said) || said.magic != HELLO_MAGIC) {
        return false;
    }
    reply back = {HELLO_MAGIC, (int32_t)judge(serves, &said, pid_of_peer(fd)), job->size,
                  job->page->nonce};
    const int files[2] = {job->data_fd, job->lock_fd};
    if (!send_all(fd, &back, sizeof back) || back.verdict != VERDICT_WELCOME ||
        !send_files(fd, files)) {
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
find_rank_0(const address *where, const fs_join *join, const uint64_t name[2])
{
    hello mine = greeting_of(join, name);
    reply back;
    int fd = connect_to(where);
    if (fd < 0) {
        return 0;
    }
    bool known = send_all(fd, &mine, sizeof mine) && receive_all(fd, &back, sizeof back) &&
                 back.magic == HELLO_MAGIC;
    int64_t pid = known ? pid_of_peer(fd) : 0;
    (void)close(fd);
    return pid;
}

/* The address of this job, *out_fd -1 when a stranger has taken it. A rank 0 of the same name that
 * is about to end (the job before this one) is waited for; one that stays is another job, whose
 * ranks would be mixed with ours. */
static fs_status
take_name(const address *where, const fs_join *join, const uint64_t name[2], int *out_fd)
{
    int64_t end = fs_now_ns() + NAME_WAIT_NS;
    for (;;) {
        *out_fd = listen_at(where);
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
    address first = abstract_address(serves.name);
    address second = folder_address(join->folder, serves.name);
    int listeners[2] = {-1, -1};
    FS_TRY(take_name(&first, join, serves.name, &listeners[0]));
    bool tried_folder = false;
    int64_t start = fs_now_ns();
    fs_status st = FS_OK;
    for (int missing = job->size - 1; missing > 0 && st == FS_OK;) {
        int64_t now = fs_now_ns();
        if (!tried_folder && (listeners[0] < 0 || now - start > FOLDER_AFTER_NS)) {
            tried_folder = true;
            if (second.nbytes != 0 && private_folder(join->folder)) {
                (void)unlink(
                    second.name.sun_path); /* of a job that was killed; ours has this name */
                listeners[1] = listen_at(&second);
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
    if (send_all(fd, &mine, sizeof mine) && receive_all(fd, &back, sizeof back) &&
        back.magic == HELLO_MAGIC) {
        if (back.verdict == VERDICT_WELCOME && receive_files(fd, files)) {
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
ask_once(fs_job *job, const fs_join *join, const address *where, const uint64_t name[2],
         uint64_t *out_nonce)
{
    int fd = connect_to(where);
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
    const address where[2] = {abstract_address(name), folder_address(join->folder, name)};
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
