/* Catalogs of pieces out of tuples, for reading and for exporting. */
#ifndef FS_BINDING_PY_CATALOG_H
#define FS_BINDING_PY_CATALOG_H

#include "binding.h"

#include "../io/pieces.h"

/* What one call knows of a catalog; pointers into the tuple, which outlives the call. Begins as
 * zeros. */
typedef struct fs_py_catalog {
    const char *folder;
    int files_n;
    fs_file_def *files;
    fs_blocks *blocks;
    bool ours;
    size_t shapes_n;
    fs_shape_def *shapes;
    fs_catalog *catalog;
} fs_py_catalog;

/* Takes the tuple of a catalog. -1 with an exception; after success or failure the caller drops
 * *call. */
int fs_py_catalog_take(PyObject *tuple, fs_py_catalog *call);
/* Opens what was taken: reads the headers of its files. Without the GIL; ledger may be NULL. */
FS_NODISCARD fs_status
fs_py_catalog_open(fs_py_catalog *call, fs_ledger *ledger);
/* Takes and opens, without a world. -1 with an exception; the caller drops *call. */
int fs_py_catalog_enter(PyObject *tuple, fs_py_catalog *call);
void fs_py_catalog_drop(fs_py_catalog *call);

/* A tuple of at most max sizes into dims; name is for the message. -1 with an exception. */
int fs_py_dims_take(PyObject *tuple, const char *name, size_t max, size_t *dims, size_t *out_n);

#endif
