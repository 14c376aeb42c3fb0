/* Inside the stand-in for NCCL: communicators, and groups of calls on their way to a stream. */
#ifndef FS_CUDASIM_COMMUNICATOR_H
#define FS_CUDASIM_COMMUNICATOR_H

#include <array>
#include <tuple>
#include <utility>

#include "device.h"

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
extern const char *const NCCL_KIND_NAMES[];

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

/* Ranks that called different things, or in different orders: counted, or the end. */
struct nccl_mismatches {
    bool tolerated;
    size_t n;
    std::string latest;
};
extern nccl_mismatches mismatches;

/* Bytes of an element; 0: no such type. */
size_t nccl_bytes_of(int type);

/* The ranks that a task of comm is between; (-1, -1): all. */
std::pair<int, int> nccl_between(const ncclComm *comm, const nccl_task &task);
bool nccl_is_pair(const nccl_task &task);

/* Gives comm's pending group to its stream, as one operation. */
void nccl_give(ncclComm *comm);

/* Forgets what is over. */
void nccl_forget_parts(ncclComm *comm);

#endif
