// sanitizers: tsan
// needs: c++
/* Each instruction of csrc/cuda/tensor_core.cuh alone, run by the stand-in: what a register of a
 * lane holds, against plain products of matrices; and what the stand-in refuses of warps. */
#include <math.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../cudasim/instructions.h"
#include "../cudasim/sim.h"
#include "base/math.h"
#include "check.h"
#include "cuda/device.h"

static fs_cuda_stream stream;
static uint64_t state = 1;

static uint32_t
next_u32(void)
{
    state += 0x9e3779b97f4a7c15u;
    return (uint32_t)(fs_mix_u64(state) >> 32);
}

/* A copy of nbytes of host memory in device memory. */
static void *
sent(const void *host, size_t nbytes)
{
    void *device;
    CHECK_OK(fs_cuda_memory_open(nbytes, &device));
    CHECK_OK(fs_cuda_copy(stream, device, host, nbytes));
    return device;
}

static void
fetch(void *host, void *device, size_t nbytes)
{
    if (host != NULL) {
        CHECK_OK(fs_cuda_copy(stream, host, device, nbytes));
    }
    CHECK_OK(fs_cuda_stream_wait(stream));
    CHECK_OK(fs_cuda_memory_close(device, nbytes));
}

/* Integers of 16 bits: sums of 16 of their products are exact in fp32. */
static void
test_mma(bool bf16)
{
    uint16_t a[256], b[128];
    float c[128], got[128];
    double left[256], right[128];
    for (int i = 0; i < 256; i++) {
        left[i] = (double)(next_u32() % 255) - 127.0;
        a[i] = bf16 ? fs_bf16_of_f32((float)left[i]) : fs_f16_of_f32((float)left[i]);
    }
    for (int i = 0; i < 128; i++) {
        right[i] = (double)(next_u32() % 255) - 127.0;
        b[i] = bf16 ? fs_bf16_of_f32((float)right[i]) : fs_f16_of_f32((float)right[i]);
        c[i] = (float)(next_u32() % 1001) - 500.0f;
    }
    void *a_there = sent(a, sizeof a), *b_there = sent(b, sizeof b), *c_there = sent(c, sizeof c);
    CHECK_OK(fs_try_mma(stream, bf16, c_there, a_there, b_there));
    fetch(got, c_there, sizeof got);
    fetch(NULL, a_there, sizeof a);
    fetch(NULL, b_there, sizeof b);
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 8; j++) {
            double sum = (double)c[i * 8 + j];
            for (int k = 0; k < 16; k++) {
                sum += left[i * 16 + k] * right[k * 8 + j];
            }
            CHECK((double)got[i * 8 + j] == sum, "c[%d][%d] is %g, not %g", i, j,
                  (double)got[i * 8 + j], sum);
        }
    }
}

static void
test_ldmatrix(bool turned)
{
    uint16_t in[4][8][8];
    uint32_t out[32][4];
    for (int i = 0; i < 256; i++) {
        in[i / 64][i / 8 % 8][i % 8] = (uint16_t)(i * 257);
    }
    void *in_there = sent(in, sizeof in), *out_there = sent(in, sizeof out);
    CHECK_OK(fs_try_ldmatrix(stream, turned, out_there, in_there));
    fetch(out, out_there, sizeof out);
    fetch(NULL, in_there, sizeof in);
    for (int lane = 0; lane < 32; lane++) {
        for (int m = 0; m < 4; m++) {
            for (int half = 0; half < 2; half++) {
                int row = turned ? lane % 4 * 2 + half : lane / 4;
                int column = turned ? lane / 4 : lane % 4 * 2 + half;
                unsigned got = out[lane][m] >> (16 * half) & 0xffffu;
                CHECK(got == in[m][row][column], "lane %d, matrix %d, half %d: %#x", lane, m, half,
                      got);
            }
        }
    }
}

static void
test_copies(void)
{
    uint32_t in[384], out[384];
    for (int i = 0; i < 384; i++) {
        in[i] = next_u32();
    }
    void *in_there = sent(in, sizeof in), *out_there = sent(in, sizeof out);
    CHECK_OK(fs_try_copies(stream, out_there, in_there));
    fetch(out, out_there, sizeof out);
    fetch(NULL, in_there, sizeof in);
    for (int i = 0; i < 384; i++) {
        uint32_t wanted = i / 128 == 1 && i / 4 % 2 == 1 ? 0 : in[i];
        CHECK(out[i] == wanted, "word %d is %#x, not %#x", i, out[i], wanted);
    }
}

/* The conversions are those of base/math.h, bit for bit; 2^x is within 2^-22. */
static void
test_lanes(int lanes)
{
    static const float special[] = {0.0f,      -0.0f,   1.0f,     -127.5f, 127.99f, -1000.0f,
                                    -INFINITY, 65519.0f, 65520.0f, 3e-8f,   -126.0f, -126.5f};
    float x[32], y[32], power[32], other[32];
    uint32_t bf16[32], f16[32];
    for (int i = 0; i < 32; i++) {
        x[i] = i < 12 ? special[i] : (float)(next_u32() % 2000000) * 1e-4f - 150.0f;
        y[i] = fs_f32_of_bits(next_u32() & 0xbfffffffu);
    }
    void *x_there = sent(x, sizeof x), *y_there = sent(y, sizeof y);
    void *bf16_there = sent(x, sizeof x), *f16_there = sent(x, sizeof x);
    void *power_there = sent(x, sizeof x), *other_there = sent(x, sizeof x);
    CHECK_OK(fs_try_lanes(stream, bf16_there, f16_there, power_there, other_there, lanes, x_there,
                          y_there));
    fetch(bf16, bf16_there, sizeof bf16);
    fetch(f16, f16_there, sizeof f16);
    fetch(power, power_there, sizeof power);
    fetch(other, other_there, sizeof other);
    fetch(NULL, x_there, sizeof x);
    fetch(NULL, y_there, sizeof y);
    for (int i = 0; i < 32; i++) {
        CHECK(bf16[i] == (fs_bf16_of_f32(x[i]) | (uint32_t)fs_bf16_of_f32(y[i]) << 16),
              "%g, %g as bf16: %#x", (double)x[i], (double)y[i], bf16[i]);
        CHECK(f16[i] == (fs_f16_of_f32(x[i]) | (uint32_t)fs_f16_of_f32(y[i]) << 16),
              "%g, %g as fp16: %#x", (double)x[i], (double)y[i], f16[i]);
        CHECK(fs_bits_of_f32(other[i]) == fs_bits_of_f32(x[i ^ lanes]), "lane %d got %g", i,
              (double)other[i]);
        double wanted = exp2((double)x[i]);
        double bound = wanted < 0x1p-126 ? 0x1p-126 : wanted * 0x1p-22;
        CHECK(wanted > 3.4028234e38 ? isinf(power[i]) : fabs((double)power[i] - wanted) <= bound,
              "2^%g is %g, not %g", (double)x[i], (double)power[i], wanted);
    }
}

/* In a child, since it ends the program: by abort, or by a sanitizer's word for it. */
static void
test_fault(int fault)
{
    pid_t child = fork();
    CHECK(child >= 0, "no child");
    if (child == 0) {
        fs_cuda_stream own;
        (void)freopen("/dev/null", "w", stderr);
        (void)alarm(20);
        CHECK_OK(fs_cuda_stream_open(&own));
        CHECK_OK(fs_try_fault(own, fault));
        CHECK_OK(fs_cuda_stream_wait(own));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child, "the child is lost");
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "fault %d: status %#x", fault,
          (unsigned)status);
}

int
main(void)
{
    /* Before the stand-in has a thread: children have none. */
    for (int fault = 0; fault < (FS_STAND_IN ? FS_TRY_FAULTS : 0); fault++) {
        test_fault(fault);
    }
    CHECK_OK(fs_cuda_stream_open(&stream));
    for (uint64_t seed = 1; seed <= 4; seed++) {
        fs_sim_reset(seed, seed == 2 ? FS_SIM_LATE : FS_SIM_SHUFFLED, (size_t)1 << 24);
        test_mma(false);
        test_mma(true);
        test_ldmatrix(false);
        test_ldmatrix(true);
        test_copies();
        test_lanes(1 << seed % 4);
        CHECK(fs_sim_kernels() == 6, "%zu kernels ran", fs_sim_kernels());
    }
    CHECK_OK(fs_cuda_stream_close(stream));
    return 0;
}
