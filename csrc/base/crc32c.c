#define _GNU_SOURCE
#include "crc32c.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1UL << 7)
#endif
#endif

#define POLYNOMIAL 0x82f63b78u /* 0x1edc6f41, bits reversed */

// ---- by table -----------------------------------------------------------------------------------

/* Bytes of one of the three stretches that the instruction works on at once (it takes three cycles
 * and can begin one each cycle). */
#define LANE_NBYTES ((size_t)8192)

/* table[0] is the classic one; table[k] moves a byte over k more zero bytes, so that eight bytes
 * are looked up at once. shift moves a register over LANE_NBYTES zero bytes, a byte of it at a
 * time. Filled at first use: the flag is set (release) after them and read (acquire) before. */
static uint32_t table[8][256], shift[4][256];
static _Atomic int tables_ready;

static void
fill_shift(void)
{
    uint32_t of_bit[32];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t crc = (uint32_t)1 << bit;
        for (size_t i = 0; i < LANE_NBYTES; i++) {
            crc = (crc >> 8) ^ table[0][crc & 0xffu];
        }
        of_bit[bit] = crc;
    }
    for (int k = 0; k < 4; k++) {
        for (uint32_t i = 0; i < 256; i++) { /* linear: the sum over the bits of the byte */
            shift[k][i] = 0;
            for (int bit = 0; bit < 8; bit++) {
                shift[k][i] ^= (i >> bit & 1u) ? of_bit[8 * k + bit] : 0u;
            }
        }
    }
}

static void
tables_fill(void)
{
    if (atomic_load_explicit(&tables_ready, memory_order_acquire) == 2) {
        return;
    }
    int idle = 0;
    if (!atomic_compare_exchange_strong(&tables_ready, &idle, 1)) {
        while (atomic_load_explicit(&tables_ready, memory_order_acquire) != 2) {
        }
        return;
    }
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ ((crc & 1u) ? POLYNOMIAL : 0u);
        }
        table[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; i++) {
        for (int k = 1; k < 8; k++) {
            uint32_t before = table[k - 1][i];
            table[k][i] = (before >> 8) ^ table[0][before & 0xffu];
        }
    }
    fill_shift();
    atomic_store_explicit(&tables_ready, 2, memory_order_release);
}

uint32_t
fs_crc32c_table(uint32_t crc, const void *bytes, size_t nbytes)
{
    tables_fill();
    const unsigned char *at = bytes;
    crc = ~crc;
    for (; nbytes >= 8; nbytes -= 8, at += 8) {
        uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
                              (uint32_t)at[3] << 24);
        crc = table[7][low & 0xffu] ^ table[6][(low >> 8) & 0xffu] ^
              table[5][(low >> 16) & 0xffu] ^ table[4][low >> 24] ^ table[3][at[4]] ^
              table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
    }
    for (; nbytes > 0; nbytes--, at++) {
        crc = (crc >> 8) ^ table[0][(crc ^ *at) & 0xffu];
    }
    return ~crc;
}

// ---- by instruction -----------------------------------------------------------------------------

#if defined(__x86_64__)

#define HARDWARE_TARGET "sse4.2"
#define HARDWARE_NAME "sse4.2"
#define HARDWARE_RUNS __builtin_cpu_supports("sse4.2")
#define CRC_8(crc, word) ((uint32_t)_mm_crc32_u64((crc), (word)))
#define CRC_1(crc, byte) _mm_crc32_u8((crc), (byte))

#elif defined(__aarch64__) && defined(__linux__)

#define HARDWARE_TARGET "+crc"
#define HARDWARE_NAME "armv8-crc"
#define HARDWARE_RUNS ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0)
#define CRC_8(crc, word) __builtin_aarch64_crc32cx((crc), (word))
#define CRC_1(crc, byte) __builtin_aarch64_crc32cb((crc), (byte))

#endif

#ifdef HARDWARE_TARGET

static uint32_t
over_lane(uint32_t crc)
{
    return shift[0][crc & 0xffu] ^ shift[1][(crc >> 8) & 0xffu] ^ shift[2][(crc >> 16) & 0xffu] ^
           shift[3][crc >> 24];
}

static uint64_t
word_at(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

__attribute__((target(HARDWARE_TARGET))) static uint32_t
crc32c_hardware(uint32_t crc, const void *bytes, size_t nbytes)
{
    const unsigned char *at = bytes;
    crc = ~crc;
    for (; nbytes >= 3 * LANE_NBYTES; nbytes -= 3 * LANE_NBYTES, at += 3 * LANE_NBYTES) {
        uint32_t second = 0, third = 0;
        for (size_t i = 0; i < LANE_NBYTES; i += 8) {
            crc = CRC_8(crc, word_at(at + i));
            second = CRC_8(second, word_at(at + LANE_NBYTES + i));
            third = CRC_8(third, word_at(at + 2 * LANE_NBYTES + i));
        }
        crc = over_lane(over_lane(crc) ^ second) ^ third;
    }
    for (; nbytes >= 8; nbytes -= 8, at += 8) {
        crc = CRC_8(crc, word_at(at));
    }
    for (; nbytes > 0; nbytes--, at++) {
        crc = CRC_1(crc, *at);
    }
    return ~crc;
}

#endif

uint32_t
fs_crc32c(uint32_t crc, const void *bytes, size_t nbytes)
{
#ifdef HARDWARE_TARGET
    if (HARDWARE_RUNS) {
        tables_fill();
        return crc32c_hardware(crc, bytes, nbytes);
    }
#endif
    return fs_crc32c_table(crc, bytes, nbytes);
}

const char *
fs_crc32c_name(void)
{
#ifdef HARDWARE_TARGET
    if (HARDWARE_RUNS) {
        return HARDWARE_NAME;
    }
#endif
    return "table";
}
