/* What fuzz targets share: a promise that ends the program when it is broken, and bytes as a file.
 *
 * Each fuzz_*.c is one target in libFuzzer's form, LLVMFuzzerTestOneInput; replay.c runs one over
 * files where there is no libFuzzer. Inputs are at most FS_FUZZ_NBYTES_MAX bytes. */
#ifndef FS_TESTS_FUZZ_H
#define FS_TESTS_FUZZ_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FS_FUZZ_NBYTES_MAX 4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

/* What the code under test promises. Not assert: NDEBUG must not turn it off. */
#define PROMISE(condition)                                                             \
    do {                                                                               \
        if (!(condition)) {                                                            \
            (void)fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                   \
        }                                                                              \
    } while (0)

/* A file that holds these bytes and nothing else: *fd, or a memory file where that is -1. */
static inline void
fuzz_file(int *fd, const void *head, size_t head_nbytes, const void *rest, size_t rest_nbytes,
          size_t zeros_nbytes)
{
    if (*fd < 0) {
        *fd = memfd_create("fuzz", MFD_CLOEXEC);
    }
    PROMISE(*fd >= 0 && ftruncate(*fd, 0) == 0);
    PROMISE(pwrite(*fd, head, head_nbytes, 0) == (ssize_t)head_nbytes);
    PROMISE(pwrite(*fd, rest, rest_nbytes, (off_t)head_nbytes) == (ssize_t)rest_nbytes);
    PROMISE(ftruncate(*fd, (off_t)(head_nbytes + rest_nbytes + zeros_nbytes)) == 0);
}

#endif
