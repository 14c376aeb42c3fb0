#include "block.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "fibers.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define TSAN_RELEASE(token) __tsan_release(token)
#define TSAN_ACQUIRE(token) __tsan_acquire(token)
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))
#else
#define TSAN_RELEASE(token) ((void)(token))
#define TSAN_ACQUIRE(token) ((void)(token))
#define UNSEEN
#endif

static const unsigned WARP = 32;

enum sim_state { RUNS, AT_BARRIER, AT_WARP, ENDED };

/* A copy that a thread has begun: it is over when its group is waited for. */
struct sim_copy {
    void *dst;
    const void *src;
    size_t nbytes, zeros; /* copied, and set to zero behind them */
    size_t group;         /* 0: not committed yet */
};

/* One thread of the block that is running. */
struct sim_thread {
    fs_sim_place place;
    fiber *turn;
    sim_state state;
    const char *file; /* of what it waits at */
    int line;
    size_t barriers; /* passed or waited at */
    /* What it shows to its warp. */
    unsigned mask;
    size_t warp_calls, shown_nbytes;
    fs_sim_shown shown;
    char shown_token[2], *seen_token;
    std::vector<sim_copy> copies; /* asynchronous ones that are not waited for, in order */
    size_t groups;                /* of copies, committed */
};

/* The block that runs on this worker. Barriers take turns between two tokens: a thread that is
 * already at the next one must not look as if it came before those still leaving this one. */
struct sim_block {
    const char *kernel;
    std::vector<sim_thread> threads;
    std::vector<fs_sim_shown> seen; /* what each showed when its warp last met */
    std::vector<unsigned char> shared;
    unsigned char *shared_begin;
    size_t shared_nbytes;
    const std::function<void()> *body;
    char started, ended, token[2];
};

static thread_local sim_block *now;
static thread_local sim_thread *self;

void
sim_die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)std::fputs("cudasim: ", stderr);
    (void)std::vfprintf(stderr, format, arguments);
    (void)std::fputc('\n', stderr);
    va_end(arguments);
    std::abort();
}

UNSEEN const fs_sim_place &
fs_sim_here()
{
    if (self == NULL) {
        sim_die("threadIdx outside a kernel");
    }
    return self->place;
}

UNSEEN unsigned char *
fs_sim_shared_memory()
{
    return now->shared_begin;
}

UNSEEN void
fs_sim_check_shared(const void *at, size_t nbytes, size_t alignment)
{
    uintptr_t address = reinterpret_cast<uintptr_t>(at);
    uintptr_t begin = reinterpret_cast<uintptr_t>(now->shared_begin);
    if (address % alignment != 0 || address < begin ||
        address - begin + nbytes > now->shared_nbytes) {
        sim_die("kernel %s, thread %u: %zu bytes at %td of %zu bytes of shared memory, which must "
                "be aligned to %zu",
                now->kernel, self->place.thread.x, nbytes,
                static_cast<const unsigned char *>(at) - now->shared_begin, now->shared_nbytes,
                alignment);
    }
}

UNSEEN void
fs_sim_barrier(const char *file, int line)
{
    sim_thread *me = self;
    char *token = &now->token[me->barriers % 2];
    me->file = file;
    me->line = line;
    me->barriers++;
    me->state = AT_BARRIER;
    TSAN_RELEASE(token);
    fiber_yield();
    TSAN_ACQUIRE(token);
}

// ---- what a warp does together ------------------------------------------------------------------

UNSEEN unsigned
fs_sim_lane()
{
    return static_cast<unsigned>(self - now->threads.data()) % WARP;
}

UNSEEN const fs_sim_shown *
fs_sim_warp_show(unsigned mask, const void *bytes, size_t nbytes, const char *file, int line)
{
    sim_thread *me = self;
    const volatile unsigned char *from = static_cast<const volatile unsigned char *>(bytes);
    if (nbytes > FS_SIM_SHOWN_MAX) {
        sim_die("%s:%d: a lane shows %zu bytes", file, line, nbytes);
    }
    for (size_t i = 0; i < nbytes; i++) {
        me->shown.bytes[i] = from[i];
    }
    me->shown_nbytes = nbytes;
    me->mask = mask;
    me->file = file;
    me->line = line;
    me->warp_calls++;
    me->state = AT_WARP;
    TSAN_RELEASE(&me->shown_token[me->warp_calls % 2]);
    fiber_yield();
#if defined(__SANITIZE_THREAD__)
    sim_thread *first = me - fs_sim_lane();
    for (unsigned l = 0; l < WARP; l++) {
        if (mask >> l & 1u) {
            TSAN_ACQUIRE(first[l].seen_token);
        }
    }
#endif
    return &now->seen[static_cast<size_t>(self - now->threads.data()) / WARP * WARP];
}

// ---- asynchronous copies ------------------------------------------------------------------------

UNSEEN static sim_thread *
running_thread()
{
    return self;
}

/* Until it is waited for, a copy's target holds NaN. */
void
fs_sim_copy_async(void *dst, const void *src, size_t nbytes, size_t zeros)
{
    if ((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) % 16 != 0) {
        sim_die("an asynchronous copy that is not aligned to 16 bytes");
    }
    std::memset(dst, 0xff, nbytes + zeros);
    running_thread()->copies.push_back(sim_copy{dst, src, nbytes, zeros, 0});
}

void
fs_sim_copies_commit()
{
    sim_thread *me = running_thread();
    me->groups++;
    for (sim_copy &copy : me->copies) {
        copy.group = copy.group == 0 ? me->groups : copy.group;
    }
}

void
fs_sim_copies_wait(size_t pending)
{
    sim_thread *me = running_thread();
    std::vector<sim_copy> left;
    for (const sim_copy &copy : me->copies) {
        if (copy.group == 0 || copy.group + pending > me->groups) {
            left.push_back(copy);
            continue;
        }
        std::memcpy(copy.dst, copy.src, copy.nbytes);
        std::memset(static_cast<char *>(copy.dst) + copy.nbytes, 0, copy.zeros);
    }
    me->copies = left;
}

// ---- running to the next barrier ----------------------------------------------------------------

static void
resume(sim_thread *thread)
{
    self = thread;
    thread->state = RUNS;
    if (!fiber_resume(thread->turn)) {
        thread->state = ENDED;
    }
    self = NULL;
}

[[noreturn]] static void
die_of_warp(const sim_block *block, const sim_thread *waiting, const sim_thread *other,
            const char *what)
{
    sim_die("kernel %s, block (%u, %u, %u): thread %u waits for its warp at %s:%d (mask %08x), "
            "thread %u %s",
            block->kernel, waiting->place.block.x, waiting->place.block.y, waiting->place.block.z,
            waiting->place.thread.x, waiting->file, waiting->line, waiting->mask,
            other->place.thread.x, what);
}

/* The lanes that wait must be those that each of them names, all at one place. */
UNSEEN static void
meet_lane(sim_block *block, size_t first, size_t lanes, sim_thread *lane)
{
    size_t mine = static_cast<size_t>(lane - &block->threads[first]);
    if ((lane->mask >> mine & 1u) == 0) {
        die_of_warp(block, lane, lane, "is not in its own mask");
    }
    for (size_t l = 0; l < WARP; l++) {
        if ((lane->mask >> l & 1u) == 0) {
            continue;
        }
        if (l >= lanes) {
            die_of_warp(block, lane, lane, "names lanes that the block does not have");
        }
        const sim_thread *other = &block->threads[first + l];
        if (other->state == ENDED) {
            die_of_warp(block, lane, other, "has ended");
        } else if (other->state == AT_BARRIER) {
            die_of_warp(block, lane, other, "is at a barrier of the block");
        } else if (other->mask != lane->mask || other->line != lane->line ||
                   std::strcmp(other->file, lane->file) != 0 ||
                   other->shown_nbytes != lane->shown_nbytes) {
            die_of_warp(block, lane, other, "waits for it elsewhere, or with another mask");
        }
    }
    block->seen[first + mine] = lane->shown;
    lane->seen_token = &lane->shown_token[lane->warp_calls % 2];
}

/* Lets the warp go on from where its lanes meet; false when they wait at no such place. */
static bool
step_warp(sim_block *block, size_t first, std::mt19937_64 &random)
{
    size_t lanes = std::min<size_t>(WARP, block->threads.size() - first);
    sim_thread *meeting[WARP];
    size_t meeting_n = 0;
    for (size_t l = 0; l < lanes; l++) {
        if (block->threads[first + l].state == AT_WARP) {
            meeting[meeting_n++] = &block->threads[first + l];
        }
    }
    for (size_t m = 0; m < meeting_n; m++) {
        meet_lane(block, first, lanes, meeting[m]);
    }
    std::shuffle(meeting, meeting + meeting_n, random);
    for (size_t m = 0; m < meeting_n; m++) {
        resume(meeting[m]);
    }
    return meeting_n > 0;
}

/* Runs warps from meeting to meeting, a random one a random number of steps, until none meets. */
static void
run_warps(sim_block *block, std::mt19937_64 &random)
{
    std::vector<size_t> active;
    for (size_t first = 0; first < block->threads.size(); first += WARP) {
        active.push_back(first);
    }
    while (!active.empty()) {
        size_t chosen = random() % active.size(), steps = static_cast<size_t>(1)
                                                          << random() % 8;
        for (; steps > 0; steps--) {
            if (!step_warp(block, active[chosen], random)) {
                active[chosen] = active.back();
                active.pop_back();
                break;
            }
        }
    }
}

/* Lets every thread run to its next barrier, in a shuffled order; false when all have ended. */
static bool
run_to_barrier(sim_block *block, std::vector<size_t> &order, std::mt19937_64 &random)
{
    std::shuffle(order.begin(), order.end(), random);
    const sim_thread *waiting = NULL, *over = NULL;
    for (size_t index : order) {
        resume(&block->threads[index]);
    }
    run_warps(block, random);
    for (const sim_thread &thread : block->threads) {
        if (thread.state == ENDED) {
            over = &thread;
        } else if (waiting == NULL) {
            waiting = &thread;
        } else if (thread.line != waiting->line || std::strcmp(thread.file, waiting->file) != 0) {
            sim_die("kernel %s, block (%u, %u, %u): threads wait at different barriers, %s:%d "
                    "and %s:%d",
                    block->kernel, thread.place.block.x, thread.place.block.y,
                    thread.place.block.z, waiting->file, waiting->line, thread.file, thread.line);
        }
    }
    if (waiting != NULL && over != NULL) {
        sim_die("kernel %s, block (%u, %u, %u): thread %u ended while thread %u waits at the "
                "barrier %s:%d",
                block->kernel, over->place.block.x, over->place.block.y, over->place.block.z,
                over->place.thread.x, waiting->place.thread.x, waiting->file, waiting->line);
    }
    return waiting != NULL;
}

/* A thread's life, in its fiber. */
static void
run_thread(void *opaque)
{
    sim_block *block = static_cast<sim_block *>(opaque);
    TSAN_ACQUIRE(&block->started);
    (*block->body)();
    TSAN_RELEASE(&block->ended);
}

static void
run_block(sim_block *block, uint3 at, std::vector<size_t> &order, std::mt19937_64 &random)
{
    for (sim_thread &thread : block->threads) {
        thread.place.block = at;
        thread.barriers = 0;
        thread.warp_calls = 0;
        thread.copies.clear();
        thread.groups = 0;
        fiber_give(thread.turn, run_thread, block);
    }
    /* Bytes of ones are NaN in every float format. */
    std::fill(block->shared.begin(), block->shared.end(), static_cast<unsigned char>(0xff));
    TSAN_RELEASE(&block->started);
    while (run_to_barrier(block, order, random)) {
    }
    TSAN_ACQUIRE(&block->ended);
    for (const sim_thread &thread : block->threads) {
        if (!thread.copies.empty()) {
            sim_die("kernel %s: thread %u ended before its asynchronous copies", block->kernel,
                    thread.place.thread.x);
        }
    }
}

static void
check_launch(const char *name, dim3 grid, dim3 block, size_t shared_nbytes, size_t shared_max)
{
    size_t threads = static_cast<size_t>(block.x) * block.y * block.z;
    if (threads == 0 || threads > 1024 || block.z > 64) {
        sim_die("kernel %s: a block of (%u, %u, %u) threads", name, block.x, block.y, block.z);
    }
    if (grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 65535 || grid.z == 0 ||
        grid.z > 65535) {
        sim_die("kernel %s: a grid of (%u, %u, %u) blocks", name, grid.x, grid.y, grid.z);
    }
    if (shared_nbytes > shared_max) {
        sim_die("kernel %s: %zu bytes of shared memory, %zu at most (more must be asked for)",
                name, shared_nbytes, shared_max);
    }
}

static std::vector<fiber *> &
fiber_pool()
{
    struct pool {
        std::vector<fiber *> list;
        ~pool()
        {
            for (fiber *each : list) {
                fiber_close(each);
            }
        }
    };
    static thread_local pool fibers;
    return fibers.list;
}

size_t
run_grid(const char *name, dim3 grid, dim3 block_dim, size_t shared_nbytes, size_t shared_max,
         const std::function<void()> &body, std::mt19937_64 &random)
{
    check_launch(name, grid, block_dim, shared_nbytes, shared_max);
    size_t threads = static_cast<size_t>(block_dim.x) * block_dim.y * block_dim.z;
    sim_block block = {};
    block.kernel = name;
    block.body = &body;
    block.shared.resize(shared_nbytes + 16);
    uintptr_t unaligned = reinterpret_cast<uintptr_t>(block.shared.data());
    block.shared_nbytes = shared_nbytes;
    block.shared_begin = block.shared.data() + (16 - unaligned % 16) % 16;
    std::vector<fiber *> &fibers = fiber_pool();
    while (fibers.size() < threads) {
        fibers.push_back(fiber_open());
    }
    block.threads.resize(threads);
    block.seen.resize(threads);
    for (size_t i = 0; i < threads; i++) {
        unsigned index = static_cast<unsigned>(i);
        fs_sim_place *place = &block.threads[i].place;
        place->thread = uint3{index % block_dim.x, index / block_dim.x % block_dim.y,
                              index / block_dim.x / block_dim.y};
        place->block_dim = block_dim;
        place->grid_dim = grid;
        block.threads[i].turn = fibers[i];
    }
    size_t blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
    std::vector<size_t> block_order(blocks), thread_order(threads);
    std::iota(block_order.begin(), block_order.end(), static_cast<size_t>(0));
    std::iota(thread_order.begin(), thread_order.end(), static_cast<size_t>(0));
    std::shuffle(block_order.begin(), block_order.end(), random);
    now = &block;
    for (size_t i : block_order) {
        unsigned index = static_cast<unsigned>(i);
        uint3 at = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
        run_block(&block, at, thread_order, random);
    }
    now = NULL;
    return blocks * threads;
}
