/* Functions that glibc 2.28 offers only under another name (see glibc_2_28.h). Hidden: they serve
 * this library alone. */
#define _GNU_SOURCE
#include <sys/stat.h>

#if defined(__x86_64__)
#define STAT_VERSION 1
#else
#define STAT_VERSION 0
#endif

/* name(where, out) as glibc 2.28 has it, for struct type. */
#define OLD_STAT(name, old, where_type, type)                              \
    int old(int version, where_type where, struct type *out);              \
    __attribute__((visibility("hidden"))) int                              \
    name(where_type where, struct type *out)                               \
    {                                                                      \
        return old(STAT_VERSION, where, out);                              \
    }

OLD_STAT(fstat, __fxstat, int, stat)
OLD_STAT(stat, __xstat, const char *, stat)
OLD_STAT(lstat, __lxstat, const char *, stat)
OLD_STAT(fstat64, __fxstat64, int, stat64)
OLD_STAT(stat64, __xstat64, const char *, stat64)
OLD_STAT(lstat64, __lxstat64, const char *, stat64)
