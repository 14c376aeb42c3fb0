/* Element arithmetic, written once: for every instruction set of the CPU and for CUDA.
 *
 * Rules that keep the bits equal everywhere: separate multiply and add (the build turns contraction
 * off), no call of libm (its results differ between systems), no fmaxf or fminf (signed zeros and
 * NaN differ), only + - * / and square root, which IEEE 754 rounds correctly. Everything is free of
 * branches, so that a loop over it becomes vector code. */
#ifndef FS_BASE_MATH_H
#define FS_BASE_MATH_H

#include <stdint.h>
#include <string.h>

#if (defined(__FAST_MATH__) && __FAST_MATH__) || \
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "built with -ffast-math or -ffinite-math-only: tests for NaN would vanish and sums change"
#endif

#ifdef __CUDACC__
#define FS_HD static __host__ __device__ __forceinline__
#else
#define FS_HD static inline
#endif

// ---- bits ---------------------------------------------------------------------------------------

FS_HD uint32_t
fs_bits_of_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

FS_HD float
fs_f32_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

FS_HD uint64_t
fs_bits_of_f64(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

FS_HD double
fs_f64_of_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Neither infinite nor NaN: decided on the exponent's bits, which no compiler flag can fold
 * away. */
FS_HD int
fs_f32_is_finite(float x)
{
    return (fs_bits_of_f32(x) & 0x7f800000u) != 0x7f800000u;
}

FS_HD int
fs_f64_is_finite(double x)
{
    return (fs_bits_of_f64(x) & 0x7ff0000000000000u) != 0x7ff0000000000000u;
}

FS_HD float
fs_sqrt_f32(float x)
{
#ifdef __CUDACC__
    return sqrtf(x);
#else
    return __builtin_sqrtf(x);
#endif
}

// ---- bfloat16, float16 --------------------------------------------------------------------------

/* Exact; a signalling NaN becomes quiet. */
FS_HD float
fs_f32_of_bf16(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float x = fs_f32_of_bits(bits);
    return fs_f32_of_bits(x != x ? bits | 0x00400000u : bits);
}

/* The same, but a signalling NaN stays one: for values that arithmetic or fs_bf16_of_f32, which
 * make it quiet, are next to see. */
FS_HD float
fs_f32_of_bf16_raw(uint16_t h)
{
    return fs_f32_of_bits((uint32_t)h << 16);
}

/* To nearest, ties to even; NaN stays NaN (quiet, its leading payload kept), overflow becomes
 * infinity. */
FS_HD uint16_t
fs_bf16_of_f32(float x)
{
    uint32_t bits = fs_bits_of_f32(x);
    uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    uint32_t nan = bits | 0x00400000u;
    uint32_t chosen = x != x ? nan : rounded; /* before the shift: one width throughout a loop */
    return (uint16_t)(chosen >> 16);
}

/* Up or down at random, in proportion: up if the 16 bits that are cut off and 16 random ones carry.
 * So the mean of many roundings is x. What bf16 holds stays; NaN stays NaN (quiet); infinity
 * stays. */
FS_HD uint16_t
fs_bf16_of_f32_random(float x, uint32_t random16)
{
    uint32_t bits = fs_bits_of_f32(x);
    uint32_t rounded = bits + random16;
    uint32_t nan = bits | 0x00400000u;
    uint32_t chosen = x != x ? nan : rounded;
    return (uint16_t)(chosen >> 16);
}

/* x as a bf16 number, which is returned, and a remainder. The number is x rounded to nearest, ties
 * away from zero: the remainder is the lower 16 bits, and its first bit says that the upper ones
 * were rounded up (ties to even would need a bit more). NaN becomes quiet; of its payload the upper
 * part stays. */
FS_HD uint16_t
fs_split_f32(float x, uint16_t *remainder)
{
    uint32_t bits = fs_bits_of_f32(x);
    uint32_t quiet = (bits & 0xffff0000u) | 0x00400000u;
    bits = x != x ? quiet : bits;
    *remainder = (uint16_t)bits;
    return (uint16_t)((bits + 0x8000u) >> 16);
}

/* The float that was split. */
FS_HD float
fs_join_f32(uint16_t rounded, uint16_t remainder)
{
    uint32_t up = (uint32_t)remainder >> 15;
    return fs_f32_of_bits((((uint32_t)rounded - up) << 16) | remainder);
}

/* Exact, subnormal halves included; a signalling NaN becomes quiet. */
FS_HD float
fs_f32_of_f16(uint16_t h)
{
    uint32_t sign = ((uint32_t)h & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)h & 0x7fffu;
    uint32_t normal = (magnitude << 13) + 0x38000000u;      /* exponent bias 15 -> 127 */
    uint32_t special = (magnitude << 13) | 0x7f800000u;     /* infinity, NaN */
    uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
    /* A subnormal half is a small integer times 2^-24: no subnormal fp32 on the way. */
    uint32_t small = fs_bits_of_f32((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t bits = magnitude < 0x0400u ? small : normal;
    bits = magnitude >= 0x7c00u ? (special | quiet) : bits;
    return fs_f32_of_bits(sign | bits);
}

/* To nearest, ties to even; from 65520 on infinity; NaN stays NaN, quiet. */
FS_HD uint16_t
fs_f16_of_f32(float x)
{
    uint32_t bits = fs_bits_of_f32(x);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    /* Below 2^-14 the sum with 0.5, whose last bit is 2^-24, rounds to a multiple of 2^-24. */
    float below = fs_f32_of_bits(magnitude < 0x38800000u ? magnitude : 0u);
    uint32_t small = fs_bits_of_f32(below + 0.5f) - 0x3f000000u;
    uint32_t special =
        magnitude > 0x7f800000u ? (0x7e00u | ((magnitude >> 13) & 0x01ffu)) : 0x7c00u;
    uint32_t half = magnitude < 0x38800000u ? small : normal;
    half = magnitude >= 0x477ff000u ? special : half;
    return (uint16_t)(sign | half);
}

/* fp32 nearest below in magnitude, last bit set if inexact ("round to odd"): rounding the result to
 * bf16 or fp16 then equals rounding x once. NaN stays NaN. */
FS_HD float
fs_f32_odd_of_f64(double x)
{
    float nearest = (float)x;
    uint32_t bits = fs_bits_of_f32(nearest);
    double back = (double)nearest;
    double size = x < 0.0 ? -x : x;
    double back_size = back < 0.0 ? -back : back;
    uint32_t toward_zero = back_size > size ? bits - 1u : bits;
    uint32_t odd = back != x ? (toward_zero | 1u) : bits;
    return fs_f32_of_bits(x != x ? (bits | 0x00400000u) : odd);
}

// ---- random numbers -----------------------------------------------------------------------------

/* Every bit of x turns about half of the bits of the result, which is one to one.
 * Steele, Lea and Flood 2014 (SplitMix), finaliser of Stafford's variant 13. */
FS_HD uint64_t
fs_mix_u64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* A random number from a key and a counter, without state: the same wherever and whenever it is
 * asked for. Two rounds of a 32-bit mixer (multipliers by C. Wellons, "Prospecting for Hash
 * Functions"), one half of the key in each, so that the numbers of two keys are not those of each
 * other shifted. */
FS_HD uint32_t
fs_random_u32(uint64_t key, uint32_t counter)
{
    uint32_t x = counter + (uint32_t)key;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    x = (x ^ (x >> 16)) + (uint32_t)(key >> 32);
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// ---- small moments ------------------------------------------------------------------------------

/* Moments below 2^-100 in magnitude become zero, so that a parameter whose gradient stays zero does
 * not decay into subnormal numbers, which many processors handle a hundred times slower. The second
 * moment is flushed by the same bound. NaN is kept. */
#define FS_TINY_MOMENT 0x1p-100f

FS_HD float
fs_flush_tiny(float x)
{
    float size = fs_f32_of_bits(fs_bits_of_f32(x) & 0x7fffffffu);
    return size < FS_TINY_MOMENT ? 0.0f : x;
}

// ---- exp, log -----------------------------------------------------------------------------------

/* e^x within 2 ulp. Below -87.33 the result is 0 (it would be subnormal), above 88.72 infinity; NaN
 * stays NaN. x = n ln 2 + r with ln 2 in two constants, then a polynomial of degree 6 in r. */
FS_HD float
fs_exp_f32(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float shifted = x * 1.44269504f + shift;
    float n = shifted - shift;
    float r = x - n * 0.693359375f; /* exact: 10 bits times at most 8 */
    r = r - n * -2.12194440e-4f;
    float q = 0.0013814318f;
    q = q * r + 0.008368852f;
    q = q * r + 0.0416684f;
    q = q * r + 0.1666652f;
    q = q * r + 0.49999994f;
    float p = (q * (r * r) + r) + 1.0f;
    /* 2^n as two factors: n may be 128 or -126, and each factor must be a normal number. */
    int32_t whole = (int32_t)(fs_bits_of_f32(shifted) - 0x4b400000u);
    uint32_t half = (uint32_t)(whole >> 1);
    uint32_t rest = (uint32_t)whole - half;
    float y = p * fs_f32_of_bits((half + 127u) << 23) * fs_f32_of_bits((rest + 127u) << 23);
    y = x < -87.33f ? 0.0f : y;
    return x > 88.722839f ? fs_f32_of_bits(0x7f800000u) : y;
}

/* Natural logarithm within 2 ulp for normal x > 0; 0 gives -infinity, negative and NaN give NaN.
 * Subnormal x is taken as 0. */
FS_HD float
fs_log_f32(float x)
{
    uint32_t bits = fs_bits_of_f32(x);
    /* x = 2^e * m with m in [sqrt(1/2), sqrt(2)). */
    uint32_t moved = bits - 0x3f3504f3u;
    int32_t e = (int32_t)moved >> 23;
    float m = fs_f32_of_bits((moved & 0x007fffffu) + 0x3f3504f3u);
    float f = m - 1.0f;
    float q = -0.0763446f;
    q = q * f + 0.12761563f;
    q = q * f + -0.1316019f;
    q = q * f + 0.1420176f;
    q = q * f + -0.16623357f;
    q = q * f + 0.20001227f;
    q = q * f + -0.2500082f;
    q = q * f + 0.3333333f;
    float f2 = f * f;
    float n = (float)e;
    float y = n * -2.12194440e-4f + q * f * f2;
    y = (y - 0.5f * f2) + f;
    y = y + n * 0.693359375f;
    y = bits < 0x00800000u ? fs_f32_of_bits(0xff800000u) : y;
    y = bits == 0x7f800000u ? x : y;
    y = x < 0.0f ? fs_f32_of_bits(0x7fc00000u) : y;
    return x != x ? x : y;
}

/* Natural logarithm of a normal x > 0, within 1e-15: 2 atanh((m - 1) / (m + 1)) by its series. For
 * one value a row, not for a loop over elements: it branches. */
FS_HD double
fs_log_f64(double x)
{
    uint64_t bits = fs_bits_of_f64(x);
    int64_t e = (int64_t)(bits >> 52) - 1023;
    double m = fs_f64_of_bits((bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e += 1;
    }
    double f = (m - 1.0) / (m + 1.0), f2 = f * f, sum = 0.0;
    for (int k = 23; k >= 1; k -= 2) {
        sum = sum * f2 + 1.0 / (double)k;
    }
    return 2.0 * f * sum + (double)e * 0.69314718055994531;
}

#endif
