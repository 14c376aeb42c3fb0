/* What must end the program, tried in a child: code that a device would punish. */
#ifndef FS_TESTS_ENDS_H
#define FS_TESTS_ENDS_H

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* The function must end a child by a signal, saying this on stderr (NULL: anything). */
static inline void
check_ends(void (*function)(void), const char *saying)
{
    int ends[2], status = 0;
    char text[4096];
    size_t length = 0;
    CHECK(pipe(ends) == 0, "no pipe");
    pid_t child = fork();
    CHECK(child >= 0, "no child");
    if (child == 0) {
        (void)dup2(ends[1], 2);
        (void)signal(SIGSEGV, SIG_DFL);
        (void)signal(SIGABRT, SIG_DFL);
        (void)alarm(60);
        function();
        _exit(0);
    }
    (void)close(ends[1]);
    for (ssize_t got = 1; got > 0 && length < sizeof text - 1; length += (size_t)got) {
        got = read(ends[0], text + length, sizeof text - 1 - length);
        CHECK(got >= 0, "no answer");
    }
    text[length] = '\0';
    (void)close(ends[0]);
    CHECK(waitpid(child, &status, 0) == child, "the child is lost");
    CHECK(WIFSIGNALED(status), "it ended with %d, and said '%s'", status, text);
    CHECK(saying == NULL || strstr(text, saying) != NULL, "it said '%s', not '%s'", text, saying);
}

#endif
