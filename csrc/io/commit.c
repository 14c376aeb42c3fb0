#define _GNU_SOURCE
#include "commit.h"

#include <stdio.h>

#include "../base/arena.h"
#include "../base/checked.h"
#include "file.h"

fs_status
fs_agree(fs_world *world, fs_op op, fs_status mine, uint64_t value, uint64_t *values)
{
    int size = fs_world_size(world), rank = fs_world_rank(world);
    fs_payload all[FS_RANKS_MAX]; /* no allocation: a rank that cannot join would keep the others */
    fs_kept kept;
    if (mine == FS_ABORTED) {
        return mine;
    }
    fs_status_keep(mine, &kept);
    const fs_what what = {.op = op, .dtype = -1, .root = -1};
    const fs_payload payload = {.u = {(uint64_t)mine, value}};
    FS_TRY(fs_meet(world, &what, &payload, all, 0));
    int failed = 0;
    while (failed < size && all[failed].u[0] == FS_OK) {
        failed++;
    }
    if (failed == size) {
        for (int r = 0; values != NULL && r < size; r++) {
            values[r] = all[r].u[1];
        }
        return FS_OK;
    }
    FS_TRY(fs_broadcast(world, FS_U8, failed, &kept, sizeof kept));
    char who[48];
    (void)snprintf(who, sizeof who, failed == rank ? "rank %d: " : "rank %d failed: ", failed);
    return fs_status_tell(&kept, who);
}

fs_status
fs_share(fs_world *world, fs_op op, fs_status mine, const void *bytes, size_t nbytes, char **out,
         size_t **out_nbytes)
{
    size_t size = (size_t)fs_world_size(world), total = 0;
    uint64_t *values = NULL;
    size_t *counts = NULL;
    char *all = NULL;
    fs_status st = mine;
    st = st == FS_OK ? fs_calloc(size, sizeof *values, &values) : st;
    st = st == FS_OK ? fs_calloc(size, sizeof *counts, &counts) : st;
    FS_TRY_GOTO(fs_agree(world, op, st, nbytes, values), st, fail);
    for (size_t r = 0; r < size; r++) {
        counts[r] = (size_t)values[r];
        FS_TRY_GOTO(fs_add_size(total, counts[r], &total), st, fail);
    }
    /* A rank without the memory for it must say so before the others wait in the gather. */
    FS_TRY_GOTO(fs_agree(world, op, fs_calloc(total, 1, &all), 0, NULL), st, fail);
    FS_TRY_GOTO(fs_all_gather(world, FS_U8, bytes, nbytes, counts, all), st, fail);
    fs_free(values);
    *out = all;
    *out_nbytes = counts;
    return FS_OK;
fail:
    fs_free(values);
    fs_free(counts);
    fs_free(all);
    return st;
}

static fs_status
commit(const char *folder, const char *final, const char *parent, const void *text,
       size_t text_nbytes)
{
    fs_file file = FS_FILE_CLOSED;
    FS_TRY(fs_file_create(folder, "index.json", &file));
    fs_status st = fs_file_write(&file, 0, text_nbytes, text);
    if (st == FS_OK) {
        st = fs_file_sync(&file);
    }
    if (st != FS_OK) {
        fs_file_discard(&file);
        return st;
    }
    FS_TRY(fs_file_close(&file));
    FS_TRY(fs_folder_sync(folder));
    if (rename(folder, final) != 0) {
        return FS_FAIL_ERRNO("%s: could not rename to %s", folder, final);
    }
    return fs_folder_sync(parent);
}

fs_status
fs_commit(fs_world *world, const char *folder, const char *final, const char *parent,
          const void *text, size_t text_nbytes)
{
    if (world == NULL) {
        return commit(folder, final, parent, text, text_nbytes);
    }
    fs_status st = FS_OK;
    if (fs_world_rank(world) == 0) {
        st = commit(folder, final, parent, text, text_nbytes);
    }
    return fs_agree(world, FS_OP_SAVE, st, 0, NULL);
}
