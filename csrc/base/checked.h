/* Size arithmetic that says when it would wrap. Every size that comes from a caller or a file goes
 * through these before it reaches an allocation or an offset. */
#ifndef FS_BASE_CHECKED_H
#define FS_BASE_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

static inline bool
fs_add_fits(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

static inline bool
fs_mul_fits(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

FS_NODISCARD static inline fs_status
fs_add_size(size_t a, size_t b, size_t *out)
{
    return fs_add_fits(a, b, out) ? FS_OK : FS_FAIL(FS_EINVAL, "size overflow: %zu + %zu", a, b);
}

FS_NODISCARD static inline fs_status
fs_mul_size(size_t a, size_t b, size_t *out)
{
    return fs_mul_fits(a, b, out) ? FS_OK : FS_FAIL(FS_EINVAL, "size overflow: %zu * %zu", a, b);
}

/* n rounded up to a multiple of step (a power of two); the caller has checked that it fits. */
static inline size_t
fs_round_up(size_t n, size_t step)
{
    return (n + step - 1) & ~(step - 1);
}

static inline size_t
fs_min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t
fs_max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

#endif
