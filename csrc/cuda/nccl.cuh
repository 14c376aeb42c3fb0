/* The part of NCCL that is used: its functions by our own prototypes, its numbers by our names.
 *
 * Written from NVIDIA's documentation; nothing of its headers is copied. Counts are of elements. */
#ifndef FS_CUDA_NCCL_CUH
#define FS_CUDA_NCCL_CUH

#include "common.cuh"

extern "C" {
#include "nccl.h"
}

typedef struct nccl_communicator_of *nccl_communicator;

/* What a call returns (ncclResult_t). */
enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };
/* Types of elements (ncclDataType_t), and the one operation (ncclRedOp_t). */
enum {
    NCCL_U8 = 1, NCCL_I32 = 2, NCCL_I64 = 4, NCCL_F16 = 6, NCCL_F32 = 7, NCCL_F64 = 8, NCCL_BF16 = 9
};
enum { NCCL_SUM = 0 };

/* Passed by value (ncclUniqueId). */
struct nccl_id {
    char bytes[FS_ENGINE_ID_NBYTES];
};

/* How a communicator is (ncclConfig_t), as of version 2.18: a later library reads size bytes of it,
 * and has defaults for what it knows beside. */
#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_CONFIG_VERSION 21800u
#define NCCL_UNDEFINED (-2147483647 - 1)
struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_blocks, max_blocks;
    const char *network;
    int split_share;
    int traffic_class; /* of later versions; would be padding, and any number, without a name */
};

struct nccl_functions {
    int (*get_version)(int *version);
    const char *(*error_string)(int result);
    const char *(*last_error)(nccl_communicator communicator);
    int (*make_id)(nccl_id *out);
    int (*open)(nccl_communicator *out, int size, nccl_id id, int rank, nccl_config *config);
    int (*async_error)(nccl_communicator communicator, int *out);
    int (*abort)(nccl_communicator communicator);
    int (*finalize)(nccl_communicator communicator);
    int (*destroy)(nccl_communicator communicator);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*send)(const void *src, size_t count, int type, int peer, nccl_communicator communicator,
                cudaStream_t stream);
    int (*receive)(void *dst, size_t count, int type, int peer, nccl_communicator communicator,
                   cudaStream_t stream);
    /* dst holds count elements of every rank. */
    int (*all_gather)(const void *src, void *dst, size_t count, int type,
                      nccl_communicator communicator, cudaStream_t stream);
    int (*broadcast)(const void *src, void *dst, size_t count, int type, int root,
                     nccl_communicator communicator, cudaStream_t stream);
    /* src holds count elements for every rank. */
    int (*reduce_scatter)(const void *src, void *dst, size_t count, int type, int operation,
                          nccl_communicator communicator, cudaStream_t stream);
};

/* The library that was loaded. FS_ESTATE before. */
FS_NODISCARD fs_status
fs_nccl_functions(const nccl_functions **out);

#endif
