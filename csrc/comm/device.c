/* What a world does with its rank's device: orders it with streams of others, brings memory to the
 * host. */
#include "shared.h"

#include <time.h>

static fs_status
check_device(const fs_world *world)
{
    FS_TRY(fs_world_usable(world));
    return world->exec->context != NULL
               ? FS_OK
               : FS_FAIL(FS_ESTATE, "this world computes on the CPU: it has no streams");
}

fs_status
fs_world_after_stream(fs_world *world, void *stream)
{
    FS_TRY(check_device(world));
    return world->exec->device->runtime->after_foreign(world->exec, stream);
}

fs_status
fs_world_stream_after(fs_world *world, void *stream)
{
    FS_TRY(check_device(world));
    return world->exec->device->runtime->foreign_after(world->exec, stream);
}

fs_status
fs_world_reserve(fs_world *world, fs_stream_id stream, size_t nbytes)
{
    FS_TRY(check_device(world));
    const fs_exec *exec = world->exec;
    const fs_runtime *runtime = exec->device->runtime;
    size_t before = runtime->scratch_nbytes(exec->context);
    fs_status st = runtime->reserve(exec->context, stream, nbytes);
    size_t after = runtime->scratch_nbytes(exec->context);
    fs_ledger_charge(&world->ledger, FS_MEM_SCRATCH, FS_HOME_DEVICE,
                     after > before ? after - before : 0);
    fs_ledger_discharge(&world->ledger, FS_MEM_SCRATCH, FS_HOME_DEVICE,
                        before > after ? before - after : 0);
    return st;
}

fs_status
fs_world_device_memory(fs_world *world, fs_device_memory *out)
{
    FS_TRY(check_device(world));
    return world->exec->device->runtime->memory(world->exec->context, out);
}

typedef struct event_wait {
    const fs_exec *exec;
    fs_event *event;
} event_wait;

static bool
is_done(void *ctx)
{
    const event_wait *wait = ctx;
    return wait->exec->device->runtime->is_done(wait->exec->context, wait->event);
}

fs_status
fs_world_await(fs_world *world, fs_event *event, unsigned flags)
{
    event_wait wait = {world->exec, event};
    return fs_wait(world, is_done, &wait, flags | FS_NOBELL);
}

/* All that was given before, and then the copy: which waits for the device by itself where dst is
 * ordinary memory, but then for nothing that peers have a part in. */
static fs_status
fetch(fs_world *world, fs_event *event, void *dst, const void *src, size_t nbytes)
{
    const fs_exec *exec = world->exec;
    const fs_runtime *runtime = exec->device->runtime;
    runtime->record(exec, event);
    FS_TRY(fs_world_await(world, event, 0));
    FS_TRY(runtime->check(exec->context));
    runtime->copy(exec, dst, src, nbytes);
    runtime->record(exec, event);
    FS_TRY(fs_world_await(world, event, 0));
    return runtime->check(exec->context);
}

fs_status
fs_world_fetch(fs_world *world, void *dst, const void *src, size_t nbytes)
{
    fs_event *event;
    FS_TRY(check_device(world));
    const fs_runtime *runtime = world->exec->device->runtime;
    FS_TRY(runtime->event_open(world->exec->context, &event));
    fs_status st = fetch(world, event, dst, src, nbytes);
    runtime->event_close(world->exec->context, event);
    return st;
}

fs_status
fs_world_copy(fs_world *world, void *dst, const void *src, size_t nbytes)
{
    FS_TRY(check_device(world));
    const fs_runtime *runtime = world->exec->device->runtime;
    runtime->copy(world->exec, dst, src, nbytes);
    return runtime->check(world->exec->context);
}

/* Ten seconds for what only runs out; a job that is over ends it at once. */
enum { FINISH_TURN_NS = 200000, FINISH_TURNS = 50000 };

static fs_status
finish_stream(fs_world *world, fs_stream_id stream)
{
    fs_exec exec = *world->exec;
    const fs_runtime *runtime = exec.device->runtime;
    fs_event *event;
    exec.stream = stream;
    FS_TRY(runtime->event_open(exec.context, &event));
    event_wait wait = {&exec, event};
    runtime->record(&exec, event);
    fs_status st = FS_OK;
    /* Not fs_wait: peers that have left in peace gave their parts before, and are no fault here. */
    for (int turns = 0; st == FS_OK && !is_done(&wait) && turns < FINISH_TURNS; turns++) {
        const struct timespec turn = {.tv_nsec = FINISH_TURN_NS};
        (void)nanosleep(&turn, NULL);
        st = fs_world_usable(world);
    }
    runtime->event_close(exec.context, event);
    return st;
}

fs_status
fs_world_finish(fs_world *world)
{
    FS_TRY(fs_world_usable(world));
    for (int s = 0; world->exec->context != NULL && s < FS_STREAM_COUNT; s++) {
        FS_TRY(finish_stream(world, (fs_stream_id)s));
    }
    return FS_OK;
}
