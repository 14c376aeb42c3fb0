/* Stands in for NCCL: the functions that csrc/cuda uses, by the real ones' names and conventions,
 * for ranks that are threads of this process, each with a device of the stand-in.
 *
 * A communicator is not blocking: what waits for other ranks (its start, the first time two ranks
 * meet in it, its end) is ncclInProgress until somebody looks, and nothing is given to the stream
 * before. A group is one operation of its stream, which is over when all its sends, receives and
 * collectives are, each of which needs the ranks it is between at the heads of their streams: no
 * host thread waits. Between two ranks sends and receives match in order; collectives match by
 * their number in the communicator. Sums start at another rank for each rank, and are rounded to
 * the dtype at every hop, as around a ring.
 *
 * Ends the program, or counts where fs_sim_tolerate_mismatches says so: ranks that call different
 * things; two ranks that use two communicators in different orders, where real GPUs may wait for
 * each other for ever. */
#include <algorithm>
#include <array>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <tuple>

#include "device.h"
#include "numbers.h"

enum ncclResult_t {
    ncclSuccess = 0,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclInProgress = 7,
};
enum ncclDataType_t {
    ncclInt8 = 0, ncclUint8 = 1, ncclInt32 = 2, ncclInt64 = 4,
    ncclFloat16 = 6, ncclFloat32 = 7, ncclFloat64 = 8, ncclBfloat16 = 9,
};
enum ncclRedOp_t { ncclSum = 0 };

struct ncclUniqueId {
    char internal[128];
};

/* Up to version 2.18; later ones are longer, and say so in size. */
struct ncclConfig_t {
    size_t size;
    unsigned magic, version;
    int blocking;
};

enum task_kind { SEND, RECEIVE, ALL_GATHER, BROADCAST, REDUCE_SCATTER };
static const char *const KIND_NAMES[] = {"ncclSend", "ncclRecv", "ncclAllGather", "ncclBroadcast",
                                         "ncclReduceScatter"};

/* One call. */
struct nccl_task {
    task_kind kind;
    const void *src;
    void *dst;
    size_t count;
    ncclDataType_t type;
    int peer; /* of a send or receive; a broadcast's root; else -1 */
};

/* When two ranks' devices were given something: 0 never, else the number of the group. */
struct nccl_turns {
    size_t clique;
    std::array<size_t, 64> at;
};

/* What a meeting is about: between whom, and their how-manieth. */
typedef std::tuple<int, int, size_t> nccl_key; /* (from, to, n), or (-1, -1, n) for all */

struct nccl_joint {
    std::shared_ptr<sim_meeting> meeting;
    std::shared_ptr<nccl_turns> turns;
    std::vector<std::pair<int, nccl_task>> tasks; /* with their ranks */
    bool broken;
};

struct ncclComm;

/* The ranks of one communicator. */
struct nccl_clique {
    size_t number;
    int size;
    std::vector<ncclComm *> members; /* by rank; NULL: not yet, or gone */
    int joined;
    std::set<std::tuple<int, int, int>> reached; /* (from, to, rank) that came to its first time */
    std::map<nccl_key, nccl_joint> open;
};

struct ncclComm {
    std::shared_ptr<nccl_clique> clique;
    int rank;
    sim_device *device;
    int result; /* ncclResult_t */
    std::string words;
    unsigned looks; /* until what is in progress may be over */
    bool started, finalized;
    std::vector<nccl_task> pending; /* a group that was not given to its stream yet */
    cudaStream_t pending_stream, stream; /* and that of the last one given */
    size_t stream_number;
    std::map<std::pair<int, int>, size_t> counts; /* of keys that it took part in */
    std::vector<std::shared_ptr<sim_part>> parts;
};

static std::map<std::string, std::shared_ptr<nccl_clique>> cliques;
static std::set<ncclComm *> communicators;
static size_t ids_made, mismatches, cliques_made;
static bool tolerate_mismatches;
static std::string latest_mismatch;
static int version = 22809;
/* What each device was given of late, and how many groups. */
static std::array<std::deque<std::shared_ptr<nccl_turns>>, 64> given;
static std::array<size_t, 64> groups_given;
static const size_t REMEMBERED = 64;

static thread_local std::string last_words;
static thread_local int group_depth;
static thread_local int group_result;
static thread_local std::vector<std::tuple<ncclComm *, cudaStream_t, nccl_task>> group;

// ---- errors -------------------------------------------------------------------------------------

static int refuse(int result, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int
refuse(int result, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    (void)std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    last_words = text;
    return result;
}

static void
mismatch(const std::string &text)
{
    mismatches++;
    latest_mismatch = text;
    if (!tolerate_mismatches) {
        sim_die("NCCL: %s", text.c_str());
    }
}

static void
check_alive(ncclComm *comm)
{
    if (communicators.count(comm) == 0) {
        sim_die("NCCL: a communicator that was destroyed, or none");
    }
}

static size_t
bytes_of(int type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclFloat64:
        return 8;
    default:
        return 0;
    }
}

// ---- what a meeting does ------------------------------------------------------------------------

/* One hop around the ring: acc + x of element i, rounded to the dtype; in place. */
static void
add_to(int type, void *acc, const void *x, size_t i)
{
    switch (type) {
    case ncclFloat32:
        static_cast<float *>(acc)[i] += static_cast<const float *>(x)[i];
        break;
    case ncclFloat64:
        static_cast<double *>(acc)[i] += static_cast<const double *>(x)[i];
        break;
    case ncclFloat16: {
        uint16_t *at = static_cast<uint16_t *>(acc) + i;
        *at = sim_to_half(sim_of_half(*at) + sim_of_half(static_cast<const uint16_t *>(x)[i]));
        break;
    }
    case ncclBfloat16: {
        uint16_t *at = static_cast<uint16_t *>(acc) + i;
        *at = sim_to_bfloat16(sim_of_bfloat16(*at) +
                              sim_of_bfloat16(static_cast<const uint16_t *>(x)[i]));
        break;
    }
    case ncclInt32:
        static_cast<uint32_t *>(acc)[i] += static_cast<const uint32_t *>(x)[i];
        break;
    case ncclInt64:
        static_cast<uint64_t *>(acc)[i] += static_cast<const uint64_t *>(x)[i];
        break;
    default:
        static_cast<uint8_t *>(acc)[i] =
            static_cast<uint8_t>(static_cast<uint8_t *>(acc)[i] +
                                 static_cast<const uint8_t *>(x)[i]);
    }
}

static void
reduce_scatter(const std::vector<nccl_task> &by_rank)
{
    size_t size = by_rank.size(), n = by_rank[0].count, width = bytes_of(by_rank[0].type);
    std::vector<std::vector<unsigned char>> sums(size);
    for (size_t r = 0; r < size; r++) {
        sums[r].resize(n * width);
        for (size_t hop = 1; hop <= size; hop++) {
            const unsigned char *x =
                static_cast<const unsigned char *>(by_rank[(r + hop) % size].src) + r * n * width;
            if (hop == 1) {
                std::copy(x, x + n * width, sums[r].begin());
                continue;
            }
            for (size_t i = 0; i < n; i++) {
                add_to(by_rank[0].type, sums[r].data(), x, i);
            }
        }
    }
    for (size_t r = 0; r < size; r++) { /* last: the sums may lie where they came from */
        std::copy(sums[r].begin(), sums[r].end(), static_cast<unsigned char *>(by_rank[r].dst));
    }
}

static void
run_tasks(int size, const std::vector<std::pair<int, nccl_task>> &tasks)
{
    std::vector<nccl_task> by_rank(static_cast<size_t>(size));
    nccl_task send = {}, receive = {};
    for (const auto &[rank, task] : tasks) {
        by_rank[static_cast<size_t>(rank)] = task;
        (task.kind == SEND ? send : receive) = task;
    }
    const nccl_task &any = tasks[0].second;
    size_t nbytes = any.count * bytes_of(any.type);
    switch (any.kind) {
    case SEND:
    case RECEIVE:
        std::memcpy(receive.dst, send.src, nbytes);
        break;
    case ALL_GATHER:
        for (const nccl_task &to : by_rank) {
            for (size_t r = 0; r < by_rank.size(); r++) {
                std::memmove(static_cast<unsigned char *>(to.dst) + r * nbytes, by_rank[r].src,
                             nbytes);
            }
        }
        break;
    case BROADCAST:
        for (const nccl_task &to : by_rank) {
            std::memmove(to.dst, by_rank[static_cast<size_t>(any.peer)].src, nbytes);
        }
        break;
    case REDUCE_SCATTER:
        reduce_scatter(by_rank);
    }
}

// ---- giving a group to its stream ---------------------------------------------------------------

static std::string
say(int rank, const nccl_task &task)
{
    char text[160];
    (void)std::snprintf(text, sizeof text, "rank %d %s(%zu of type %d, %d)", rank,
                        KIND_NAMES[task.kind], task.count, static_cast<int>(task.type), task.peer);
    return text;
}

static std::pair<int, int>
between(const ncclComm *comm, const nccl_task &task)
{
    switch (task.kind) {
    case SEND:
        return {comm->rank, task.peer};
    case RECEIVE:
        return {task.peer, comm->rank};
    default:
        return {-1, -1};
    }
}

static bool
is_pair(const nccl_task &task)
{
    return task.kind == SEND || task.kind == RECEIVE;
}

static void
check_same(nccl_clique &clique, const nccl_joint &joint, int rank, const nccl_task &task)
{
    const auto &[first_rank, first] = joint.tasks[0];
    bool same = first.count == task.count && first.type == task.type &&
                (is_pair(task) ? is_pair(first) : first.kind == task.kind) &&
                (is_pair(task) || first.peer == task.peer);
    if (same) {
        return;
    }
    mismatch(say(first_rank, first) + " meets " + say(rank, task));
    for (ncclComm *member : clique.members) {
        if (member != NULL) {
            member->result = ncclInvalidUsage;
            member->words = latest_mismatch;
        }
    }
}

/* Two devices that both take part in two communicators' operations must be given them in one
 * order: a GPU may run one alone, and wait in it for a peer that waits in the other. */
static void
check_turns(size_t device, const nccl_turns &now)
{
    for (const auto &old : given[device]) {
        if (old->clique == now.clique) {
            continue;
        }
        for (size_t other = 0; other < now.at.size(); other++) {
            if (other != device && now.at[other] != 0 && old->at[other] > now.at[other]) {
                mismatch("devices " + std::to_string(device) + " and " + std::to_string(other) +
                         " use communicators " + std::to_string(old->clique) + " and " +
                         std::to_string(now.clique) + " in different orders");
            }
        }
    }
}

static void
join(ncclComm *comm, const nccl_task &task, const std::shared_ptr<sim_part> &part)
{
    nccl_clique &clique = *comm->clique;
    auto [from, to] = between(comm, task);
    /* A rank's sends to itself and receives from itself are counted apart. */
    size_t n = comm->counts[{from, from == to && task.kind == RECEIVE ? -2 : to}]++;
    nccl_key key = {from, to, n};
    nccl_joint &joint = clique.open[key];
    if (joint.meeting == NULL) {
        size_t expected = is_pair(task) ? 2 : static_cast<size_t>(clique.size);
        std::string name = KIND_NAMES[task.kind];
        joint.meeting = std::make_shared<sim_meeting>(
            sim_meeting{name, expected, {}, NULL, sim_meeting::WAITING});
        joint.turns = std::make_shared<nccl_turns>(nccl_turns{clique.number, {}});
        joint.broken = false;
    } else {
        size_t before = mismatches;
        check_same(clique, joint, comm->rank, task);
        joint.broken = joint.broken || mismatches != before;
    }
    size_t device = static_cast<size_t>(comm->device->index);
    joint.turns->at[device] = groups_given[device];
    check_turns(device, *joint.turns);
    given[device].push_back(joint.turns);
    if (given[device].size() > REMEMBERED) {
        given[device].pop_front();
    }
    joint.tasks.emplace_back(comm->rank, task);
    part->meetings.push_back(joint.meeting);
    if (joint.broken) {
        return; /* it never takes place, as on a GPU */
    }
    joint.meeting->parts.push_back(part);
    if (joint.tasks.size() == joint.meeting->expected) {
        auto tasks = joint.tasks;
        int size = clique.size;
        joint.meeting->run = [size, tasks] { run_tasks(size, tasks); };
        clique.open.erase(key);
    }
}

/* The bytes that a task reads and writes on its own rank. */
static void
declare(const ncclComm *comm, const nccl_task &task, fs_sim_ranges &ranges)
{
    size_t nbytes = task.count * bytes_of(task.type);
    size_t all = nbytes * static_cast<size_t>(comm->clique->size);
    bool in_place = false;
    switch (task.kind) {
    case SEND:
        ranges.add(task.src, nbytes, false);
        return;
    case RECEIVE:
        ranges.add(task.dst, nbytes, true);
        return;
    case ALL_GATHER:
        in_place = task.src == static_cast<char *>(task.dst) +
                                   static_cast<size_t>(comm->rank) * nbytes;
        ranges.add(task.dst, all, true);
        break;
    case BROADCAST:
        in_place = task.src == task.dst || comm->rank != task.peer;
        ranges.add(task.dst, nbytes, true);
        break;
    case REDUCE_SCATTER:
        in_place = task.dst == static_cast<const char *>(task.src) +
                                   static_cast<size_t>(comm->rank) * nbytes;
        ranges.add(task.dst, nbytes, true);
        nbytes = all;
    }
    if (!in_place) {
        ranges.add(task.src, nbytes, false);
    } else if (task.kind == REDUCE_SCATTER) {
        const char *src = static_cast<const char *>(task.src), *dst = static_cast<char *>(task.dst);
        size_t own = task.count * bytes_of(task.type);
        ranges.add(src, static_cast<size_t>(dst - src), false);
        ranges.add(dst + own, static_cast<size_t>(src + nbytes - (dst + own)), false);
    }
}

/* What is written must be touched by nothing else of the group, and be this device's memory. */
static void
check_ranges(const ncclComm *comm, const fs_sim_ranges &ranges)
{
    for (size_t i = 0; i < ranges.list.size(); i++) {
        const fs_sim_range &a = ranges.list[i];
        sim_home home = sim_home_of(*comm->device, reinterpret_cast<const void *>(a.begin),
                                    a.end - a.begin, "NCCL: a buffer");
        if (home == SIM_HOME_PAGEABLE) {
            sim_die("NCCL: rank %d: a buffer that no device can reach", comm->rank);
        }
        for (size_t j = 0; j < i; j++) {
            const fs_sim_range &b = ranges.list[j];
            if (a.begin < b.end && b.begin < a.end && (a.is_write || b.is_write)) {
                sim_die("NCCL: rank %d: buffers of one group overlap", comm->rank);
            }
        }
    }
}

static void
give(ncclComm *comm)
{
    cudaStream_t stream = comm->pending_stream;
    fs_sim_ranges ranges;
    for (const nccl_task &task : comm->pending) {
        declare(comm, task, ranges);
    }
    check_ranges(comm, ranges);
    /* NCCL runs the groups of a communicator one after the other, whatever their streams. */
    if (comm->stream != NULL && comm->stream != stream) {
        sim_enqueue(stream, sim_operation{"wait", NULL, comm->stream, comm->stream_number, NULL},
                    fs_sim_ranges());
    }
    auto part = std::make_shared<sim_part>(sim_part{stream, 0, false, false, false, {}});
    groups_given[static_cast<size_t>(comm->device->index)]++;
    std::string name = KIND_NAMES[comm->pending[0].kind];
    for (const nccl_task &task : comm->pending) {
        join(comm, task, part);
    }
    sim_enqueue(stream, sim_operation{name, NULL, NULL, 0, part}, ranges);
    comm->stream = stream;
    comm->stream_number = stream->given;
    comm->parts.push_back(part);
    comm->pending.clear();
}

static bool
is_over(const std::shared_ptr<sim_part> &part)
{
    return part->stream->done >= part->number;
}

static void
forget_parts(ncclComm *comm)
{
    comm->parts.erase(std::remove_if(comm->parts.begin(), comm->parts.end(), is_over),
                      comm->parts.end());
}

// ---- progress -----------------------------------------------------------------------------------

/* Have all ranks that the pending group is the first between come as far? */
static bool
is_connected(ncclComm *comm)
{
    nccl_clique &clique = *comm->clique;
    bool all = true;
    for (const nccl_task &task : comm->pending) {
        auto [from, to] = between(comm, task);
        if (is_pair(task)) {
            all = all && clique.reached.count({from, to, task.peer}) > 0;
        }
        for (int r = 0; r < clique.size && !is_pair(task); r++) {
            all = all && clique.reached.count({from, to, r}) > 0;
        }
    }
    return all;
}

static void
look(ncclComm *comm)
{
    if (comm->result != ncclInProgress) {
        return;
    }
    if (comm->looks > 0) {
        comm->looks--;
        return;
    }
    if (!comm->started) {
        comm->started = comm->clique->joined == comm->clique->size;
        comm->result = comm->started ? ncclSuccess : ncclInProgress;
    } else if (!comm->pending.empty()) {
        if (is_connected(comm)) {
            comm->result = ncclSuccess;
            give(comm);
        }
    } else if (comm->finalized) {
        forget_parts(comm);
        comm->result = comm->parts.empty() ? ncclSuccess : ncclInProgress;
    }
}

static void
begin(ncclComm *comm)
{
    comm->result = ncclInProgress;
    comm->looks = static_cast<unsigned>(comm->device->random() % 3);
}

// ---- NCCL's functions ---------------------------------------------------------------------------

extern "C" {

int
ncclGetVersion(int *out)
{
    *out = version;
    return ncclSuccess;
}

const char *
ncclGetErrorString(int result)
{
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclInvalidUsage:
        return "invalid usage";
    case ncclInProgress:
        return "NCCL operation in progress";
    case 1:
        return "unhandled cuda error";
    case 6:
        return "remote process exited or there was a network error";
    default:
        return "unknown result code";
    }
}

const char *
ncclGetLastError(ncclComm *comm)
{
    sim_lock lock(sim.mutex);
    if (comm != NULL && communicators.count(comm) > 0 && !comm->words.empty()) {
        last_words = comm->words;
    }
    return last_words.c_str();
}

int
ncclGetUniqueId(ncclUniqueId *out)
{
    sim_lock lock(sim.mutex);
    std::memset(out, 0, sizeof *out);
    (void)std::snprintf(out->internal, sizeof out->internal, "stand-in %zu", ++ids_made);
    cliques[out->internal] = std::make_shared<nccl_clique>();
    cliques[out->internal]->number = ++cliques_made;
    return ncclSuccess;
}

int
ncclCommInitRankConfig(ncclComm **out, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    sim_lock lock(sim.mutex);
    *out = NULL;
    if (config == NULL || config->magic != 0xcafebeef || config->size < sizeof *config ||
        config->version < 21400) {
        return refuse(ncclInvalidArgument, "config argument not initialized via "
                                           "NCCL_CONFIG_INITIALIZER");
    }
    if (config->blocking != 0) {
        return refuse(ncclInvalidUsage, "the stand-in has no blocking communicators");
    }
    if (size < 1 || rank < 0 || rank >= size) {
        return refuse(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, size);
    }
    id.internal[sizeof id.internal - 1] = '\0';
    auto found = cliques.find(id.internal);
    if (found == cliques.end()) {
        return refuse(ncclInvalidArgument, "an id that nobody made");
    }
    nccl_clique &clique = *found->second;
    if (clique.joined == 0) {
        clique.size = size;
        clique.members.resize(static_cast<size_t>(size));
    }
    if (clique.size != size || clique.members[static_cast<size_t>(rank)] != NULL) {
        return refuse(ncclInvalidUsage, "rank %d of %d, in a communicator of %d", rank, size,
                      clique.size);
    }
    for (const ncclComm *member : clique.members) {
        if (member != NULL && member->device == &sim_here()) {
            return refuse(ncclInvalidUsage,
                          "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d",
                          rank, member->rank, sim_here().index);
        }
    }
    ncclComm *comm = new ncclComm{found->second, rank,  &sim_here(), ncclInProgress, "", 0, false,
                                  false,         {},    NULL,        NULL,           0,  {}, {}};
    clique.members[static_cast<size_t>(rank)] = comm;
    communicators.insert(comm);
    if (++clique.joined == size) {
        cliques.erase(found);
    }
    begin(comm);
    *out = comm;
    return ncclInProgress;
}

int
ncclCommGetAsyncError(ncclComm *comm, int *out)
{
    sim_lock lock(sim.mutex);
    check_alive(comm);
    look(comm);
    *out = comm->result;
    return ncclSuccess;
}

static void
close_communicator(ncclComm *comm)
{
    for (ncclComm *&member : comm->clique->members) {
        member = member == comm ? NULL : member;
    }
    communicators.erase(comm);
    delete comm;
}

int
ncclCommAbort(ncclComm *comm)
{
    sim_lock lock(sim.mutex);
    check_alive(comm);
    for (const auto &part : comm->parts) {
        if (!is_over(part)) {
            sim_drop(part);
        }
    }
    close_communicator(comm);
    return ncclSuccess;
}

int
ncclCommFinalize(ncclComm *comm)
{
    sim_lock lock(sim.mutex);
    check_alive(comm);
    if (comm->result != ncclSuccess) {
        return refuse(ncclInvalidUsage, "ncclCommFinalize while something is in progress, or after "
                                        "an error");
    }
    comm->finalized = true;
    begin(comm);
    return ncclInProgress;
}

int
ncclCommDestroy(ncclComm *comm)
{
    sim_lock lock(sim.mutex);
    check_alive(comm);
    forget_parts(comm);
    if (!comm->finalized || comm->result != ncclSuccess || !comm->parts.empty()) {
        sim_die("NCCL: ncclCommDestroy of rank %d would wait: before ncclCommFinalize was over",
                comm->rank);
    }
    close_communicator(comm);
    return ncclSuccess;
}

int
ncclGroupStart(void)
{
    if (group_depth++ == 0) {
        group_result = ncclSuccess;
        group.clear();
    }
    return ncclSuccess;
}

int
ncclGroupEnd(void)
{
    if (group_depth == 0) {
        return refuse(ncclInvalidUsage, "ncclGroupEnd: not in a group call");
    }
    if (--group_depth > 0 || group_result != ncclSuccess) {
        return group_result;
    }
    sim_lock lock(sim.mutex);
    std::set<ncclComm *> members;
    for (const auto &[comm, stream, task] : group) {
        if (!members.insert(comm).second && comm->pending_stream != stream) {
            sim_die("NCCL: a group on two streams, which the stand-in does not know");
        }
        auto [from, to] = between(comm, task);
        comm->clique->reached.insert({from, to, comm->rank});
        comm->pending_stream = stream;
        comm->pending.push_back(task);
        begin(comm);
    }
    return group.empty() ? ncclSuccess : ncclInProgress;
}

/* One call of a collective, a send or a receive. */
static int
add_task(ncclComm *comm, cudaStream_t stream, const nccl_task &task)
{
    int result = ncclSuccess;
    {
        sim_lock lock(sim.mutex);
        check_alive(comm);
        if (comm->result == ncclInProgress || comm->finalized || !comm->started) {
            result = refuse(ncclInvalidUsage, "%s while something else is in progress",
                            KIND_NAMES[task.kind]);
        } else if (comm->result != ncclSuccess) {
            result = comm->result;
        } else if (bytes_of(task.type) == 0) {
            result = refuse(ncclInvalidArgument, "%s : invalid type %d", KIND_NAMES[task.kind],
                            static_cast<int>(task.type));
        } else if (task.peer >= comm->clique->size) {
            result = refuse(ncclInvalidArgument, "%s : invalid root %d", KIND_NAMES[task.kind],
                            task.peer);
        } else if (stream == NULL || stream->device != comm->device) {
            sim_die("NCCL: rank %d: a stream that is not of the communicator's device %d",
                    comm->rank, comm->device->index);
        }
    }
    if (result != ncclSuccess) {
        group_result = result;
        return result;
    }
    if (task.count == 0 && !is_pair(task)) {
        return ncclSuccess;
    }
    (void)ncclGroupStart();
    group.emplace_back(comm, stream, task);
    return ncclGroupEnd();
}

int
ncclSend(const void *src, size_t count, ncclDataType_t type, int peer, ncclComm *comm,
         cudaStream_t stream)
{
    return add_task(comm, stream, nccl_task{SEND, src, NULL, count, type, peer});
}

int
ncclRecv(void *dst, size_t count, ncclDataType_t type, int peer, ncclComm *comm,
         cudaStream_t stream)
{
    return add_task(comm, stream, nccl_task{RECEIVE, NULL, dst, count, type, peer});
}

int
ncclAllGather(const void *src, void *dst, size_t count, ncclDataType_t type, ncclComm *comm,
              cudaStream_t stream)
{
    return add_task(comm, stream, nccl_task{ALL_GATHER, src, dst, count, type, -1});
}

int
ncclBroadcast(const void *src, void *dst, size_t count, ncclDataType_t type, int root,
              ncclComm *comm, cudaStream_t stream)
{
    return add_task(comm, stream, nccl_task{BROADCAST, src, dst, count, type, root});
}

int
ncclReduceScatter(const void *src, void *dst, size_t count, ncclDataType_t type, ncclRedOp_t op,
                  ncclComm *comm, cudaStream_t stream)
{
    if (op != ncclSum) {
        return refuse(ncclInvalidArgument, "the stand-in only sums");
    }
    return add_task(comm, stream, nccl_task{REDUCE_SCATTER, src, dst, count, type, -1});
}

// ---- what tests ask -----------------------------------------------------------------------------

void
fs_sim_tolerate_mismatches(bool tolerate)
{
    sim_lock lock(sim.mutex);
    tolerate_mismatches = tolerate;
    mismatches = 0;
    latest_mismatch.clear();
}

size_t
fs_sim_mismatches(void)
{
    sim_lock lock(sim.mutex);
    return mismatches;
}

const char *
fs_sim_latest_mismatch(void)
{
    return latest_mismatch.c_str();
}

void
fs_sim_fail_communicators(int device, int result)
{
    sim_lock lock(sim.mutex);
    for (ncclComm *comm : communicators) {
        if (comm->device->index == device) {
            comm->result = result;
            comm->words = "a test made this fail";
            comm->pending.clear();
            for (const auto &part : comm->parts) {
                part->stuck = true;
            }
        }
    }
}

size_t
fs_sim_communicators(void)
{
    sim_lock lock(sim.mutex);
    return communicators.size();
}

void
fs_sim_set_nccl_version(int number)
{
    version = number;
}
}
