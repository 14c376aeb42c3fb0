/* Included before every file when a wheel is built (FLATSHARD_MANYLINUX=1), with glibc_2_28.c
 * linked in.
 *
 * Newer releases of glibc moved functions between libraries and gave them new versions. This asks
 * for the versions of old, whose meaning is the same, so that what is linked here runs on glibc
 * 2.28; there they are in libdl, libpthread and libm, which Python itself has loaded. tools/dist.py
 * finds out whether the list is complete. Must not include anything: a file's own feature macros
 * come later. */
#ifndef FS_TOOLS_GLIBC_2_28_H
#define FS_TOOLS_GLIBC_2_28_H

#if defined(__x86_64__)
#define FS_OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FS_OLDEST "GLIBC_2.17"
#else
#error "no list for this processor: build without FLATSHARD_MANYLINUX"
#endif

#define FS_OLD(name) __asm__(".symver " #name "," #name "@" FS_OLDEST)

FS_OLD(dladdr);
FS_OLD(dlclose);
FS_OLD(dlerror);
FS_OLD(dlopen);
FS_OLD(dlsym);
FS_OLD(pthread_attr_setstacksize);
FS_OLD(pthread_create);
FS_OLD(pthread_detach);
FS_OLD(pthread_getspecific);
FS_OLD(pthread_join);
FS_OLD(pthread_key_create);
FS_OLD(pthread_key_delete);
FS_OLD(pthread_kill);
FS_OLD(pthread_mutex_trylock);
FS_OLD(pthread_mutexattr_destroy);
FS_OLD(pthread_mutexattr_init);
FS_OLD(pthread_mutexattr_setpshared);
FS_OLD(pthread_mutexattr_settype);
FS_OLD(pthread_once);
FS_OLD(pthread_setspecific);
FS_OLD(pthread_sigmask);
#if defined(__x86_64__) /* elsewhere the only versions, or new enough */
FS_OLD(exp);
FS_OLD(log);
FS_OLD(log2);
FS_OLD(pow);
#endif

#endif
