/* A library that fills the device table, loaded at run time: libfs_cuda.so.
 *
 * It has one symbol, FS_PLUGIN_ENTRY, and is built from the same sources as whoever loads it: what
 * the two tell each other is checked before anything else is read. Failures of the library lie in
 * the caller's fs_status_message. */
#ifndef FS_DEVICE_PLUGIN_H
#define FS_DEVICE_PLUGIN_H

#include <stdint.h>

#include "../base/status.h"
#include "device.h"

#define FS_PLUGIN_ENTRY "fs_plugin_get"
#define FS_PLUGIN_ABI 1u

/* Where installed packages keep libraries that the library loads when it first needs them: lists of
 * files, NULL-ended, or NULL. Valid for the process's life. */
typedef struct fs_plugin_libraries {
    const char *const *cublas;
    const char *const *nccl;
} fs_plugin_libraries;

/* What the library is given. Valid for the process's life. */
typedef struct fs_plugin_host {
    uint32_t abi, struct_nbytes;
    fs_status_note *(*status_here)(void); /* fs_status_here of the caller */
    fs_plugin_libraries libraries;
} fs_plugin_host;

/* The library's table, whose first four members say what it is: a caller of another build reads
 * those and refuses it. host is not kept unless its abi and size are the library's own. */
typedef const fs_device *(*fs_plugin_entry)(const fs_plugin_host *host);

/* Loads the library at path, for good; the first caller's libraries count. FS_EUNSUPPORTED: it
 * does not load, is no library of this kind, or of another build than the caller: the text says
 * which. */
FS_NODISCARD fs_status
fs_plugin_load(const char *path, const fs_plugin_libraries *libraries, const fs_device **out);

#endif
