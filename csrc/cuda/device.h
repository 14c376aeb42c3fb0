/* A GPU as the rest of the code sees it: memory, streams, events.
 *
 * Every call that waits says so; all others only put work into a stream's queue. Errors carry the
 * runtime's words. */
#ifndef FS_CUDA_DEVICE_H
#define FS_CUDA_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/status.h"
#include "kernels.h"

/* A point of a stream's work (cudaEvent_t). */
typedef struct fs_cuda_event_of *fs_cuda_event;

/* How many devices this process may use. FS_EUNSUPPORTED, naming why, where there is no driver, it
 * is older than the runtime, or no device is there. Starts CUDA: never called by an import. */
FS_NODISCARD fs_status
fs_cuda_device_count(int *out);

/* Makes device the one that the calling thread's next calls are for. */
FS_NODISCARD fs_status
fs_cuda_device_use(int device);

/* Makes device the calling thread's again, as it was before some fs_cuda_device_use: unless nobody
 * in the process has used it yet, for choosing a device starts CUDA there, which takes hundreds of
 * MB of its memory. Then the thread's device stays. */
void fs_cuda_device_give_back(int device);

/* Compute capability (9.0 is 90) and memory of the calling thread's device, bytes. */
FS_NODISCARD fs_status
fs_cuda_device_describe(int *capability, size_t *free_nbytes, size_t *total_nbytes);

/* Device memory, aligned to 256 bytes. nbytes 0 gives NULL. FS_ENOMEM says what was asked for, what
 * this process has taken, what is free and what there is; the device stays usable. */
FS_NODISCARD fs_status
fs_cuda_memory_open(size_t nbytes, void **out);

/* Waits for the whole device. NULL is fine. nbytes as opened. */
FS_NODISCARD fs_status
fs_cuda_memory_close(void *memory, size_t nbytes);

/* Host memory that copies to and from a device need not stage ("pinned"). */
FS_NODISCARD fs_status
fs_cuda_pinned_open(size_t nbytes, void **out);

FS_NODISCARD fs_status
fs_cuda_pinned_close(void *memory);

/* Bytes of the device's memory that this process holds through fs_cuda_memory_open. */
size_t fs_cuda_memory_held(void);

/* Copies nbytes in stream order, between devices and pinned host memory in any direction. */
FS_NODISCARD fs_status
fs_cuda_copy(fs_cuda_stream stream, void *dst, const void *src, size_t nbytes);

/* Sets nbytes to byte in stream order. */
FS_NODISCARD fs_status
fs_cuda_fill(fs_cuda_stream stream, void *dst, int byte, size_t nbytes);

/* A stream that does not wait for the default one. */
FS_NODISCARD fs_status
fs_cuda_stream_open(fs_cuda_stream *out);

FS_NODISCARD fs_status
fs_cuda_stream_close(fs_cuda_stream stream);

/* Waits until all that was given to the stream is done. */
FS_NODISCARD fs_status
fs_cuda_stream_wait(fs_cuda_stream stream);

FS_NODISCARD fs_status
fs_cuda_event_open(fs_cuda_event *out);

FS_NODISCARD fs_status
fs_cuda_event_close(fs_cuda_event event);

/* The event now stands for what stream has been given so far. */
FS_NODISCARD fs_status
fs_cuda_event_record(fs_cuda_event event, fs_cuda_stream stream);

/* What stream is given from now on comes after what the event stands for now. An event that was
 * never recorded is FS_ESTATE here: CUDA would silently not wait. */
FS_NODISCARD fs_status
fs_cuda_stream_after(fs_cuda_stream stream, fs_cuda_event event);

/* The same with a stream of the caller's (cudaStream_t, NULL is the default one): the event stands
 * for what it has been given; what it is given from now on comes after the event. */
FS_NODISCARD fs_status
fs_cuda_event_record_foreign(fs_cuda_event event, void *foreign_stream);

FS_NODISCARD fs_status
fs_cuda_foreign_after(void *foreign_stream, fs_cuda_event event);

/* Has the device come past the event? Does not wait. */
FS_NODISCARD fs_status
fs_cuda_event_is_done(fs_cuda_event event, bool *out);

/* Waits for the event. */
FS_NODISCARD fs_status
fs_cuda_event_wait(fs_cuda_event event);

#endif
