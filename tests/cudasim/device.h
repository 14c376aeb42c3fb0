/* Inside the stand-in: devices, their queues of operations, and how these are given and run.
 *
 * One lock for everything but the running of an operation. Each device has one worker, which takes
 * the next operation of a stream that may run. An operation that meets others, on streams of other
 * devices, never blocks a worker: it stays at the head of its queue until all have come. */
#ifndef FS_CUDASIM_DEVICE_H
#define FS_CUDASIM_DEVICE_H

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "block.h"
#include "cuda_runtime.h"
#include "sim.h"

struct sim_device;
struct sim_part;

/* Who has been seen how far: stream -> number of its operations. */
typedef std::map<size_t, size_t> sim_clock;

struct sim_operation {
    std::string name;
    std::function<void()> run;
    cudaStream_t after; /* a wait for operation after_number of another stream; else NULL */
    size_t after_number;
    std::shared_ptr<sim_part> part; /* of meetings; else NULL */
};

struct fs_sim_stream {
    sim_device *device;
    size_t id; /* counted over all devices */
    std::deque<sim_operation> queue;
    size_t given, done;  /* operations */
    size_t demanded;     /* somebody waits for this many */
    sim_clock clock;     /* of the latest operation given */
};

struct fs_sim_event {
    sim_device *device;
    cudaStream_t stream; /* NULL: never recorded */
    size_t number;       /* the operation it stands for */
    sim_clock clock;
};

/* Work that several streams' operations do together: once, when all of them are at the heads of
 * their queues. */
struct sim_meeting {
    std::string name;
    size_t expected; /* parts */
    std::vector<std::shared_ptr<sim_part>> parts;
    std::function<void()> run; /* set when all parts are given */
    enum { WAITING, RUNNING, DONE } state;
};

/* One operation's share in meetings: it is over when all of them are, or when it is dropped. */
struct sim_part {
    cudaStream_t stream;
    size_t number; /* of the operation; 0 until it is given */
    bool arrived, dropped;
    bool stuck; /* it will never arrive */
    std::vector<std::shared_ptr<sim_meeting>> meetings;
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

typedef std::map<uintptr_t, sim_allocation> sim_allocations;

struct sim_device {
    int index = 0;
    std::atomic<bool> is_used{false}; /* its primary context is active */
    std::condition_variable changed;
    std::thread worker;
    int running = 0;      /* operations that use its memory now */
    bool is_open = false; /* its memory, to the host too */
    std::mt19937_64 random;
    size_t taken = 0;
    std::set<cudaStream_t> streams;
    sim_allocations memory;
    std::vector<sim_access> accesses;
    std::map<const void *, size_t> shared_max; /* of kernels that asked for more */
    sim_clock host;                  /* of the thread whose device it is */
    std::set<sim_device *> watchers; /* whose streams wait for events of this one */
};

static const size_t SIM_PAGE = 4096;
static const size_t SIM_ALIGNMENT = 256;
static const size_t SIM_LARGE = (size_t)1 << 22; /* from here on in large pages */
static const unsigned char SIM_CANARY = 0xa5;

struct sim_state {
    std::mutex mutex;
    bool stop = false;
    fs_sim_order order = FS_SIM_SHUFFLED;
    size_t capacity = static_cast<size_t>(1) << 32, streams_made = 0, kernels = 0;
    sim_allocations pinned;
    int driver = 13000;
    bool tolerate_races = false;
    size_t races = 0;
    std::string latest_race;
    std::vector<std::unique_ptr<sim_device>> devices;
    int visible; /* devices, of those */
    sim_state();
};

extern sim_state &sim;

typedef std::unique_lock<std::mutex> sim_lock;

/* The calling thread's device. */
sim_device &sim_here();

void sim_join_clock(sim_clock &clock, const sim_clock &other);

/* Wakes whoever waits for something of the device. */
void sim_wake(sim_device &device);

/* Somebody waits for the first number operations of the stream. */
void sim_demand(cudaStream_t stream, size_t number);

/* Waits until they are done; the host knows then what the clock knows. */
void sim_wait(sim_lock &lock, cudaStream_t stream, size_t number, const sim_clock &clock);

/* Has the device nothing left to run? */
bool sim_is_idle(const sim_device &device);

/* Waits for all that the device was given. */
void sim_wait_all(sim_lock &lock, sim_device &device);

/* Gives a stream its next operation, and checks that what it touches is in order with all that came
 * before. */
void sim_enqueue(cudaStream_t stream, sim_operation operation, const fs_sim_ranges &ranges);

/* Ends a part without its meetings: what they should have written is left. */
void sim_drop(const std::shared_ptr<sim_part> &part);

/* The allocation that holds nbytes at at, or NULL. */
const sim_allocation *sim_find(const sim_allocations &map, uintptr_t at, size_t nbytes);

/* Opens the device's memory to the host and to what runs, or closes it. */
void sim_protect(sim_device &device, int protection);

/* Ends the program if something lies behind the end of an allocation. after: who ran last. */
void sim_check_canaries(const sim_device &device, const char *after);

/* Ends the program if the range holds memory of another device. */
void sim_check_owner(const sim_device &device, uintptr_t begin, uintptr_t end, const char *what);

/* Is it device memory, pinned memory, or any other of the host? A part outside its allocation, or
 * memory of another device, ends the program. */
enum sim_home { SIM_HOME_DEVICE, SIM_HOME_PINNED, SIM_HOME_PAGEABLE };
sim_home sim_home_of(const sim_device &device, const void *at, size_t nbytes, const char *what);

#endif
