#define _GNU_SOURCE
#include "local_socket.h"

#ifndef FS_THREADS_ONLY

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// ---- addresses ----------------------------------------------------------------------------------

fs_address
fs_address_abstract(const uint64_t hash[2])
{
    fs_address a = {.name = {.sun_family = AF_UNIX}};
    int n = snprintf(a.name.sun_path + 1, sizeof a.name.sun_path - 1, "flatshard-%u-%016llx%016llx",
                     (unsigned)getuid(), (unsigned long long)hash[0], (unsigned long long)hash[1]);
    a.nbytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    return a;
}

bool
fs_private_folder(const char *path)
{
    struct stat info;
    if (mkdir(path, 0700) < 0 && errno != EEXIST) {
        return false;
    }
    return lstat(path, &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == getuid() &&
           (info.st_mode & 077) == 0;
}

fs_address
fs_address_in_folder(const char *folder, const uint64_t hash[2])
{
    fs_address a = {.name = {.sun_family = AF_UNIX}};
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

// ---- ends ---------------------------------------------------------------------------------------

bool
fs_socket_same_user(int fd)
{
    struct ucred peer;
    socklen_t nbytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) == 0 && peer.uid == getuid();
}

int64_t
fs_socket_peer(int fd)
{
    struct ucred peer = {0};
    socklen_t nbytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) == 0 ? peer.pid : 0;
}

void
fs_socket_limit_silence(int fd)
{
    const struct timeval limit = {1, 0};
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

int
fs_socket_connect(const fs_address *where)
{
    if (where->nbytes == 0) {
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        fs_socket_limit_silence(fd);
        if (connect(fd, (const struct sockaddr *)&where->name, where->nbytes) == 0 &&
            fs_socket_same_user(fd)) {
            return fd;
        }
        (void)close(fd);
    }
    return -1;
}

int
fs_socket_listen(const fs_address *where)
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

// ---- messages -----------------------------------------------------------------------------------

bool
fs_socket_send(int fd, const void *data, size_t nbytes)
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

bool
fs_socket_receive(int fd, void *data, size_t nbytes)
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

bool
fs_socket_send_files(int fd, const int files[2])
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

bool
fs_socket_receive_files(int fd, int files[2])
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

#else

/* A translation unit is not empty. */
typedef int fs_local_socket_is_for_processes;

#endif
