/* Queues of operations: what is in order with what, what may run, and the workers that run it. */
#include <algorithm>
#include <cstdlib>

#include <sys/mman.h>

#include "device.h"

sim_state &sim = *new sim_state;

static const int DEVICES_MOST = 64;
static const int DEVICES_USUALLY = 8;

sim_state::sim_state()
{
    const char *asked = std::getenv("CUDASIM_DEVICES");
    visible = asked != NULL ? std::atoi(asked) : DEVICES_USUALLY;
    if (visible < 0 || visible > DEVICES_MOST) {
        sim_die("CUDASIM_DEVICES=%s: 0 to %d", asked, DEVICES_MOST);
    }
    for (int i = 0; i < DEVICES_MOST; i++) {
        devices.emplace_back(new sim_device);
        devices.back()->index = i;
        devices.back()->random.seed(static_cast<uint64_t>(i) + 1);
    }
}

/* At the end of the program workers stop. The state stays: a rank's thread that is still waiting
 * then must not make its end wait for it. */
static struct at_end {
    ~at_end()
    {
        {
            std::lock_guard<std::mutex> lock(sim.mutex);
            sim.stop = true;
        }
        for (auto &device : sim.devices) {
            device->changed.notify_all();
            if (device->worker.joinable()) {
                device->worker.join();
            }
        }
    }
} stop_workers;

void
sim_join_clock(sim_clock &clock, const sim_clock &other)
{
    for (const auto &[stream, number] : other) {
        clock[stream] = std::max(clock[stream], number);
    }
}

void
sim_wake(sim_device &device)
{
    device.changed.notify_all();
    for (sim_device *watcher : device.watchers) {
        watcher->changed.notify_all();
    }
}

void
sim_demand(cudaStream_t stream, size_t number)
{
    if (stream->demanded < number) {
        stream->demanded = number;
        stream->device->changed.notify_all();
    }
}

void
sim_wait(sim_lock &lock, cudaStream_t stream, size_t number, const sim_clock &clock)
{
    sim_device &device = *stream->device;
    sim_clock known = clock;
    sim_demand(stream, number);
    device.changed.wait(lock, [stream, number] { return stream->done >= number; });
    sim_join_clock(device.host, known);
    sim_join_clock(sim_here().host, known);
}

bool
sim_is_idle(const sim_device &device)
{
    return device.running == 0 &&
           std::all_of(device.streams.begin(), device.streams.end(),
                       [](cudaStream_t stream) { return stream->queue.empty(); });
}

void
sim_wait_all(sim_lock &lock, sim_device &device)
{
    for (cudaStream_t stream : device.streams) {
        sim_demand(stream, stream->given);
        sim_join_clock(device.host, stream->clock);
        sim_join_clock(sim_here().host, stream->clock);
    }
    device.changed.wait(lock, [&device] { return sim_is_idle(device); });
}

// ---- order --------------------------------------------------------------------------------------

static bool
is_before(const sim_access &access, const sim_clock &clock)
{
    auto seen = clock.find(access.stream);
    return seen != clock.end() && seen->second >= access.number;
}

/* Compares an operation's ranges with those of all that came before and is not known to be over.
 * Memory is touched by operations of its own device alone. An order that comes about only through
 * another device's stream is none here: code should not lean on it. */
static void
note_accesses(cudaStream_t stream, const std::string &name, const fs_sim_ranges &ranges)
{
    sim_device &device = *stream->device;
    const sim_clock &clock = stream->clock;
    auto over = [&device](const sim_access &a) { return is_before(a, device.host); };
    device.accesses.erase(std::remove_if(device.accesses.begin(), device.accesses.end(), over),
                          device.accesses.end());
    for (const fs_sim_range &range : ranges.list) {
        for (const sim_access &old : device.accesses) {
            bool meets = range.begin < old.range.end && old.range.begin < range.end;
            if (!meets || !(range.is_write || old.range.is_write) || is_before(old, clock)) {
                continue;
            }
            sim.races++;
            sim.latest_race = name + " on stream " + std::to_string(stream->id) + " and " +
                              old.name + " on stream " + std::to_string(old.stream);
            if (!sim.tolerate_races) {
                sim_die("race: %s touch the same memory without an order", sim.latest_race.c_str());
            }
        }
    }
    for (const fs_sim_range &range : ranges.list) {
        device.accesses.push_back(sim_access{range, stream->id, stream->given, name});
    }
}

// ---- what may run -------------------------------------------------------------------------------

/* A meeting of the part that can be held now, or NULL. Peers on their way are asked to hurry. */
static sim_meeting *
find_meeting(const sim_part &part)
{
    sim_meeting *found = NULL;
    for (const auto &meeting : part.meetings) {
        if (meeting->state != sim_meeting::WAITING) {
            continue;
        }
        bool here = meeting->parts.size() == meeting->expected;
        for (const auto &other : meeting->parts) {
            if (!other->arrived && !other->dropped && other->number > 0) {
                sim_demand(other->stream, other->number);
            }
            here = here && other->arrived && !other->dropped && !other->stuck;
        }
        if (here && found == NULL) {
            found = meeting.get();
        }
    }
    return found;
}

static bool
is_over(const sim_part &part)
{
    return part.dropped ||
           std::all_of(part.meetings.begin(), part.meetings.end(),
                       [](const auto &m) { return m->state == sim_meeting::DONE; });
}

/* A dropped part stays where it is while a meeting it has begun still uses its memory. */
static bool
is_meeting_now(const sim_part &part)
{
    return std::any_of(part.meetings.begin(), part.meetings.end(),
                       [](const auto &m) { return m->state == sim_meeting::RUNNING; });
}

/* Can the stream's next operation, or some of it, run now? Asks for what it waits for. */
static bool
is_ready(cudaStream_t stream)
{
    if (stream->queue.empty()) {
        return false;
    }
    if (sim.order == FS_SIM_LATE && stream->done >= stream->demanded) {
        return false;
    }
    const sim_operation &next = stream->queue.front();
    if (next.after != NULL && next.after->done < next.after_number) {
        next.after->device->watchers.insert(stream->device);
        sim_demand(next.after, next.after_number);
        return false;
    }
    if (next.part != NULL) {
        next.part->arrived = !next.part->stuck;
        return !is_meeting_now(*next.part) &&
               (is_over(*next.part) || find_meeting(*next.part) != NULL);
    }
    return true;
}

static cudaStream_t
choose_stream(sim_device &device)
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

// ---- running ------------------------------------------------------------------------------------

/* Closes the memory of a device that uses it no more. */
static void
close_memory(sim_device &device)
{
    if (device.is_open && device.running == 0) {
        sim_protect(device, PROT_NONE);
        device.is_open = false;
    }
}

/* Runs with the memory of the devices open, and leaves it open: the next operation, which mostly
 * follows at once, need not open it again. The lock is held between this and what closes it. */
static void
run_on(sim_lock &lock, const std::set<sim_device *> &devices, const char *name,
       const std::function<void()> &run)
{
    for (sim_device *device : devices) {
        if (!device->is_open) {
            sim_protect(*device, PROT_READ | PROT_WRITE);
            device->is_open = true;
        }
        device->running++;
    }
    lock.unlock();
    run();
    lock.lock();
    for (sim_device *device : devices) {
        sim_check_canaries(*device, name);
        device->running--;
    }
}

static void
hold(sim_lock &lock, sim_meeting &meeting)
{
    std::set<sim_device *> devices;
    for (const auto &part : meeting.parts) {
        devices.insert(part->stream->device);
    }
    meeting.state = sim_meeting::RUNNING;
    run_on(lock, devices, meeting.name.c_str(), meeting.run);
    meeting.state = sim_meeting::DONE;
    meeting.parts.clear();
    for (sim_device *device : devices) {
        close_memory(*device);
        sim_wake(*device);
    }
}

static void
serve(sim_device *device)
{
    sim_lock lock(sim.mutex);
    while (!sim.stop) {
        cudaStream_t stream = choose_stream(*device);
        if (stream == NULL) {
            close_memory(*device);
            device->changed.wait(lock);
            continue;
        }
        std::shared_ptr<sim_part> part = stream->queue.front().part;
        if (part != NULL && !is_over(*part)) {
            /* Kept by the part, whatever becomes of the queue. */
            hold(lock, *find_meeting(*part));
            continue;
        }
        sim_operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        if (part != NULL) {
            part->meetings.clear();
        }
        if (operation.run) {
            run_on(lock, {device}, operation.name.c_str(), operation.run);
        }
        stream->done++;
        sim_wake(*device);
    }
}

void
sim_enqueue(cudaStream_t stream, sim_operation operation, const fs_sim_ranges &ranges)
{
    if (stream == NULL || stream->device->streams.count(stream) == 0) {
        sim_die("%s: on the default stream, or on one that was destroyed", operation.name.c_str());
    }
    sim_device &device = *stream->device;
    for (const fs_sim_range &range : ranges.list) {
        sim_check_owner(device, range.begin, range.end, operation.name.c_str());
    }
    if (!device.worker.joinable()) {
        device.worker = std::thread(serve, &device);
    }
    stream->given++;
    sim_join_clock(stream->clock, device.host);
    stream->clock[stream->id] = stream->given;
    note_accesses(stream, operation.name, ranges);
    if (operation.part != NULL) {
        operation.part->number = stream->given;
        for (const auto &meeting : operation.part->meetings) {
            for (const auto &other : meeting->parts) {
                other->stream->device->changed.notify_all();
            }
        }
    }
    stream->queue.push_back(std::move(operation));
    device.changed.notify_all();
}

void
sim_drop(const std::shared_ptr<sim_part> &part)
{
    part->dropped = true;
    part->stream->device->changed.notify_all();
}
