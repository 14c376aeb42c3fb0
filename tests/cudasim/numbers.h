/* Numbers of 16 bits, by the words of the standards: the stand-in shares no arithmetic with what it
 * tests. Rounded to nearest, ties to even. */
#ifndef FS_CUDASIM_NUMBERS_H
#define FS_CUDASIM_NUMBERS_H

#include <cmath>
#include <cstdint>
#include <cstring>

static inline float
sim_of_bits(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float
sim_of_half(uint16_t bits)
{
    float magnitude;
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) {
        magnitude = sim_of_bits(0x7f800000u | static_cast<uint32_t>(fraction) << 13);
    } else if (exponent == 0) {
        magnitude = std::ldexp(static_cast<float>(fraction), -24);
    } else {
        magnitude = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    }
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

static inline float
sim_of_bfloat16(uint16_t bits)
{
    return sim_of_bits(static_cast<uint32_t>(bits) << 16);
}

static inline uint16_t
sim_to_bfloat16(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (std::isnan(value)) {
        return static_cast<uint16_t>(bits >> 16 | 0x40);
    }
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t
sim_to_half(float value)
{
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    float magnitude = std::fabs(value);
    if (std::isnan(value)) {
        return 0x7fff;
    }
    if (magnitude >= 65520.0f) {
        return static_cast<uint16_t>(sign | 0x7c00);
    }
    /* In units of the last place: rounded to even by nearbyint. */
    int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
    float units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
    int bits = static_cast<int>(units) + (magnitude < 0x1p-14f ? 0 : (exponent + 14) << 10);
    return static_cast<uint16_t>(sign | bits);
}

#endif
