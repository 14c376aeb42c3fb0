/* What C tests share: CHECK says what failed, where, with which values, and ends the program. */
#ifndef FS_TESTS_CHECK_H
#define FS_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"

/* Does this build look for data races alone? Of cases that differ in values, or that one thread
 * runs, it needs no more than one: the other flavours run them all. */
#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#define UNDER_TSAN __has_feature(thread_sanitizer)
#else
#define UNDER_TSAN 0
#endif

/* Sanitizers make the stand-in's fibers slow: tests over it run one case in so many there, and all
 * in a plain build. */
#if UNDER_TSAN
#define ONE_CASE_IN 100 /* of races, one case of a kind says most */
#elif defined(__SANITIZE_ADDRESS__)
#define ONE_CASE_IN 10
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ONE_CASE_IN 10
#endif
#endif
#ifndef ONE_CASE_IN
#define ONE_CASE_IN 1
#endif

/* condition must hold; the rest is a printf format and its values. */
#define CHECK(condition, ...)                                                   \
    do {                                                                        \
        if (!(condition)) {                                                     \
            (void)fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            (void)fprintf(stderr, __VA_ARGS__);                                 \
            (void)fputc('\n', stderr);                                          \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

/* expression is a fs_status and must be FS_OK. */
#define CHECK_OK(expression)                                                                    \
    do {                                                                                        \
        fs_status check_status_ = (expression);                                                 \
        CHECK(check_status_ == FS_OK, "%s gave status %d: %s", #expression, (int)check_status_, \
              fs_status_message());                                                             \
    } while (0)

/* expression is a fs_status and must be this one. */
#define CHECK_STATUS(expression, expected)                                               \
    do {                                                                                 \
        fs_status check_status_ = (expression);                                          \
        CHECK(check_status_ == (expected), "%s gave status %d, not %d: %s", #expression, \
              (int)check_status_, (int)(expected),                                       \
              check_status_ == FS_OK ? "" : fs_status_message());                        \
    } while (0)

#endif
