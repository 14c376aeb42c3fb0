/* Cases of the device table whose results are known by a hash: the same for every filling of the
 * table, on whatever it runs. A test calls check_table for each.
 *
 * The golden values are hashes of outputs for inputs made below. That the outputs are right is for
 * tests/kernels, which compares with NumPy and torch. */
#ifndef FS_TESTS_KERNEL_CASES_H
#define FS_TESTS_KERNEL_CASES_H

#include <stdint.h>
#include <string.h>

#include "base/math.h"
#include "check.h"
#include "device/device.h"

// ---- inputs -------------------------------------------------------------------------------------

static uint64_t state;

static uint64_t
next_bits(void)
{
    state += 0x9e3779b97f4a7c15u;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Mostly between 2^-24 and 2^24 in size, some zeros of both signs, some subnormal, some huge. */
static float
next_f32(void)
{
    uint64_t bits = next_bits();
    uint32_t sign = (uint32_t)(bits >> 63) << 31;
    uint32_t fraction = (uint32_t)bits & 0x007fffffu;
    uint32_t kind = (uint32_t)(bits >> 32) & 63u;
    uint32_t exponent = 103u + (uint32_t)((bits >> 40) % 48u);
    exponent = kind == 0 ? 0u : kind == 1 ? 250u : exponent;
    fraction = kind == 2 ? 0u : fraction;
    exponent = kind == 2 ? 0u : exponent;
    return fs_f32_of_bits(sign | exponent << 23 | fraction);
}

static void *
room(size_t nbytes)
{
    void *memory = malloc(nbytes == 0 ? 1 : nbytes);
    CHECK(memory != NULL, "%zu bytes", nbytes);
    return memory;
}

static float *
floats(size_t n, uint64_t seed)
{
    float *x = room(n * sizeof *x);
    state = seed;
    for (size_t i = 0; i < n; i++) {
        x[i] = next_f32();
    }
    return x;
}

/* n elements of dtype, converted by the scalar functions of math.h. */
static void *
array(fs_dtype dtype, size_t n, uint64_t seed)
{
    float *x = floats(n, seed);
    if (dtype == FS_F32) {
        return x;
    }
    unsigned char *out = room(n * fs_dtype_nbytes(dtype));
    for (size_t i = 0; i < n; i++) {
        uint16_t half = dtype == FS_BF16 ? fs_bf16_of_f32(x[i]) : fs_f16_of_f32(x[i]);
        double wide = (double)x[i] * 1.0000000001;
        if (dtype == FS_F64) {
            memcpy(out + 8 * i, &wide, 8);
        } else {
            memcpy(out + 2 * i, &half, 2);
        }
    }
    free(x);
    return out;
}

/* FNV-1a. */
static uint64_t
hash_bytes(uint64_t hash, const void *bytes, size_t nbytes)
{
    const unsigned char *byte = bytes;
    for (size_t i = 0; i < nbytes; i++) {
        hash = (hash ^ byte[i]) * 0x100000001b3u;
    }
    return hash;
}

#define HASH_START 0xcbf29ce484222325u

/* The sign and payload of a NaN that an operation makes are the processor's choice: all are one. */
static uint64_t
hash_array(uint64_t hash, const void *array, fs_dtype dtype, size_t n)
{
    static const uint64_t infinities[FS_DTYPE_COUNT] = {
        [FS_F32] = 0x7f800000u,
        [FS_F64] = 0x7ff0000000000000u,
        [FS_BF16] = 0x7f80u,
        [FS_F16] = 0x7c00u,
    };
    size_t nbytes = fs_dtype_nbytes(dtype);
    uint64_t infinity = infinities[dtype], sign = (uint64_t)1 << (8 * nbytes - 1);
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = 0;
        memcpy(&bits, (const unsigned char *)array + i * nbytes, nbytes);
        if (infinity != 0 && (bits & (sign - 1)) > infinity) {
            bits = infinity + 1;
        }
        hash = hash_bytes(hash, &bits, nbytes);
    }
    return hash;
}

// ---- cases --------------------------------------------------------------------------------------

static uint64_t
convert_case(const fs_exec *exec, fs_dtype dst_dtype, fs_dtype src_dtype, size_t n)
{
    void *src = array(src_dtype, n, 11);
    void *dst = room(n * fs_dtype_nbytes(dst_dtype));
    exec->device->convert(exec, dst, dst_dtype, src, src_dtype, n);
    uint64_t hash = hash_array(HASH_START, dst, dst_dtype, n);
    free(dst);
    free(src);
    return hash;
}

/* All patterns of a 16-bit format, to fp32 and back: exact but for signalling NaN, which become
 * quiet. */
static void
all_halves(const fs_exec *exec, fs_dtype dtype)
{
    uint16_t *half = room(65536 * 2), *back = room(65536 * 2);
    float *wide = room(65536 * 4);
    uint16_t quiet = dtype == FS_BF16 ? 0x0040u : 0x0200u;
    uint16_t infinity = dtype == FS_BF16 ? 0x7f80u : 0x7c00u;
    for (uint32_t i = 0; i < 65536; i++) {
        half[i] = (uint16_t)i;
    }
    exec->device->convert(exec, wide, FS_F32, half, dtype, 65536);
    exec->device->convert(exec, back, dtype, wide, FS_F32, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
        int is_nan = (i & 0x7fffu) > infinity;
        CHECK(back[i] == (is_nan ? (i | quiet) : i), "%s: pattern %04x came back as %04x",
              exec->device->name, i, back[i]);
    }
    free(wide);
    free(back);
    free(half);
}

static uint64_t
sum_case(const fs_exec *exec, fs_dtype acc_dtype, fs_dtype src_dtype, size_t src_n, bool accumulate,
         size_t n)
{
    const void *src[8];
    void *owned[8];
    for (size_t r = 0; r < src_n; r++) {
        owned[r] = array(src_dtype, n, 100 + r);
        src[r] = src_n > 2 && r == 1 ? NULL : owned[r];
    }
    fs_sums found = {.bad_source = -1}, again;
    fs_sum sum = {.found = &found, .src = src, .src_n = src_n, .src_dtype = src_dtype,
                  .acc = array(acc_dtype, n, 7),
                  .acc_dtype = acc_dtype, .accumulate = accumulate, .n = n};
    exec->device->sum(exec, &sum);
    uint64_t hash = hash_array(HASH_START, sum.acc, acc_dtype, n);
    hash = hash_array(hash, &found.sumsq, FS_F64, 1);
    hash = hash_array(hash, &found.absmax, FS_F64, 1);
    exec->device->sumsq(exec, sum.acc, acc_dtype, n, &again);
    CHECK(again.sumsq == found.sumsq ||
              (again.sumsq != again.sumsq && found.sumsq != found.sumsq),
          "sum %a, sumsq %a", found.sumsq, again.sumsq);
    CHECK(again.absmax == found.absmax ||
              (again.absmax != again.absmax && found.absmax != found.absmax),
          "largest of the sum %a, of it again %a", found.absmax, again.absmax);
    uint64_t bad = n, first;
    exec->device->find_nonfinite(exec, sum.acc, acc_dtype, n, &bad);
    CHECK(found.finite == (bad == n) && again.finite == found.finite,
          "finite %d and %d, first bad %llu of %zu", (int)found.finite, (int)again.finite,
          (unsigned long long)bad, n);
    int64_t source = -1;
    for (size_t r = src_n; r-- > 0 && found.finite == 0;) {
        first = n;
        if (src[r] != NULL) {
            exec->device->find_nonfinite(exec, src[r], src_dtype, n, &first);
        }
        source = first < n ? (int64_t)r : source;
    }
    CHECK(found.bad_source == source, "blames source %lld, not %lld",
          (long long)found.bad_source, (long long)source);
    for (size_t r = 0; r < src_n; r++) {
        free(owned[r]);
    }
    free(sum.acc);
    return hash;
}

typedef struct kinds {
    fs_dtype grad, weight, moment;
    bool master, momentum, nesterov;
    fs_rule rule;
    bool amsgrad, stochastic;
} kinds;

/* Three steps. */
static uint64_t
update_case(const fs_exec *exec, kinds k, size_t n)
{
    void *weight = array(k.weight, n, 21), *m1 = array(k.moment, n, 22);
    void *m2 = array(k.moment, n, 23), *m3 = array(k.moment, n, 26), *grad = array(k.grad, n, 24);
    float *master = floats(n, 25);
    memset(m1, 0, n * fs_dtype_nbytes(k.moment));
    memset(m2, 0, n * fs_dtype_nbytes(k.moment));
    memset(m3, 0, n * fs_dtype_nbytes(k.moment));
    bool adam = k.rule == FS_RULE_ADAM || k.rule == FS_RULE_ADAMW;
    bool decoupled = k.rule == FS_RULE_ADAMW || k.rule == FS_RULE_LION;
    for (int step = 1; step <= 3; step++) {
        fs_hyper hyper = {
            .rule = k.rule, .lr = 1e-2f, .decay = decoupled ? 0.999f : 0.01f,
            .beta1 = 0.9f, .beta2 = 0.999f, .one_minus_beta1 = 0.1f, .one_minus_beta2 = 0.001f,
            .eps = 1e-8f, .step_size = 1e-2f / (0.1f * (float)step),
            .inv_sqrt_bc2 = 10.0f / (float)step, .nesterov = k.nesterov, .first = step == 1,
            .random_key = (uint64_t)step * 0x9e3779b97f4a7c15u,
        };
        fs_update u = {.hyper = hyper, .grad_scale = 0.37f, .grad = grad, .grad_dtype = k.grad,
                       .master = k.master ? master : NULL, .weight = weight,
                       .weight_dtype = k.weight, .moment1 = adam || k.momentum ? m1 : NULL,
                       .moment2 = adam ? m2 : NULL, .moment3 = k.amsgrad ? m3 : NULL,
                       .moment_dtype = k.moment, .stochastic = k.stochastic,
                       .first = 0xfffffff0u, .n = n};
        exec->device->update(exec, &u);
    }
    uint64_t hash = hash_array(HASH_START, weight, k.weight, n);
    hash = hash_array(hash, m1, k.moment, n);
    hash = hash_array(hash, m2, k.moment, n);
    if (k.amsgrad) {
        hash = hash_array(hash, m3, k.moment, n);
    }
    hash = hash_array(hash, master, FS_F32, n);
    free(master);
    free(grad);
    free(m3);
    free(m2);
    free(m1);
    free(weight);
    return hash;
}

/* A split master is the fp32 master bit for bit: converted there and back, moved by three steps,
 * and moved where somebody else writes its upper half. */
static void
split_case(const fs_exec *exec, fs_rule rule, size_t n)
{
    float *master = floats(n, 61), *joined = room(n * 4), *grad = floats(n, 62);
    uint16_t *copy = room(n * 2), *half = room(n * 2), *rest = room(n * 2);
    uint16_t *old = room(n * 2), *other = room(n * 2);
    float *moments = room(n * 16);
    memset(moments, 0, n * 16);
    exec->device->split(exec, half, rest, master, FS_F32, n);
    exec->device->join(exec, joined, FS_F32, half, rest, n);
    CHECK(memcmp(joined, master, n * 4) == 0, "%zu elements differ after split and join", n);
    exec->device->split(exec, NULL, other, master, FS_F32, n);
    CHECK(memcmp(rest, other, n * 2) == 0, "%zu remainders differ without the other half", n);
    for (int step = 1; step <= 3; step++) {
        const fs_hyper hyper = {
            .rule = rule, .lr = 1e-2f, .decay = 0.99f, .beta1 = 0.9f, .beta2 = 0.99f,
            .one_minus_beta1 = 0.1f, .one_minus_beta2 = 0.01f, .eps = 1e-8f, .step_size = 1e-2f,
            .inv_sqrt_bc2 = 1.0f,
        };
        fs_update u = {.hyper = hyper, .grad_scale = 0.5f, .grad = grad, .grad_dtype = FS_F32,
                       .weight_dtype = FS_BF16, .moment1 = moments, .moment2 = moments + n, .n = n};
        fs_update split = u;
        split.moment1 = moments + 2 * n;
        split.moment2 = moments + 3 * n;
        u.master = master;
        u.weight = copy;
        exec->device->update(exec, &u);
        memcpy(old, half, n * 2);
        memcpy(other, rest, n * 2);
        float *saved = room(n * 8);
        memcpy(saved, split.moment1, n * 8);
        split.weight = half;
        split.remainder = rest;
        exec->device->update(exec, &split);
        memcpy(split.moment1, saved, n * 8);
        split.weight = NULL;
        split.weight_read = old;
        split.remainder = other;
        exec->device->update(exec, &split);
        free(saved);
        exec->device->join(exec, joined, FS_F32, half, rest, n);
        CHECK(memcmp(joined, master, n * 4) == 0, "step %d: %zu masters differ", step, n);
        CHECK(memcmp(moments, moments + 2 * n, n * 8) == 0, "step %d: moments differ", step);
        CHECK(memcmp(rest, other, n * 2) == 0, "step %d: remainders differ", step);
    }
    void *const all[] = {master, joined, grad, copy, half, rest, old, other, moments};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        free(all[i]);
    }
}

static uint64_t
combine_case(const fs_exec *exec, int op, size_t n)
{
    uint64_t hash = HASH_START;
    for (int d = 0; d < FS_DTYPE_COUNT; d++) {
        size_t nbytes = n * fs_dtype_nbytes((fs_dtype)d);
        bool is_float = fs_dtype_is_float((fs_dtype)d);
        unsigned char *acc = is_float ? array((fs_dtype)d, n, 31) : room(nbytes);
        unsigned char *src = is_float ? array((fs_dtype)d, n, 32) : room(nbytes);
        for (size_t i = 0; !is_float && i < nbytes; i++) {
            acc[i] = (unsigned char)next_bits();
            src[i] = (unsigned char)next_bits();
        }
        exec->device->combine(exec, op, (fs_dtype)d, acc, src, n);
        hash = hash_array(hash, acc, (fs_dtype)d, n);
        free(src);
        free(acc);
    }
    return hash;
}

static uint64_t
copy_case(const fs_exec *exec, size_t nbytes)
{
    unsigned char *src = array(FS_F32, nbytes / 4 + 1, 41), *dst = room(nbytes + 3);
    exec->device->copy(exec, dst + 3, src, nbytes);
    CHECK(memcmp(dst + 3, src, nbytes) == 0, "a copy of %zu bytes differs", nbytes);
    free(dst);
    free(src);
    return 0;
}

// ---- golden -------------------------------------------------------------------------------------

static const size_t lengths[] = {0, 1, 15, 16, 17, 1023, 1024, 1025, 10007, 70001};
#define LENGTHS_N (sizeof lengths / sizeof lengths[0])

static const kinds updates[] = {
    {FS_F32, FS_F32, FS_F32, false, false, false, FS_RULE_SGD, false, false},
    {FS_F32, FS_F32, FS_F32, false, true, false, FS_RULE_SGD, false, false},
    {FS_BF16, FS_BF16, FS_F32, true, true, true, FS_RULE_SGD, false, false},
    {FS_F32, FS_F32, FS_F32, false, false, false, FS_RULE_ADAM, false, false},
    {FS_F32, FS_F32, FS_F32, false, false, false, FS_RULE_ADAMW, false, false},
    {FS_F32, FS_BF16, FS_F32, true, false, false, FS_RULE_ADAMW, false, false},
    {FS_BF16, FS_BF16, FS_BF16, false, false, false, FS_RULE_ADAMW, false, false},
    {FS_F16, FS_F16, FS_F16, true, false, false, FS_RULE_ADAMW, false, false},
    {FS_F32, FS_F32, FS_F32, false, false, false, FS_RULE_ADAM, true, false},
    {FS_F32, FS_BF16, FS_BF16, true, false, false, FS_RULE_ADAMW, true, false},
    {FS_BF16, FS_BF16, FS_F32, true, true, false, FS_RULE_LION, false, false},
    {FS_F32, FS_F32, FS_F32, false, true, false, FS_RULE_ADAGRAD, false, false},
    {FS_F32, FS_BF16, FS_BF16, false, false, false, FS_RULE_ADAMW, true, true},
};

static const struct {
    fs_dtype acc, src;
    size_t src_n;
    bool accumulate;
} sums[] = {
    {FS_F32, FS_F32, 1, false}, {FS_F32, FS_F32, 2, false}, {FS_F32, FS_F32, 3, false},
    {FS_F32, FS_F32, 5, true},  {FS_F32, FS_BF16, 2, true}, {FS_BF16, FS_BF16, 4, false},
    {FS_F16, FS_F16, 3, true},  {FS_F64, FS_F64, 3, true},  {FS_F64, FS_F32, 2, false},
    {FS_F32, FS_F64, 2, true},  {FS_F32, FS_F32, 0, false}, {FS_F32, FS_F32, 1, true},
};

enum { GOLDEN_CONVERT, GOLDEN_SUM, GOLDEN_UPDATE, GOLDEN_COMBINE, GOLDEN_COUNT };

static const char *const golden_names[GOLDEN_COUNT] = {"convert", "sum", "update", "combine"};

/* Equal on x86-64 and Arm. They change only with a change of arithmetic, on purpose. */
static const uint64_t golden[GOLDEN_COUNT] = {
    [GOLDEN_CONVERT] = 0x417030cee6e2fe36u,
    [GOLDEN_SUM] = 0x768f1d4ec748d6b3u,
    [GOLDEN_UPDATE] = 0xd4a35a377acf0055u,
    [GOLDEN_COMBINE] = 0x62d1f686260853bbu,
};

static uint64_t
mix(uint64_t hash, uint64_t value)
{
    return hash_bytes(hash, &value, sizeof value);
}

static void
run_all(const fs_exec *exec, uint64_t *hash)
{
    static const fs_dtype float_dtypes[] = {FS_F32, FS_F64, FS_BF16, FS_F16};
    for (int i = 0; i < GOLDEN_COUNT; i++) {
        hash[i] = HASH_START;
    }
    for (size_t l = 0; l < LENGTHS_N; l++) {
        size_t n = lengths[l];
        for (size_t d = 0; d < 16; d++) {
            hash[GOLDEN_CONVERT] = mix(hash[GOLDEN_CONVERT], convert_case(exec, float_dtypes[d / 4],
                                                                          float_dtypes[d % 4], n));
        }
        for (size_t i = 0; i < sizeof sums / sizeof sums[0]; i++) {
            hash[GOLDEN_SUM] =
                mix(hash[GOLDEN_SUM],
                    sum_case(exec, sums[i].acc, sums[i].src, sums[i].src_n, sums[i].accumulate, n));
        }
        for (size_t i = 0; i < sizeof updates / sizeof updates[0]; i++) {
            hash[GOLDEN_UPDATE] = mix(hash[GOLDEN_UPDATE], update_case(exec, updates[i], n));
        }
        for (int op = FS_SUM; op <= FS_MIN; op++) {
            hash[GOLDEN_COMBINE] = mix(hash[GOLDEN_COMBINE], combine_case(exec, op, n));
        }
        (void)copy_case(exec, n * 4 + 1);
        split_case(exec, FS_RULE_ADAM, n);
        split_case(exec, FS_RULE_ADAMW, n);
    }
    (void)copy_case(exec, (size_t)3 * 1024 * 1024 + 17);
    all_halves(exec, FS_BF16);
    all_halves(exec, FS_F16);
}

static void
test_find_nonfinite(const fs_exec *exec)
{
    static const fs_dtype dtypes[] = {FS_F32, FS_F64, FS_BF16, FS_F16};
    static const size_t places[] = {0, 1, 1023, 1024, 40000, 69999, 70000};
    for (size_t d = 0; d < 4; d++) {
        for (size_t p = 0; p < sizeof places / sizeof places[0]; p++) {
            unsigned char *x = array(dtypes[d], 70001, 51);
            size_t nbytes = fs_dtype_nbytes(dtypes[d]);
            memset(x, 0, 70001 * nbytes);
            /* Infinity where the first bad one is, NaN at the end. */
            memset(x + 70000 * nbytes, 0xff, nbytes);
            uint64_t infinity = dtypes[d] == FS_F64   ? 0x7ff0000000000000u
                                : dtypes[d] == FS_F32 ? 0x7f800000u
                                : dtypes[d] == FS_F16 ? 0x7c00u
                                                      : 0x7f80u;
            memcpy(x + places[p] * nbytes, &infinity, nbytes);
            uint64_t found = 0;
            exec->device->find_nonfinite(exec, x, dtypes[d], 70001, &found);
            CHECK(found == places[p], "%s: found %llu, not %zu", fs_dtype_name(dtypes[d]),
                  (unsigned long long)found, places[p]);
            free(x);
        }
    }
}

/* Runs every case on the table of exec and compares with the golden values. */
static void
check_table(const fs_exec *exec)
{
    uint64_t hash[GOLDEN_COUNT];
    run_all(exec, hash);
    test_find_nonfinite(exec);
    for (int i = 0; i < GOLDEN_COUNT; i++) {
        CHECK(hash[i] == golden[i], "%s with %zu threads: %s gives 0x%016llx, not 0x%016llx",
              exec->device->name, exec->pool == NULL ? (size_t)1 : fs_pool_threads(exec->pool),
              golden_names[i], (unsigned long long)hash[i], (unsigned long long)golden[i]);
    }
}

#endif
