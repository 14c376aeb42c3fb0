// sanitizers: tsan
// needs: c++
// stand-in only
/* Memory, streams and events of csrc/cuda, and the stand-in itself: that it finds what it is for.
 * Each wait of a pipeline over three streams is left out once, and must be missed; code that a GPU
 * would punish must end the program, seen from a parent. */
#include <string.h>

#include "../cudasim/sim.h"
#include "check.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "ends.h"

#define N 5000

// ---- a pipeline ---------------------------------------------------------------------------------

enum { COMPUTE, GATHER, REDUCE, STREAMS };
/* Waits of the pipeline, in the order they are given. */
enum { WAIT_GATHERED, WAIT_COMPUTED, WAIT_BUFFER_FREE, WAIT_REDUCED, WAITS };

typedef struct pipeline {
    fs_cuda_stream streams[STREAMS];
    fs_cuda_event gathered, computed, buffer_free, reduced;
    float *shard, *pool, *acc; /* device, N each */
    float *host;               /* pinned, N */
} pipeline;

static void
open_pipeline(pipeline *p)
{
    for (int i = 0; i < STREAMS; i++) {
        CHECK_OK(fs_cuda_stream_open(&p->streams[i]));
    }
    fs_cuda_event *const events[] = {&p->gathered, &p->computed, &p->buffer_free, &p->reduced};
    for (size_t i = 0; i < 4; i++) {
        CHECK_OK(fs_cuda_event_open(events[i]));
    }
    CHECK_OK(fs_cuda_memory_open(N * sizeof(float), (void **)&p->shard));
    CHECK_OK(fs_cuda_memory_open(N * sizeof(float), (void **)&p->pool));
    CHECK_OK(fs_cuda_memory_open(N * sizeof(float), (void **)&p->acc));
    CHECK_OK(fs_cuda_pinned_open(N * sizeof(float), (void **)&p->host));
    for (size_t i = 0; i < N; i++) {
        p->host[i] = (float)i;
    }
    CHECK_OK(fs_cuda_copy(p->streams[GATHER], p->shard, p->host, N * sizeof(float)));
    CHECK_OK(fs_cuda_fill(p->streams[GATHER], p->acc, 0, N * sizeof(float)));
    CHECK_OK(fs_cuda_stream_wait(p->streams[GATHER]));
}

static void
close_pipeline(pipeline *p)
{
    for (int i = 0; i < STREAMS; i++) {
        CHECK_OK(fs_cuda_stream_close(p->streams[i]));
    }
    CHECK_OK(fs_cuda_event_close(p->gathered));
    CHECK_OK(fs_cuda_event_close(p->computed));
    CHECK_OK(fs_cuda_event_close(p->buffer_free));
    CHECK_OK(fs_cuda_event_close(p->reduced));
    CHECK_OK(fs_cuda_memory_close(p->shard, N * sizeof(float)));
    CHECK_OK(fs_cuda_memory_close(p->pool, N * sizeof(float)));
    CHECK_OK(fs_cuda_memory_close(p->acc, N * sizeof(float)));
    CHECK_OK(fs_cuda_pinned_close(p->host));
}

static void
wait_unless(pipeline *p, int stream, fs_cuda_event event, int which, int left_out)
{
    if (which != left_out) {
        CHECK_OK(fs_cuda_stream_after(p->streams[stream], event));
    }
}

/* Gathers a shard into the pool, doubles it there, adds it to acc on a third stream, and fetches
 * acc: twice, so that the pool's buffer is used again. */
static void
run_pipeline(pipeline *p, int left_out)
{
    size_t nbytes = N * sizeof(float);
    for (int turn = 0; turn < 2; turn++) {
        if (turn > 0) {
            wait_unless(p, GATHER, p->buffer_free, WAIT_BUFFER_FREE, left_out);
        }
        CHECK_OK(fs_cuda_copy(p->streams[GATHER], p->pool, p->shard, nbytes));
        CHECK_OK(fs_cuda_event_record(p->gathered, p->streams[GATHER]));
        wait_unless(p, COMPUTE, p->gathered, WAIT_GATHERED, left_out);
        CHECK_OK(fs_cuda_combine(p->streams[COMPUTE], FS_SUM, FS_F32, p->pool, p->pool, N));
        CHECK_OK(fs_cuda_event_record(p->computed, p->streams[COMPUTE]));
        wait_unless(p, REDUCE, p->computed, WAIT_COMPUTED, left_out);
        CHECK_OK(fs_cuda_combine(p->streams[REDUCE], FS_SUM, FS_F32, p->acc, p->pool, N));
        CHECK_OK(fs_cuda_event_record(p->buffer_free, p->streams[REDUCE]));
    }
    CHECK_OK(fs_cuda_event_record(p->reduced, p->streams[REDUCE]));
    wait_unless(p, COMPUTE, p->reduced, WAIT_REDUCED, left_out);
    CHECK_OK(fs_cuda_copy(p->streams[COMPUTE], p->host, p->acc, nbytes));
    CHECK_OK(fs_cuda_stream_wait(p->streams[COMPUTE]));
    for (int i = 0; i < STREAMS; i++) {
        CHECK_OK(fs_cuda_stream_wait(p->streams[i]));
    }
}

static void
test_orders(void)
{
    for (uint64_t seed = 1; seed <= 200; seed++) {
        pipeline p;
        fs_sim_reset(seed, seed % 2 == 0 ? FS_SIM_LATE : FS_SIM_SHUFFLED, 1u << 20);
        open_pipeline(&p);
        run_pipeline(&p, -1);
        for (size_t i = 0; i < N; i++) {
            CHECK(p.host[i] == 4.0f * (float)i, "seed %llu: element %zu is %g",
                  (unsigned long long)seed, i, (double)p.host[i]);
        }
        CHECK(fs_sim_races() == 0, "%zu races", fs_sim_races());
        close_pipeline(&p);
    }
}

/* Whatever order the worker happens to take: the missing wait is seen. */
static void
test_each_wait_is_needed(void)
{
    for (int left_out = 0; left_out < WAITS; left_out++) {
        for (uint64_t seed = 1; seed <= 5; seed++) {
            pipeline p;
            fs_sim_reset(seed, FS_SIM_SHUFFLED, 1u << 20);
            fs_sim_tolerate_races(true);
            open_pipeline(&p);
            run_pipeline(&p, left_out);
            CHECK(fs_sim_races() > 0, "wait %d left out, seed %llu: nothing seen", left_out,
                  (unsigned long long)seed);
            CHECK(strstr(fs_sim_latest_race(), " on stream ") != NULL, "%s", fs_sim_latest_race());
            close_pipeline(&p);
        }
    }
}

// ---- memory, events, driver ---------------------------------------------------------------------

static void
test_out_of_memory(void)
{
    void *half, *rest, *none = NULL;
    int capability;
    size_t available, total;
    fs_sim_reset(1, FS_SIM_SHUFFLED, 1000000);
    CHECK_OK(fs_cuda_memory_open(500000, &half));
    CHECK_STATUS(fs_cuda_memory_open(600000, &none), FS_ENOMEM);
    CHECK(none == NULL, "memory beside an error");
    static const char *const said[] = {"asked for 600000", "1000000 on",
                                       "500000 are allocated by flatshard", "0 reserved",
                                       "500000 free"};
    for (size_t i = 0; i < sizeof said / sizeof said[0]; i++) {
        CHECK(strstr(fs_status_message(), said[i]) != NULL, "'%s' is not in '%s'", said[i],
              fs_status_message());
    }
    CHECK_OK(fs_cuda_memory_open(500000, &rest)); /* the device lives on */
    CHECK(fs_cuda_memory_held() == 1000000, "%zu held", fs_cuda_memory_held());
    CHECK_OK(fs_cuda_device_describe(&capability, &available, &total));
    CHECK(available == 0 && total == 1000000 && capability == 90, "%zu of %zu, %d", available,
          total, capability);
    CHECK_OK(fs_cuda_memory_close(half, 500000));
    CHECK_OK(fs_cuda_memory_close(rest, 500000));
    CHECK_OK(fs_cuda_memory_close(NULL, 0));
    CHECK(fs_cuda_memory_held() == 0, "%zu held", fs_cuda_memory_held());
}

static void
test_events(void)
{
    fs_cuda_stream stream;
    fs_cuda_event event;
    void *memory;
    bool done = true;
    fs_sim_reset(1, FS_SIM_LATE, 1u << 20);
    CHECK_OK(fs_cuda_stream_open(&stream));
    CHECK_OK(fs_cuda_event_open(&event));
    CHECK_STATUS(fs_cuda_stream_after(stream, event), FS_ESTATE);
    CHECK_STATUS(fs_cuda_event_wait(event), FS_ESTATE);
    CHECK_STATUS(fs_cuda_event_is_done(event, &done), FS_ESTATE);
    CHECK_STATUS(fs_cuda_event_record(event, NULL), FS_EINVAL);
    CHECK_STATUS(fs_cuda_fill(NULL, NULL, 0, 1), FS_EINVAL);
    CHECK_OK(fs_cuda_memory_open(64, &memory));
    CHECK_OK(fs_cuda_fill(stream, memory, 0, 64));
    CHECK_OK(fs_cuda_event_record(event, stream));
    CHECK_OK(fs_cuda_event_is_done(event, &done));
    CHECK(!done, "nothing has run: nobody waited for it");
    CHECK_OK(fs_cuda_event_wait(event));
    CHECK_OK(fs_cuda_event_is_done(event, &done));
    CHECK(done, "waited for, and not done");
    CHECK_OK(fs_cuda_memory_close(memory, 64));
    CHECK_OK(fs_cuda_event_close(event));
    CHECK_OK(fs_cuda_stream_close(stream));
}

static void
test_drivers(void)
{
    int count = -1;
    fs_sim_reset(1, FS_SIM_SHUFFLED, 1u << 20);
    CHECK_OK(fs_cuda_device_count(&count));
    CHECK(count == 8, "%d devices", count);
    fs_sim_set_devices(1);
    CHECK_OK(fs_cuda_device_count(&count));
    CHECK(count == 1, "%d devices", count);
    CHECK_OK(fs_cuda_device_use(0));
    CHECK_STATUS(fs_cuda_device_use(1), FS_ESTATE);
    fs_sim_set_devices(8);
    fs_sim_set_driver(12040);
    CHECK_STATUS(fs_cuda_device_count(&count), FS_EUNSUPPORTED);
    CHECK(strstr(fs_status_message(), "CUDA 12.4, this build needs 13.0") != NULL, "%s",
          fs_status_message());
    fs_sim_set_driver(0);
    CHECK_STATUS(fs_cuda_device_count(&count), FS_EUNSUPPORTED);
    CHECK(strstr(fs_status_message(), "no CUDA driver") != NULL, "%s", fs_status_message());
    fs_sim_set_driver(13000);
}

/* Each device has memory and streams of its own; events order streams of two devices. */
static void
test_devices(void)
{
    enum { DEVICES = 3 };
    for (uint64_t seed = 1; seed <= 20; seed++) {
        fs_cuda_stream streams[DEVICES];
        fs_cuda_event events[DEVICES];
        unsigned char *memory[DEVICES], *host;
        fs_sim_reset(seed, seed % 2 == 0 ? FS_SIM_LATE : FS_SIM_SHUFFLED, 5000);
        CHECK_OK(fs_cuda_pinned_open(DEVICES * N, (void **)&host));
        for (int d = 0; d < DEVICES; d++) {
            CHECK_OK(fs_cuda_device_use(d));
            CHECK_OK(fs_cuda_stream_open(&streams[d]));
            CHECK_OK(fs_cuda_event_open(&events[d]));
            CHECK_OK(fs_cuda_memory_open(N, (void **)&memory[d])); /* 5000: all that it has */
        }
        for (int d = 0; d < DEVICES; d++) {
            /* Through pinned memory, each from the one before it. */
            CHECK_OK(fs_cuda_device_use(d));
            if (d == 0) {
                CHECK_OK(fs_cuda_fill(streams[d], memory[d], 7, N));
            } else {
                CHECK_OK(fs_cuda_stream_after(streams[d], events[d - 1]));
                CHECK_OK(fs_cuda_copy(streams[d], memory[d], host + (d - 1) * N, N));
            }
            CHECK_OK(fs_cuda_copy(streams[d], host + d * N, memory[d], N));
            CHECK_OK(fs_cuda_event_record(events[d], streams[d]));
        }
        CHECK_OK(fs_cuda_event_wait(events[DEVICES - 1]));
        for (size_t i = 0; i < DEVICES * N; i++) {
            CHECK(host[i] == 7, "seed %llu: byte %zu is %d", (unsigned long long)seed, i, host[i]);
        }
        for (int d = 0; d < DEVICES; d++) {
            CHECK_OK(fs_cuda_memory_close(memory[d], N));
            CHECK_OK(fs_cuda_event_close(events[d]));
            CHECK_OK(fs_cuda_stream_close(streams[d]));
        }
        CHECK_OK(fs_cuda_pinned_close(host));
        CHECK_OK(fs_cuda_device_use(0));
    }
}

// ---- what must end the program ------------------------------------------------------------------

static void
write_beyond(void)
{
    fs_cuda_stream stream;
    void *memory;
    CHECK_OK(fs_cuda_stream_open(&stream));
    CHECK_OK(fs_cuda_memory_open(100, &memory));
    /* The 30 elements do not fit: a copy says so, a kernel writes them. */
    CHECK_OK(fs_cuda_combine(stream, FS_SUM, FS_F32, memory, memory, 30));
    CHECK_OK(fs_cuda_stream_wait(stream));
}

static void
copy_beyond(void)
{
    fs_cuda_stream stream;
    void *memory;
    char bytes[200] = {0};
    CHECK_OK(fs_cuda_stream_open(&stream));
    CHECK_OK(fs_cuda_memory_open(100, &memory));
    CHECK_OK(fs_cuda_copy(stream, memory, bytes, 200));
}

static void
touch_from_host(void)
{
    void *memory;
    CHECK_OK(fs_cuda_memory_open(100, &memory));
    *(volatile char *)memory = 1;
}

static void
touch_from_device(void)
{
    fs_cuda_stream stream;
    void *memory;
    CHECK_OK(fs_cuda_memory_open(100, &memory));
    CHECK_OK(fs_cuda_device_use(1));
    CHECK_OK(fs_cuda_stream_open(&stream));
    CHECK_OK(fs_cuda_fill(stream, memory, 0, 100));
}

static void
launch_elsewhere(void)
{
    fs_cuda_stream stream;
    void *memory;
    CHECK_OK(fs_cuda_stream_open(&stream));
    CHECK_OK(fs_cuda_device_use(1));
    CHECK_OK(fs_cuda_memory_open(100, &memory));
    CHECK_OK(fs_cuda_combine(stream, FS_SUM, FS_F32, memory, memory, 25));
}

static void
race(void)
{
    pipeline p;
    open_pipeline(&p);
    run_pipeline(&p, WAIT_COMPUTED);
}

int
main(void)
{
    /* Children first: the worker thread would not follow them. */
    fs_sim_reset(1, FS_SIM_SHUFFLED, 1u << 20);
#ifndef __SANITIZE_THREAD__ /* which does not go with a child that makes threads */
    check_ends(write_beyond, "beyond an allocation of 100 bytes");
    check_ends(copy_beyond, "reaches beyond an allocation of 100 bytes");
    check_ends(race, "touch the same memory without an order");
    check_ends(touch_from_host, NULL);
    check_ends(touch_from_device, "on device 1 touches memory of device 0");
    check_ends(launch_elsewhere, "on a stream of device 0, by a thread whose device is 1");
#else
    (void)check_ends;
    (void)write_beyond;
    (void)copy_beyond;
    (void)touch_from_host;
    (void)touch_from_device;
    (void)launch_elsewhere;
    (void)race;
#endif
    test_orders();
    test_each_wait_is_needed();
    test_out_of_memory();
    test_events();
    test_drivers();
    test_devices();
    return 0;
}
