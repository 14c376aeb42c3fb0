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
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "communicator.h"

static std::map<std::string, std::shared_ptr<nccl_clique>> cliques;
static std::set<ncclComm *> communicators;
static size_t ids_made, cliques_made;
static int version = 22809;

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
check_alive(ncclComm *comm)
{
    if (communicators.count(comm) == 0) {
        sim_die("NCCL: a communicator that was destroyed, or none");
    }
}

// ---- progress -----------------------------------------------------------------------------------

/* Have all ranks that the pending group is the first between come as far? */
static bool
is_connected(ncclComm *comm)
{
    nccl_clique &clique = *comm->clique;
    bool all = true;
    for (const nccl_task &task : comm->pending) {
        auto [from, to] = nccl_between(comm, task);
        if (nccl_is_pair(task)) {
            all = all && clique.reached.count({from, to, task.peer}) > 0;
        }
        for (int r = 0; r < clique.size && !nccl_is_pair(task); r++) {
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
            nccl_give(comm);
        }
    } else if (comm->finalized) {
        nccl_forget_parts(comm);
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
    /* The real one leaves its device behind. */
    (void)cudaSetDevice(comm->device->index);
    communicators.erase(comm);
    delete comm;
}

int
ncclCommAbort(ncclComm *comm)
{
    sim_lock lock(sim.mutex);
    check_alive(comm);
    nccl_forget_parts(comm);
    for (const auto &part : comm->parts) {
        sim_drop(part);
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
    nccl_forget_parts(comm);
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
        auto [from, to] = nccl_between(comm, task);
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
                            NCCL_KIND_NAMES[task.kind]);
        } else if (comm->result != ncclSuccess) {
            result = comm->result;
        } else if (nccl_bytes_of(task.type) == 0) {
            result = refuse(ncclInvalidArgument, "%s : invalid type %d", NCCL_KIND_NAMES[task.kind],
                            static_cast<int>(task.type));
        } else if (task.peer >= comm->clique->size) {
            result = refuse(ncclInvalidArgument, "%s : invalid root %d", NCCL_KIND_NAMES[task.kind],
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
    if (task.count == 0 && !nccl_is_pair(task)) {
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
    mismatches = nccl_mismatches{tolerate, 0, ""};
}

size_t
fs_sim_mismatches(void)
{
    sim_lock lock(sim.mutex);
    return mismatches.n;
}

const char *
fs_sim_latest_mismatch(void)
{
    return mismatches.latest.c_str();
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
