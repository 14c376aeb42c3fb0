/* Moving data between GPUs by NVIDIA's NCCL, which is loaded when it is first asked for.
 *
 * What fs_engine_ops (device/engine.h) promises, over a device and a stream. A communicator is not
 * blocking: whatever waits for peers (opening it, and the first time two ranks meet in it) looks
 * again and again, asks the patience it was opened with in between, and ends with it. So a call
 * that moves data returns at once but for that first time, and what it moves is in its stream's
 * order when it returns. After any failure an engine only says it again; it is to be aborted. */
#ifndef FS_CUDA_NCCL_H
#define FS_CUDA_NCCL_H

#include <stddef.h>

#include "../base/status.h"
#include "../device/engine.h"
#include "kernels.h"

/* Loads NCCL 2.18 or later, once per process; a second call keeps the first library. Looked for as
 * base/library.h says: FLATSHARD_NCCL, the process, paths (files of installed packages, NULL-ended,
 * or NULL), the system. *out_description (may be NULL): version and where it was found, valid for
 * the process's life. FS_EUNSUPPORTED says what was tried or what is wrong with what was found.
 * Needs no GPU. Thread-safe. */
FS_NODISCARD fs_status
fs_nccl_load(const char *const *paths, const char **out_description);

/* All of these as fs_engine_ops has them; FS_ESTATE before fs_nccl_load. make_id finds a network
 * interface that other hosts may reach (NCCL_SOCKET_IFNAME says which). */
FS_NODISCARD fs_status
fs_nccl_make_id(fs_engine_id *out);

/* A communicator of the calling thread's device. Each rank has another device. */
FS_NODISCARD fs_status
fs_nccl_open(const fs_engine_open *open, fs_engine **out);

/* As one collective where the pieces of consecutive roots 0, 1, ... are of one size and their
 * targets adjoin (a unit's equal cuts), else as a broadcast for each piece; all as one group. */
FS_NODISCARD fs_status
fs_nccl_gather(fs_engine *engine, fs_cuda_stream stream, const fs_engine_piece *pieces, size_t n);

FS_NODISCARD fs_status
fs_nccl_alltoall(fs_engine *engine, fs_cuda_stream stream, const fs_engine_part *sends,
                 size_t sends_n, const fs_engine_part *receives, size_t receives_n);

FS_NODISCARD fs_status
fs_nccl_reduce_scatter(fs_engine *engine, fs_cuda_stream stream, fs_dtype dtype, const void *in,
                       size_t n, void *out);

FS_NODISCARD fs_status
fs_nccl_check(fs_engine *engine);

void fs_nccl_abort(fs_engine *engine);

/* Lets what this rank has sent leave it, and the ranks of its host come to their ends, for at most
 * two seconds; then as abort. Ranks that are threads must not need a lock that the caller holds. */
void fs_nccl_close(fs_engine *engine);

#endif
