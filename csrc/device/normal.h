/* Normal numbers for initial weights: Philox 4x32-10 (Salmon et al. 2011) through Box and Muller
 * 1958. Number i of a stream is number i mod 4 of block i / 4: a pure function of (seed, stream,
 * i), with equal bits on every instruction set and on a GPU. */
#ifndef FS_DEVICE_NORMAL_H
#define FS_DEVICE_NORMAL_H

#include <stdint.h>

#include "../base/math.h"

#define FS_PHILOX_ROUNDS 10

/* Philox's counter: words 0 and 1 are the block, 2 and 3 the stream. The key is the seed. One round
 * on the four words; fs_philox_next makes the next round's key. */
FS_HD void
fs_philox_round(uint32_t *x0, uint32_t *x1, uint32_t *x2, uint32_t *x3, uint32_t key0,
                uint32_t key1)
{
    uint64_t product0 = (uint64_t)0xD2511F53u * *x0;
    uint64_t product1 = (uint64_t)0xCD9E8D57u * *x2;
    uint32_t old1 = *x1, old3 = *x3;
    *x0 = (uint32_t)(product1 >> 32) ^ old1 ^ key0;
    *x1 = (uint32_t)product1;
    *x2 = (uint32_t)(product0 >> 32) ^ old3 ^ key1;
    *x3 = (uint32_t)product0;
}

FS_HD void
fs_philox_next(uint32_t *key0, uint32_t *key1)
{
    *key0 += 0x9E3779B9u;
    *key1 += 0xBB67AE85u;
}

/* Two independent normal numbers from two words. The radius takes 24 bits of the first; the
 * angle is a quarter turn (2 bits) and an angle within an eighth of it either way, by Taylor
 * polynomials. */
FS_HD void
fs_box_muller(uint32_t word0, uint32_t word1, float *out0, float *out1)
{
    float uniform = ((float)(int32_t)(word0 >> 8) + 0.5f) * 0x1p-24f;
    float radius = fs_sqrt_f32(-2.0f * fs_log_f32(uniform));
    float a =
        ((float)(int32_t)((word1 >> 6) & 0x00ffffffu) - 8388607.5f) * (1.57079633f * 0x1p-24f);
    float a2 = a * a;
    float sine =
        a +
        a * a2 * (-0.16666667f + a2 * (8.3333333e-3f + a2 * (-1.9841270e-4f + a2 * 2.7557319e-6f)));
    float cosine =
        1.0f + a2 * (-0.5f + a2 * (0.041666667f + a2 * (-1.3888889e-3f + a2 * 2.4801587e-5f)));
    uint32_t quarter = word1 >> 30;
    float first = (quarter & 1u) != 0 ? -sine : cosine;
    float second = (quarter & 1u) != 0 ? cosine : sine;
    float sign = (quarter & 2u) != 0 ? -1.0f : 1.0f;
    *out0 = radius * sign * first;
    *out1 = radius * sign * second;
}

#endif
