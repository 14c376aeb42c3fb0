/* Memory, streams and events over the CUDA runtime, and its errors as statuses. */
#include "common.cuh"

#include <atomic>
#include <new>

extern "C" {
#include "device.h"
}

/* Of each device; those beyond are counted together. */
#define DEVICES_COUNTED 64
static std::atomic<size_t> held_nbytes[DEVICES_COUNTED];

static std::atomic<size_t> &
held_here(void)
{
    int device = 0;
    (void)cudaGetDevice(&device);
    return held_nbytes[device < DEVICES_COUNTED ? device : DEVICES_COUNTED - 1];
}

/* An event and whether it stands for anything. */
struct fs_cuda_event_of {
    cudaEvent_t event;
    bool recorded;
};

fs_status
fs_cuda_check(cudaError_t code, const char *what)
{
    if (code == cudaSuccess) {
        return FS_OK;
    }
    /* An error that a call reports is also kept for the next launch to find: take it out. */
    (void)cudaGetLastError();
    fs_status status = code == cudaErrorMemoryAllocation ? FS_ENOMEM : FS_ESTATE;
    return FS_FAIL(status, "CUDA: %s: %s (error %d)", what, cudaGetErrorString(code), (int)code);
}

fs_status
fs_cuda_launched(const char *what)
{
    return fs_cuda_check(cudaGetLastError(), what);
}

extern "C" fs_status
fs_cuda_check_stream(fs_cuda_stream stream, const char *what)
{
    return stream != NULL ? FS_OK
                          : FS_FAIL(FS_EINVAL,
                                    "%s: the default stream, which waits for all others; open one",
                                    what);
}

extern "C" fs_status
fs_cuda_check_float(fs_dtype dtype, const char *what, const char *of)
{
    if ((int)dtype < 0 || dtype >= FS_DTYPE_COUNT) {
        return FS_FAIL(FS_ETYPE, "%s: no dtype has number %d", what, (int)dtype);
    }
    return fs_dtype_is_float(dtype)
               ? FS_OK
               : FS_FAIL(FS_ETYPE, "%s: dtype %s %s, must be a float", what, of,
                         fs_dtype_name(dtype));
}

// ---- devices ------------------------------------------------------------------------------------

extern "C" fs_status
fs_cuda_device_count(int *out)
{
    int driver = 0, runtime = 0;
    cudaError_t code = cudaGetDeviceCount(out);
    if (code == cudaSuccess && *out > 0) {
        return FS_OK;
    }
    (void)cudaGetLastError();
    *out = 0;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    if (driver == 0) {
        return FS_FAIL(FS_EUNSUPPORTED, "no CUDA driver is loaded here (libcuda.so.1 is missing or "
                                        "found no device)");
    }
    if (code == cudaErrorInsufficientDriver) {
        return FS_FAIL(FS_EUNSUPPORTED, "the CUDA driver is for CUDA %d.%d, this build needs %d.%d "
                                        "or newer: update the driver",
                       driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    return FS_FAIL(FS_EUNSUPPORTED, "no CUDA device: %s", cudaGetErrorString(code));
}

extern "C" fs_status
fs_cuda_device_use(int device)
{
    FS_CUDA_TRY(cudaSetDevice(device));
    return FS_OK;
}

/* Has somebody in this process used the device? Asked of the driver: the runtime cannot say. */
static bool
is_in_use(int device)
{
    typedef int (*state_fn)(int device, unsigned *flags, int *active);
    static const state_fn state = [] {
        void *found = NULL;
        cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
        const char *name = "cuDevicePrimaryCtxGetState";
#if CUDART_VERSION >= 12050
        cudaError_t code =
            cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
        cudaError_t code = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
        bool is_there = code == cudaSuccess && result == cudaDriverEntryPointSuccess;
        return is_there ? (state_fn)found : (state_fn)NULL;
    }();
    unsigned flags = 0;
    int active = 0;
    return state == NULL || state(device, &flags, &active) != 0 || active != 0;
}

extern "C" void
fs_cuda_device_give_back(int device)
{
    if (is_in_use(device)) {
        (void)cudaSetDevice(device);
    }
}

extern "C" fs_status
fs_cuda_device_describe(int *capability, size_t *free_nbytes, size_t *total_nbytes)
{
    int device = 0, major = 0, minor = 0;
    FS_CUDA_TRY(cudaGetDevice(&device));
    FS_CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    FS_CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    FS_CUDA_TRY(cudaMemGetInfo(free_nbytes, total_nbytes));
    *capability = 10 * major + minor;
    return FS_OK;
}

// ---- memory -------------------------------------------------------------------------------------

extern "C" fs_status
fs_cuda_memory_open(size_t nbytes, void **out)
{
    *out = NULL;
    if (nbytes == 0) {
        return FS_OK;
    }
    cudaError_t code = cudaMalloc(out, nbytes);
    if (code == cudaErrorMemoryAllocation) {
        size_t available = 0, total = 0;
        (void)cudaGetLastError();
        *out = NULL;
        FS_CUDA_TRY(cudaMemGetInfo(&available, &total));
        size_t held = held_here().load(), taken = total - available;
        return FS_FAIL(FS_ENOMEM,
                       "device memory: asked for %zu bytes; of %zu on the device in all %zu are "
                       "allocated by flatshard, %zu reserved by CUDA, libraries and other "
                       "processes, %zu free",
                       nbytes, total, held, taken > held ? taken - held : 0, available);
    }
    FS_TRY(fs_cuda_check(code, "cudaMalloc"));
    held_here() += nbytes;
    return FS_OK;
}

extern "C" fs_status
fs_cuda_memory_close(void *memory, size_t nbytes)
{
    if (memory == NULL) {
        return FS_OK;
    }
    FS_CUDA_TRY(cudaFree(memory));
    held_here() -= nbytes;
    return FS_OK;
}

extern "C" size_t
fs_cuda_memory_held(void)
{
    return held_here().load();
}

extern "C" fs_status
fs_cuda_pinned_open(size_t nbytes, void **out)
{
    *out = NULL;
    if (nbytes == 0) {
        return FS_OK;
    }
    FS_CUDA_TRY(cudaMallocHost(out, nbytes));
    return FS_OK;
}

extern "C" fs_status
fs_cuda_pinned_close(void *memory)
{
    if (memory != NULL) {
        FS_CUDA_TRY(cudaFreeHost(memory));
    }
    return FS_OK;
}

extern "C" fs_status
fs_cuda_copy(fs_cuda_stream stream, void *dst, const void *src, size_t nbytes)
{
    FS_TRY(fs_cuda_check_stream(stream, "copy"));
    if (nbytes > 0) {
        FS_CUDA_TRY(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, (cudaStream_t)stream));
    }
    return FS_OK;
}

extern "C" fs_status
fs_cuda_fill(fs_cuda_stream stream, void *dst, int byte, size_t nbytes)
{
    FS_TRY(fs_cuda_check_stream(stream, "fill"));
    if (nbytes > 0) {
        FS_CUDA_TRY(cudaMemsetAsync(dst, byte, nbytes, (cudaStream_t)stream));
    }
    return FS_OK;
}

// ---- streams and events -------------------------------------------------------------------------

extern "C" fs_status
fs_cuda_stream_open(fs_cuda_stream *out)
{
    cudaStream_t stream = NULL;
    *out = NULL;
    FS_CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    *out = (fs_cuda_stream)stream;
    return FS_OK;
}

extern "C" fs_status
fs_cuda_stream_close(fs_cuda_stream stream)
{
    if (stream != NULL) {
        FS_CUDA_TRY(cudaStreamDestroy((cudaStream_t)stream));
    }
    return FS_OK;
}

extern "C" fs_status
fs_cuda_stream_wait(fs_cuda_stream stream)
{
    FS_TRY(fs_cuda_check_stream(stream, "wait for a stream"));
    FS_CUDA_TRY(cudaStreamSynchronize((cudaStream_t)stream));
    return FS_OK;
}

extern "C" fs_status
fs_cuda_event_open(fs_cuda_event *out)
{
    *out = NULL;
    fs_cuda_event event = new (std::nothrow) fs_cuda_event_of{NULL, false};
    if (event == NULL) {
        return FS_FAIL(FS_ENOMEM, "no memory for an event");
    }
    cudaError_t code = cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming);
    fs_status status = fs_cuda_check(code, "cudaEventCreateWithFlags");
    if (status != FS_OK) {
        delete event;
        return status;
    }
    *out = event;
    return FS_OK;
}

extern "C" fs_status
fs_cuda_event_close(fs_cuda_event event)
{
    if (event != NULL) {
        cudaEvent_t inner = event->event;
        delete event;
        FS_CUDA_TRY(cudaEventDestroy(inner));
    }
    return FS_OK;
}

extern "C" fs_status
fs_cuda_event_record(fs_cuda_event event, fs_cuda_stream stream)
{
    FS_TRY(fs_cuda_check_stream(stream, "record an event"));
    FS_CUDA_TRY(cudaEventRecord(event->event, (cudaStream_t)stream));
    event->recorded = true;
    return FS_OK;
}

static fs_status
check_recorded(fs_cuda_event event)
{
    return event->recorded ? FS_OK
                           : FS_FAIL(FS_ESTATE, "an event that was never recorded: CUDA would not "
                                                "wait for anything");
}

extern "C" fs_status
fs_cuda_stream_after(fs_cuda_stream stream, fs_cuda_event event)
{
    FS_TRY(fs_cuda_check_stream(stream, "wait for an event"));
    FS_TRY(check_recorded(event));
    FS_CUDA_TRY(cudaStreamWaitEvent((cudaStream_t)stream, event->event, 0));
    return FS_OK;
}

extern "C" fs_status
fs_cuda_event_record_foreign(fs_cuda_event event, void *foreign_stream)
{
    FS_CUDA_TRY(cudaEventRecord(event->event, (cudaStream_t)foreign_stream));
    event->recorded = true;
    return FS_OK;
}

extern "C" fs_status
fs_cuda_foreign_after(void *foreign_stream, fs_cuda_event event)
{
    FS_TRY(check_recorded(event));
    FS_CUDA_TRY(cudaStreamWaitEvent((cudaStream_t)foreign_stream, event->event, 0));
    return FS_OK;
}

extern "C" fs_status
fs_cuda_event_is_done(fs_cuda_event event, bool *out)
{
    FS_TRY(check_recorded(event));
    cudaError_t code = cudaEventQuery(event->event);
    *out = code == cudaSuccess;
    return code == cudaErrorNotReady ? FS_OK : fs_cuda_check(code, "cudaEventQuery");
}

extern "C" fs_status
fs_cuda_event_wait(fs_cuda_event event)
{
    FS_TRY(check_recorded(event));
    FS_CUDA_TRY(cudaEventSynchronize(event->event));
    return FS_OK;
}
