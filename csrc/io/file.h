/* Files as the rest of io/ sees them: whole reads and whole writes, or an error that names the
 * path.
 *
 * One call of the system moves at most 2 GiB, may move less, and may be interrupted; nothing
 * outside file.c needs to know. Names that come from a file are opened only after fs_name_check. */
#ifndef FS_IO_FILE_H
#define FS_IO_FILE_H

#include <stddef.h>

#include "../base/status.h"

typedef struct fs_file {
    int fd;      /* -1 when closed */
    char *path;  /* for messages; owned */
    size_t nbytes; /* at open; 0 for a new file */
} fs_file;

#define FS_FILE_CLOSED ((fs_file){.fd = -1})

/* A plain name of a file inside a folder: not empty, no slash, no leading dot, no control
 * characters, at most 255 bytes. FS_ECORRUPT: it came from an index. where: what it came from. */
FS_NODISCARD fs_status
fs_name_check(const char *where, const char *name);

/* Opens folder/name (folder NULL: name is a path of the caller's) for reading. Anything but a
 * regular file is FS_ECORRUPT and never blocks; a missing one is FS_ESYS with ENOENT. A link in a
 * folder that leads out of it is FS_ECORRUPT, unless it leads to a blob of the Hugging Face cache
 * that the folder is part of. */
FS_NODISCARD fs_status
fs_file_open(const char *folder, const char *name, fs_file *out);

/* Creates folder/name for writing; it must not exist. */
FS_NODISCARD fs_status
fs_file_create(const char *folder, const char *name, fs_file *out);

/* Reads exactly nbytes at offset. FS_ECORRUPT "unexpected end of file" when the file is shorter. */
FS_NODISCARD fs_status
fs_file_read(const fs_file *file, size_t offset, size_t nbytes, void *out);

/* Writes exactly nbytes at offset. */
FS_NODISCARD fs_status
fs_file_write(const fs_file *file, size_t offset, size_t nbytes, const void *bytes);

/* Asks the system to start writing a finished range back, so that the sync at the end is short. A
 * hint: never fails. */
void fs_file_start_writeback(const fs_file *file, size_t offset, size_t nbytes);

/* Waits until the file is on the device. */
FS_NODISCARD fs_status
fs_file_sync(const fs_file *file);

/* Closes; the error of a close that fails (a full network disk) is reported. Safe on a closed
 * one. */
FS_NODISCARD fs_status
fs_file_close(fs_file *file);

/* Closes after a failure that has been reported already: keeps its message. */
void fs_file_discard(fs_file *file);

/* Waits until the names in a folder are on the device. */
FS_NODISCARD fs_status
fs_folder_sync(const char *path);

/* FS_ESYS with ENOSPC, in words, when the file system that holds path has less than nbytes free for
 * this user. */
FS_NODISCARD fs_status
fs_room_check(const char *path, size_t nbytes);

#endif
