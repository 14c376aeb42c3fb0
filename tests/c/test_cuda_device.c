// needs: c++
/* A device's runtime, on the stand-in and on a real GPU alike: memory that runs out and a device
 * that lives on, pinned memory that kernels read in place, streams that events order. */
#include <string.h>

#include "../cudasim/sim.h"
#include "check.h"
#include "device/device.h"
#include "device/plugin.h"

#define N ((size_t)5000)
#define TURNS 40

const fs_device *fs_plugin_get(const fs_plugin_host *host);

static const fs_runtime *runtime;
static fs_exec compute, gather;

static void
finish(const fs_exec *exec)
{
    fs_event *event = NULL;
    CHECK_OK(runtime->event_open(exec->context, &event));
    runtime->record(exec, event);
    while (!runtime->is_done(exec->context, event)) {
    }
    CHECK_OK(runtime->check(exec->context));
    runtime->event_close(exec->context, event);
}

static void
test_out_of_memory(void)
{
    fs_device_memory before, after;
    void *memory = &before;
    CHECK_OK(runtime->memory(compute.context, &before));
    CHECK(before.total >= before.free && before.free > 0, "%zu of %zu", before.free, before.total);
    CHECK_STATUS(runtime->memory_open(compute.context, "a test's", before.total + 1, &memory),
                 FS_ENOMEM);
    CHECK(memory == NULL, "memory beside an error");
    char asked[32];
    (void)snprintf(asked, sizeof asked, "%zu", before.total + 1);
    CHECK(strstr(fs_status_message(), asked) != NULL && strstr(fs_status_message(), "a test's"),
          "'%s' does not say %s", fs_status_message(), asked);
    CHECK_OK(runtime->check(compute.context)); /* the context lives on */
    CHECK_OK(runtime->memory_open(compute.context, "a test's", 4096, &memory));
    CHECK_OK(runtime->memory(compute.context, &after));
    CHECK(after.held == before.held + 4096, "%zu held, then %zu", before.held, after.held);
    runtime->memory_close(compute.context, memory, 4096);
    CHECK_OK(runtime->memory(compute.context, &after));
    CHECK(after.held == before.held, "%zu held, not %zu", after.held, before.held);
}

/* Fresh memory is zero; kernels read pinned memory in place. */
static void
test_pinned(void)
{
    float *device = NULL, *pinned = NULL;
    CHECK_OK(runtime->memory_open(compute.context, "a test's", N * sizeof(float),
                                  (void **)&device));
    CHECK_OK(runtime->pinned_open(compute.context, N * sizeof(float), (void **)&pinned));
    for (size_t i = 0; i < N; i++) {
        CHECK(pinned[i] == 0.0f, "fresh pinned memory holds %g", (double)pinned[i]);
        pinned[i] = (float)i;
    }
    for (int turn = 0; turn < 3; turn++) {
        compute.device->combine(&compute, FS_SUM, FS_F32, device, pinned, N);
    }
    finish(&compute); /* the host writes what kernels have read */
    memset(pinned, 0xff, N * sizeof(float));
    runtime->copy(&compute, pinned, device, N * sizeof(float));
    finish(&compute);
    for (size_t i = 0; i < N; i++) {
        CHECK(pinned[i] == 3.0f * (float)i, "element %zu is %g", i, (double)pinned[i]);
    }
    runtime->pinned_close(compute.context, pinned);
    runtime->memory_close(compute.context, device, N * sizeof(float));
}

/* One buffer is filled on a stream and used on another, over and over: events alone keep the two
 * apart. */
static void
test_streams(void)
{
    float *shard = NULL, *pool = NULL, *acc = NULL, *pinned = NULL;
    fs_event *filled = NULL, *used = NULL;
    size_t nbytes = N * sizeof(float);
    CHECK_OK(runtime->memory_open(compute.context, "shard", nbytes, (void **)&shard));
    CHECK_OK(runtime->memory_open(compute.context, "pool", nbytes, (void **)&pool));
    CHECK_OK(runtime->memory_open(compute.context, "sums", nbytes, (void **)&acc));
    CHECK_OK(runtime->pinned_open(compute.context, nbytes, (void **)&pinned));
    CHECK_OK(runtime->event_open(compute.context, &filled));
    CHECK_OK(runtime->event_open(compute.context, &used));
    for (size_t i = 0; i < N; i++) {
        pinned[i] = (float)(i % 97);
    }
    runtime->copy(&gather, shard, pinned, nbytes);
    for (int turn = 0; turn < TURNS; turn++) {
        runtime->after(&gather, used); /* never recorded at first: stands for nothing */
        runtime->copy(&gather, pool, shard, nbytes);
        runtime->record(&gather, filled);
        runtime->after(&compute, filled);
        compute.device->combine(&compute, FS_SUM, FS_F32, acc, pool, N);
        runtime->record(&compute, used);
    }
    finish(&compute);
    runtime->copy(&compute, pinned, acc, nbytes);
    finish(&compute);
    for (size_t i = 0; i < N; i++) {
        CHECK(pinned[i] == (float)(TURNS * (i % 97)), "element %zu is %g", i, (double)pinned[i]);
    }
    finish(&gather);
    runtime->event_close(compute.context, filled);
    runtime->event_close(compute.context, used);
    runtime->pinned_close(compute.context, pinned);
    runtime->memory_close(compute.context, acc, nbytes);
    runtime->memory_close(compute.context, pool, nbytes);
    runtime->memory_close(compute.context, shard, nbytes);
}

int
main(void)
{
    char text[200] = "";
    int count = 0;
    fs_sim_reset(1, FS_SIM_SHUFFLED, (size_t)1 << 24);
    compute.device = fs_plugin_get(NULL);
    runtime = compute.device->runtime;
    CHECK_OK(runtime->count(&count));
    CHECK(count > 0, "%d devices", count);
    CHECK_OK(runtime->describe(0, text, sizeof text));
    CHECK(text[0] != '\0', "a device without a name");
    CHECK_OK(runtime->context_open(0, &compute.context));
    gather = compute;
    gather.stream = FS_STREAM_GATHER;
    test_out_of_memory();
    test_pinned();
    test_streams();
    runtime->context_close(compute.context);
    return 0;
}
