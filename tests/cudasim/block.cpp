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

/* One thread of the block that is running. */
struct sim_thread {
    fs_sim_place place;
    fiber *turn;
    const char *file; /* of the barrier it waits at */
    int line;
    size_t barriers; /* passed or waited at */
    bool ended;
};

/* The block that runs on this worker. Barriers take turns between two tokens: a thread that is
 * already at the next one must not look as if it came before those still leaving this one. */
struct sim_block {
    const char *kernel;
    std::vector<sim_thread> threads;
    std::vector<unsigned char> shared;
    unsigned char *shared_begin;
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
fs_sim_barrier(const char *file, int line)
{
    sim_thread *me = self;
    char *token = &now->token[me->barriers % 2];
    me->file = file;
    me->line = line;
    me->barriers++;
    TSAN_RELEASE(token);
    fiber_yield();
    TSAN_ACQUIRE(token);
}

/* Lets every thread run once, in a shuffled order; false when all have ended. */
static bool
run_to_barrier(sim_block *block, std::vector<size_t> &order, std::mt19937_64 &random)
{
    std::shuffle(order.begin(), order.end(), random);
    const sim_thread *waiting = NULL, *over = NULL;
    for (size_t index : order) {
        sim_thread *thread = &block->threads[index];
        self = thread;
        thread->ended = !fiber_resume(thread->turn);
        self = NULL;
    }
    for (const sim_thread &thread : block->threads) {
        if (thread.ended) {
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
        thread.ended = false;
        fiber_give(thread.turn, run_thread, block);
    }
    /* Bytes of ones are NaN in every float format. */
    std::fill(block->shared.begin(), block->shared.end(), static_cast<unsigned char>(0xff));
    TSAN_RELEASE(&block->started);
    while (run_to_barrier(block, order, random)) {
    }
    TSAN_ACQUIRE(&block->ended);
}

static void
check_launch(const char *name, dim3 grid, dim3 block, size_t shared_nbytes)
{
    size_t threads = static_cast<size_t>(block.x) * block.y * block.z;
    if (threads == 0 || threads > 1024 || block.z > 64) {
        sim_die("kernel %s: a block of (%u, %u, %u) threads", name, block.x, block.y, block.z);
    }
    if (grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 65535 || grid.z == 0 ||
        grid.z > 65535) {
        sim_die("kernel %s: a grid of (%u, %u, %u) blocks", name, grid.x, grid.y, grid.z);
    }
    if (shared_nbytes > 48 * 1024) {
        sim_die("kernel %s: %zu bytes of shared memory, 49152 at most without asking", name,
                shared_nbytes);
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
run_grid(const char *name, dim3 grid, dim3 block_dim, size_t shared_nbytes,
         const std::function<void()> &body, std::mt19937_64 &random)
{
    check_launch(name, grid, block_dim, shared_nbytes);
    size_t threads = static_cast<size_t>(block_dim.x) * block_dim.y * block_dim.z;
    sim_block block = {};
    block.kernel = name;
    block.body = &body;
    block.shared.resize(shared_nbytes + 16);
    uintptr_t unaligned = reinterpret_cast<uintptr_t>(block.shared.data());
    block.shared_begin = block.shared.data() + (16 - unaligned % 16) % 16;
    std::vector<fiber *> &fibers = fiber_pool();
    while (fibers.size() < threads) {
        fibers.push_back(fiber_open());
    }
    block.threads.resize(threads);
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
