/* Functions that glibc 2.28 offers only under another name (see glibc_2_28.h). Hidden: they serve this
 * library alone. */
#define _GNU_SOURCE
#include <sys/stat.h>

#if defined(__x86_64__)
#define STAT_VERSION 1
#else
#define STAT_VERSION 0
#endif

#define HIDDEN __attribute__((visibility("hidden")))

int __fxstat(int version, int fd, struct stat *out);
int __xstat(int version, const char *path, struct stat *out);

HIDDEN int
fstat(int fd, struct stat *out)
{
    return __fxstat(STAT_VERSION, fd, out);
}

HIDDEN int
stat(const char *path, struct stat *out)
{
    return __xstat(STAT_VERSION, path, out);
}
