/* CRC-32C (Castagnoli), the checksum of blocks: instructions where the processor has them. */
#ifndef FS_BASE_CRC32C_H
#define FS_BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of a text that continues one whose checksum is crc (0 to begin). */
uint32_t fs_crc32c(uint32_t crc, const void *bytes, size_t nbytes);

/* The same by table, on any processor: what the instructions are tested against. */
uint32_t fs_crc32c_table(uint32_t crc, const void *bytes, size_t nbytes);

/* "sse4.2", "armv8-crc" or "table": what fs_crc32c uses here. */
const char *fs_crc32c_name(void);

#endif
