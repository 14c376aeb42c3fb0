/* What a peer says before and in a job: the greeting of a rank, rank 0's answer to it, the head of
 * the job's shared page, and the record of a fence. The sources are included: most of it is static.
 *
 * Input: a byte that chooses which, and the peer's bytes; what is missing of them is zero or, for
 * messages, never comes. */
#include "fuzz.h"

#include <fcntl.h>
#include <sys/socket.h>

#include "comm/join.c"
#include "comm/rendezvous.c"

#define RANKS 3
#define NONCE 0x1122334455667788u

/* Ranks here compute nothing: the tables, which take long to compile, are left out. */
fs_status
fs_device_choose(const fs_device **out)
{
    (void)out;
    return FS_FAIL(FS_EUNSUPPORTED, "no table in a fuzz target");
}

static const char JOB_NAME[] = "fuzz";

/* A pair of sockets on which the peer has said this and will say no more. */
static void
peer_says(int sockets[2], const uint8_t *data, size_t nbytes)
{
    PROMISE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    PROMISE(send(sockets[1], data, nbytes, MSG_NOSIGNAL) == (ssize_t)nbytes);
}

static void
greeting(const uint8_t *data, size_t nbytes)
{
    int sockets[2];
    const fs_join join = {.name = JOB_NAME, .size = RANKS, .parent = 5, .timeout_s = 10.0};
    server serves = {.join = &join};
    const uint64_t *name = serves.name;
    fs_job *job;
    bool *came = calloc(RANKS, sizeof *came); /* of exactly this size */
    PROMISE(came != NULL && fs_job_threads(RANKS, &job) == FS_OK);
    job->data_fd = job->lock_fd = 0; /* something to hand over */
    serves.job = job;
    serves.came = came;
    hash_name(JOB_NAME, serves.name);
    hello first = {HELLO_MAGIC, FS_JOB_LAYOUT, {name[0], name[1]}, RANKS, 1, 5};
    for (size_t i = 0; i < nbytes && i < sizeof first; i++) {
        ((unsigned char *)&first)[i] ^= data[i]; /* zeros: as it should be */
    }
    size_t cut = nbytes > sizeof first ? data[sizeof first] % (sizeof first + 1) : 0;
    peer_says(sockets, (const uint8_t *)&first, sizeof first - cut);
    PROMISE(shutdown(sockets[1], SHUT_WR) == 0);
    bool welcome = answer(sockets[0], &serves);
    bool right = cut == 0 && first.magic == HELLO_MAGIC && first.layout == FS_JOB_LAYOUT &&
                 memcmp(first.name, name, sizeof first.name) == 0 &&
                 first.size == RANKS && first.rank >= 1 && first.rank < RANKS &&
                 (first.parent == 5 || first.parent == 0);
    PROMISE(welcome == right);
    for (int r = 0; r < RANKS; r++) {
        PROMISE(came[r] == (right && r == first.rank));
    }
    (void)close(sockets[0]);
    (void)close(sockets[1]);
    job->data_fd = job->lock_fd = -1;
    fs_job_close(job);
    free(came);
}

/* A byte with this many descriptors. */
static void
send_descriptors(int fd, int n)
{
    char byte = 0;
    struct iovec data = {&byte, 1};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(4 * sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = CMSG_SPACE((size_t)n * sizeof(int))};
    struct cmsghdr *part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN((size_t)n * sizeof(int));
    PROMISE(sendmsg(fd, &message, MSG_NOSIGNAL) == 1);
}

static void
answered(const uint8_t *data, size_t nbytes, int files_n)
{
    int sockets[2];
    const uint64_t name[2] = {1, 2};
    const fs_join join = {.name = JOB_NAME, .size = RANKS, .rank = 1, .data_fd = -1};
    fs_job *job;
    uint64_t nonce = 0;
    PROMISE(fs_job_new(RANKS, &job) == FS_OK);
    peer_says(sockets, data, nbytes);
    if (files_n > 0) {
        send_descriptors(sockets[1], files_n);
    }
    PROMISE(shutdown(sockets[1], SHUT_WR) == 0);
    fs_status st = ask_over(sockets[0], job, &join, name, &nonce);
    PROMISE(st == FS_OK || st == FS_EINVAL || st == FS_ESTATE);
    PROMISE((job->data_fd < 0) == (job->lock_fd < 0));
    PROMISE(files_n == 2 || job->data_fd < 0);
    PROMISE(st == FS_OK || job->data_fd < 0);
    (void)close(sockets[0]);
    (void)close(sockets[1]);
    fs_job_close(job); /* closes what came */
}

/* The data file of a job whose first bytes a peer wrote. */
static void
head(const uint8_t *data, size_t nbytes, uint64_t nonce)
{
    size_t page_nbytes = fs_job_page_nbytes(RANKS);
    fs_job_page *page = calloc(1, page_nbytes);
    fs_job *job;
    PROMISE(page != NULL && fs_job_new(RANKS, &job) == FS_OK);
    fs_job_page_init(page, RANKS, NONCE);
    unsigned char *bytes = (unsigned char *)page;
    for (size_t i = 0; i < nbytes && i < sizeof *page; i++) {
        bytes[i] ^= data[i]; /* zeros: as it should be */
    }
    job->data_fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    job->lock_fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    PROMISE(pwrite(job->data_fd, page, page_nbytes, 0) == (ssize_t)page_nbytes);
    PROMISE(fcntl(job->data_fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    fs_status st = attach(job, 1, nonce);
    PROMISE(st == FS_OK || st == FS_ESTATE);
    if (st == FS_OK) {
        fs_world_page *root = (fs_world_page *)((unsigned char *)job->page + job->page->root_at);
        PROMISE((unsigned char *)root >= (unsigned char *)&job->page->slot[RANKS]);
        PROMISE((unsigned char *)&root->member[RANKS] <= (unsigned char *)job->page + page_nbytes);
        PROMISE(nonce == 0 || job->page->nonce == nonce);
    }
    fs_job_close(job);
    free(page);
}

/* A fence at which the others have arrived with these records, doing what these notes say. */
static void
record(const uint8_t *data, size_t nbytes, fs_op op)
{
    fs_job *job;
    PROMISE(fs_job_threads(RANKS, &job) == FS_OK);
    int ranks[RANKS] = {0, 1, 2};
    fs_world world = {.job = job,
                      .size = RANKS,
                      .ranks = ranks,
                      .root = true,
                      .deadlines = {.timeout_s = 10.0, .report_after_s = 5.0}};
    world.page = (fs_world_page *)((unsigned char *)job->page + job->page->root_at);
    char events[FS_EVENTS_MAX * FS_REPORT_NBYTES] = "";
    world.events = events;
    const fs_what mine = {.op = op, .dtype = FS_F32, .root = 0, .nbytes = 8};
    bool same = true;
    for (int r = 1; r < RANKS; r++) {
        fs_rec *rec = &world.page->member[r].rec[0];
        rec->what = mine;
        fs_note *note = &job->page->slot[r].note;
        unsigned char *to[] = {(unsigned char *)&rec->what, (unsigned char *)note};
        const size_t sizes[] = {sizeof rec->what, sizeof(fs_note)};
        for (int part = 0; part < 2; part++) {
            for (size_t i = 0; i < sizes[part] && nbytes > 0; i++, nbytes--) {
                to[part][i] ^= *data++; /* zeros: what this rank calls too */
            }
        }
        same = same && memcmp(&rec->what, &mine, sizeof mine) == 0;
        atomic_store(&rec->fence, 1);
        atomic_fetch_add(&world.page->arrived, 1);
    }
    fs_payload all[RANKS];
    fs_status st = fs_meet(&world, &mine, NULL, all, 0);
    PROMISE(st == FS_OK || st == FS_ABORTED);
    PROMISE(st == FS_OK || !same); /* ranks that differ may still go together: FS_OP_SKIP */
    char report[FS_REPORT_NBYTES];
    fs_report_format(job, &world, (fs_cause){.kind = FS_CAUSE_MISMATCH, .rank = 1}, 1.0, report,
                     sizeof report);
    PROMISE(strnlen(report, sizeof report) < sizeof report);
    fs_job_close(job);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    if (nbytes == 0 || nbytes > FS_FUZZ_NBYTES_MAX) {
        return 0;
    }
    switch (data[0]) {
    case 'g':
        greeting(data + 1, nbytes - 1);
        break;
    case '0':
    case '1':
    case '2':
    case '3':
        answered(data + 1, nbytes - 1, data[0] - '0');
        break;
    case 'h':
    case 'n':
        head(data + 1, nbytes - 1, data[0] == 'n' ? NONCE : 0);
        break;
    case 'r':
        record(data + 1, nbytes - 1, FS_OP_ALL_REDUCE);
        break;
    case 's':
        record(data + 1, nbytes - 1, FS_OP_SKIP);
        break;
    default:
        break;
    }
    return 0;
}
