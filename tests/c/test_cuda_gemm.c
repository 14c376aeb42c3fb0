// needs: c++
/* Products of csrc/cuda through the stand-in for cuBLAS, which has the real one's conventions:
 * exact for integers in every type, within k roundings of a float64 product otherwise, C never read
 * for beta 0, two streams, and every refusal. */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../cudasim/sim.h"
#include "base/math.h"
#include "check.h"
#include "cuda/cublas.h"
#include "cuda/device.h"

#define WORKSPACE ((size_t)1 << 16)

static uint64_t state = 1;

static uint32_t
next_u32(void)
{
    state += 0x9e3779b97f4a7c15u;
    return (uint32_t)(fs_mix_u64(state) >> 32);
}

// ---- a stream and its handle --------------------------------------------------------------------

typedef struct lane {
    fs_cuda_stream stream;
    void *workspace;
    fs_cublas *cublas;
} lane;

static lane
open_lane(void)
{
    lane l;
    CHECK_OK(fs_cuda_stream_open(&l.stream));
    CHECK_OK(fs_cuda_memory_open(WORKSPACE, &l.workspace));
    CHECK_OK(fs_cublas_open(l.stream, l.workspace, WORKSPACE, &l.cublas));
    return l;
}

static void
close_lane(lane *l)
{
    CHECK_OK(fs_cublas_close(l->cublas));
    CHECK_OK(fs_cuda_memory_close(l->workspace, WORKSPACE));
    CHECK_OK(fs_cuda_stream_close(l->stream));
}

// ---- matrices on both sides ---------------------------------------------------------------------

/* rows x width elements, ld apart; the gap of a row holds NaN. */
typedef struct matrix {
    size_t rows, width, ld, nbytes;
    fs_dtype dtype;
    void *host, *device;
} matrix;

static double
get(const matrix *x, size_t row, size_t column)
{
    size_t at = row * x->ld + column;
    return x->dtype == FS_F32    ? (double)((const float *)x->host)[at]
           : x->dtype == FS_BF16 ? (double)fs_f32_of_bf16(((const uint16_t *)x->host)[at])
                                 : (double)fs_f32_of_f16(((const uint16_t *)x->host)[at]);
}

static void
set(const matrix *x, size_t row, size_t column, float value)
{
    size_t at = row * x->ld + column;
    if (x->dtype == FS_F32) {
        ((float *)x->host)[at] = value;
    } else {
        ((uint16_t *)x->host)[at] =
            x->dtype == FS_BF16 ? fs_bf16_of_f32(value) : fs_f16_of_f32(value);
    }
}

typedef enum contents { INTEGERS, FRACTIONS, NANS } contents;

static matrix
make(const lane *l, size_t rows, size_t width, size_t gap, fs_dtype dtype, contents kind)
{
    matrix x = {.rows = rows, .width = width, .ld = width + gap, .dtype = dtype};
    x.nbytes = rows * x.ld * fs_dtype_nbytes(dtype);
    x.host = malloc(x.nbytes == 0 ? 1 : x.nbytes);
    CHECK(x.host != NULL, "%zu bytes", x.nbytes);
    memset(x.host, 0xff, x.nbytes);
    for (size_t r = 0; r < rows && kind != NANS; r++) {
        for (size_t c = 0; c < width; c++) {
            float whole = (float)(int)(next_u32() % 5) - 2.0f;
            float part = (float)(int32_t)next_u32() * 0x1p-31f;
            set(&x, r, c, kind == INTEGERS ? whole : part);
        }
    }
    CHECK_OK(fs_cuda_memory_open(x.nbytes, &x.device));
    CHECK_OK(fs_cuda_copy(l->stream, x.device, x.host, x.nbytes));
    return x;
}

static void
drop(matrix *x)
{
    CHECK_OK(fs_cuda_memory_close(x->device, x->nbytes));
    free(x->host);
}

// ---- one product --------------------------------------------------------------------------------

typedef struct shape {
    size_t m, n, k;
    bool trans_a, trans_b, add;
    fs_dtype dtype, c_dtype;
    size_t gap; /* between the rows of every matrix */
    contents contents;
} shape;

/* The last rounding of a value of this size. */
static double
rounding(fs_dtype dtype, double size)
{
    return dtype == FS_BF16  ? size * 0x1p-8
           : dtype == FS_F16 ? size * 0x1p-11 + 0x1p-25
                             : size * 0x1p-24;
}

static void
check_product(const lane *l, const shape *s)
{
    matrix a = make(l, s->trans_a ? s->k : s->m, s->trans_a ? s->m : s->k, s->gap, s->dtype,
                    s->contents);
    matrix b = make(l, s->trans_b ? s->n : s->k, s->trans_b ? s->k : s->n, s->gap, s->dtype,
                    s->contents);
    matrix c = make(l, s->m, s->n, s->gap, s->c_dtype, s->add ? s->contents : NANS);
    fs_gemm op = {.trans_a = s->trans_a,
                  .trans_b = s->trans_b,
                  .m = s->m,
                  .n = s->n,
                  .k = s->k,
                  .dtype = s->dtype,
                  .c_dtype = s->c_dtype,
                  .a = a.device,
                  .lda = a.ld,
                  .b = b.device,
                  .ldb = b.ld,
                  .beta = s->add ? 1.0f : 0.0f,
                  .c = c.device,
                  .ldc = c.ld};
    matrix got = c;
    got.host = malloc(c.nbytes == 0 ? 1 : c.nbytes);
    CHECK(got.host != NULL, "%zu bytes", c.nbytes);
    CHECK_OK(fs_cuda_gemm(l->cublas, &op));
    CHECK_OK(fs_cuda_copy(l->stream, got.host, got.device, got.nbytes));
    for (size_t i = 0; i < s->m; i++) {
        for (size_t j = 0; j < s->n; j++) {
            double sum = 0.0, size = 0.0;
            for (size_t p = 0; p < s->k; p++) {
                double term = (s->trans_a ? get(&a, p, i) : get(&a, i, p)) *
                              (s->trans_b ? get(&b, j, p) : get(&b, p, j));
                sum += term;
                size += fabs(term);
            }
            double old = s->add ? get(&c, i, j) : 0.0;
            /* A sum of k products in fp32 in any order, then one addition and one rounding. Tensor
             * cores, which sum 16-bit products, cut off (twice a rounding), the terms first. */
            double each = s->dtype == FS_F32 ? 0x1p-24 : 0x1p-22;
            double bound = ((double)s->k + 1.0) * each * (size + fabs(old));
            bound += rounding(s->c_dtype, fabs(sum + old) + bound);
            bound = s->contents == INTEGERS ? 0.0 : bound;
            double value = get(&got, i, j);
            CHECK(fabs(value - (sum + old)) <= bound,
                  "%zu x %zu x %zu, %s to %s, %d%d, add %d: (%zu, %zu) is %g, not %g within %g",
                  s->m, s->k, s->n, fs_dtype_name(s->dtype), fs_dtype_name(s->c_dtype), s->trans_a,
                  s->trans_b, s->add, i, j, value, sum + old, bound);
        }
        for (size_t j = s->n; j < c.ld; j++) {
            CHECK(isnan(get(&got, i, j)), "row %zu: the gap at %zu was written", i, j);
        }
    }
    free(got.host);
    drop(&a);
    drop(&b);
    drop(&c);
}

static const fs_dtype PAIRS[][2] = {{FS_F32, FS_F32},
                                    {FS_BF16, FS_BF16},
                                    {FS_BF16, FS_F32},
                                    {FS_F16, FS_F16},
                                    {FS_F16, FS_F32}};
#define PAIRS_N (sizeof PAIRS / sizeof *PAIRS)

/* Every transposition, beta, pair of types, with and without gaps; integers small enough that every
 * type holds every sum (at most 4 * k + 2 = 254 in size), and fractions, in turns. */
static void
test_all(const lane *l, size_t turn)
{
    static const size_t sizes[][3] = {{1, 1, 1},  {5, 3, 2},   {9, 17, 63}, {8, 8, 8},
                                      {40, 1, 7}, {0, 3, 4},   {3, 0, 4},   {3, 4, 0},
                                      {33, 7, 1}, {16, 31, 50}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t way = 0; way < 16 * PAIRS_N; way++) {
            size_t pair = way / 16;
            shape s = {.m = sizes[i][0],
                       .n = sizes[i][1],
                       .k = sizes[i][2],
                       .trans_a = (way & 1) != 0,
                       .trans_b = (way & 2) != 0,
                       .add = (way & 4) != 0,
                       .gap = (way & 8) != 0 ? 1 + 2 * (i % 3) : 0,
                       .dtype = PAIRS[pair][0],
                       .c_dtype = PAIRS[pair][1],
                       .contents = (i + turn) % 2 == 0 ? INTEGERS : FRACTIONS};
            check_product(l, &s);
        }
    }
}

/* Several products in one call, and the same bits when one is made again at another place of the
 * same alignment. x' x is symmetric, but for what each of two sums of 70 may round. */
static void
test_several(const lane *l)
{
    matrix x = make(l, 70, 33, 0, FS_F32, FRACTIONS), y = make(l, 33, 20, 3, FS_F32, FRACTIONS);
    matrix c = make(l, 160, 20, 0, FS_F32, NANS), d = make(l, 33, 33, 0, FS_F32, NANS);
    fs_gemm ops[3] = {{.m = 70, .n = 20, .k = 33, .a = x.device, .lda = 33, .b = y.device,
                       .ldb = y.ld, .c = c.device, .ldc = 20},
                      {.m = 70, .n = 20, .k = 33, .a = x.device, .lda = 33, .b = y.device,
                       .ldb = y.ld, .c = (float *)c.device + 1600, .ldc = 20},
                      {.trans_a = true, .m = 33, .n = 33, .k = 70, .a = x.device, .lda = 33,
                       .b = x.device, .ldb = 33, .c = d.device, .ldc = 33}};
    CHECK_OK(fs_cuda_gemms(l->cublas, ops, 3));
    CHECK_OK(fs_cuda_gemms(l->cublas, ops, 0));
    CHECK_OK(fs_cuda_copy(l->stream, c.host, c.device, c.nbytes));
    CHECK_OK(fs_cuda_copy(l->stream, d.host, d.device, d.nbytes));
    CHECK(memcmp(c.host, (float *)c.host + 1600, 1400 * sizeof(float)) == 0, "not the same bits");
    for (size_t i = 0; i < 33; i++) {
        for (size_t j = 0; j < i; j++) {
            double apart = fabs(get(&d, i, j) - get(&d, j, i));
            CHECK(apart <= 2.0 * 70.0 * 0x1p-24 * 70.0, "x' x at %zu, %zu: %g apart", i, j, apart);
        }
    }
    drop(&x);
    drop(&y);
    drop(&c);
    drop(&d);
}

/* Handles of two streams: a chain over both, ordered by events; and what a workspace that both use,
 * or an event that is left out, leads to. */
static void
test_two_streams(uint64_t seed, fs_sim_order order)
{
    for (int fault = 0; fault < (FS_STAND_IN ? 3 : 1); fault++) {
        fs_sim_reset(seed, order, (size_t)1 << 22);
        fs_sim_tolerate_races(fault != 0);
        lane one = open_lane(), two = open_lane();
        if (fault == 1) {
            CHECK_OK(fs_cublas_close(two.cublas));
            CHECK_OK(fs_cublas_open(two.stream, one.workspace, WORKSPACE, &two.cublas));
        }
        fs_cuda_event event;
        CHECK_OK(fs_cuda_event_open(&event));
        matrix x = make(&one, 24, 24, 0, FS_F32, INTEGERS);
        matrix y = make(&one, 24, 24, 0, FS_F32, NANS), z = make(&one, 24, 24, 0, FS_F32, NANS);
        matrix w = make(&one, 24, 24, 0, FS_F32, NANS);
        CHECK_OK(fs_cuda_stream_wait(one.stream));
        fs_gemm square = {.m = 24, .n = 24, .k = 24, .a = x.device, .lda = 24, .b = x.device,
                          .ldb = 24, .c = y.device, .ldc = 24};
        fs_gemm other = square, cube = square;
        other.trans_a = true;
        other.c = w.device;
        cube.a = y.device;
        cube.c = z.device;
        CHECK_OK(fs_cuda_gemm(one.cublas, &square));
        CHECK_OK(fs_cuda_event_record(event, one.stream));
        CHECK_OK(fs_cuda_gemm(two.cublas, &other)); /* beside the first */
        if (fault != 2) {
            CHECK_OK(fs_cuda_stream_after(two.stream, event));
        }
        CHECK_OK(fs_cuda_gemm(two.cublas, &cube));
        CHECK_OK(fs_cuda_stream_wait(one.stream));
        CHECK_OK(fs_cuda_copy(two.stream, z.host, z.device, z.nbytes));
        CHECK_OK(fs_cuda_stream_wait(two.stream));
        for (size_t i = 0; i < 24 && fault == 0; i++) {
            double sum = 0.0;
            for (size_t p = 0; p < 24 * 24; p++) {
                sum += get(&x, i, p / 24) * get(&x, p / 24, p % 24) * get(&x, p % 24, 5);
            }
            CHECK(get(&z, i, 5) == sum, "row %zu is %g, not %g", i, get(&z, i, 5), sum);
        }
        CHECK((fs_sim_races() > 0) == (fault != 0), "fault %d: %zu races", fault, fs_sim_races());
        CHECK_OK(fs_cuda_event_close(event));
        drop(&x);
        drop(&y);
        drop(&z);
        drop(&w);
        close_lane(&one);
        close_lane(&two);
    }
}

// ---- refusals -----------------------------------------------------------------------------------

static void
test_loading(void)
{
    const char *description = NULL;
    fs_cublas *none = NULL;
    fs_cuda_stream stream;
    CHECK_OK(fs_cuda_stream_open(&stream));
    CHECK_STATUS(fs_cublas_open(stream, &state, 256, &none), FS_ESTATE);
    CHECK_OK(fs_cuda_stream_close(stream));
    CHECK(setenv("FLATSHARD_CUBLAS", "/nowhere/libcublas.so.13", 1) == 0, "setenv");
    CHECK_STATUS(fs_cublas_load(NULL, &description), FS_EUNSUPPORTED);
    CHECK(strstr(fs_status_message(), "FLATSHARD_CUBLAS=/nowhere/libcublas.so.13") != NULL, "%s",
          fs_status_message());
    CHECK(setenv("FLATSHARD_CUBLAS", "libresolv.so.2", 1) == 0, "setenv");
    CHECK_STATUS(fs_cublas_load(NULL, &description), FS_EUNSUPPORTED);
    CHECK(strstr(fs_status_message(), "it is not cuBLAS of CUDA 12 or 13") != NULL, "%s",
          fs_status_message());
    CHECK(unsetenv("FLATSHARD_CUBLAS") == 0, "unsetenv");
    if (!FS_STAND_IN) {
        CHECK_OK(fs_cublas_load(NULL, &description));
        return;
    }
    for (int version = 11; version <= 14; version += 3) {
        fs_sim_set_cublas_version(version);
        CHECK_STATUS(fs_cublas_load(NULL, &description), FS_EUNSUPPORTED);
        CHECK(strstr(fs_status_message(), "must be 12 or 13") != NULL, "%s", fs_status_message());
    }
    fs_sim_set_cublas_version(12);
    CHECK_OK(fs_cublas_load(NULL, &description));
    CHECK(strcmp(description, "cuBLAS 12.0.0 (this process)") == 0, "%s", description);
    fs_sim_set_cublas_version(13);
    CHECK_OK(fs_cublas_load(NULL, NULL));
}

static void
test_refusals(const lane *l)
{
    char memory[256];
    fs_cublas *none = NULL;
    CHECK_STATUS(fs_cublas_open(NULL, l->workspace, WORKSPACE, &none), FS_EINVAL);
    CHECK_STATUS(fs_cublas_open(l->stream, NULL, WORKSPACE, &none), FS_EINVAL);
    CHECK_STATUS(fs_cublas_open(l->stream, l->workspace, 0, &none), FS_EINVAL);
    CHECK_STATUS(fs_cublas_open(l->stream, (char *)l->workspace + 8, 256, &none), FS_EINVAL);
    CHECK(none == NULL, "a handle");
    CHECK_OK(fs_cublas_close(NULL));
    CHECK(fs_cublas_workspace_nbytes(90) > fs_cublas_workspace_nbytes(80), "Hopper wants more");
    fs_gemm good = {.m = 4, .n = 5, .k = 6, .a = memory, .lda = 6, .b = memory, .ldb = 5,
                    .c = memory, .ldc = 5};
    fs_gemm bad[12];
    for (size_t i = 0; i < 12; i++) {
        bad[i] = good;
    }
    bad[0].lda = 5;
    bad[1].ldb = 4;
    bad[2].ldc = 4;
    bad[3].trans_a = true;
    bad[3].lda = 3;
    bad[4].beta = 0.5f;
    bad[5].a = NULL;
    bad[6].c = NULL;
    bad[7].lda = SIZE_MAX / 8;
    bad[8].m = SIZE_MAX / 2;
    bad[9].dtype = FS_F64;
    bad[10].c_dtype = FS_BF16;
    bad[11].dtype = FS_BF16;
    bad[11].c_dtype = FS_F16;
    for (size_t i = 0; i < 12; i++) {
        fs_gemm both[2] = {good, bad[i]};
        size_t before = fs_sim_kernels();
        CHECK_STATUS(fs_cuda_gemms(l->cublas, both, 2), i < 9 ? FS_EINVAL : FS_ETYPE);
        CHECK(strncmp(fs_status_message(), "gemm: ", 6) == 0, "%zu: %s", i, fs_status_message());
        CHECK(fs_sim_kernels() == before, "%zu: something was started", i);
    }
}

int
main(void)
{
    test_loading();
    for (uint64_t seed = 1; seed <= 2; seed++) {
        fs_sim_order order = seed == 2 ? FS_SIM_LATE : FS_SIM_SHUFFLED;
        fs_sim_reset(seed, order, (size_t)1 << 22);
        lane l = open_lane();
        test_refusals(&l);
        test_all(&l, seed);
        test_several(&l);
        close_lane(&l);
        test_two_streams(seed, order);
        CHECK(fs_cuda_memory_held() == 0, "%zu bytes are still held", fs_cuda_memory_held());
        CHECK(fs_sim_cublas_handles() == 0, "%zu handles are open", fs_sim_cublas_handles());
    }
    return 0;
}
