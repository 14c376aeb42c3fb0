/* Groups of NCCL's calls on their way to a stream: whom they meet, what is wrong with that, and
 * what they do when all have come. */
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>

#include "communicator.h"
#include "numbers.h"

const char *const NCCL_KIND_NAMES[] = {"ncclSend", "ncclRecv", "ncclAllGather", "ncclBroadcast",
                                       "ncclReduceScatter"};
nccl_mismatches mismatches;

/* What each device was given of late, and how many groups. */
static std::array<std::deque<std::shared_ptr<nccl_turns>>, 64> given;
static std::array<size_t, 64> groups_given;
static const size_t REMEMBERED = 64;

static void
mismatch(const std::string &text)
{
    mismatches.n++;
    mismatches.latest = text;
    if (!mismatches.tolerated) {
        sim_die("NCCL: %s", text.c_str());
    }
}

size_t
nccl_bytes_of(int type)
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
    size_t size = by_rank.size(), n = by_rank[0].count, width = nccl_bytes_of(by_rank[0].type);
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
    size_t nbytes = any.count * nccl_bytes_of(any.type);
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
                        NCCL_KIND_NAMES[task.kind], task.count, static_cast<int>(task.type),
                        task.peer);
    return text;
}

std::pair<int, int>
nccl_between(const ncclComm *comm, const nccl_task &task)
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

bool
nccl_is_pair(const nccl_task &task)
{
    return task.kind == SEND || task.kind == RECEIVE;
}

static void
check_same(nccl_clique &clique, const nccl_joint &joint, int rank, const nccl_task &task)
{
    const auto &[first_rank, first] = joint.tasks[0];
    bool same = first.count == task.count && first.type == task.type &&
                (nccl_is_pair(task) ? nccl_is_pair(first) : first.kind == task.kind) &&
                (nccl_is_pair(task) || first.peer == task.peer);
    if (same) {
        return;
    }
    mismatch(say(first_rank, first) + " meets " + say(rank, task));
    for (ncclComm *member : clique.members) {
        if (member != NULL) {
            member->result = ncclInvalidUsage;
            member->words = mismatches.latest;
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
    auto [from, to] = nccl_between(comm, task);
    /* A rank's sends to itself and receives from itself are counted apart. */
    size_t n = comm->counts[{from, from == to && task.kind == RECEIVE ? -2 : to}]++;
    nccl_key key = {from, to, n};
    nccl_joint &joint = clique.open[key];
    if (joint.meeting == NULL) {
        size_t expected = nccl_is_pair(task) ? 2 : static_cast<size_t>(clique.size);
        std::string name = NCCL_KIND_NAMES[task.kind];
        joint.meeting = std::make_shared<sim_meeting>(
            sim_meeting{name, expected, {}, NULL, sim_meeting::WAITING});
        joint.turns = std::make_shared<nccl_turns>(nccl_turns{clique.number, {}});
        joint.broken = false;
    } else {
        size_t before = mismatches.n;
        check_same(clique, joint, comm->rank, task);
        joint.broken = joint.broken || mismatches.n != before;
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
    size_t nbytes = task.count * nccl_bytes_of(task.type);
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
        size_t own = task.count * nccl_bytes_of(task.type);
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

void
nccl_give(ncclComm *comm)
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
    std::string name = NCCL_KIND_NAMES[comm->pending[0].kind];
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

void
nccl_forget_parts(ncclComm *comm)
{
    comm->parts.erase(std::remove_if(comm->parts.begin(), comm->parts.end(), is_over),
                      comm->parts.end());
}
