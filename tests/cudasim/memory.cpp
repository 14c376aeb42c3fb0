/* Memory of devices, pinned memory, copies and fills. */
#include <algorithm>
#include <cstring>

#include <sys/mman.h>

#include "device.h"
#include "errors.h"

void
sim_protect(sim_device &device, int protection)
{
    for (const auto &[begin, allocation] : device.memory) {
        char *pages = static_cast<char *>(allocation.mapping) + SIM_PAGE;
        if (mprotect(pages, allocation.mapped, protection) != 0) {
            sim_die("mprotect failed");
        }
    }
}

const sim_allocation *
sim_find(const sim_allocations &map, uintptr_t at, size_t nbytes)
{
    auto found = map.upper_bound(at);
    if (found == map.begin()) {
        return NULL;
    }
    --found;
    bool inside = at + nbytes <= found->first + found->second.nbytes;
    return inside ? &found->second : NULL;
}

void
sim_check_canaries(const sim_device &device, const char *after)
{
    for (const auto &[begin, allocation] : device.memory) {
        const unsigned char *end = reinterpret_cast<unsigned char *>(begin) + allocation.nbytes;
        const unsigned char *pages_end =
            static_cast<unsigned char *>(allocation.mapping) + SIM_PAGE + allocation.mapped;
        for (const unsigned char *at = end; at < pages_end; at++) {
            if (*at != SIM_CANARY) {
                sim_die("%s wrote %zu bytes beyond an allocation of %zu bytes", after,
                        static_cast<size_t>(at - end) + 1, allocation.nbytes);
            }
        }
    }
}

/* The allocation whose pages, guards included, the range touches; NULL. */
static const sim_allocation *
find_touched(const sim_device &device, uintptr_t begin, uintptr_t end)
{
    for (const auto &[first, allocation] : device.memory) {
        uintptr_t mapped = reinterpret_cast<uintptr_t>(allocation.mapping);
        if (begin < mapped + allocation.mapped + 2 * SIM_PAGE && mapped < end) {
            return &allocation;
        }
    }
    return NULL;
}

void
sim_check_owner(const sim_device &device, uintptr_t begin, uintptr_t end, const char *what)
{
    for (const auto &other : sim.devices) {
        if (other.get() != &device && find_touched(*other, begin, end) != NULL) {
            sim_die("%s on device %d touches memory of device %d", what, device.index,
                    other->index);
        }
    }
}

sim_home
sim_home_of(const sim_device &device, const void *at, size_t nbytes, const char *what)
{
    uintptr_t begin = reinterpret_cast<uintptr_t>(at);
    sim_check_owner(device, begin, begin + nbytes, what);
    const sim_allocation *touched = find_touched(device, begin, begin + nbytes);
    if (touched != NULL && sim_find(device.memory, begin, nbytes) == NULL) {
        sim_die("%s reaches beyond an allocation of %zu bytes", what, touched->nbytes);
    }
    if (touched != NULL) {
        return SIM_HOME_DEVICE;
    }
    return sim_find(sim.pinned, begin, nbytes) != NULL ? SIM_HOME_PINNED : SIM_HOME_PAGEABLE;
}

// ---- allocations --------------------------------------------------------------------------------

cudaError_t
cudaMalloc(void **out, size_t nbytes)
{
    sim_lock lock(sim.mutex);
    sim_device &device = sim_here();
    device.changed.wait(lock, [&device] { return device.running == 0; });
    if (nbytes > sim.capacity - device.taken) {
        return sim_fail(cudaErrorMemoryAllocation);
    }
    size_t padded = (nbytes + SIM_ALIGNMENT - 1) / SIM_ALIGNMENT * SIM_ALIGNMENT;
    size_t mapped = (padded + SIM_PAGE - 1) / SIM_PAGE * SIM_PAGE;
    void *mapping = mmap(NULL, mapped + 2 * SIM_PAGE, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        sim_die("no memory for %zu bytes of the device", nbytes);
    }
    unsigned char *pages = static_cast<unsigned char *>(mapping) + SIM_PAGE;
    unsigned char *begin = pages + (mapped - padded); /* its end lies at the guard page */
    (void)mprotect(pages, mapped, PROT_READ | PROT_WRITE);
    /* Opening and closing it page by page, for every operation, would take most of the time. */
    (void)madvise(pages, mapped, mapped >= SIM_LARGE ? MADV_HUGEPAGE : MADV_NORMAL);
    std::memset(pages, 0xff, mapped);
    std::memset(begin + nbytes, SIM_CANARY, padded - nbytes);
    (void)mprotect(pages, mapped, device.is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
    device.memory[reinterpret_cast<uintptr_t>(begin)] = sim_allocation{nbytes, mapped, mapping};
    device.taken += nbytes;
    *out = begin;
    return cudaSuccess;
}

cudaError_t
cudaFree(void *memory)
{
    sim_lock lock(sim.mutex);
    for (auto &owner : sim.devices) {
        sim_device &device = *owner;
        auto found = device.memory.find(reinterpret_cast<uintptr_t>(memory));
        if (found == device.memory.end()) {
            continue;
        }
        sim_wait_all(lock, device);
        uintptr_t begin = found->first, end = begin + found->second.nbytes;
        (void)munmap(found->second.mapping, found->second.mapped + 2 * SIM_PAGE);
        device.taken -= found->second.nbytes;
        device.memory.erase(found);
        auto gone = [begin, end](const sim_access &a) {
            return a.range.begin >= begin && a.range.end <= end;
        };
        device.accesses.erase(
            std::remove_if(device.accesses.begin(), device.accesses.end(), gone),
            device.accesses.end());
        return cudaSuccess;
    }
    return memory == NULL ? cudaSuccess : sim_fail(cudaErrorInvalidValue);
}

cudaError_t
cudaMallocHost(void **out, size_t nbytes)
{
    sim_lock lock(sim.mutex);
    *out = std::malloc(nbytes);
    if (*out == NULL) {
        return sim_fail(cudaErrorMemoryAllocation);
    }
    sim.pinned[reinterpret_cast<uintptr_t>(*out)] = sim_allocation{nbytes, nbytes, *out};
    return cudaSuccess;
}

cudaError_t
cudaFreeHost(void *memory)
{
    sim_lock lock(sim.mutex);
    sim_wait_all(lock, sim_here());
    if (sim.pinned.erase(reinterpret_cast<uintptr_t>(memory)) == 0) {
        return sim_fail(cudaErrorInvalidValue);
    }
    std::free(memory);
    return cudaSuccess;
}

// ---- copies -------------------------------------------------------------------------------------

static void
enqueue(cudaStream_t stream, const char *name, const fs_sim_ranges &ranges,
        std::function<void()> run)
{
    sim_enqueue(stream, sim_operation{name, std::move(run), NULL, 0, NULL}, ranges);
}

cudaError_t
cudaMemcpyAsync(void *dst, const void *src, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    sim_lock lock(sim.mutex);
    const sim_device &device = stream != NULL ? *stream->device : sim_here();
    sim_home to = sim_home_of(device, dst, nbytes, "a copy's target");
    sim_home from = sim_home_of(device, src, nbytes, "a copy's source");
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (to_device != (to == SIM_HOME_DEVICE) ||
                                      from_device != (from == SIM_HOME_DEVICE))) {
        return sim_fail(cudaErrorInvalidValue);
    }
    /* Ordinary memory is the host's again after the call: read at the call, or waited for. */
    fs_sim_ranges ranges;
    if (from != SIM_HOME_PAGEABLE) {
        ranges.add(src, nbytes, false);
    }
    if (to != SIM_HOME_PAGEABLE) {
        ranges.add(dst, nbytes, true);
    }
    if (from == SIM_HOME_PAGEABLE) {
        /* Staged at the call: the caller may change it at once. */
        std::vector<unsigned char> staged(static_cast<const unsigned char *>(src),
                                          static_cast<const unsigned char *>(src) + nbytes);
        enqueue(stream, "copy", ranges,
                [dst, staged] { std::memcpy(dst, staged.data(), staged.size()); });
    } else {
        enqueue(stream, "copy", ranges, [dst, src, nbytes] { std::memcpy(dst, src, nbytes); });
    }
    if (to == SIM_HOME_PAGEABLE) {
        /* Waits, as CUDA does. */
        sim_wait(lock, stream, stream->given, stream->clock);
    }
    return cudaSuccess;
}

cudaError_t
cudaMemsetAsync(void *dst, int byte, size_t nbytes, cudaStream_t stream)
{
    sim_lock lock(sim.mutex);
    const sim_device &device = stream != NULL ? *stream->device : sim_here();
    if (sim_home_of(device, dst, nbytes, "a fill") != SIM_HOME_DEVICE) {
        return sim_fail(cudaErrorInvalidValue);
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
    sim_lock lock(sim.mutex);
    const sim_device &device = stream != NULL ? *stream->device : sim_here();
    size_t nbytes = height == 0 ? 0 : (height - 1) * pitch + width;
    if (width > pitch || sim_home_of(device, dst, nbytes, "a fill") != SIM_HOME_DEVICE) {
        return sim_fail(cudaErrorInvalidValue);
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
