/* Loading a library that fills the device table, and refusing one that is not ours. */
#include "plugin.h"

#include <string.h>

#include "../base/build.h"
#include "../base/library.h"

/* The first thing that differs, in words. */
static fs_status
check_table(const char *path, const fs_device *table)
{
    if (table == NULL || table->magic != FS_DEVICE_MAGIC) {
        return FS_FAIL(FS_EUNSUPPORTED, "%s is no library of flatshard's", path);
    }
    if (table->abi != FS_DEVICE_ABI || table->struct_nbytes != sizeof *table) {
        return FS_FAIL(FS_EUNSUPPORTED,
                       "%s has a device table of version %u (%u bytes), this build of flatshard "
                       "has version %u (%zu bytes): build both from the same sources",
                       path, table->abi, table->struct_nbytes, FS_DEVICE_ABI, sizeof *table);
    }
    if (table->build_id == NULL || strcmp(table->build_id, FS_BUILD_ID) != 0) {
        return FS_FAIL(FS_EUNSUPPORTED,
                       "%s is of build %s, and this is build %s of flatshard: build both from the "
                       "same sources",
                       path, table->build_id != NULL ? table->build_id : "(none)", FS_BUILD_ID);
    }
    return table->runtime != NULL
               ? FS_OK
               : FS_FAIL(FS_EUNSUPPORTED, "%s: table %s has no runtime", path, table->name);
}

fs_status
fs_plugin_load(const char *path, const fs_plugin_libraries *libraries, const fs_device **out)
{
    const fs_plugin_host host = {FS_PLUGIN_ABI, sizeof host, fs_status_here, *libraries};
    void *library;
    fs_plugin_entry entry;
    FS_TRY(fs_library_open(path, &library));
    if (fs_library_symbol(library, FS_PLUGIN_ENTRY, &entry) != FS_OK) {
        return FS_FAIL(FS_EUNSUPPORTED, "%s is no library of flatshard's: it has no symbol %s",
                       path, FS_PLUGIN_ENTRY);
    }
    const fs_device *table = entry(&host);
    FS_TRY(check_table(path, table));
    *out = table;
    return FS_OK;
}
