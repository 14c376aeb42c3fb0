/* Where a rank is that did not come: its Python line, asked of it when the job fails.
 *
 * A rank that answers has a handler for a real-time signal: one that knows Python (faulthandler's)
 * writes the lines of the interrupted thread to a descriptor of the data file, at this rank's
 * answer, and then calls ours, which says that it is there. Handlers run wherever the thread is,
 * in Python or deep in C with the interpreter's lock held; only a stopped process cannot answer. A
 * rank is asked once, and only when the job is over anyway: a signal interrupts system calls.
 *
 * The answers lie in a hole of the data file: a page is real only where somebody has answered. */
#define _GNU_SOURCE
#include "shared.h"

#include <stdio.h>
#include <string.h>

#include "../base/checked.h"

#ifndef FS_THREADS_ONLY

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// ---- answering ----------------------------------------------------------------------------------

/* What the handler needs of the one job of processes that this process answers for. */
static _Atomic(fs_job *) answering;
static _Atomic int in_handler;

/* The signal that our handler is installed for, 0: none yet. It stays for the life of the process:
 * a late question must find somebody who takes it, or it would end the process. */
static int installed;
static struct sigaction before; /* who had the signal, and is still called */
static struct sigaction on_top; /* the handler of the lines, before ours */

static bool
is_handler(const struct sigaction *a, const struct sigaction *b)
{
    bool info = (a->sa_flags & SA_SIGINFO) != 0;
    return info == ((b->sa_flags & SA_SIGINFO) != 0) &&
           (info ? a->sa_sigaction == b->sa_sigaction : a->sa_handler == b->sa_handler);
}

static void
call_before(int number, siginfo_t *info, void *context)
{
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    }
}

static void
on_signal(int number, siginfo_t *info, void *context)
{
    int error = errno;
    bool asked = false;
    atomic_fetch_add(&in_handler, 1);
    fs_job *job = atomic_load(&answering);
    if (job != NULL && !fs_job_is_forked(job)) {
        fs_slot *slot = &job->page->slot[job->self];
        off_t begin = (off_t)(job->page->answers_at + (uint64_t)job->self * FS_ANSWER_NBYTES);
        off_t end = lseek(job->answer_fd, 0, SEEK_CUR);
        uint32_t expected = FS_ANSWER_ASKED;
        (void)lseek(job->answer_fd, begin, SEEK_SET); /* what nobody asked for is written over */
        if (atomic_load(&slot->answer) == FS_ANSWER_ASKED) {
            asked = true;
            atomic_store(&slot->answer_nbytes, end > begin ? (uint32_t)(end - begin) : 0);
            (void)atomic_compare_exchange_strong(&slot->answer, &expected, FS_ANSWER_GIVEN);
        }
    }
    atomic_fetch_sub(&in_handler, 1);
    if (!asked) {
        call_before(number, info, context); /* a signal of the program's own */
    }
    errno = error;
}

/* The first signal at or above FS_ANSWER_SIGNAL that nobody uses. */
static int
free_signal(void)
{
    for (int number = FS_ANSWER_SIGNAL; number < SIGRTMAX; number++) {
        struct sigaction now;
        if (sigaction(number, NULL, &now) == 0 && !(now.sa_flags & SA_SIGINFO) &&
            now.sa_handler == SIG_DFL) {
            return number;
        }
    }
    return 0;
}

fs_status
fs_job_answer_open(fs_job *job, int number, int *out_number, int *out_fd)
{
    *out_number = 0;
    *out_fd = -1;
    if (job->threads || job->size == 1 || fs_job_is_forked(job) ||
        atomic_load(&answering) != NULL) {
        return FS_OK;
    }
    if (number != 0 && (number < SIGRTMIN || number > SIGRTMAX)) {
        return FS_FAIL(FS_EINVAL, "signal %d is not a real-time signal, %d to %d", number, SIGRTMIN,
                       SIGRTMAX);
    }
    if (installed == 0) {
        number = number != 0 ? number : free_signal();
        struct sigaction action = {.sa_sigaction = on_signal,
                                   .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK};
        (void)sigemptyset(&action.sa_mask);
        if (number == 0 || sigaction(number, &action, &before) < 0) {
            return FS_OK; /* all are taken: the lines stored at operations have to do */
        }
        installed = number;
    }
    struct sigaction now;
    const struct sigaction ours = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
    if (sigaction(installed, NULL, &now) < 0 || !is_handler(&now, &ours)) {
        return FS_OK; /* the program has taken it since */
    }
    /* A description of its own: its offset is where the next answer goes. */
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", job->data_fd);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    off_t at = (off_t)(job->page->answers_at + (uint64_t)job->self * FS_ANSWER_NBYTES);
    if (fd < 0 || lseek(fd, at, SEEK_SET) != at) {
        if (fd >= 0) {
            (void)close(fd);
        }
        return FS_OK; /* no /proc */
    }
    job->answer_fd = fd;
    *out_number = installed;
    *out_fd = fd;
    return FS_OK;
}

void
fs_job_answer_ready(fs_job *job)
{
    if (job->answer_fd >= 0 && !fs_job_is_forked(job) &&
        sigaction(installed, NULL, &on_top) == 0) {
        atomic_store(&answering, job);
        atomic_store(&job->page->slot[job->self].answer_signal, installed);
    }
}

bool
fs_job_answer_is_on_top(const fs_job *job)
{
    struct sigaction now;
    return job->answer_fd >= 0 && sigaction(installed, NULL, &now) == 0 &&
           is_handler(&now, &on_top);
}

void
fs_job_answer_close(fs_job *job)
{
    if (job->answer_fd < 0 || fs_job_is_forked(job)) {
        return;
    }
    atomic_store(&job->page->slot[job->self].answer_signal, 0);
    fs_job *expected = job;
    (void)atomic_compare_exchange_strong(&answering, &expected, NULL);
    /* A handler that has begun on another thread ends within microseconds. */
    for (int i = 0; i < 10000 && atomic_load(&in_handler) != 0; i++) {
        (void)sched_yield();
    }
    /* Unless a handler that is called by somebody else's may still write there. */
    struct sigaction now;
    const struct sigaction ours = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
    if (sigaction(installed, NULL, &now) == 0 && is_handler(&now, &ours)) {
        (void)close(job->answer_fd);
    }
    job->answer_fd = -1;
}

// ---- asking -------------------------------------------------------------------------------------

/* The letter of the process's state, or 0 if it is gone or not ours to see. */
char
fs_process_state(int64_t pid)
{
    char path[64], line[512];
    (void)snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    ssize_t n = read(fd, line, sizeof line - 1);
    (void)close(fd);
    line[n > 0 ? n : 0] = '\0';
    const char *end = strrchr(line, ')'); /* the name before it may hold anything */
    return end != NULL && end[1] == ' ' ? end[2] : 0;
}

/* Sends the question to a rank that lives and runs; false if it cannot answer. */
static bool
ask(fs_job *job, int rank)
{
    fs_slot *slot = &job->page->slot[rank];
    int number = atomic_load(&slot->answer_signal);
    int64_t pid;
    if (rank == job->self || number == 0 || atomic_load(&slot->left) != FS_HERE ||
        !fs_job_holds_lock(job, rank, &pid) || pid <= 0) {
        return false;
    }
    char state = fs_process_state(pid);
    if (state == 'T' || state == 't') {
        return false; /* it would answer when it is continued */
    }
    uint32_t nobody = FS_ANSWER_NONE;
    if (!atomic_compare_exchange_strong(&slot->answer, &nobody, FS_ANSWER_ASKED)) {
        return true; /* another rank has asked */
    }
    /* The thread that opened the world, if its number means the same here. */
    bool sent = pid == atomic_load(&slot->pid) &&
                syscall(SYS_tgkill, (pid_t)pid, (pid_t)atomic_load(&slot->thread), number) == 0;
    return sent || kill((pid_t)pid, number) == 0;
}

/* Is this rank one of those that keep world waiting? */
static bool
is_late(const fs_world *world, int job_rank)
{
    const fs_slot *slot = &world->job->page->slot[job_rank];
    for (int r = 0; r < world->size; r++) {
        if (world->ranks[r] == job_rank && fs_world_has_come(world, world->rank)) {
            return !fs_world_has_come(world, r);
        }
    }
    return atomic_load(&slot->note.waiting) == 0;
}

static void
wait_for_answers(const fs_job *job, int64_t patience_ns)
{
    int64_t end = fs_now_ns() + patience_ns;
    for (bool open = true; open && fs_now_ns() < end;) {
        open = false;
        for (int r = 0; r < job->size; r++) {
            open = open || atomic_load(&job->page->slot[r].answer) == FS_ANSWER_ASKED;
        }
        if (open) {
            const struct timespec pause = {0, 200000};
            (void)nanosleep(&pause, NULL);
        }
    }
}

void
fs_world_locate(const fs_world *world, int64_t patience_ns)
{
    fs_job *job = world->job;
    if (job->threads) {
        return; /* their lines are had without asking */
    }
    for (int r = 0; r < job->size; r++) {
        if (is_late(world, r)) {
            (void)ask(job, r);
        }
    }
    wait_for_answers(job, patience_ns);
}

void
fs_job_locate(fs_job *job, double patience_s)
{
    for (int r = 0; r < job->size && !job->threads; r++) {
        if (atomic_load(&job->page->slot[r].note.waiting) == 0) {
            (void)ask(job, r);
        }
    }
    wait_for_answers(job, (int64_t)(patience_s * 1e9));
}

static size_t
read_answer(fs_job *job, int rank, char *text, size_t nbytes)
{
    fs_slot *slot = &job->page->slot[rank];
    if (job->threads || atomic_load(&slot->answer) != FS_ANSWER_GIVEN) {
        return 0;
    }
    size_t n = fs_min_size(atomic_load(&slot->answer_nbytes), nbytes);
    off_t at = (off_t)(job->page->answers_at + (uint64_t)rank * FS_ANSWER_NBYTES);
    ssize_t got = pread(job->data_fd, text, n, at);
    return got > 0 ? (size_t)got : 0;
}

int64_t
fs_thread_id(const fs_job *job)
{
    return job->threads ? (int64_t)(intptr_t)pthread_self() : (int64_t)syscall(SYS_gettid);
}

#else

fs_status
fs_job_answer_open(fs_job *job, int number, int *out_number, int *out_fd)
{
    (void)job;
    (void)number;
    *out_number = 0;
    *out_fd = -1;
    return FS_OK;
}

void
fs_job_answer_ready(fs_job *job)
{
    (void)job;
}

bool
fs_job_answer_is_on_top(const fs_job *job)
{
    (void)job;
    return false;
}

void
fs_job_answer_close(fs_job *job)
{
    (void)job;
}

void
fs_world_locate(const fs_world *world, int64_t patience_ns)
{
    (void)world;
    (void)patience_ns;
}

void
fs_job_locate(fs_job *job, double patience_s)
{
    (void)job;
    (void)patience_s;
}

static size_t
read_answer(fs_job *job, int rank, char *text, size_t nbytes)
{
    (void)job;
    (void)rank;
    (void)text;
    (void)nbytes;
    return 0;
}

int64_t
fs_thread_id(const fs_job *job)
{
    (void)job;
    return (int64_t)(intptr_t)pthread_self();
}

#endif

// ---- reading ------------------------------------------------------------------------------------

#define FS_FRAMES_SHOWN 4

void
fs_job_set_locate(fs_job *job, fs_locate locate)
{
    job->locate = locate;
}

/* '  File "train.py", line 57 in load' becomes 'train.py:57 in load'; false at the end of the
 * lines. */
static bool
next_frame(const char **at, const char *end, char *frame, size_t nbytes)
{
    while (*at < end) {
        const char *line = *at, *stop = memchr(line, '\n', (size_t)(end - line));
        stop = stop != NULL ? stop : end;
        *at = stop < end ? stop + 1 : end;
        static const char mark[] = "  File \"", between[] = "\", line ";
        size_t n = (size_t)(stop - line);
        if (n <= sizeof mark || memcmp(line, mark, sizeof mark - 1) != 0) {
            continue;
        }
        const char *file = line + sizeof mark - 1, *quote = NULL;
        for (const char *p = file; p + sizeof between - 1 <= stop; p++) {
            if (memcmp(p, between, sizeof between - 1) == 0) {
                quote = p; /* the last one: a file may have any name */
            }
        }
        if (quote == NULL) {
            continue;
        }
        int file_n = (int)(quote - file), skip = file_n > 80 ? file_n - 80 : 0;
        const char *rest = quote + sizeof between - 1;
        (void)snprintf(frame, nbytes, "%s%.*s:%.*s", skip > 0 ? "..." : "", file_n - skip,
                       file + skip, (int)(stop - rest), rest);
        return true;
    }
    return false;
}

size_t
fs_job_where(fs_job *job, int rank, char *text, size_t nbytes)
{
    char lines[4096], frame[256];
    int64_t thread = atomic_load(&job->page->slot[rank].thread);
    size_t n = job->threads && job->locate != NULL && thread != 0
                   ? job->locate(thread, lines, sizeof lines)
                   : read_answer(job, rank, lines, sizeof lines);
    const char *at = lines;
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < FS_FRAMES_SHOWN && next_frame(&at, lines + n, frame, sizeof frame); i++) {
        int added = snprintf(text + used, nbytes - used, "%s%s", i > 0 ? ", called at " : "",
                             frame);
        if (added < 0 || (size_t)added >= nbytes - used) {
            text[used] = '\0'; /* whole frames only */
            break;
        }
        used += (size_t)added;
    }
    return used;
}
