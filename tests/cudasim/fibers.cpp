#include "fibers.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <sys/mman.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

static const size_t STACK_NBYTES = 64 * 1024;
static const size_t GUARD_NBYTES = 4096;

/* The system's way to switch also saves the signal mask, by two system calls: twenty times as slow.
 * Sanitizers know no other. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define OWN_SWITCH 1

/* Saves what a callee must keep and the stack pointer in *from, and goes on at to. */
extern "C" void fs_sim_switch(void **from, void *to);
__asm__(".text\n"
        "fs_sim_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n");
#else
#define OWN_SWITCH 0
#endif

struct fiber {
    ucontext_t context, resumer;
    void *stack, *resumer_stack_pointer; /* of the own switch */
    void *mapping;
    fiber_body body;
    void *ctx;
    bool ended;
#if defined(__SANITIZE_ADDRESS__)
    void *resumer_fake;
    const void *resumer_stack;
    size_t resumer_nbytes;
#endif
#if defined(__SANITIZE_THREAD__)
    void *tsan, *resumer_tsan;
#endif
};

static thread_local fiber *running;

/* Fibers take turns, and the thread sanitizer is not told so (no_sync): to it they are threads,
 * whose order only barriers make. So it sees races inside a block; but what this file itself keeps
 * must not count. */
#if defined(__SANITIZE_THREAD__)
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))
#else
#define UNSEEN
#endif

static void
die(const char *what)
{
    (void)std::fprintf(stderr, "cudasim: %s\n", what);
    std::abort();
}

/* Hands the thread back to the resumer. */
UNSEEN static void
leave(fiber *self)
{
#if defined(__SANITIZE_ADDRESS__)
    void *fake = NULL;
    __sanitizer_start_switch_fiber(&fake, self->resumer_stack, self->resumer_nbytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(self->resumer_tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if OWN_SWITCH
    fs_sim_switch(&self->stack, self->resumer_stack_pointer);
#else
    if (swapcontext(&self->context, &self->resumer) != 0) {
        die("swapcontext failed");
    }
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, &self->resumer_stack, &self->resumer_nbytes);
#endif
}

UNSEEN static void
live(fiber *self)
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, &self->resumer_stack, &self->resumer_nbytes);
#endif
    for (;;) {
        self->body(self->ctx);
        self->ended = true;
        leave(self);
    }
}

#if OWN_SWITCH
/* Where a new stack returns to. */
static void
entry()
{
    live(running);
}
#else
static void
entry(unsigned low, unsigned high)
{
    live(reinterpret_cast<fiber *>(static_cast<uintptr_t>(low) |
                                   static_cast<uintptr_t>(high) << 32));
}
#endif

UNSEEN fiber *
fiber_open()
{
    fiber *self = static_cast<fiber *>(std::calloc(1, sizeof(fiber)));
    if (self == NULL) {
        die("no memory for a fiber");
    }
    self->mapping = mmap(NULL, STACK_NBYTES + GUARD_NBYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (self->mapping == MAP_FAILED || mprotect(self->mapping, GUARD_NBYTES, PROT_NONE) != 0) {
        die("no stack for a fiber");
    }
    char *stack = static_cast<char *>(self->mapping) + GUARD_NBYTES;
#if OWN_SWITCH
    /* Six registers, the way in, and a word so that the stack is aligned as after a call. */
    void **top = reinterpret_cast<void **>(stack + STACK_NBYTES) - 8;
    top[6] = reinterpret_cast<void *>(entry);
    self->stack = top;
#else
    if (getcontext(&self->context) != 0) {
        die("getcontext failed");
    }
    self->context.uc_stack.ss_sp = stack;
    self->context.uc_stack.ss_size = STACK_NBYTES;
    self->context.uc_link = NULL;
    uintptr_t bits = reinterpret_cast<uintptr_t>(self);
    makecontext(&self->context, reinterpret_cast<void (*)()>(entry), 2,
                static_cast<unsigned>(bits), static_cast<unsigned>(bits >> 32));
#endif
#if defined(__SANITIZE_THREAD__)
    self->tsan = __tsan_create_fiber(0);
#endif
    return self;
}

UNSEEN void
fiber_give(fiber *self, fiber_body body, void *ctx)
{
    self->body = body;
    self->ctx = ctx;
    self->ended = false;
}

UNSEEN bool
fiber_resume(fiber *self)
{
    running = self;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&self->resumer_fake, self->context.uc_stack.ss_sp,
                                   self->context.uc_stack.ss_size);
#endif
#if defined(__SANITIZE_THREAD__)
    self->resumer_tsan = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(self->tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if OWN_SWITCH
    fs_sim_switch(&self->resumer_stack_pointer, self->stack);
#else
    if (swapcontext(&self->resumer, &self->context) != 0) {
        die("swapcontext failed");
    }
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(self->resumer_fake, NULL, NULL);
#endif
    running = NULL;
    return !self->ended;
}

UNSEEN void
fiber_yield()
{
    if (running == NULL) {
        die("a yield outside any fiber");
    }
    leave(running);
}

void
fiber_close(fiber *self)
{
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(self->tsan);
#endif
    (void)munmap(self->mapping, STACK_NBYTES + GUARD_NBYTES);
    std::free(self);
}
