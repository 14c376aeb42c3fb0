// needs: c++
/* Normal numbers of csrc/cuda, run by the stand-in for CUDA's runtime: the CPU's bits, wherever a
 * range begins. That they are normal is for tests/model. */
#include <stdlib.h>
#include <string.h>

#include "../cudasim/sim.h"
#include "check.h"
#include "cuda/device.h"
#include "cuda/model.h"

static fs_cuda_stream stream;
static fs_exec cpu;

static void
check_range(uint64_t seed, uint64_t stream_number, uint64_t first, size_t n)
{
    size_t nbytes = n * sizeof(float);
    float *want = malloc(nbytes + 1), *got = malloc(nbytes + 1);
    CHECK(want != NULL && got != NULL, "%zu bytes", nbytes);
    fs_normal op = {seed, stream_number, first, n, 0.02f, want};
    cpu.device->model.normal(&cpu, &op);
    void *device;
    CHECK_OK(fs_cuda_memory_open(nbytes, &device));
    op.out = device;
    CHECK_OK(fs_cuda_normal(stream, &op));
    CHECK_OK(fs_cuda_copy(stream, got, device, nbytes));
    for (size_t i = 0; i < n; i++) {
        CHECK(memcmp(&got[i], &want[i], sizeof(float)) == 0, "seed %llu, number %llu: %g, not %g",
              (unsigned long long)seed, (unsigned long long)(first + i), (double)got[i],
              (double)want[i]);
    }
    CHECK_OK(fs_cuda_memory_close(device, nbytes));
    free(want);
    free(got);
}

int
main(void)
{
    CHECK_OK(fs_device_cpu(FS_ISA_BASELINE, &cpu.device));
    fs_sim_reset(1, FS_SIM_SHUFFLED, (size_t)1 << 24);
    CHECK_OK(fs_cuda_stream_open(&stream));
    for (uint64_t first = 0; first < 6; first++) {
        for (size_t n = 0; n < 7; n++) {
            check_range(7, 3, first, n);
        }
    }
    check_range(0, 0, 0, 5000);
    check_range(UINT64_MAX, (uint64_t)1 << 40, 1001, 4096);
    /* Over the end of the counter's low word. */
    check_range(11, 1, ((uint64_t)1 << 34) - 9, 30);
    fs_normal wrong = {1, 1, UINT64_MAX - 3, 8, 1.0f, NULL};
    CHECK_STATUS(fs_cuda_normal(stream, &wrong), FS_EINVAL);
    CHECK_STATUS(fs_cuda_normal(NULL, &wrong), FS_EINVAL);
    CHECK(fs_cuda_memory_held() == 0, "%zu bytes are still held", fs_cuda_memory_held());
    CHECK_OK(fs_cuda_stream_close(stream));
    return 0;
}
