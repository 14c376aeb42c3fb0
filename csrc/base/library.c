#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "env.h"

/* NULL, the process, where dlsym looks through what everybody sees and what this file's own library
 * was linked with. */
#define PROCESS RTLD_DEFAULT

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

// ---- search -------------------------------------------------------------------------------------

/* Is it in the process? The probe first: that is the one everybody calls. */
static bool
find_in_process(const fs_library_search *search, void **out_handle, char *where,
                size_t where_nbytes)
{
    if (dlsym(PROCESS, search->probe) != NULL) {
        *out_handle = PROCESS;
        (void)snprintf(where, where_nbytes, "this process");
        return true;
    }
    for (const char *const *name = search->names; *name != NULL; name++) {
        void *handle = dlopen(*name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (handle != NULL) {
            *out_handle = handle;
            (void)snprintf(where, where_nbytes, "%s, which this process had loaded", *name);
            return true;
        }
    }
    return false;
}

/* The first of files that loads; tried grows by the reasons of those that do not. */
static bool
find_among(const char *const *files, void **out_handle, char *where, size_t where_nbytes,
           char *tried, size_t tried_nbytes)
{
    for (; files != NULL && *files != NULL; files++) {
        *out_handle = dlopen(*files, RTLD_NOW | RTLD_LOCAL);
        if (*out_handle != NULL) {
            (void)snprintf(where, where_nbytes, "%s", *files);
            return true;
        }
        size_t used = strlen(tried);
        (void)snprintf(tried + used, tried_nbytes - used, "; %.300s", dlerror());
    }
    return false;
}

fs_status
fs_library_find(const fs_library_search *search, void **out_handle, char *where,
                size_t where_nbytes)
{
    const char *named = fs_env_get(search->variable);
    char tried[FS_MESSAGE_NBYTES / 2] = "";
    if (named != NULL) {
        void *handle = dlopen(named, RTLD_NOW | RTLD_LOCAL);
        if (handle == NULL) {
            return FS_FAIL(FS_EUNSUPPORTED, "%s: %s=%s does not load: %s", search->what,
                           search->variable, named, dlerror());
        }
        *out_handle = handle;
        (void)snprintf(where, where_nbytes, "%s, of %s", named, search->variable);
        return FS_OK;
    }
    if (find_in_process(search, out_handle, where, where_nbytes) ||
        find_among(search->paths, out_handle, where, where_nbytes, tried, sizeof tried) ||
        find_among(search->names, out_handle, where, where_nbytes, tried, sizeof tried)) {
        return FS_OK;
    }
    return FS_FAIL(FS_EUNSUPPORTED,
                   "no %s: %s is not set; this process has not loaded %s or the like%s",
                   search->what, search->variable, search->names[0], tried);
}
