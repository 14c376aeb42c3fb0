/* Stacks that take turns on one thread: the threads of a block. */
#ifndef FS_CUDASIM_FIBERS_H
#define FS_CUDASIM_FIBERS_H

struct fiber;

typedef void (*fiber_body)(void *ctx);

/* A fiber that has nothing to run yet. */
fiber *fiber_open();

/* What a new fiber, or one that has ended, is to run next. */
void fiber_give(fiber *fiber, fiber_body body, void *ctx);

/* Lets it run until it yields (true) or ends (false). Called from outside any fiber. */
bool fiber_resume(fiber *fiber);

/* Back to who resumed this fiber. Called from inside one. */
void fiber_yield();

void fiber_close(fiber *fiber);

#endif
