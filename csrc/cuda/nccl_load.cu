/* Loading NCCL. */
#include "nccl.cuh"

#include <cstdio>
#include <mutex>

extern "C" {
#include "../base/library.h"
}

/* Its version says 21800: since then a communicator's configuration may be shorter than it. */
#define OLDEST_VERSION 21800
#define TOO_NEW_VERSION 30000

static const char *const LIBRARIES[] = {"libnccl.so.2", NULL};

static std::mutex load_lock;
static bool loaded;
static nccl_functions functions;
static char description[512];

static fs_status
find_functions(void *library, const char *where, nccl_functions *out)
{
    const struct {
        const char *name;
        void *out;
    } all[] = {
        {"ncclGetVersion", &out->get_version},
        {"ncclGetErrorString", &out->error_string},
        {"ncclGetLastError", &out->last_error},
        {"ncclGetUniqueId", &out->make_id},
        {"ncclCommInitRankConfig", &out->open},
        {"ncclCommGetAsyncError", &out->async_error},
        {"ncclCommAbort", &out->abort},
        {"ncclCommFinalize", &out->finalize},
        {"ncclCommDestroy", &out->destroy},
        {"ncclGroupStart", &out->group_start},
        {"ncclGroupEnd", &out->group_end},
        {"ncclSend", &out->send},
        {"ncclRecv", &out->receive},
        {"ncclAllGather", &out->all_gather},
        {"ncclBroadcast", &out->broadcast},
        {"ncclReduceScatter", &out->reduce_scatter},
    };
    for (const auto &function : all) {
        if (fs_library_symbol(library, function.name, function.out) != FS_OK) {
            return FS_FAIL(FS_EUNSUPPORTED, "NCCL: %s has no %s: it is not NCCL 2.18 or later",
                           where, function.name);
        }
    }
    return FS_OK;
}

static fs_status
load(const char *const *paths)
{
    void *library = NULL;
    char where[256] = "";
    nccl_functions found;
    int version = 0;
    fs_library_search search = {"NCCL", "FLATSHARD_NCCL", "ncclGetVersion", LIBRARIES, paths};
    FS_TRY(fs_library_find(&search, &library, where, sizeof where));
    FS_TRY(find_functions(library, where, &found));
    int result = found.get_version(&version);
    if (result != NCCL_SUCCESS) {
        return FS_FAIL(FS_EUNSUPPORTED, "NCCL: %s does not say its version: %s", where,
                       found.error_string(result));
    }
    int major = version / 10000, minor = version / 100 % 100, patch = version % 100;
    if (version < OLDEST_VERSION || version >= TOO_NEW_VERSION) {
        return FS_FAIL(FS_EUNSUPPORTED, "NCCL: %s is version %d.%d.%d, must be 2.18 or a later 2",
                       where, major, minor, patch);
    }
    (void)std::snprintf(description, sizeof description, "NCCL %d.%d.%d (%s)", major, minor, patch,
                        where);
    functions = found;
    loaded = true;
    return FS_OK;
}

extern "C" fs_status
fs_nccl_load(const char *const *paths, const char **out_description)
{
    std::lock_guard<std::mutex> lock(load_lock);
    if (!loaded) {
        FS_TRY(load(paths));
    }
    if (out_description != NULL) {
        *out_description = description;
    }
    return FS_OK;
}

fs_status
fs_nccl_functions(const nccl_functions **out)
{
    std::lock_guard<std::mutex> lock(load_lock);
    *out = &functions;
    return loaded ? FS_OK : FS_FAIL(FS_ESTATE, "NCCL: used before the library was loaded");
}
