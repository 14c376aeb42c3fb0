/* What a device needs besides operations: memory, streams, events, errors. NULL in the CPU's table,
 * whose operations are done when they return.
 *
 * A context is one rank's use of one device: its streams, its scratch, its first error. Its
 * functions may be called by any host thread, one at a time. Operations of the table go to
 * exec->stream of exec->context in the order they are given, and return at once; arrays are device
 * memory (or pinned host memory), structs are read before the call returns. An operation cannot
 * fail: what a launch reports is kept, and check returns it from then on. */
#ifndef FS_DEVICE_RUNTIME_H
#define FS_DEVICE_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>

#include "../base/status.h"
#include "engine.h"

struct fs_exec;

typedef struct fs_context fs_context;
typedef struct fs_event fs_event;

/* The streams of a context. */
typedef enum fs_stream_id {
    FS_STREAM_COMPUTE = 0,
    FS_STREAM_GATHER, /* weights on their way into the pool, and after a step */
    FS_STREAM_REDUCE, /* gradients: exchanged and summed */
    FS_STREAM_COPY,   /* between the device and the host: offload */
    FS_STREAM_COUNT
} fs_stream_id;

/* Bytes of a device. */
typedef struct fs_device_memory {
    size_t total, free;
    size_t held; /* of it, by this process through memory_open */
} fs_device_memory;

typedef struct fs_runtime {
    /* How many devices this process may use. FS_EUNSUPPORTED says why none: no driver, too old a
     * driver, no device. The first call starts the runtime; no import makes it. */
    fs_status (*count)(int *out);
    /* Name and architecture of a device, for people. */
    fs_status (*describe)(int ordinal, char *text, size_t nbytes);
    /* Loads what else the device needs when it comes to that, and says which version was found
     * where: "cublas" (products) or "nccl" (several devices). FS_EUNSUPPORTED says what was
     * tried. Needs no device. */
    fs_status (*library)(const char *name, char *text, size_t nbytes);

    fs_status (*context_open)(int ordinal, fs_context **out);
    /* Waits for what this context was given, unless it has failed. NULL is fine. */
    void (*context_close)(fs_context *context);
    /* The first failure of an operation given to the context, from then on for ever. No waiting. */
    fs_status (*check)(fs_context *context);
    fs_status (*memory)(fs_context *context, fs_device_memory *out);

    /* Zeroed device memory, aligned to 256 bytes; 0 bytes give NULL. FS_ENOMEM says requested,
     * total, held, free; the context stays usable. what: names it in that text. */
    fs_status (*memory_open)(fs_context *context, const char *what, size_t nbytes, void **out);
    /* Waits for the device. NULL is fine. */
    void (*memory_close)(fs_context *context, void *memory, size_t nbytes);
    /* Zeroed host memory that the device reads and writes in place, and the host at any time. */
    fs_status (*pinned_open)(fs_context *context, size_t nbytes, void **out);
    void (*pinned_close)(fs_context *context, void *memory);
    /* Makes a stream's scratch (of sums and products) at least that large; before operations. */
    fs_status (*reserve)(fs_context *context, fs_stream_id stream, size_t nbytes);
    /* Bytes of scratch of all streams. */
    size_t (*scratch_nbytes)(const fs_context *context);
    /* What sum, sumsq need of it for n elements; and a product. */
    size_t (*sum_scratch_nbytes)(size_t n);
    size_t (*gemm_scratch_nbytes)(void);

    /* dst = src in stream order, between device memory and pinned memory in any direction, or from
     * pageable host memory (read before the call returns). */
    void (*copy)(const struct fs_exec *exec, void *dst, const void *src, size_t nbytes);
    void (*fill)(const struct fs_exec *exec, void *dst, int byte, size_t nbytes);

    fs_status (*event_open)(fs_context *context, fs_event **out);
    void (*event_close)(fs_context *context, fs_event *event);
    /* The event now stands for all that exec's stream has been given. */
    void (*record)(const struct fs_exec *exec, fs_event *event);
    /* What exec's stream is given from now on comes after what event stands for now; an event that
     * was never recorded stands for nothing. */
    void (*after)(const struct fs_exec *exec, fs_event *event);
    /* Has the device come past it? Does not wait; true too once the context has failed. */
    bool (*is_done)(fs_context *context, fs_event *event);

    /* A stream of the caller's (cudaStream_t; NULL: the legacy default stream): exec's stream comes
     * after all it was given so far, or it after all of exec's stream. */
    fs_status (*after_foreign)(const struct fs_exec *exec, void *foreign_stream);
    fs_status (*foreign_after)(const struct fs_exec *exec, void *foreign_stream);

    const fs_engine_ops *engine;
} fs_runtime;

#endif
