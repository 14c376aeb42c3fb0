#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <string.h>

fs_status
fs_library_open(const char *path, void **out_handle)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        return FS_FAIL(FS_EUNSUPPORTED, "could not load %s: %s", path, dlerror());
    }
    *out_handle = handle;
    return FS_OK;
}

fs_status
fs_library_symbol(void *handle, const char *name, void *out)
{
    void *symbol = dlsym(handle, name);
    if (symbol == NULL) {
        return FS_FAIL(FS_EUNSUPPORTED, "the library has no symbol %s", name);
    }
    memcpy(out, &symbol, sizeof symbol);
    return FS_OK;
}
