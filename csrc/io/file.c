#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "../base/arena.h"
#include "../base/checked.h"

/* One call moves at most 0x7ffff000 bytes on Linux; other systems refuse more than INT_MAX. */
#define CALL_NBYTES_MAX ((size_t)1 << 30)

fs_status
fs_name_check(const char *where, const char *name)
{
    size_t n = strlen(name);
    if (n == 0 || n > 255) {
        return FS_FAIL(FS_ECORRUPT, "%s: a file name of %zu bytes", where, n);
    }
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c < 0x20 || c == 0x7f) {
            return FS_FAIL(FS_ECORRUPT, "%s: a file name with a control character", where);
        }
        if (c == '/' || c == '\\') {
            return FS_FAIL(FS_ECORRUPT, "%s: file name \"%s\" leaves its folder", where, name);
        }
    }
    if (name[0] == '.') {
        return FS_FAIL(FS_ECORRUPT, "%s: file name \"%s\" begins with a dot", where, name);
    }
    return FS_OK;
}

static fs_status
join(const char *folder, const char *name, char **out)
{
    if (folder == NULL) {
        return fs_strdup(name, out);
    }
    size_t folder_n = strlen(folder), name_n = strlen(name), total;
    FS_TRY(fs_add_size(folder_n, name_n, &total));
    FS_TRY(fs_add_size(total, 2, &total));
    char *path;
    FS_TRY(fs_calloc(total, 1, &path));
    (void)snprintf(path, total, "%s/%s", folder, name);
    *out = path;
    return FS_OK;
}

static int
open_retrying(const char *path, int flags, mode_t mode)
{
    int fd;
    do {
        fd = open(path, flags, mode);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

/* Whether a resolved path lies in a resolved folder. */
static bool
lies_in(const char *path, const char *folder)
{
    size_t n = strlen(folder);
    return strncmp(path, folder, n) == 0 && (path[n] == '/' || (n > 0 && folder[n - 1] == '/'));
}

/* Whether real, the end of a link in folder, may be read: it lies in the folder, or is a blob of
 * the Hugging Face cache whose snapshot that is (CACHE/snapshots/REVISION and CACHE/blobs). */
static bool
link_is_inside(const char *folder, const char *real)
{
    char home[PATH_MAX], beside[PATH_MAX];
    if (realpath(folder, home) == NULL) {
        return false;
    }
    if (lies_in(real, home)) {
        return true;
    }
    char *revision = strrchr(home, '/');
    if (revision == NULL) {
        return false;
    }
    *revision = '\0';
    char *snapshots = strrchr(home, '/');
    if (snapshots == NULL || strcmp(snapshots, "/snapshots") != 0) {
        return false;
    }
    *snapshots = '\0';
    int n = snprintf(beside, sizeof beside, "%s/blobs", home);
    return n > 0 && (size_t)n < sizeof beside && lies_in(real, beside) &&
           strchr(real + n + 1, '/') == NULL;
}

/* Opens path; a link in a folder (not NULL) only where it stays inside. */
static fs_status
open_inside(const char *folder, const char *path, int *out_fd)
{
    /* Without O_NONBLOCK a pipe of that name would hang the open. */
    int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
    char real[PATH_MAX];
    *out_fd = open_retrying(path, folder == NULL ? flags : flags | O_NOFOLLOW, 0);
    if (*out_fd < 0 && folder != NULL && (errno == ELOOP || errno == EMLINK)) {
        if (realpath(path, real) != NULL) {
            if (!link_is_inside(folder, real)) {
                return FS_FAIL(FS_ECORRUPT, "%s: a link that leads out of its folder", path);
            }
            *out_fd = open_retrying(real, flags | O_NOFOLLOW, 0);
        }
    }
    return *out_fd < 0 ? FS_FAIL_ERRNO("%s: could not open", path) : FS_OK;
}

fs_status
fs_file_open(const char *folder, const char *name, fs_file *out)
{
    fs_file file = FS_FILE_CLOSED;
    fs_status st;
    struct stat about;
    FS_TRY(join(folder, name, &file.path));
    FS_TRY_GOTO(open_inside(folder, file.path, &file.fd), st, fail);
    if (fstat(file.fd, &about) != 0) {
        st = FS_FAIL_ERRNO("%s: could not read its size", file.path);
        goto fail;
    }
    if (!S_ISREG(about.st_mode)) {
        st = FS_FAIL(FS_ECORRUPT, "%s: not a regular file", file.path);
        goto fail;
    }
    file.nbytes = (size_t)about.st_size;
    *out = file;
    return FS_OK;
fail:
    fs_file_discard(&file);
    return st;
}

fs_status
fs_file_create(const char *folder, const char *name, fs_file *out)
{
    fs_file file = FS_FILE_CLOSED;
    FS_TRY(join(folder, name, &file.path));
    file.fd = open_retrying(file.path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file.fd < 0) {
        fs_status st = FS_FAIL_ERRNO("%s: could not create", file.path);
        fs_file_discard(&file);
        return st;
    }
    *out = file;
    return FS_OK;
}

fs_status
fs_file_read(const fs_file *file, size_t offset, size_t nbytes, void *out)
{
    size_t end;
    if (!fs_add_fits(offset, nbytes, &end) || end > (size_t)INT64_MAX) {
        return FS_FAIL(FS_ECORRUPT, "%s: offset %zu + %zu bytes is no place in a file", file->path,
                       offset, nbytes);
    }
    unsigned char *to = out;
    while (nbytes > 0) {
        ssize_t n = pread(file->fd, to, fs_min_size(nbytes, CALL_NBYTES_MAX), (off_t)offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return FS_FAIL_ERRNO("%s: could not read at byte %zu", file->path, offset);
        }
        if (n == 0) {
            return FS_FAIL(FS_ECORRUPT, "%s: unexpected end of file at byte %zu, %zu bytes missing",
                           file->path, offset, nbytes);
        }
        to += n;
        offset += (size_t)n;
        nbytes -= (size_t)n;
    }
    return FS_OK;
}

fs_status
fs_file_write(const fs_file *file, size_t offset, size_t nbytes, const void *bytes)
{
    size_t end;
    if (!fs_add_fits(offset, nbytes, &end) || end > (size_t)INT64_MAX) {
        return FS_FAIL(FS_EINVAL, "%s: offset %zu + %zu bytes is no place in a file", file->path,
                       offset, nbytes);
    }
    const unsigned char *from = bytes;
    while (nbytes > 0) {
        ssize_t n = pwrite(file->fd, from, fs_min_size(nbytes, CALL_NBYTES_MAX), (off_t)offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n == 0) {
            errno = ENOSPC; /* what a device that takes nothing means */
        }
        if (n <= 0) {
            return FS_FAIL_ERRNO("%s: could not write at byte %zu", file->path, offset);
        }
        from += n;
        offset += (size_t)n;
        nbytes -= (size_t)n;
    }
    return FS_OK;
}

void
fs_file_start_writeback(const fs_file *file, size_t offset, size_t nbytes)
{
#ifdef __linux__
    (void)sync_file_range(file->fd, (off_t)offset, (off_t)nbytes, SYNC_FILE_RANGE_WRITE);
#else
    (void)file;
    (void)offset;
    (void)nbytes;
#endif
}

static int
sync_retrying(int fd)
{
    int rc;
    do {
        rc = fsync(fd);
    } while (rc != 0 && errno == EINTR);
    return rc;
}

fs_status
fs_file_sync(const fs_file *file)
{
    if (sync_retrying(file->fd) != 0) {
        return FS_FAIL_ERRNO("%s: could not sync", file->path);
    }
    return FS_OK;
}

fs_status
fs_file_close(fs_file *file)
{
    fs_status st = FS_OK;
    /* After EINTR the descriptor is gone on Linux: never close twice. */
    if (file->fd >= 0 && close(file->fd) != 0 && errno != EINTR) {
        st = FS_FAIL_ERRNO("%s: could not close", file->path);
    }
    fs_free(file->path);
    *file = FS_FILE_CLOSED;
    return st;
}

void
fs_file_discard(fs_file *file)
{
    if (file->fd >= 0) {
        (void)close(file->fd);
    }
    fs_free(file->path);
    *file = FS_FILE_CLOSED;
}

fs_status
fs_folder_sync(const char *path)
{
    int fd = open_retrying(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0) {
        return FS_FAIL_ERRNO("%s: could not open the folder", path);
    }
    fs_status st = FS_OK;
    /* Some network file systems cannot sync a folder and say EINVAL. */
    if (sync_retrying(fd) != 0 && errno != EINVAL) {
        st = FS_FAIL_ERRNO("%s: could not sync the folder", path);
    }
    (void)close(fd);
    return st;
}

fs_status
fs_room_check(const char *path, size_t nbytes)
{
    struct statvfs about;
    int rc;
    do {
        rc = statvfs(path, &about);
    } while (rc != 0 && errno == EINTR);
    if (rc != 0) {
        return FS_FAIL_ERRNO("%s: could not read the free room of its file system", path);
    }
    size_t room;
    size_t unit = about.f_frsize != 0 ? (size_t)about.f_frsize : (size_t)about.f_bsize;
    if (!fs_mul_fits((size_t)about.f_bavail, unit, &room)) {
        room = SIZE_MAX;
    }
    if (room < nbytes) {
        errno = ENOSPC;
        return FS_FAIL_ERRNO("%s: %zu bytes are needed and %zu are free: free some room, or lower "
                             "keep; nothing was written", path, nbytes, room);
    }
    return FS_OK;
}
