/* A rank's use of a GPU: its streams, scratch and first failure; fs_runtime over them. */
#include "common.cuh"

#include <cstdio>
#include <mutex>
#include <new>

#include <unistd.h>

#include "context.cuh"

extern "C" {
#include "engine.h"
#include "nccl.h"
}

struct fs_context {
    int ordinal;
    pid_t owner; /* a forked child has no device */
    bool has_failed;
    fs_cuda_stream streams[FS_STREAM_COUNT];
    void *scratch[FS_STREAM_COUNT];
    size_t scratch_nbytes[FS_STREAM_COUNT];
    fs_cublas *cublas[FS_STREAM_COUNT]; /* over the stream's scratch; NULL until a product comes */
    int capability;
    fs_cuda_event foreign; /* between our streams and those of others */
    fs_kept failed;
};

struct fs_event {
    fs_cuda_event inner;
    bool is_recorded;
};

/* The oldest architecture that the library has kernels for. */
static const int CAPABILITY_MIN = 80;

extern "C" int
fs_cuda_context_ordinal(const fs_context *context)
{
    return context->ordinal;
}

extern "C" fs_cuda_stream
fs_cuda_exec_stream(const fs_exec *exec)
{
    return exec->context->streams[exec->stream];
}

extern "C" void *
fs_cuda_exec_scratch(const fs_exec *exec, size_t *out_nbytes)
{
    *out_nbytes = exec->context->scratch_nbytes[exec->stream];
    return exec->context->scratch[exec->stream];
}

// ---- libraries ----------------------------------------------------------------------------------

static fs_plugin_libraries installed;

extern "C" void
fs_cuda_set_libraries(const fs_plugin_libraries *libraries)
{
    static std::once_flag once;
    std::call_once(once, [libraries] { installed = *libraries; });
}

extern "C" const fs_plugin_libraries *
fs_cuda_libraries(void)
{
    return &installed;
}

static fs_status
library(const char *name, char *text, size_t nbytes)
{
    const char *description = "";
    if (std::strcmp(name, "cublas") == 0) {
        FS_TRY(fs_cublas_load(installed.cublas, &description));
    } else if (std::strcmp(name, "nccl") == 0) {
        FS_TRY(fs_nccl_load(installed.nccl, &description));
    } else {
        return FS_FAIL(FS_EINVAL, "no library of CUDA's is called '%s' here", name);
    }
    (void)snprintf(text, nbytes, "%s", description);
    return FS_OK;
}

extern "C" fs_status
fs_cuda_exec_cublas(const fs_exec *exec, fs_cublas **out)
{
    fs_context *context = exec->context;
    fs_cublas **cublas = &context->cublas[exec->stream];
    size_t nbytes = context->scratch_nbytes[exec->stream];
    size_t needed = fs_cublas_workspace_nbytes(context->capability);
    if (*cublas == NULL) {
        if (nbytes < needed) {
            return FS_FAIL(FS_EINVAL, "gemm: %zu bytes of scratch, %zu are needed", nbytes, needed);
        }
        FS_TRY(fs_cublas_load(installed.cublas, NULL));
        FS_TRY(fs_cublas_open(fs_cuda_exec_stream(exec), context->scratch[exec->stream], needed,
                              cublas));
    }
    *out = *cublas;
    return FS_OK;
}

// ---- failures -----------------------------------------------------------------------------------

extern "C" void
fs_cuda_context_keep(fs_context *context, fs_status status)
{
    if (status != FS_OK && !context->has_failed) {
        fs_status_keep(status, &context->failed);
        context->has_failed = true;
    }
}

extern "C" bool
fs_cuda_context_has_failed(const fs_context *context)
{
    return context->has_failed;
}

static fs_status
check(fs_context *context)
{
    char prefix[32];
    (void)snprintf(prefix, sizeof prefix, "device cuda:%d: ", context->ordinal);
    return context->has_failed ? fs_status_tell(&context->failed, prefix) : FS_OK;
}

// ---- the thread's device ------------------------------------------------------------------------

static fs_status
enter(int ordinal, int *out_before)
{
    FS_CUDA_TRY(cudaGetDevice(out_before));
    return *out_before == ordinal ? FS_OK : fs_cuda_device_use(ordinal);
}

static fs_status
check_owner(const fs_context *context)
{
    return context->owner == getpid()
               ? FS_OK
               : FS_FAIL(FS_ESTATE, "device cuda:%d is used by the parent process: a forked child "
                                    "cannot go on with it; start workers with 'spawn'",
                         context->ordinal);
}

extern "C" bool
fs_cuda_context_enter(fs_context *context, int *out_before)
{
    if (context->has_failed) {
        return false;
    }
    fs_status status = check_owner(context);
    status = status == FS_OK ? enter(context->ordinal, out_before) : status;
    fs_cuda_context_keep(context, status);
    return !context->has_failed;
}

extern "C" void
fs_cuda_context_exit(const fs_context *context, int before)
{
    if (before != context->ordinal) {
        fs_cuda_device_give_back(before);
    }
}

/* Runs call, which returns a status, on the context's device, whether it has failed or not. */
template <typename Call>
static fs_status
on_device(const fs_context *context, Call call)
{
    int before = context->ordinal;
    FS_TRY(check_owner(context));
    FS_TRY(enter(context->ordinal, &before));
    fs_status status = call();
    fs_cuda_context_exit(context, before);
    return status;
}

// ---- devices ------------------------------------------------------------------------------------

static fs_status
check_ordinal(int ordinal)
{
    int count = 0;
    FS_TRY(fs_cuda_device_count(&count));
    return ordinal >= 0 && ordinal < count
               ? FS_OK
               : FS_FAIL(FS_EINVAL, "no device cuda:%d: this process may use %d, counted from 0 "
                                    "(CUDA_VISIBLE_DEVICES chooses)",
                         ordinal, count);
}

/* On the calling thread's device. */
static fs_status
describe_current(int ordinal, char *text, size_t nbytes)
{
    cudaDeviceProp properties;
    int capability;
    size_t available, total;
    FS_CUDA_TRY(cudaGetDeviceProperties(&properties, ordinal));
    FS_TRY(fs_cuda_device_describe(&capability, &available, &total));
    (void)snprintf(text, nbytes, "%.120s (sm_%d, %.1f GiB)", properties.name, capability,
                   (double)total / (double)((size_t)1 << 30));
    return FS_OK;
}

static fs_status
describe(int ordinal, char *text, size_t nbytes)
{
    int before = 0;
    FS_TRY(check_ordinal(ordinal));
    FS_TRY(enter(ordinal, &before));
    fs_status status = describe_current(ordinal, text, nbytes);
    fs_cuda_device_give_back(before);
    return status;
}

// ---- open and close -----------------------------------------------------------------------------

static fs_status
close_parts(fs_context *context)
{
    fs_status status = FS_OK;
    /* A device that failed fails here too, and there is nothing to be done about it. */
    for (int i = 0; i < FS_STREAM_COUNT; i++) {
        fs_cuda_stream stream = context->streams[i];
        if (stream != NULL && !context->has_failed) {
            status = status == FS_OK ? fs_cuda_stream_wait(stream) : status;
        }
        fs_status ended = fs_cublas_close(context->cublas[i]);
        fs_status freed = fs_cuda_memory_close(context->scratch[i], context->scratch_nbytes[i]);
        freed = ended != FS_OK ? ended : freed;
        fs_status closed = fs_cuda_stream_close(stream);
        status = status != FS_OK ? status : freed != FS_OK ? freed : closed;
    }
    fs_status closed = fs_cuda_event_close(context->foreign);
    return status != FS_OK ? status : closed;
}

static void
context_close(fs_context *context)
{
    if (context != NULL) {
        fs_status status = on_device(context, [context] { return close_parts(context); });
        (void)status; /* nobody is left to be told */
        delete context;
    }
}

static fs_status
open_parts(fs_context *context)
{
    size_t available, total;
    FS_TRY(fs_cuda_device_describe(&context->capability, &available, &total));
    int capability = context->capability;
    if (capability < CAPABILITY_MIN) {
        return FS_FAIL(FS_EUNSUPPORTED,
                       "device cuda:%d is of compute capability %d.%d; %d.%d is the oldest that "
                       "this build has kernels for",
                       context->ordinal, capability / 10, capability % 10, CAPABILITY_MIN / 10,
                       CAPABILITY_MIN % 10);
    }
    for (int i = 0; i < FS_STREAM_COUNT; i++) {
        FS_TRY(fs_cuda_stream_open(&context->streams[i]));
    }
    return fs_cuda_event_open(&context->foreign);
}

static fs_status
context_open(int ordinal, fs_context **out)
{
    FS_TRY(check_ordinal(ordinal));
    fs_context *context = new (std::nothrow) fs_context();
    if (context == NULL) {
        return FS_FAIL(FS_ENOMEM, "no memory for a context of device cuda:%d", ordinal);
    }
    context->ordinal = ordinal;
    context->owner = getpid();
    fs_status status = on_device(context, [context] { return open_parts(context); });
    if (status != FS_OK) {
        fs_kept why;
        fs_status_keep(status, &why);
        context_close(context);
        return fs_status_tell(&why, "");
    }
    *out = context;
    return FS_OK;
}

// ---- memory -------------------------------------------------------------------------------------

static fs_status
memory(fs_context *context, fs_device_memory *out)
{
    return on_device(context, [out] {
        FS_CUDA_TRY(cudaMemGetInfo(&out->free, &out->total));
        out->held = fs_cuda_memory_held();
        return FS_OK;
    });
}

/* Zeroes fresh memory, and waits for it: it may be used on any stream. */
static fs_status
zero(fs_context *context, void *memory, size_t nbytes)
{
    FS_TRY(fs_cuda_fill(context->streams[FS_STREAM_COMPUTE], memory, 0, nbytes));
    return fs_cuda_stream_wait(context->streams[FS_STREAM_COMPUTE]);
}

static fs_status
open_zeroed(fs_context *context, size_t nbytes, void **out)
{
    FS_TRY(fs_cuda_memory_open(nbytes, out));
    fs_status status = nbytes > 0 ? zero(context, *out, nbytes) : FS_OK;
    if (status != FS_OK) {
        fs_status freed = fs_cuda_memory_close(*out, nbytes);
        (void)freed; /* the first failure is the one to tell */
        *out = NULL;
    }
    return status;
}

static fs_status
memory_open(fs_context *context, const char *what, size_t nbytes, void **out)
{
    fs_status status =
        on_device(context, [context, nbytes, out] { return open_zeroed(context, nbytes, out); });
    if (status != FS_OK) {
        fs_kept why;
        char prefix[96];
        fs_status_keep(status, &why);
        (void)snprintf(prefix, sizeof prefix, "%.60s on cuda:%d: ", what, context->ordinal);
        return fs_status_tell(&why, prefix);
    }
    return FS_OK;
}

static void
memory_close(fs_context *context, void *memory, size_t nbytes)
{
    fs_cuda_context_keep(context, on_device(context, [memory, nbytes] {
                             return fs_cuda_memory_close(memory, nbytes);
                         }));
}

static fs_status
pinned_open(fs_context *context, size_t nbytes, void **out)
{
    FS_TRY(on_device(context, [nbytes, out] { return fs_cuda_pinned_open(nbytes, out); }));
    if (nbytes > 0) {
        std::memset(*out, 0, nbytes);
    }
    return FS_OK;
}

static void
pinned_close(fs_context *context, void *memory)
{
    fs_cuda_context_keep(context,
                         on_device(context, [memory] { return fs_cuda_pinned_close(memory); }));
}

static fs_status
reserve(fs_context *context, fs_stream_id stream, size_t nbytes)
{
    if (nbytes <= context->scratch_nbytes[stream]) {
        return FS_OK;
    }
    FS_TRY(on_device(context, [=] { return fs_cublas_close(context->cublas[stream]); }));
    context->cublas[stream] = NULL;
    memory_close(context, context->scratch[stream], context->scratch_nbytes[stream]);
    context->scratch[stream] = NULL;
    context->scratch_nbytes[stream] = 0;
    FS_TRY(memory_open(context, "scratch of kernels", nbytes, &context->scratch[stream]));
    context->scratch_nbytes[stream] = nbytes;
    return FS_OK;
}

static size_t
scratch_nbytes(const fs_context *context)
{
    size_t sum = 0;
    for (size_t nbytes : context->scratch_nbytes) {
        sum += nbytes;
    }
    return sum;
}

/* Of the hungriest architecture that there are figures for: contexts of several may ask. */
static size_t
gemm_scratch_nbytes(void)
{
    return FS_GEMM_SCRATCH_NBYTES;
}

static void
copy(const fs_exec *exec, void *dst, const void *src, size_t nbytes)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        return fs_cuda_copy(stream, dst, src, nbytes);
    });
}

static void
fill(const fs_exec *exec, void *dst, int byte, size_t nbytes)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        return fs_cuda_fill(stream, dst, byte, nbytes);
    });
}

// ---- events -------------------------------------------------------------------------------------

static fs_status
event_open(fs_context *context, fs_event **out)
{
    fs_event *event = new (std::nothrow) fs_event();
    if (event == NULL) {
        return FS_FAIL(FS_ENOMEM, "no memory for an event");
    }
    fs_status status = on_device(context, [event] { return fs_cuda_event_open(&event->inner); });
    if (status != FS_OK) {
        delete event;
        return status;
    }
    *out = event;
    return FS_OK;
}

static void
event_close(fs_context *context, fs_event *event)
{
    if (event != NULL) {
        fs_cuda_event inner = event->inner;
        delete event;
        fs_cuda_context_keep(context,
                             on_device(context, [inner] { return fs_cuda_event_close(inner); }));
    }
}

static void
record(const fs_exec *exec, fs_event *event)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        FS_TRY(fs_cuda_event_record(event->inner, stream));
        event->is_recorded = true;
        return FS_OK;
    });
}

static void
after(const fs_exec *exec, fs_event *event)
{
    if (event->is_recorded) {
        fs_cuda_give(exec, [=](fs_cuda_stream stream) {
            return fs_cuda_stream_after(stream, event->inner);
        });
    }
}

static bool
is_done(fs_context *context, fs_event *event)
{
    int before;
    bool done = true;
    if (event->is_recorded && fs_cuda_context_enter(context, &before)) {
        fs_cuda_context_keep(context, fs_cuda_event_is_done(event->inner, &done));
        fs_cuda_context_exit(context, before);
    }
    return done || context->has_failed;
}

// ---- streams of others --------------------------------------------------------------------------

/* In fs_cuda_event's functions the default stream is refused: here it is the caller's own. */
static fs_status
after_foreign(const fs_exec *exec, void *foreign_stream)
{
    fs_context *context = exec->context;
    FS_TRY(check(context));
    return on_device(context, [=] {
        FS_TRY(fs_cuda_event_record_foreign(context->foreign, foreign_stream));
        return fs_cuda_stream_after(fs_cuda_exec_stream(exec), context->foreign);
    });
}

static fs_status
foreign_after(const fs_exec *exec, void *foreign_stream)
{
    fs_context *context = exec->context;
    FS_TRY(check(context));
    return on_device(context, [=] {
        FS_TRY(fs_cuda_event_record(context->foreign, fs_cuda_exec_stream(exec)));
        return fs_cuda_foreign_after(foreign_stream, context->foreign);
    });
}

// ---- the table ----------------------------------------------------------------------------------

/* In the order of their declarations: C++17 has no names here. */
extern "C" const fs_runtime fs_cuda_runtime = {
    fs_cuda_device_count,
    describe,
    library,
    context_open,
    context_close,
    check,
    memory,
    memory_open,
    memory_close,
    pinned_open,
    pinned_close,
    reserve,
    scratch_nbytes,
    fs_cuda_sum_scratch_nbytes,
    gemm_scratch_nbytes,
    copy,
    fill,
    event_open,
    event_close,
    record,
    after,
    is_done,
    after_foreign,
    foreign_after,
    &fs_cuda_engine,
};
