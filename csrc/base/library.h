/* Libraries loaded at run time (BLAS today, CUDA and MPI later): the only caller of the loader. */
#ifndef FS_BASE_LIBRARY_H
#define FS_BASE_LIBRARY_H

#include "status.h"

/* Loads path privately (its symbols are seen by nobody else). FS_EUNSUPPORTED names path and
 * reason. */
FS_NODISCARD fs_status
fs_library_open(const char *path, void **out_handle);

/* Finds a symbol; *out is a function pointer of any type. FS_EUNSUPPORTED when it is missing. */
FS_NODISCARD fs_status
fs_library_symbol(void *handle, const char *name, void *out);

#endif
