/* Devices, memory, streams, events: one worker thread serves the streams' queues. */
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

#include <sys/mman.h>

#include "block.h"
#include "cuda_runtime.h"
#include "sim.h"

/* Who has been seen how far: stream -> number of its operations. The host is stream 0. */
typedef std::map<size_t, size_t> sim_clock;

static void
join_clock(sim_clock &clock, const sim_clock &other)
{
    for (const auto &[stream, number] : other) {
        clock[stream] = std::max(clock[stream], number);
    }
}

struct sim_operation {
    std::string name;
    std::function<void()> run;
    cudaStream_t after; /* a wait for operation after_number of another stream; else NULL */
    size_t after_number;
};

struct fs_sim_stream {
    size_t id;
    std::deque<sim_operation> queue;
    size_t given, done;  /* operations */
    size_t demanded;     /* the host waits for this many */
    sim_clock clock;     /* of the latest operation given */
};

struct fs_sim_event {
    cudaStream_t stream; /* NULL: never recorded */
    size_t number;       /* the operation it stands for */
    sim_clock clock;
};

struct sim_access {
    fs_sim_range range;
    size_t stream, number;
    std::string name;
};

struct sim_allocation {
    size_t nbytes, mapped;
    void *mapping;
};

static const size_t PAGE = 4096;
static const size_t ALIGNMENT = 256;
static const unsigned char CANARY = 0xa5;

struct sim_device {
    std::mutex mutex;
    std::condition_variable changed;
    std::thread worker;
    bool stop = false, running = false;
    std::mt19937_64 random{1};
    fs_sim_order order = FS_SIM_SHUFFLED;
    size_t capacity = static_cast<size_t>(1) << 32, taken = 0, streams_made = 0;
    std::set<cudaStream_t> streams;
    std::map<uintptr_t, sim_allocation> memory, pinned;
    std::vector<sim_access> accesses;
    sim_clock host;
    bool tolerate_races = false;
    size_t races = 0, kernels = 0;
    std::string latest_race;
    int driver = 13000;
    ~sim_device()
    {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stop = true;
        }
        changed.notify_all();
        if (worker.joinable()) {
            worker.join();
        }
    }
};

static sim_device device;
static thread_local cudaError_t last_error;

static cudaError_t
fail(cudaError_t code)
{
    last_error = code;
    return code;
}

// ---- memory -------------------------------------------------------------------------------------

static void
protect_memory(int protection)
{
    for (const auto &[begin, allocation] : device.memory) {
        char *pages = static_cast<char *>(allocation.mapping) + PAGE;
        if (mprotect(pages, allocation.mapped, protection) != 0) {
            sim_die("mprotect failed");
        }
    }
}

/* The allocation that holds at, or NULL. */
static const sim_allocation *
find_allocation(const std::map<uintptr_t, sim_allocation> &map, uintptr_t at, size_t nbytes)
{
    auto found = map.upper_bound(at);
    if (found == map.begin()) {
        return NULL;
    }
    --found;
    bool inside = at + nbytes <= found->first + found->second.nbytes;
    return inside ? &found->second : NULL;
}

static void
check_canaries(const char *after)
{
    for (const auto &[begin, allocation] : device.memory) {
        const unsigned char *end = reinterpret_cast<unsigned char *>(begin) + allocation.nbytes;
        const unsigned char *pages_end =
            static_cast<unsigned char *>(allocation.mapping) + PAGE + allocation.mapped;
        for (const unsigned char *at = end; at < pages_end; at++) {
            if (*at != CANARY) {
                sim_die("%s wrote %zu bytes beyond an allocation of %zu bytes", after,
                        static_cast<size_t>(at - end) + 1, allocation.nbytes);
            }
        }
    }
}

cudaError_t
cudaMalloc(void **out, size_t nbytes)
{
    std::unique_lock<std::mutex> lock(device.mutex);
    device.changed.wait(lock, [] { return !device.running; });
    if (nbytes > device.capacity - device.taken) {
        return fail(cudaErrorMemoryAllocation);
    }
    size_t padded = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    size_t mapped = (padded + PAGE - 1) / PAGE * PAGE;
    void *mapping = mmap(NULL, mapped + 2 * PAGE, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        sim_die("no memory for %zu bytes of the device", nbytes);
    }
    unsigned char *pages = static_cast<unsigned char *>(mapping) + PAGE;
    unsigned char *begin = pages + (mapped - padded); /* its end lies at the guard page */
    (void)mprotect(pages, mapped, PROT_READ | PROT_WRITE);
    std::memset(pages, 0xff, mapped);
    std::memset(begin + nbytes, CANARY, padded - nbytes);
    (void)mprotect(pages, mapped, PROT_NONE);
    device.memory[reinterpret_cast<uintptr_t>(begin)] = sim_allocation{nbytes, mapped, mapping};
    device.taken += nbytes;
    *out = begin;
    return cudaSuccess;
}

/* Is nothing left to run, and are all waits of the host's order done? */
static bool
all_done()
{
    return !device.running && std::all_of(device.streams.begin(), device.streams.end(),
                                          [](cudaStream_t s) { return s->queue.empty(); });
}

static void
wait_all(std::unique_lock<std::mutex> &lock)
{
    for (cudaStream_t stream : device.streams) {
        stream->demanded = stream->given;
        join_clock(device.host, stream->clock);
    }
    device.changed.notify_all();
    device.changed.wait(lock, all_done);
}

cudaError_t
cudaFree(void *memory)
{
    std::unique_lock<std::mutex> lock(device.mutex);
    wait_all(lock);
    auto found = device.memory.find(reinterpret_cast<uintptr_t>(memory));
    if (found == device.memory.end()) {
        return memory == NULL ? cudaSuccess : fail(cudaErrorInvalidValue);
    }
    uintptr_t begin = found->first, end = begin + found->second.nbytes;
    (void)munmap(found->second.mapping, found->second.mapped + 2 * PAGE);
    device.taken -= found->second.nbytes;
    device.memory.erase(found);
    auto gone = [begin, end](const sim_access &a) {
        return a.range.begin >= begin && a.range.end <= end;
    };
    device.accesses.erase(std::remove_if(device.accesses.begin(), device.accesses.end(), gone),
                          device.accesses.end());
    return cudaSuccess;
}

cudaError_t
cudaMallocHost(void **out, size_t nbytes)
{
    std::lock_guard<std::mutex> lock(device.mutex);
    *out = std::malloc(nbytes);
    if (*out == NULL) {
        return fail(cudaErrorMemoryAllocation);
    }
    device.pinned[reinterpret_cast<uintptr_t>(*out)] = sim_allocation{nbytes, nbytes, *out};
    return cudaSuccess;
}

cudaError_t
cudaFreeHost(void *memory)
{
    std::unique_lock<std::mutex> lock(device.mutex);
    wait_all(lock);
    if (device.pinned.erase(reinterpret_cast<uintptr_t>(memory)) == 0) {
        return fail(cudaErrorInvalidValue);
    }
    std::free(memory);
    return cudaSuccess;
}

// ---- order --------------------------------------------------------------------------------------

static bool
is_before(const sim_access &access, const sim_clock &clock)
{
    auto seen = clock.find(access.stream);
    return seen != clock.end() && seen->second >= access.number;
}

/* Compares an operation's ranges with those of all that came before and is not known to be over. */
static void
note_accesses(cudaStream_t stream, const std::string &name, const fs_sim_ranges &ranges)
{
    const sim_clock &clock = stream->clock;
    auto over = [](const sim_access &a) { return is_before(a, device.host); };
    device.accesses.erase(std::remove_if(device.accesses.begin(), device.accesses.end(), over),
                          device.accesses.end());
    for (const fs_sim_range &range : ranges.list) {
        for (const sim_access &old : device.accesses) {
            bool meets = range.begin < old.range.end && old.range.begin < range.end;
            if (!meets || !(range.is_write || old.range.is_write) || is_before(old, clock)) {
                continue;
            }
            device.races++;
            device.latest_race = name + " on stream " + std::to_string(stream->id) + " and " +
                                 old.name + " on stream " + std::to_string(old.stream);
            if (!device.tolerate_races) {
                sim_die("race: %s touch the same memory without an order",
                        device.latest_race.c_str());
            }
        }
    }
    for (const fs_sim_range &range : ranges.list) {
        device.accesses.push_back(sim_access{range, stream->id, stream->given, name});
    }
}

/* Can the stream's next operation run now? Asks for what it waits for. */
static bool
is_ready(cudaStream_t stream)
{
    if (stream->queue.empty()) {
        return false;
    }
    if (device.order == FS_SIM_LATE && stream->done >= stream->demanded) {
        return false;
    }
    const sim_operation &next = stream->queue.front();
    if (next.after != NULL && next.after->done < next.after_number) {
        next.after->demanded = std::max(next.after->demanded, next.after_number);
        return false;
    }
    return true;
}

static cudaStream_t
choose_stream()
{
    std::vector<cudaStream_t> ready;
    /* A demand may reach a stream that was looked at already: as often as there are streams. */
    for (size_t i = 0; i < device.streams.size() && ready.empty(); i++) {
        for (cudaStream_t stream : device.streams) {
            if (is_ready(stream)) {
                ready.push_back(stream);
            }
        }
    }
    /* By number, not by address: a seed means one order. */
    std::sort(ready.begin(), ready.end(),
              [](cudaStream_t a, cudaStream_t b) { return a->id < b->id; });
    return ready.empty() ? NULL : ready[device.random() % ready.size()];
}

static void
serve()
{
    std::unique_lock<std::mutex> lock(device.mutex);
    while (!device.stop) {
        cudaStream_t stream = choose_stream();
        if (stream == NULL) {
            device.changed.wait(lock);
            continue;
        }
        sim_operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        if (operation.run) {
            device.running = true;
            protect_memory(PROT_READ | PROT_WRITE);
            lock.unlock();
            operation.run();
            lock.lock();
            check_canaries(operation.name.c_str());
            protect_memory(PROT_NONE);
            device.running = false;
        }
        stream->done++;
        device.changed.notify_all();
    }
}

static void
enqueue(cudaStream_t stream, const char *name, const fs_sim_ranges &ranges,
        std::function<void()> run, cudaStream_t after = NULL, size_t after_number = 0)
{
    if (stream == NULL || device.streams.count(stream) == 0) {
        sim_die("%s: on the default stream, or on one that was destroyed", name);
    }
    if (!device.worker.joinable()) {
        device.worker = std::thread(serve);
    }
    stream->given++;
    join_clock(stream->clock, device.host);
    stream->clock[stream->id] = stream->given;
    note_accesses(stream, name, ranges);
    stream->queue.push_back(sim_operation{name, std::move(run), after, after_number});
    device.changed.notify_all();
}

void
fs_sim_enqueue_kernel(const char *name, dim3 grid, dim3 block, size_t shared_nbytes,
                      cudaStream_t stream, const fs_sim_ranges &ranges,
                      std::function<void()> thread)
{
    std::lock_guard<std::mutex> lock(device.mutex);
    uint64_t seed = device.random();
    std::string kept = name;
    device.kernels++;
    enqueue(stream, name, ranges, [kept, grid, block, shared_nbytes, thread, seed] {
        std::mt19937_64 random(seed);
        (void)run_grid(kept.c_str(), grid, block, shared_nbytes, thread, random);
    });
}

// ---- copies -------------------------------------------------------------------------------------

/* Is it device memory, pinned memory, or any other of the host? A part outside its allocation ends
 * the program. */
enum sim_home { HOME_DEVICE, HOME_PINNED, HOME_PAGEABLE };

static sim_home
home_of(const void *at, size_t nbytes, const char *what)
{
    uintptr_t begin = reinterpret_cast<uintptr_t>(at);
    for (const auto &[first, allocation] : device.memory) {
        uintptr_t mapped = reinterpret_cast<uintptr_t>(allocation.mapping);
        bool touches = begin < mapped + allocation.mapped + 2 * PAGE && mapped < begin + nbytes;
        if (touches && find_allocation(device.memory, begin, nbytes) == NULL) {
            sim_die("%s reaches beyond an allocation of %zu bytes", what, allocation.nbytes);
        }
        if (touches) {
            return HOME_DEVICE;
        }
    }
    return find_allocation(device.pinned, begin, nbytes) != NULL ? HOME_PINNED : HOME_PAGEABLE;
}

cudaError_t
cudaMemcpyAsync(void *dst, const void *src, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    std::unique_lock<std::mutex> lock(device.mutex);
    sim_home to = home_of(dst, nbytes, "a copy's target");
    sim_home from = home_of(src, nbytes, "a copy's source");
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault &&
        (to_device != (to == HOME_DEVICE) || from_device != (from == HOME_DEVICE))) {
        return fail(cudaErrorInvalidValue);
    }
    fs_sim_ranges ranges;
    ranges.add(src, nbytes, false);
    ranges.add(dst, nbytes, true);
    if (from == HOME_PAGEABLE) {
        /* Staged at the call: the caller may change it at once. */
        std::vector<unsigned char> staged(static_cast<const unsigned char *>(src),
                                          static_cast<const unsigned char *>(src) + nbytes);
        enqueue(stream, "copy", ranges,
                [dst, staged] { std::memcpy(dst, staged.data(), staged.size()); });
    } else {
        enqueue(stream, "copy", ranges, [dst, src, nbytes] { std::memcpy(dst, src, nbytes); });
    }
    if (to == HOME_PAGEABLE) {
        /* Waits, as CUDA does. */
        size_t number = stream->given;
        stream->demanded = number;
        device.changed.notify_all();
        device.changed.wait(lock, [stream, number] { return stream->done >= number; });
        join_clock(device.host, stream->clock);
    }
    return cudaSuccess;
}

cudaError_t
cudaMemsetAsync(void *dst, int byte, size_t nbytes, cudaStream_t stream)
{
    std::lock_guard<std::mutex> lock(device.mutex);
    if (home_of(dst, nbytes, "a fill") != HOME_DEVICE) {
        return fail(cudaErrorInvalidValue);
    }
    fs_sim_ranges ranges;
    ranges.add(dst, nbytes, true);
    enqueue(stream, "fill", ranges, [dst, byte, nbytes] { std::memset(dst, byte, nbytes); });
    return cudaSuccess;
}

cudaError_t
cudaMemset2DAsync(void *dst, size_t pitch, int byte, size_t width, size_t height,
                  cudaStream_t stream)
{
    std::lock_guard<std::mutex> lock(device.mutex);
    size_t nbytes = height == 0 ? 0 : (height - 1) * pitch + width;
    if (width > pitch || home_of(dst, nbytes, "a fill") != HOME_DEVICE) {
        return fail(cudaErrorInvalidValue);
    }
    fs_sim_ranges ranges;
    ranges.add(dst, nbytes, true);
    enqueue(stream, "fill", ranges, [dst, pitch, byte, width, height] {
        for (size_t row = 0; row < height; row++) {
            std::memset(static_cast<char *>(dst) + row * pitch, byte, width);
        }
    });
    return cudaSuccess;
}

void
fs_sim_enqueue_call(const char *name, cudaStream_t stream, const fs_sim_ranges &ranges,
                    std::function<void()> run)
{
    std::lock_guard<std::mutex> lock(device.mutex);
    for (const fs_sim_range &range : ranges.list) {
        const void *at = reinterpret_cast<const void *>(range.begin);
        if (home_of(at, range.end - range.begin, name) == HOME_PAGEABLE) {
            sim_die("%s touches host memory that is not pinned", name);
        }
    }
    device.kernels++;
    enqueue(stream, name, ranges, std::move(run));
}

// ---- streams and events -------------------------------------------------------------------------

cudaError_t
cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    std::lock_guard<std::mutex> lock(device.mutex);
    *out = new fs_sim_stream{++device.streams_made, {}, 0, 0, 0, {}};
    device.streams.insert(*out);
    return cudaSuccess;
}

static void
wait_for(std::unique_lock<std::mutex> &lock, cudaStream_t stream, size_t number,
         const sim_clock &clock)
{
    stream->demanded = std::max(stream->demanded, number);
    device.changed.notify_all();
    device.changed.wait(lock, [stream, number] { return stream->done >= number; });
    join_clock(device.host, clock);
}

cudaError_t
cudaStreamDestroy(cudaStream_t stream)
{
    std::unique_lock<std::mutex> lock(device.mutex);
    if (device.streams.count(stream) == 0) {
        return fail(cudaErrorInvalidValue);
    }
    /* CUDA lets the work end behind the caller's back; here it ends now, without being seen. */
    stream->demanded = stream->given;
    device.changed.notify_all();
    device.changed.wait(lock, [stream] { return stream->done >= stream->given; });
    device.streams.erase(stream);
    /* Events may still stand for its operations. */
    static std::vector<std::unique_ptr<fs_sim_stream>> retired;
    retired.emplace_back(stream);
    return cudaSuccess;
}

cudaError_t
cudaStreamSynchronize(cudaStream_t stream)
{
    std::unique_lock<std::mutex> lock(device.mutex);
    wait_for(lock, stream, stream->given, stream->clock);
    return cudaSuccess;
}

cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    *out = new fs_sim_event{NULL, 0, {}};
    return cudaSuccess;
}

cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t
cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    std::lock_guard<std::mutex> lock(device.mutex);
    event->stream = stream;
    event->number = stream->given;
    event->clock = stream->clock;
    return cudaSuccess;
}

/* Binds to what the event stands for now. A wait on an event that was never recorded is none. */
cudaError_t
cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    std::lock_guard<std::mutex> lock(device.mutex);
    if (event->stream == NULL) {
        return cudaSuccess;
    }
    join_clock(stream->clock, event->clock);
    enqueue(stream, "wait", fs_sim_ranges(), std::function<void()>(), event->stream,
            event->number);
    return cudaSuccess;
}

cudaError_t
cudaEventQuery(cudaEvent_t event)
{
    std::lock_guard<std::mutex> lock(device.mutex);
    if (event->stream == NULL || event->stream->done >= event->number) {
        join_clock(device.host, event->clock);
        return cudaSuccess;
    }
    return cudaErrorNotReady;
}

cudaError_t
cudaEventSynchronize(cudaEvent_t event)
{
    std::unique_lock<std::mutex> lock(device.mutex);
    if (event->stream != NULL) {
        wait_for(lock, event->stream, event->number, event->clock);
    }
    return cudaSuccess;
}

// ---- the rest -----------------------------------------------------------------------------------

cudaError_t
cudaGetDeviceCount(int *count)
{
    *count = device.driver >= 13000 ? 1 : 0;
    if (device.driver == 0) {
        return fail(cudaErrorNoDevice);
    }
    return *count == 1 ? cudaSuccess : fail(cudaErrorInsufficientDriver);
}

cudaError_t
cudaSetDevice(int which)
{
    return which == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice);
}

cudaError_t
cudaGetDevice(int *which)
{
    *which = 0;
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
    std::lock_guard<std::mutex> lock(device.mutex);
    *total = device.capacity;
    *available = device.capacity - device.taken;
    return cudaSuccess;
}

cudaError_t
cudaDriverGetVersion(int *version)
{
    *version = device.driver;
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
    std::unique_lock<std::mutex> lock(device.mutex);
    device.changed.wait(lock, all_done);
    device.random.seed(seed);
    device.order = order;
    device.capacity = device_nbytes;
    device.races = 0;
    device.kernels = 0;
    device.latest_race.clear();
    device.tolerate_races = false;
    device.driver = 13000;
    device.accesses.clear();
}

void
fs_sim_tolerate_races(bool tolerate)
{
    device.tolerate_races = tolerate;
}

size_t
fs_sim_races(void)
{
    return device.races;
}

const char *
fs_sim_latest_race(void)
{
    return device.latest_race.c_str();
}

void
fs_sim_set_driver(int version)
{
    device.driver = version;
}

size_t
fs_sim_kernels(void)
{
    return device.kernels;
}
