/* Streams, events, devices, errors: CUDA's functions over the queues. */
#include <algorithm>
#include <memory>
#include <utility>

#include "device.h"
#include "errors.h"

/* Shared memory of a block: without asking, and of a device of capability 9.0. */
static const size_t SHARED_UNASKED = 48 * 1024;
static const size_t SHARED_MAX = 227 * 1024;

static thread_local cudaError_t last_error;
static thread_local int chosen; /* device */

cudaError_t
sim_fail(cudaError_t code)
{
    last_error = code;
    return code;
}

sim_device &
sim_here()
{
    sim_device &here = *sim.devices[static_cast<size_t>(chosen)];
    here.is_used = true;
    return here;
}

void
fs_sim_enqueue_kernel(const char *name, const void *kernel, dim3 grid, dim3 block,
                      size_t shared_nbytes, cudaStream_t stream, const fs_sim_ranges &ranges,
                      std::function<void()> thread)
{
    sim_lock lock(sim.mutex);
    if (stream != NULL && stream->device != &sim_here()) {
        sim_die("kernel %s: on a stream of device %d, by a thread whose device is %d", name,
                stream->device->index, chosen);
    }
    uint64_t seed = sim_here().random();
    std::string kept = name;
    sim.kernels++;
    auto asked = sim_here().shared_max.find(kernel);
    size_t shared_max = asked == sim_here().shared_max.end() ? SHARED_UNASKED : asked->second;
    auto run = [kept, grid, block, shared_nbytes, shared_max, thread, seed] {
        std::mt19937_64 random(seed);
        (void)run_grid(kept.c_str(), grid, block, shared_nbytes, shared_max, thread, random);
    };
    sim_enqueue(stream, sim_operation{kept, run, NULL, 0, NULL}, ranges);
}

cudaError_t
cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value)
{
    sim_lock lock(sim.mutex);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        static_cast<size_t>(value) > SHARED_MAX) {
        return sim_fail(cudaErrorInvalidValue);
    }
    sim_here().shared_max[kernel] = static_cast<size_t>(value);
    return cudaSuccess;
}

void
fs_sim_enqueue_call(const char *name, cudaStream_t stream, const fs_sim_ranges &ranges,
                    std::function<void()> run)
{
    sim_lock lock(sim.mutex);
    const sim_device &device = stream != NULL ? *stream->device : sim_here();
    for (const fs_sim_range &range : ranges.list) {
        const void *at = reinterpret_cast<const void *>(range.begin);
        if (sim_home_of(device, at, range.end - range.begin, name) == SIM_HOME_PAGEABLE) {
            sim_die("%s touches host memory that is not pinned", name);
        }
    }
    sim.kernels++;
    sim_enqueue(stream, sim_operation{name, std::move(run), NULL, 0, NULL}, ranges);
}

// ---- streams and events -------------------------------------------------------------------------

cudaError_t
cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    sim_lock lock(sim.mutex);
    *out = new fs_sim_stream{&sim_here(), ++sim.streams_made, {}, 0, 0, 0, {}};
    sim_here().streams.insert(*out);
    return cudaSuccess;
}

static bool
is_stream(cudaStream_t stream)
{
    return std::any_of(sim.devices.begin(), sim.devices.end(), [stream](const auto &device) {
        return device->streams.count(stream) > 0;
    });
}

cudaError_t
cudaStreamDestroy(cudaStream_t stream)
{
    sim_lock lock(sim.mutex);
    if (!is_stream(stream)) {
        return sim_fail(cudaErrorInvalidValue);
    }
    /* CUDA lets the work end behind the caller's back; here it ends now, without being seen. */
    sim_demand(stream, stream->given);
    stream->device->changed.wait(lock, [stream] { return stream->done >= stream->given; });
    stream->device->streams.erase(stream);
    /* Events may still stand for its operations. */
    static std::vector<std::unique_ptr<fs_sim_stream>> retired;
    retired.emplace_back(stream);
    return cudaSuccess;
}

cudaError_t
cudaStreamSynchronize(cudaStream_t stream)
{
    sim_lock lock(sim.mutex);
    sim_wait(lock, stream, stream->given, stream->clock);
    return cudaSuccess;
}

cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    *out = new fs_sim_event{&sim_here(), NULL, 0, {}};
    return cudaSuccess;
}

cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

/* The default stream of either kind, by any of its names. */
static bool
is_default(cudaStream_t stream)
{
    return reinterpret_cast<uintptr_t>(stream) <= 2;
}

cudaError_t
cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    sim_lock lock(sim.mutex);
    if (is_default(stream)) {
        event->stream = NULL; /* nothing is ever given to the default stream */
        event->clock.clear();
        return cudaSuccess;
    }
    if (event->device != stream->device) {
        sim_die("an event of device %d, recorded on a stream of device %d", event->device->index,
                stream->device->index);
    }
    event->stream = stream;
    event->number = stream->given;
    event->clock = stream->clock;
    return cudaSuccess;
}

/* Binds to what the event stands for now. A wait on an event that was never recorded is none. */
cudaError_t
cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    sim_lock lock(sim.mutex);
    if (event->stream == NULL || is_default(stream)) {
        return cudaSuccess;
    }
    sim_join_clock(stream->clock, event->clock);
    sim_enqueue(stream, sim_operation{"wait", NULL, event->stream, event->number, NULL},
                fs_sim_ranges());
    return cudaSuccess;
}

cudaError_t
cudaEventQuery(cudaEvent_t event)
{
    sim_lock lock(sim.mutex);
    if (event->stream == NULL || event->stream->done >= event->number) {
        sim_join_clock(event->device->host, event->clock);
        sim_join_clock(sim_here().host, event->clock);
        return cudaSuccess;
    }
    sim_demand(event->stream, event->number); /* who asks again and again waits */
    return cudaErrorNotReady;
}

cudaError_t
cudaEventSynchronize(cudaEvent_t event)
{
    sim_lock lock(sim.mutex);
    if (event->stream != NULL) {
        sim_wait(lock, event->stream, event->number, event->clock);
    }
    return cudaSuccess;
}

// ---- the rest -----------------------------------------------------------------------------------

cudaError_t
cudaGetDeviceCount(int *count)
{
    *count = sim.driver >= 13000 ? sim.visible : 0;
    if (sim.driver == 0 || sim.visible == 0) {
        return sim_fail(cudaErrorNoDevice);
    }
    return *count > 0 ? cudaSuccess : sim_fail(cudaErrorInsufficientDriver);
}

cudaError_t
cudaSetDevice(int which)
{
    if (which < 0 || which >= sim.visible) {
        return sim_fail(cudaErrorInvalidDevice);
    }
    chosen = which;
    sim_here().is_used = true; /* since CUDA 12 choosing a device starts it */
    return cudaSuccess;
}

/* cuDevicePrimaryCtxGetState. */
static int
primary_context_state(int device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = fs_sim_device_is_used(device) ? 1 : 0;
    return 0;
}

cudaError_t
cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned, unsigned long long,
                                 cudaDriverEntryPointQueryResult *result)
{
    bool is_known = std::strcmp(symbol, "cuDevicePrimaryCtxGetState") == 0;
    *out = is_known ? reinterpret_cast<void *>(primary_context_state) : NULL;
    *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t
cudaGetDevice(int *which)
{
    *which = chosen;
    return cudaSuccess;
}

cudaError_t
cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int)
{
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
    return cudaSuccess;
}

cudaError_t
cudaMemGetInfo(size_t *available, size_t *total)
{
    sim_lock lock(sim.mutex);
    *total = sim.capacity;
    *available = sim.capacity - sim_here().taken;
    return cudaSuccess;
}

cudaError_t
cudaDriverGetVersion(int *version)
{
    *version = sim.driver;
    return cudaSuccess;
}

cudaError_t
cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

cudaError_t
cudaGetLastError()
{
    cudaError_t code = last_error;
    last_error = cudaSuccess;
    return code;
}

const char *
cudaGetErrorString(cudaError_t code)
{
    switch (code) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInsufficientDriver:
        return "driver too old for the runtime";
    case cudaErrorNoDevice:
        return "no device";
    case cudaErrorInvalidDevice:
        return "no such device";
    case cudaErrorNotReady:
        return "not ready";
    default:
        return "invalid argument";
    }
}

// ---- what tests ask -----------------------------------------------------------------------------

void
fs_sim_reset(uint64_t seed, fs_sim_order order, size_t device_nbytes)
{
    sim_lock lock(sim.mutex);
    for (auto &device : sim.devices) {
        device->changed.wait(lock, [&device] { return sim_is_idle(*device); });
        device->random.seed(seed + (static_cast<uint64_t>(device->index) << 32));
        device->accesses.clear();
        device->is_used = false;
    }
    sim.order = order;
    sim.capacity = device_nbytes;
    sim.races = 0;
    sim.kernels = 0;
    sim.latest_race.clear();
    sim.tolerate_races = false;
    sim.driver = 13000;
}

void
fs_sim_set_devices(int n)
{
    if (n < 0 || static_cast<size_t>(n) > sim.devices.size()) {
        sim_die("%d devices, of %zu", n, sim.devices.size());
    }
    sim.visible = n;
}

bool
fs_sim_device_is_used(int device)
{
    return sim.devices[static_cast<size_t>(device)]->is_used;
}

void
fs_sim_tolerate_races(bool tolerate)
{
    sim.tolerate_races = tolerate;
}

size_t
fs_sim_races(void)
{
    sim_lock lock(sim.mutex);
    return sim.races;
}

const char *
fs_sim_latest_race(void)
{
    return sim.latest_race.c_str();
}

void
fs_sim_set_driver(int version)
{
    sim.driver = version;
}

size_t
fs_sim_kernels(void)
{
    sim_lock lock(sim.mutex);
    return sim.kernels;
}
