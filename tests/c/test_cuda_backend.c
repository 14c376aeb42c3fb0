// needs: c++
// stand-in only
/* The CUDA library as its user sees it: the entry, contexts, memory, events, failures that stick,
 * streams of others. What the operations compute is for test_cuda_kernels and test_cuda_model. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "../cudasim/sim.h"
#include "check.h"
#include "cuda/device.h"
#include "device/plugin.h"

const fs_device *fs_plugin_get(const fs_plugin_host *host);

static const fs_device *device;
static const fs_runtime *runtime;

#define N 1000

static void
check_says(const char *words)
{
    CHECK(strstr(fs_status_message(), words) != NULL, "'%s' is not in '%s'", words,
          fs_status_message());
}

static void
test_entry(void)
{
    fs_plugin_host host = {FS_PLUGIN_ABI + 1, sizeof host, NULL, {NULL, NULL}};
    device = fs_plugin_get(&host); /* of another kind: not looked into */
    runtime = device->runtime;
    CHECK(device->magic == FS_DEVICE_MAGIC && device->abi == FS_DEVICE_ABI &&
              device->struct_nbytes == sizeof *device && strcmp(device->name, "cuda") == 0,
          "magic %x, abi %u, %u bytes, '%s'", device->magic, device->abi, device->struct_nbytes,
          device->name);
    CHECK(strcmp(device->build_id, "tests") == 0, "build %s", device->build_id);
    host.abi = FS_PLUGIN_ABI;
    host.status_here = fs_status_here;
    CHECK(fs_plugin_get(&host) == device, "two tables");
}

static void
test_devices(void)
{
    int count = 0;
    char text[200];
    fs_context *context = NULL;
    CHECK_OK(runtime->count(&count));
    CHECK(count > 1, "%d devices", count);
    CHECK_OK(runtime->describe(1, text, sizeof text));
    CHECK(strstr(text, "sm_90") != NULL, "'%s'", text);
    CHECK_STATUS(runtime->context_open(count, &context), FS_EINVAL);
    check_says("no device cuda:");
    CHECK(context == NULL, "a context beside an error");
    fs_sim_set_driver(12040);
    CHECK_STATUS(runtime->context_open(0, &context), FS_EUNSUPPORTED);
    check_says("update the driver");
    fs_sim_set_driver(13000);
}

/* Memory is zeroed, out of memory names what it was for and is no failure of the context, and a
 * sum over three streams ends on the host. */
static void
test_work(int ordinal)
{
    fs_exec exec = {.device = device};
    fs_exec other = {.device = device, .stream = FS_STREAM_REDUCE};
    fs_device_memory memory;
    fs_event *event;
    float *a, *b, *host;
    fs_sums *found;
    void *none = NULL;
    size_t nbytes = N * sizeof(float);
    CHECK_OK(runtime->context_open(ordinal, &exec.context));
    other.context = exec.context;
    CHECK_OK(runtime->memory_open(exec.context, "weights", nbytes, (void **)&a));
    CHECK_OK(runtime->memory_open(exec.context, "sums", nbytes, (void **)&b));
    CHECK_OK(runtime->pinned_open(exec.context, nbytes, (void **)&host));
    CHECK_OK(runtime->pinned_open(exec.context, sizeof *found, (void **)&found));
    CHECK(found->finite == 0 && host[N - 1] == 0, "pinned memory is not zeroed");
    CHECK_STATUS(runtime->memory_open(exec.context, "moments", (size_t)1 << 40, &none), FS_ENOMEM);
    check_says("moments on cuda:");
    check_says("1099511627776 bytes");
    CHECK(none == NULL, "memory beside an error");
    CHECK_OK(runtime->check(exec.context));
    CHECK_OK(runtime->memory(exec.context, &memory));
    CHECK(memory.held == 2 * nbytes && memory.free < memory.total, "%zu held", memory.held);
    CHECK_OK(runtime->reserve(exec.context, FS_STREAM_REDUCE, runtime->sum_scratch_nbytes(N)));

    CHECK_OK(runtime->event_open(exec.context, &event));
    runtime->after(&exec, event); /* stands for nothing yet */
    CHECK(runtime->is_done(exec.context, event), "an event that stands for nothing is not done");
    for (size_t i = 0; i < N; i++) {
        host[i] = (float)i;
    }
    runtime->copy(&exec, a, host, nbytes);
    runtime->record(&exec, event);
    runtime->after(&other, event);
    const void *src[] = {a, NULL, a};
    fs_sum sum = {.src = src, .src_n = 3, .src_dtype = FS_F32, .acc = b, .acc_dtype = FS_F32,
                  .n = N, .found = found};
    device->sum(&other, &sum);
    runtime->copy(&other, host, b, nbytes);
    runtime->record(&other, event);
    while (!runtime->is_done(exec.context, event)) {
    }
    CHECK_OK(runtime->check(exec.context));
    CHECK(host[N - 1] == 2.0f * (N - 1), "%g", (double)host[N - 1]);
    CHECK(found->finite == 1 && found->absmax == 2.0 * (N - 1), "%g", found->absmax);

    runtime->event_close(exec.context, event);
    runtime->memory_close(exec.context, a, nbytes);
    runtime->memory_close(exec.context, b, nbytes);
    runtime->pinned_close(exec.context, host);
    runtime->pinned_close(exec.context, found);
    runtime->context_close(exec.context);
    CHECK(fs_cuda_memory_held() == 0, "%zu bytes are still held", fs_cuda_memory_held());
}

/* A rank whose device is not the first leaves the first alone: since CUDA 12 choosing a device, as
 * giving back the thread's would, takes memory there. One that is in use is given back. */
static void
test_other_devices_stay_alone(void)
{
    fs_context *first;
    void *memory;
    fs_sim_reset(1, FS_SIM_SHUFFLED, 1u << 20);
    test_work(3);
    CHECK(fs_sim_device_is_used(3) && !fs_sim_device_is_used(0), "device 0 was started, or 3 not");
    CHECK_OK(runtime->context_open(0, &first));
    CHECK(fs_sim_device_is_used(0), "a context did not start its device");
    CHECK_OK(fs_cuda_device_use(0));
    test_work(3);
    CHECK_OK(fs_cuda_memory_open(8, &memory)); /* where the thread is now: the context's */
    runtime->context_close(first);
    CHECK_OK(fs_cuda_memory_close(memory, 8));
}

/* The first failure stays, and no wait hangs after it. */
static void
test_failures_stick(void)
{
    fs_exec exec = {.device = device};
    fs_event *event;
    float *a;
    CHECK_OK(runtime->context_open(0, &exec.context));
    CHECK_OK(runtime->event_open(exec.context, &event));
    CHECK_OK(runtime->memory_open(exec.context, "x", N * sizeof(float), (void **)&a));
    device->convert(&exec, a, FS_I32, a, FS_F32, N);
    CHECK_STATUS(runtime->check(exec.context), FS_ETYPE);
    check_says("device cuda:0: convert: dtype");
    size_t kernels = fs_sim_kernels();
    device->combine(&exec, 99, FS_F32, a, a, N);
    device->combine(&exec, FS_SUM, FS_F32, a, a, N);
    runtime->record(&exec, event);
    CHECK(runtime->is_done(exec.context, event), "a wait would never end");
    CHECK(fs_sim_kernels() == kernels, "work was given after a failure");
    CHECK_STATUS(runtime->check(exec.context), FS_ETYPE);
    CHECK_STATUS(runtime->after_foreign(&exec, NULL), FS_ETYPE);
    runtime->event_close(exec.context, event);
    runtime->memory_close(exec.context, a, N * sizeof(float));
    runtime->context_close(exec.context);
    runtime->context_close(NULL);
}

/* A caller's stream reads what ours writes, and the other way round: without the waits these are
 * races, which end the program. */
static void
test_streams_of_others(void)
{
    fs_exec exec = {.device = device};
    fs_cuda_stream foreign;
    float *a, *b;
    size_t nbytes = N * sizeof(float);
    CHECK_OK(runtime->context_open(0, &exec.context));
    CHECK_OK(runtime->memory_open(exec.context, "a", nbytes, (void **)&a));
    CHECK_OK(runtime->memory_open(exec.context, "b", nbytes, (void **)&b));
    CHECK_OK(fs_cuda_stream_open(&foreign));
    runtime->fill(&exec, a, 0, nbytes);
    CHECK_OK(runtime->foreign_after(&exec, foreign));
    CHECK_OK(fs_cuda_copy(foreign, b, a, nbytes));
    CHECK_OK(runtime->after_foreign(&exec, foreign));
    device->combine(&exec, FS_SUM, FS_F32, a, b, N);
    CHECK_OK(runtime->after_foreign(&exec, NULL)); /* the default stream: nothing is in it */
    CHECK_OK(runtime->foreign_after(&exec, NULL));
    CHECK(fs_sim_races() == 0, "%s", fs_sim_latest_race());
    runtime->memory_close(exec.context, a, nbytes);
    runtime->memory_close(exec.context, b, nbytes);
    CHECK_OK(fs_cuda_stream_close(foreign));
    runtime->context_close(exec.context);
}

/* Asked for no products, the library of products is looked for all the same: whoever will need it
 * learns at once that it is missing. */
static void
test_library_of_products(void)
{
    for (int there = 0; there < 2; there++) {
        fs_exec exec = {.device = device, .stream = FS_STREAM_COMPUTE};
        fs_sim_reset(1, FS_SIM_SHUFFLED, (size_t)1 << 26);
        CHECK((there == 0 ? setenv("FLATSHARD_CUBLAS", "/nowhere/libcublas.so.13", 1)
                          : unsetenv("FLATSHARD_CUBLAS")) == 0, "the environment");
        CHECK_OK(runtime->context_open(0, &exec.context));
        CHECK_OK(runtime->reserve(exec.context, exec.stream, runtime->gemm_scratch_nbytes()));
        device->gemms(&exec, NULL, 0);
        CHECK_STATUS(runtime->check(exec.context), there == 0 ? FS_EUNSUPPORTED : FS_OK);
        if (there == 0) {
            check_says("FLATSHARD_CUBLAS=/nowhere/libcublas.so.13 does not load");
        }
        CHECK(fs_sim_cublas_handles() == (size_t)there, "%zu handles", fs_sim_cublas_handles());
        runtime->context_close(exec.context);
        CHECK(fs_sim_cublas_handles() == 0, "%zu handles", fs_sim_cublas_handles());
    }
}

int
main(void)
{
    test_entry();
    test_devices();
    test_library_of_products();
    for (int ordinal = 0; ordinal < 2; ordinal++) {
        fs_sim_reset((uint64_t)ordinal + 1, FS_SIM_SHUFFLED, 1u << 20);
        test_work(ordinal);
    }
    test_other_devices_stay_alone();
    test_failures_stick();
    test_streams_of_others();
    return 0;
}
