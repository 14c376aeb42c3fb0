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

/* table[0] is the classic one; table[k] moves a byte over k more zero bytes, so that eight bytes are
 * looked up at once. Filled at first use: two threads that race write equal values, and the flag is
 * set (release) after them and read (acquire) before. */
static uint32_t table[8][256];
static _Atomic int table_ready;

static void
table_fill(void)
{
    if (atomic_load_explicit(&table_ready, memory_order_acquire) == 2) {
        return;
    }
    int idle = 0;
    if (!atomic_compare_exchange_strong(&table_ready, &idle, 1)) {
        while (atomic_load_explicit(&table_ready, memory_order_acquire) != 2) {
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
    atomic_store_explicit(&table_ready, 2, memory_order_release);
}

uint32_t
fs_crc32c_table(uint32_t crc, const void *bytes, size_t nbytes)
{
    table_fill();
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

__attribute__((target("sse4.2"))) static uint32_t
crc32c_sse42(uint32_t crc, const void *bytes, size_t nbytes)
{
    const unsigned char *at = bytes;
    uint64_t wide = (uint32_t)~crc;
    for (; nbytes >= 8; nbytes -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        wide = _mm_crc32_u64(wide, word);
    }
    uint32_t narrow = (uint32_t)wide;
    for (; nbytes > 0; nbytes--, at++) {
        narrow = _mm_crc32_u8(narrow, *at);
    }
    return ~narrow;
}

#define HARDWARE crc32c_sse42
#define HARDWARE_NAME "sse4.2"
#define HARDWARE_RUNS __builtin_cpu_supports("sse4.2")

#elif defined(__aarch64__) && defined(__linux__)

__attribute__((target("+crc"))) static uint32_t
crc32c_arm(uint32_t crc, const void *bytes, size_t nbytes)
{
    const unsigned char *at = bytes;
    crc = ~crc;
    for (; nbytes >= 8; nbytes -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        crc = __builtin_aarch64_crc32cx(crc, word);
    }
    for (; nbytes > 0; nbytes--, at++) {
        crc = __builtin_aarch64_crc32cb(crc, *at);
    }
    return ~crc;
}

#define HARDWARE crc32c_arm
#define HARDWARE_NAME "armv8-crc"
#define HARDWARE_RUNS ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0)

#endif

uint32_t
fs_crc32c(uint32_t crc, const void *bytes, size_t nbytes)
{
#ifdef HARDWARE
    if (HARDWARE_RUNS) {
        return HARDWARE(crc, bytes, nbytes);
    }
#endif
    return fs_crc32c_table(crc, bytes, nbytes);
}

const char *
fs_crc32c_name(void)
{
#ifdef HARDWARE
    if (HARDWARE_RUNS) {
        return HARDWARE_NAME;
    }
#endif
    return "table";
}
