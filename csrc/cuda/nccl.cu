/* An engine of NCCL. */
#include "nccl.cuh"

#include <chrono>
#include <cstdio>
#include <new>
#include <thread>

extern "C" {
#include "device.h"
}

/* Between looks at what is in progress: at first nothing (a group is on its way within some tens of
 * microseconds), then sleeps that grow. */
#define EAGER_US 60
#define SLEEP_LEAST_US 20
#define SLEEP_MOST_US 1000
#define CLOSE_MOST_US 2000000

struct fs_engine {
    const nccl_functions *nccl;
    nccl_communicator communicator; /* NULL: aborted */
    int rank, size;
    char name[32];
    fs_engine_patience patience;
    void *patience_ctx;
    bool failed;
    fs_kept failure;
};

// ---- failures and waiting -----------------------------------------------------------------------

/* Keeps a failure of the calling thread, which all later calls tell. */
static fs_status
keep(fs_engine *engine, fs_status status)
{
    if (status != FS_OK && !engine->failed) {
        engine->failed = true;
        fs_status_keep(status, &engine->failure);
    }
    return status;
}

static fs_status
check_usable(const fs_engine *engine)
{
    if (engine->failed) {
        char prefix[128];
        (void)std::snprintf(prefix, sizeof prefix, "NCCL: rank %d, communicator '%s' failed: ",
                            engine->rank, engine->name);
        return fs_status_tell(&engine->failure, prefix);
    }
    return engine->communicator != NULL
               ? FS_OK
               : FS_FAIL(FS_ESTATE, "NCCL: rank %d, communicator '%s' was aborted", engine->rank,
                         engine->name);
}

/* A result that is an error, with NCCL's words. */
static fs_status
fail(const fs_engine *engine, const char *call, int result)
{
    const char *more = engine->nccl->last_error(engine->communicator);
    return FS_FAIL(FS_ESTATE, "NCCL: rank %d of %d, communicator '%s': %s: %s (result %d)%s%.1000s",
                   engine->rank, engine->size, engine->name, call,
                   engine->nccl->error_string(result), result,
                   more != NULL && more[0] != '\0' ? ": " : "", more != NULL ? more : "");
}

static fs_status
check(const fs_engine *engine, const char *call, int result)
{
    return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS ? FS_OK
                                                                : fail(engine, call, result);
}

/* *out: is it over? A failure of what was in progress is returned. */
static fs_status
look(const fs_engine *engine, const char *call, bool *out)
{
    int result = NCCL_SUCCESS;
    FS_TRY(check(engine, "ncclCommGetAsyncError",
                 engine->nccl->async_error(engine->communicator, &result)));
    *out = result == NCCL_SUCCESS;
    return check(engine, call, result);
}

static void
nap(unsigned *us)
{
    std::this_thread::sleep_for(std::chrono::microseconds(*us));
    *us = *us * 2 < SLEEP_MOST_US ? *us * 2 : SLEEP_MOST_US;
}

/* Waits until what call began is no longer in progress. */
static fs_status
settle(const fs_engine *engine, const char *call)
{
    unsigned us = SLEEP_LEAST_US;
    auto eager = std::chrono::steady_clock::now() + std::chrono::microseconds(EAGER_US);
    for (;;) {
        bool over;
        FS_TRY(look(engine, call, &over));
        if (over) {
            return FS_OK;
        }
        if (std::chrono::steady_clock::now() < eager) {
            continue;
        }
        if (engine->patience != NULL) {
            FS_TRY(engine->patience(engine->patience_ctx));
        }
        nap(&us);
    }
}

// ---- opening and closing ------------------------------------------------------------------------

extern "C" fs_status
fs_nccl_make_id(fs_engine_id *out)
{
    const nccl_functions *nccl;
    nccl_id id;
    FS_TRY(fs_nccl_functions(&nccl));
    int result = nccl->make_id(&id);
    if (result != NCCL_SUCCESS) {
        return FS_FAIL(FS_ESTATE, "NCCL: ncclGetUniqueId: %s (result %d): %.1000s",
                       nccl->error_string(result), result, nccl->last_error(NULL));
    }
    static_assert(sizeof id.bytes == sizeof out->bytes, "ids are the engine's");
    std::memcpy(out->bytes, id.bytes, sizeof out->bytes);
    return FS_OK;
}

static fs_status
start(fs_engine *engine, const fs_engine_id *id)
{
    nccl_config config = {sizeof config,  NCCL_CONFIG_MAGIC, NCCL_CONFIG_VERSION, 0,
                          NCCL_UNDEFINED, NCCL_UNDEFINED,    NCCL_UNDEFINED,      NULL,
                          NCCL_UNDEFINED, NCCL_UNDEFINED};
    nccl_id passed;
    std::memcpy(passed.bytes, id->bytes, sizeof passed.bytes);
    int result =
        engine->nccl->open(&engine->communicator, engine->size, passed, engine->rank, &config);
    FS_TRY(check(engine, "ncclCommInitRankConfig", result));
    return settle(engine, "ncclCommInitRankConfig");
}

extern "C" fs_status
fs_nccl_open(const fs_engine_open *open, fs_engine **out)
{
    const nccl_functions *nccl;
    *out = NULL;
    FS_TRY(fs_nccl_functions(&nccl));
    if (open->size < 1 || open->rank < 0 || open->rank >= open->size) {
        return FS_FAIL(FS_EINVAL, "NCCL: communicator '%s': rank %d of %d", open->name, open->rank,
                       open->size);
    }
    fs_engine *engine = new (std::nothrow) fs_engine();
    if (engine == NULL) {
        return FS_FAIL(FS_ENOMEM, "NCCL: no memory for communicator '%s'", open->name);
    }
    engine->nccl = nccl;
    engine->rank = open->rank;
    engine->size = open->size;
    (void)std::snprintf(engine->name, sizeof engine->name, "%s", open->name);
    engine->patience = open->patience;
    engine->patience_ctx = open->patience_ctx;
    fs_status status = start(engine, &open->id);
    if (status != FS_OK) {
        fs_nccl_abort(engine);
        delete engine;
        return status;
    }
    *out = engine;
    return FS_OK;
}

/* What ends a communicator may leave its device to the calling thread. */
struct device_kept {
    int before;
    bool is_known;
    device_kept() : before(0), is_known(cudaGetDevice(&before) == cudaSuccess) {}
    ~device_kept()
    {
        int now = before;
        if (is_known && cudaGetDevice(&now) == cudaSuccess && now != before) {
            fs_cuda_device_give_back(before);
        }
    }
};

extern "C" void
fs_nccl_abort(fs_engine *engine)
{
    device_kept kept;
    if (engine->communicator != NULL) {
        (void)engine->nccl->abort(engine->communicator);
        engine->communicator = NULL;
    }
}

/* Ends the communicator in peace, or leaves it to be aborted. NCCL lets the ranks of a host come to
 * the same point first. */
static void
finish(fs_engine *engine)
{
    if (engine->failed ||
        check(engine, "ncclCommFinalize", engine->nccl->finalize(engine->communicator)) != FS_OK) {
        return;
    }
    bool over = false;
    unsigned us = SLEEP_LEAST_US;
    for (unsigned waited = 0; waited < CLOSE_MOST_US; waited += us) {
        if (look(engine, "ncclCommFinalize", &over) != FS_OK) {
            return;
        }
        if (over) {
            (void)engine->nccl->destroy(engine->communicator);
            engine->communicator = NULL; /* whatever it said: it is not to be touched again */
            return;
        }
        nap(&us);
    }
}

extern "C" void
fs_nccl_close(fs_engine *engine)
{
    if (engine == NULL) {
        return;
    }
    device_kept kept;
    if (engine->communicator != NULL) {
        finish(engine);
    }
    fs_nccl_abort(engine);
    delete engine;
}

extern "C" fs_status
fs_nccl_check(fs_engine *engine)
{
    bool over;
    FS_TRY(check_usable(engine));
    return keep(engine, look(engine, "what was given before", &over));
}

// ---- moving -------------------------------------------------------------------------------------

/* Ends the group, whatever became of it, and waits until NCCL has given it to the stream. */
static fs_status
end_group(fs_engine *engine, fs_status status, const char *call)
{
    int result = engine->nccl->group_end();
    FS_TRY(status);
    FS_TRY(check(engine, call, result));
    return settle(engine, call);
}

static fs_status
check_call(const fs_engine *engine, fs_cuda_stream stream, const char *what)
{
    FS_TRY(check_usable(engine));
    return fs_cuda_check_stream(stream, what);
}

static fs_status
check_peer(const fs_engine *engine, const char *what, size_t i, int peer, const void *data,
           size_t nbytes)
{
    if (peer < 0 || peer >= engine->size) {
        return FS_FAIL(FS_EINVAL, "NCCL: rank %d, communicator '%s': %s %zu is of rank %d, of %d",
                       engine->rank, engine->name, what, i, peer, engine->size);
    }
    if (data == NULL && nbytes > 0) {
        return FS_FAIL(FS_EINVAL, "NCCL: rank %d, communicator '%s': %s %zu: %zu bytes at NULL",
                       engine->rank, engine->name, what, i, nbytes);
    }
    return FS_OK;
}

/* Do the pieces begin with one from each root in turn, of one size, that will adjoin? */
static bool
is_all_gather(const fs_engine *engine, const fs_engine_piece *pieces, size_t n)
{
    if (n < (size_t)engine->size) {
        return false;
    }
    size_t nbytes = pieces[0].nbytes;
    for (int r = 0; r < engine->size; r++) {
        const unsigned char *wanted = (const unsigned char *)pieces[0].dst + (size_t)r * nbytes;
        if (pieces[r].root != r || pieces[r].nbytes != nbytes || pieces[r].dst != wanted) {
            return false;
        }
    }
    return true;
}

static fs_status
give_pieces(const fs_engine *engine, cudaStream_t stream, const fs_engine_piece *pieces, size_t n)
{
    const nccl_functions *nccl = engine->nccl;
    for (size_t i = 0; i < n;) {
        const fs_engine_piece *piece = &pieces[i];
        if (piece->nbytes == 0) {
            i++;
        } else if (is_all_gather(engine, piece, n - i)) {
            FS_TRY(check(engine, "ncclAllGather",
                         nccl->all_gather(piece[engine->rank].src, piece->dst, piece->nbytes,
                                          NCCL_U8, engine->communicator, stream)));
            i += (size_t)engine->size;
        } else {
            const void *src = piece->root == engine->rank ? piece->src : piece->dst;
            FS_TRY(check(engine, "ncclBroadcast",
                         nccl->broadcast(src, piece->dst, piece->nbytes, NCCL_U8, piece->root,
                                         engine->communicator, stream)));
            i++;
        }
    }
    return FS_OK;
}

extern "C" fs_status
fs_nccl_gather(fs_engine *engine, fs_cuda_stream stream, const fs_engine_piece *pieces, size_t n)
{
    size_t nbytes = 0;
    FS_TRY(check_call(engine, stream, "gather"));
    for (size_t i = 0; i < n; i++) {
        const fs_engine_piece *piece = &pieces[i];
        FS_TRY(check_peer(engine, "piece", i, piece->root, piece->dst, piece->nbytes));
        if (piece->root == engine->rank) {
            FS_TRY(check_peer(engine, "own piece", i, piece->root, piece->src, piece->nbytes));
        }
        nbytes |= piece->nbytes;
    }
    if (nbytes == 0) {
        return FS_OK;
    }
    FS_TRY(keep(engine, check(engine, "ncclGroupStart", engine->nccl->group_start())));
    fs_status status = give_pieces(engine, (cudaStream_t)stream, pieces, n);
    return keep(engine, end_group(engine, status, "gather (ncclGroupEnd)"));
}

/* The next part of the list, from *i on, that is (or is not) the rank's own; NULL at the end. */
static const fs_engine_part *
next_part(const fs_engine *engine, const fs_engine_part *parts, size_t n, bool own, size_t *i)
{
    while (*i < n) {
        const fs_engine_part *part = &parts[(*i)++];
        if (part->nbytes > 0 && (part->peer == engine->rank) == own) {
            return part;
        }
    }
    return NULL;
}

/* A rank's own parts: pairs of equal sizes; copied where copy is true. */
static fs_status
walk_own(const fs_engine *engine, cudaStream_t stream, const fs_engine_part *sends, size_t sends_n,
         const fs_engine_part *receives, size_t receives_n, bool copy)
{
    for (size_t i = 0, j = 0;;) {
        const fs_engine_part *from = next_part(engine, sends, sends_n, true, &i);
        const fs_engine_part *to = next_part(engine, receives, receives_n, true, &j);
        if (from == NULL && to == NULL) {
            return FS_OK;
        }
        if (from == NULL || to == NULL || from->nbytes != to->nbytes) {
            return FS_FAIL(FS_EINVAL, "NCCL: rank %d, communicator '%s': %zu bytes for itself meet "
                                      "%zu from itself",
                           engine->rank, engine->name, from != NULL ? from->nbytes : 0,
                           to != NULL ? to->nbytes : 0);
        }
        if (copy && from->data != to->data) {
            FS_CUDA_TRY(cudaMemcpyAsync(to->data, from->data, from->nbytes, cudaMemcpyDefault,
                                        stream));
        }
    }
}

static fs_status
give_parts(const fs_engine *engine, cudaStream_t stream, const fs_engine_part *sends,
           size_t sends_n, const fs_engine_part *receives, size_t receives_n)
{
    const nccl_functions *nccl = engine->nccl;
    const fs_engine_part *part;
    for (size_t i = 0; (part = next_part(engine, sends, sends_n, false, &i)) != NULL;) {
        FS_TRY(check(engine, "ncclSend",
                     nccl->send(part->data, part->nbytes, NCCL_U8, part->peer,
                                engine->communicator, stream)));
    }
    for (size_t i = 0; (part = next_part(engine, receives, receives_n, false, &i)) != NULL;) {
        FS_TRY(check(engine, "ncclRecv",
                     nccl->receive(part->data, part->nbytes, NCCL_U8, part->peer,
                                   engine->communicator, stream)));
    }
    return FS_OK;
}

extern "C" fs_status
fs_nccl_alltoall(fs_engine *engine, fs_cuda_stream stream, const fs_engine_part *sends,
                 size_t sends_n, const fs_engine_part *receives, size_t receives_n)
{
    size_t to_peers = 0, from_peers = 0;
    FS_TRY(check_call(engine, stream, "all-to-all"));
    for (size_t i = 0; i < sends_n; i++) {
        FS_TRY(check_peer(engine, "send", i, sends[i].peer, sends[i].data, sends[i].nbytes));
    }
    for (size_t i = 0; i < receives_n; i++) {
        FS_TRY(check_peer(engine, "receive", i, receives[i].peer, receives[i].data,
                          receives[i].nbytes));
    }
    cudaStream_t on = (cudaStream_t)stream;
    FS_TRY(walk_own(engine, on, sends, sends_n, receives, receives_n, false));
    FS_TRY(keep(engine, walk_own(engine, on, sends, sends_n, receives, receives_n, true)));
    if (next_part(engine, sends, sends_n, false, &to_peers) == NULL &&
        next_part(engine, receives, receives_n, false, &from_peers) == NULL) {
        return FS_OK;
    }
    FS_TRY(keep(engine, check(engine, "ncclGroupStart", engine->nccl->group_start())));
    fs_status status = give_parts(engine, on, sends, sends_n, receives, receives_n);
    return keep(engine, end_group(engine, status, "all-to-all (ncclGroupEnd)"));
}

static int
type_of(fs_dtype dtype)
{
    switch (dtype) {
    case FS_F32:
        return NCCL_F32;
    case FS_F64:
        return NCCL_F64;
    case FS_BF16:
        return NCCL_BF16;
    case FS_F16:
        return NCCL_F16;
    case FS_I32:
        return NCCL_I32;
    case FS_I64:
        return NCCL_I64;
    case FS_U8:
        return NCCL_U8;
    default:
        return -1;
    }
}

extern "C" fs_status
fs_nccl_reduce_scatter(fs_engine *engine, fs_cuda_stream stream, fs_dtype dtype, const void *in,
                       size_t n, void *out)
{
    FS_TRY(check_call(engine, stream, "reduce-scatter"));
    int type = type_of(dtype);
    if (type < 0) {
        return FS_FAIL(FS_ETYPE, "NCCL: reduce-scatter: no dtype has number %d", (int)dtype);
    }
    FS_TRY(check_peer(engine, "source", 0, engine->rank, in, n));
    FS_TRY(check_peer(engine, "target", 0, engine->rank, out, n));
    if (n == 0) {
        return FS_OK;
    }
    int result = engine->nccl->reduce_scatter(in, out, n, type, NCCL_SUM, engine->communicator,
                                              (cudaStream_t)stream);
    FS_TRY(keep(engine, check(engine, "ncclReduceScatter", result)));
    return keep(engine, settle(engine, "ncclReduceScatter"));
}
