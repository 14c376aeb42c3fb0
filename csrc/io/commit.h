/* The end of a save: everyone is well, or nobody is; then one rename. */
#ifndef FS_IO_COMMIT_H
#define FS_IO_COMMIT_H

#include <stddef.h>
#include <stdint.h>

#include "../base/status.h"
#include "../comm/comm.h"

/* Collective: FS_OK on all ranks if mine is on all; else the first failed rank's status, errno and
 * sentence on all of them. values (may be NULL): every rank's value, when all are well. A rank that
 * was told that the job is over passes that on. */
FS_NODISCARD fs_status
fs_agree(fs_world *world, fs_op op, fs_status mine, uint64_t value, uint64_t *values);

/* Collective: every rank's bytes end to end at *out (fs_free), *out_nbytes of each (world size
 * entries, fs_free). mine: how making the bytes went on this rank; fails as fs_agree does. */
FS_NODISCARD fs_status
fs_share(fs_world *world, fs_op op, fs_status mine, const void *bytes, size_t nbytes, char **out,
         size_t **out_nbytes);

/* Collective: rank 0 writes index.json (text) into folder, syncs both, renames folder to final and
 * syncs its parent; the other ranks pass anything. Before the rename nothing is committed, after it
 * all is. Fails on all ranks if it fails. world NULL: a program that has no ranks. */
FS_NODISCARD fs_status fs_commit(fs_world *world, const char *folder, const char *final,
                                 const char *parent, const void *text, size_t text_nbytes);

#endif
