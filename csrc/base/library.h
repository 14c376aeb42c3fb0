/* Libraries loaded at run time (BLAS, cuBLAS, NCCL): the only caller of the loader. */
#ifndef FS_BASE_LIBRARY_H
#define FS_BASE_LIBRARY_H

#include <stddef.h>

#include "status.h"

/* Loads path privately (its symbols are seen by nobody else). FS_EUNSUPPORTED names path and
 * reason. */
FS_NODISCARD fs_status
fs_library_open(const char *path, void **out_handle);

/* Finds a symbol; *out is a function pointer of any type. FS_EUNSUPPORTED when it is missing.
 * handle: of fs_library_open or fs_library_find. */
FS_NODISCARD fs_status
fs_library_symbol(void *handle, const char *name, void *out);

/* A library that several others may have brought along, and where to look for it. */
typedef struct fs_library_search {
    const char *what;         /* "cuBLAS", for messages */
    const char *variable;     /* of base/env.h: where it is set, that file or none */
    const char *probe;        /* a symbol by which it is known where it is part of the process */
    const char *const *names; /* NULL-ended: libx.so.2, ...; the preferred first */
    const char *const *paths; /* NULL-ended: files, as of installed packages; NULL: none */
} fs_library_search;

/* Looks in this order: what the variable names; the process, where the probe is a symbol that
 * everybody sees, or one of the names is loaded already; the paths; the system's loader by name. So
 * a library that is there is never loaded a second time. *out_handle may be NULL: the process
 * itself. where (where_nbytes): which it was, in words. FS_EUNSUPPORTED says all that was tried. */
FS_NODISCARD fs_status
fs_library_find(const fs_library_search *search, void **out_handle, char *where,
                size_t where_nbytes);

#endif
