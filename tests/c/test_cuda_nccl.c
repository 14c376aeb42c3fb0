// sanitizers: tsan
// needs: c++
// stand-in only
/* The engine of NCCL, over a stand-in for it: ranks are threads, each with a stand-in device. What
 * moved is compared byte by byte; what goes wrong must end, and say so. */
#define _GNU_SOURCE
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../cudasim/sim.h"
#include "cuda/device.h"
#include "cuda/nccl.h"
#include "ends.h"
#include "ranks.h"

#define DEVICE_NBYTES ((size_t)1 << 22)

/* What the ranks of a case share. */
typedef struct shared_case {
    uint64_t seed;
    fs_engine_id id[2];
    _Atomic int flag;
    int out_of_order; /* ranks whose sum was not that of rank order */
    pthread_mutex_t lock;
} shared_case;

/* Opens communicator number c on the rank's own device. */
static fs_engine *
open_engine(fs_world *world, shared_case *shared, int c, const char *name)
{
    fs_engine_open open = {.rank = fs_world_rank(world),
                           .size = fs_world_size(world),
                           .name = name,
                           .patience = ask_world,
                           .patience_ctx = world};
    fs_engine *engine;
    CHECK_OK(fs_cuda_device_use(open.rank));
    if (open.rank == 0) {
        CHECK_OK(fs_nccl_make_id(&shared->id[c]));
    }
    meet(world);
    open.id = shared->id[c];
    CHECK_OK(fs_nccl_open(&open, &engine));
    CHECK_OK(fs_nccl_check(engine));
    return engine;
}

// ---- memory -------------------------------------------------------------------------------------

/* A rank's device memory, host memory beside it, and streams to move on and to read on. */
typedef struct place {
    fs_cuda_stream move, read;
    fs_cuda_event moved;
    unsigned char *device, *host;
    size_t nbytes;
} place;

static void
open_place(place *p, size_t nbytes)
{
    p->nbytes = nbytes;
    CHECK_OK(fs_cuda_stream_open(&p->move));
    CHECK_OK(fs_cuda_stream_open(&p->read));
    CHECK_OK(fs_cuda_event_open(&p->moved));
    CHECK_OK(fs_cuda_memory_open(nbytes, (void **)&p->device));
    CHECK_OK(fs_cuda_pinned_open(nbytes, (void **)&p->host));
    memset(p->host, 0xee, nbytes);
}

/* The device has what the host has, from now on in the moving stream. */
static void
upload(place *p)
{
    CHECK_OK(fs_cuda_copy(p->move, p->device, p->host, p->nbytes));
}

/* On the other stream, after an event: what was given must be in the first one's order by now. */
static void
download(place *p)
{
    CHECK_OK(fs_cuda_event_record(p->moved, p->move));
    CHECK_OK(fs_cuda_stream_after(p->read, p->moved));
    CHECK_OK(fs_cuda_copy(p->read, p->host, p->device, p->nbytes));
    CHECK_OK(fs_cuda_stream_wait(p->read));
}

static void
close_place(place *p)
{
    CHECK_OK(fs_cuda_stream_close(p->move));
    CHECK_OK(fs_cuda_stream_close(p->read));
    CHECK_OK(fs_cuda_event_close(p->moved));
    CHECK_OK(fs_cuda_memory_close(p->device, p->nbytes));
    CHECK_OK(fs_cuda_pinned_close(p->host));
}

/* Any bytes, equal wherever they are asked for. */
static uint64_t
mix(uint64_t x)
{
    x = (x ^ (x >> 31)) * 0x7fb5d329728ea185u;
    x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44du;
    return x ^ (x >> 33);
}

static unsigned char
byte_of(uint64_t seed, int from, int to, size_t i)
{
    return (unsigned char)mix(seed + 1000 * (uint64_t)from + 7 * (uint64_t)to + (i << 20));
}

/* Of these sizes some are 0, some odd. */
static size_t
size_of(uint64_t seed, int from, int to, size_t most)
{
    uint64_t x = mix(seed + 131 * (uint64_t)from + 17 * (uint64_t)to);
    return x % 3 == 0 ? 0 : (size_t)(x >> 8) % most;
}

// ---- moving -------------------------------------------------------------------------------------

/* Units as they come: equal pieces that adjoin, the same in another order of roots, the last one
 * shorter, equal ones with room between, uneven ones of which some are empty. */
enum { ADJOINING, BACKWARDS, LAST_SHORTER, APART, UNEVEN, UNITS };

static size_t
piece_nbytes(uint64_t seed, int unit, int root, int size)
{
    enum { EQUAL = 120, MOST = 200 };
    if (unit == UNEVEN) {
        return size_of(seed, root, -1, MOST);
    }
    return unit == LAST_SHORTER && root == size - 1 ? EQUAL - 1 : EQUAL;
}

static void
check_gather(fs_world *world, fs_engine *engine, uint64_t seed)
{
    enum { MOST = 208 };
    int rank = fs_world_rank(world), size = fs_world_size(world);
    size_t n = 0, at = 0;
    fs_engine_piece pieces[UNITS * 8];
    int units[UNITS * 8];
    place p;
    /* Behind what is gathered: this rank's own pieces, where they are not in place. */
    size_t own = (size_t)size * UNITS * MOST;
    bool in_place = seed % 2 == 1; /* on its root a piece may lie where it is wanted */
    open_place(&p, own + UNITS * MOST);
    for (int unit = 0; unit < UNITS; unit++) {
        for (int turn = 0; turn < size; turn++, n++) {
            int root = unit == BACKWARDS ? size - 1 - turn : turn;
            size_t nbytes = piece_nbytes(seed, unit, root, size);
            pieces[n] = (fs_engine_piece){root, NULL, p.device + at, nbytes};
            units[n] = unit;
            if (root == rank) {
                size_t src = in_place ? at : own;
                pieces[n].src = p.device + src;
                for (size_t i = 0; i < nbytes; i++) {
                    p.host[src + i] = byte_of(seed, root, unit, i);
                }
                own += nbytes;
            }
            at += nbytes + (unit == APART || unit == UNEVEN ? 8 : 0);
        }
    }
    upload(&p);
    CHECK_OK(fs_nccl_gather(engine, p.move, pieces, n));
    download(&p);
    for (size_t k = 0; k < n; k++) {
        size_t first = (size_t)((unsigned char *)pieces[k].dst - p.device);
        for (size_t i = 0; i < pieces[k].nbytes; i++) {
            CHECK(p.host[first + i] == byte_of(seed, pieces[k].root, units[k], i),
                  "seed %llu, rank %d of %d, piece %zu, byte %zu", (unsigned long long)seed, rank,
                  size, k, i);
        }
        for (size_t i = pieces[k].nbytes; units[k] >= APART && i < pieces[k].nbytes + 8; i++) {
            CHECK(p.host[first + i] == 0xee, "piece %zu of rank %d reaches into the next", k, rank);
        }
    }
    CHECK_OK(fs_nccl_gather(engine, p.move, pieces, 0));
    close_place(&p);
}

/* Each rank sends two parts of other sizes to each, itself too; some are empty. */
static void
check_alltoall(fs_world *world, fs_engine *engine, uint64_t seed)
{
    enum { MOST = 150, PARTS = 2 };
    int rank = fs_world_rank(world), size = fs_world_size(world);
    fs_engine_part sends[16], receives[16];
    size_t at = 0, n = 0;
    place p;
    open_place(&p, (size_t)size * PARTS * 2 * MOST);
    for (int part = 0; part < PARTS; part++) {
        for (int r = 0; r < size; r++, n++) {
            size_t nbytes = size_of(seed + (uint64_t)part, rank, r, MOST);
            sends[n] = (fs_engine_part){r, p.device + at, nbytes};
            for (size_t i = 0; i < nbytes; i++) {
                p.host[at + i] = byte_of(seed + (uint64_t)part, rank, r, i);
            }
            at += nbytes;
            nbytes = size_of(seed + (uint64_t)part, r, rank, MOST);
            receives[n] = (fs_engine_part){r, p.device + at, nbytes};
            at += nbytes;
        }
    }
    upload(&p);
    CHECK_OK(fs_nccl_alltoall(engine, p.move, sends, n, receives, n));
    download(&p);
    for (size_t k = 0; k < n; k++) {
        uint64_t of = seed + (uint64_t)(k >= (size_t)size);
        size_t first = (size_t)((unsigned char *)receives[k].data - p.device);
        for (size_t i = 0; i < receives[k].nbytes; i++) {
            CHECK(p.host[first + i] == byte_of(of, receives[k].peer, rank, i),
                  "seed %llu, rank %d of %d, from %d, byte %zu", (unsigned long long)seed, rank,
                  size, receives[k].peer, i);
        }
    }
    CHECK_OK(fs_nccl_alltoall(engine, p.move, NULL, 0, NULL, 0));
    close_place(&p);
}

/* A value of a rank: of magnitudes so different that sums depend on the order. */
static float
value_of(uint64_t seed, int rank, size_t i)
{
    uint64_t x = mix(seed + 77 * (uint64_t)rank + (i << 24));
    return ldexpf((float)(x % 20001) - 10000.0f, (int)((x >> 40) % 24) - 12);
}

static void
check_reduce_scatter(fs_world *world, fs_engine *engine, shared_case *shared)
{
    enum { N = 67 };
    int rank = fs_world_rank(world), size = fs_world_size(world), other = 0;
    size_t all = (size_t)size * N;
    place p;
    open_place(&p, (all + N) * sizeof(float));
    float *host = (float *)p.host, *device = (float *)p.device;
    for (size_t i = 0; i < all; i++) {
        host[i] = value_of(shared->seed, rank, i);
    }
    upload(&p);
    CHECK_OK(fs_nccl_reduce_scatter(engine, p.move, FS_F32, device, N, device + all));
    download(&p);
    for (size_t i = 0; i < N; i++) {
        double sum = 0.0, magnitude = 0.0;
        float in_rank_order = 0.0f;
        for (int r = 0; r < size; r++) {
            float x = value_of(shared->seed, r, (size_t)rank * N + i);
            sum += (double)x;
            magnitude += fabs((double)x);
            in_rank_order += x;
        }
        /* size - 1 roundings, each of at most half a unit in the last place of a partial sum. */
        double bound = (double)(size - 1) * 0x1p-24 * magnitude;
        CHECK(fabs((double)host[all + i] - sum) <= bound, "rank %d of %d, element %zu: %g, not %g",
              rank, size, i, (double)host[all + i], sum);
        other += host[all + i] != in_rank_order;
    }
    (void)pthread_mutex_lock(&shared->lock);
    shared->out_of_order += other > 0;
    (void)pthread_mutex_unlock(&shared->lock);
    close_place(&p);
}

/* Small integers, exact in every dtype; in place. */
static void
check_dtypes(fs_world *world, fs_engine *engine)
{
    enum { N = 5 };
    static const fs_dtype DTYPES[] = {FS_F32, FS_F64, FS_BF16, FS_F16, FS_I32, FS_I64, FS_U8};
    int rank = fs_world_rank(world), size = fs_world_size(world);
    size_t all = (size_t)size * N;
    for (size_t d = 0; d < sizeof DTYPES / sizeof *DTYPES; d++) {
        size_t width = fs_dtype_nbytes(DTYPES[d]);
        double sum = 0.0;
        place p;
        open_place(&p, all * width);
        for (size_t i = 0; i < all; i++) {
            int x = rank + 1 + (int)(i % 3);
            unsigned char *at = p.host + i * width;
            /* bf16 and fp16 of 1 to 10, by hand: their upper halves and 10 bits of fraction. */
            float f = (float)x;
            double g = x;
            int64_t w = x;
            uint32_t bits;
            memcpy(&bits, &f, sizeof bits);
            uint16_t half = (uint16_t)(DTYPES[d] == FS_BF16
                                           ? bits >> 16
                                           : ((bits >> 23) - 112) << 10 | (bits >> 13 & 1023));
            bool is_half = DTYPES[d] == FS_BF16 || DTYPES[d] == FS_F16;
            const void *from = DTYPES[d] == FS_F32   ? (const void *)&f
                               : DTYPES[d] == FS_F64 ? (const void *)&g
                               : is_half             ? (const void *)&half
                                                     : (const void *)&w;
            memcpy(at, from, width);
        }
        upload(&p);
        CHECK_OK(fs_nccl_reduce_scatter(engine, p.move, DTYPES[d], p.device, N,
                                        p.device + (size_t)rank * N * width));
        download(&p);
        for (size_t i = 0; i < N; i++) {
            size_t k = (size_t)rank * N + i;
            sum = (double)size * (double)(size + 1) / 2 + (double)size * (double)(k % 3);
            float f = (float)sum;
            uint32_t bits;
            memcpy(&bits, &f, sizeof bits);
            int64_t w = (int64_t)sum;
            uint16_t half = (uint16_t)(DTYPES[d] == FS_BF16
                                           ? bits >> 16
                                           : ((bits >> 23) - 112) << 10 | (bits >> 13 & 1023));
            bool is_half = DTYPES[d] == FS_BF16 || DTYPES[d] == FS_F16;
            const void *wanted = DTYPES[d] == FS_F32   ? (const void *)&f
                                 : DTYPES[d] == FS_F64 ? (const void *)&sum
                                 : is_half             ? (const void *)&half
                                                       : (const void *)&w;
            CHECK(memcmp(p.host + k * width, wanted, width) == 0, "%s, rank %d of %d, element %zu",
                  fs_dtype_name(DTYPES[d]), rank, size, i);
        }
        close_place(&p);
    }
}

static void
move_all(fs_world *world, void *ctx)
{
    shared_case *shared = ctx;
    fs_engine *gather = open_engine(world, shared, 0, "gather");
    fs_engine *reduce = open_engine(world, shared, 1, "reduce");
    for (uint64_t turn = 0; turn < 3; turn++) {
        check_gather(world, gather, shared->seed + turn);
        check_alltoall(world, reduce, shared->seed + turn);
    }
    check_reduce_scatter(world, reduce, shared);
    check_dtypes(world, reduce);
    CHECK_OK(fs_nccl_check(gather));
    CHECK_OK(fs_nccl_check(reduce));
    meet(world);
    /* The thread's device stays what it was: another one's streams would not take a kernel. */
    place p;
    CHECK_OK(fs_cuda_device_use(0));
    open_place(&p, 64);
    fs_nccl_close(gather);
    upload(&p);
    CHECK_OK(fs_cuda_combine(p.move, FS_SUM, FS_F32, p.device, p.device, 16));
    fs_nccl_abort(reduce);
    CHECK_OK(fs_cuda_combine(p.move, FS_SUM, FS_F32, p.device, p.device, 16));
    fs_nccl_close(reduce);
    fs_nccl_close(NULL);
    close_place(&p);
}

static void
test_moves(void)
{
    static const int SIZES[] = {1, 2, 3, 4, 5, 8};
    for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES; s++) {
        for (uint64_t seed = 1; seed <= 8; seed++) {
            shared_case shared = {.seed = seed * 100, .lock = PTHREAD_MUTEX_INITIALIZER};
            fs_sim_reset(seed, seed % 2 == 0 ? FS_SIM_LATE : FS_SIM_SHUFFLED, DEVICE_NBYTES);
            run_ranks(SIZES[s], move_all, &shared);
            CHECK(fs_sim_communicators() == 0, "%zu communicators left", fs_sim_communicators());
            /* With two, either order is the same. */
            CHECK(SIZES[s] < 3 || shared.out_of_order > 0,
                  "%d ranks: sums in rank order, which nobody may count on", SIZES[s]);
        }
    }
}

// ---- what goes wrong ----------------------------------------------------------------------------

static void
expect_words(const char *const *words)
{
    for (; *words != NULL; words++) {
        CHECK(strstr(fs_status_message(), *words) != NULL, "'%s' is not in '%s'", *words,
              fs_status_message());
    }
}
#define EXPECT_WORDS(...) expect_words((const char *const[]){__VA_ARGS__, NULL})

static fs_status
lose_patience(void *ctx)
{
    int *asked = ctx;
    return ++*asked < 20 ? FS_OK : FS_FAIL(FS_ABORTED, "the patience is over");
}

/* A peer that never comes: opening ends with the patience. */
static void
test_peer_never_comes(void)
{
    int asked = 0;
    fs_engine_open open = {.rank = 1,
                           .size = 2,
                           .name = "gather",
                           .patience = lose_patience,
                           .patience_ctx = &asked};
    fs_engine *engine;
    fs_sim_reset(1, FS_SIM_SHUFFLED, DEVICE_NBYTES);
    CHECK_OK(fs_nccl_make_id(&open.id));
    CHECK_STATUS(fs_nccl_open(&open, &engine), FS_ABORTED);
    EXPECT_WORDS("the patience is over");
    CHECK(engine == NULL && asked == 20, "asked %d times", asked);
    CHECK(fs_sim_communicators() == 0, "%zu communicators left", fs_sim_communicators());
    memset(&open.id, 0, sizeof open.id);
    CHECK_STATUS(fs_nccl_open(&open, &engine), FS_ESTATE);
    EXPECT_WORDS("rank 1 of 2", "'gather'", "ncclCommInitRankConfig", "an id that nobody made");
    open.rank = 2;
    CHECK_STATUS(fs_nccl_open(&open, &engine), FS_EINVAL);
    EXPECT_WORDS("rank 2 of 2");
}

/* A piece of the given size from each rank; at its own place in device memory. */
static fs_status
gather_once(fs_world *world, fs_engine *engine, place *p, size_t nbytes)
{
    fs_engine_piece pieces[FS_RANKS_MAX < 8 ? FS_RANKS_MAX : 8];
    int size = fs_world_size(world);
    for (int r = 0; r < size; r++) {
        unsigned char *at = p->device + (size_t)r * nbytes;
        pieces[r] = (fs_engine_piece){r, at, at, nbytes};
    }
    return fs_nccl_gather(engine, p->move, pieces, (size_t)size);
}

/* The first rank does not take part any more: the others' calls, and then their ends, do not wait
 * for it. */
static void
leave_peers_alone(fs_world *world, void *ctx)
{
    shared_case *shared = ctx;
    place p;
    fs_engine *engine = open_engine(world, shared, 0, "gather");
    open_place(&p, 800);
    upload(&p);
    CHECK_OK(gather_once(world, engine, &p, 100));
    CHECK_OK(fs_cuda_stream_wait(p.move));
    if (fs_world_rank(world) != 0) {
        bool done = true;
        CHECK_OK(gather_once(world, engine, &p, 100)); /* returns, though one is missing */
        CHECK_OK(fs_cuda_event_record(p.moved, p.move));
        CHECK_OK(fs_cuda_event_is_done(p.moved, &done));
        CHECK(!done, "gathered without rank 0");
        CHECK_OK(fs_nccl_check(engine));
    }
    meet(world);
    if (fs_world_rank(world) == 0) {
        fs_nccl_close(engine);
    } else {
        fs_nccl_abort(engine);
        CHECK_STATUS(gather_once(world, engine, &p, 100), FS_ESTATE);
        EXPECT_WORDS("'gather' was aborted");
        CHECK_STATUS(fs_nccl_check(engine), FS_ESTATE);
        fs_nccl_abort(engine);
        CHECK_OK(fs_cuda_event_wait(p.moved));
        fs_nccl_close(engine);
    }
    close_place(&p);
    CHECK_OK(fs_cuda_device_use(0));
}

/* The first time two ranks meet, the call itself waits: it ends with the patience. */
static void
wait_for_first_time(fs_world *world, void *ctx)
{
    shared_case *shared = ctx;
    int asked = 0;
    place p;
    fs_engine *engine;
    fs_engine_open open = {.rank = fs_world_rank(world), .size = 2, .name = "reduce"};
    open.patience = lose_patience;
    open.patience_ctx = &asked;
    CHECK_OK(fs_cuda_device_use(open.rank));
    open_place(&p, 800);
    if (open.rank == 0) {
        CHECK_OK(fs_nccl_make_id(&shared->id[0]));
    }
    meet(world);
    open.id = shared->id[0];
    asked = -1000000;
    CHECK_OK(fs_nccl_open(&open, &engine));
    asked = 0;
    if (open.rank == 1) {
        CHECK_STATUS(gather_once(world, engine, &p, 100), FS_ABORTED);
        EXPECT_WORDS("the patience is over");
        CHECK_STATUS(fs_nccl_check(engine), FS_ABORTED);
        EXPECT_WORDS("rank 1", "'reduce' failed", "the patience is over");
    }
    meet(world);
    fs_nccl_abort(engine);
    fs_nccl_close(engine);
    close_place(&p);
    CHECK_OK(fs_cuda_device_use(0));
}

/* An error that comes to light later, while something is under way. */
static void
fail_later(fs_world *world, void *ctx)
{
    shared_case *shared = ctx;
    place p;
    fs_engine *engine = open_engine(world, shared, 0, "gather");
    int rank = fs_world_rank(world);
    open_place(&p, 800);
    CHECK_OK(fs_cuda_fill(p.move, p.device, rank, 800));
    CHECK_OK(gather_once(world, engine, &p, 100));
    CHECK_OK(fs_cuda_stream_wait(p.move));
    if (rank == 1) {
        bool done = true;
        CHECK_OK(gather_once(world, engine, &p, 100));
        CHECK_OK(fs_cuda_event_record(p.moved, p.move));
        fs_sim_fail_communicators(1, 6);
        CHECK_STATUS(fs_nccl_check(engine), FS_ESTATE);
        EXPECT_WORDS("rank 1 of 2", "'gather'", "remote process exited", "(result 6)",
                     "a test made this fail");
        CHECK_STATUS(gather_once(world, engine, &p, 100), FS_ESTATE);
        EXPECT_WORDS("rank 1", "'gather' failed", "remote process exited");
        CHECK_OK(fs_cuda_event_is_done(p.moved, &done));
        CHECK(!done, "gathered in spite of it");
    }
    meet(world);
    fs_nccl_close(engine); /* which aborts where something failed */
    close_place(&p);
    CHECK_OK(fs_cuda_device_use(0));
}

static void
test_failures(void)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        shared_case shared = {.seed = seed};
        fs_sim_reset(seed, seed % 2 == 0 ? FS_SIM_LATE : FS_SIM_SHUFFLED, DEVICE_NBYTES);
        run_ranks(3, leave_peers_alone, &shared);
        run_ranks(2, wait_for_first_time, &shared);
        run_ranks(2, fail_later, &shared);
        CHECK(fs_sim_communicators() == 0, "%zu communicators left", fs_sim_communicators());
    }
}

static void
call_wrongly(fs_world *world, void *ctx)
{
    shared_case *shared = ctx;
    fs_engine *engine = open_engine(world, shared, 0, "gather");
    int rank = fs_world_rank(world);
    char mine[8];
    fs_cuda_stream stream;
    CHECK_OK(fs_cuda_stream_open(&stream));
    fs_engine_piece piece = {2, NULL, mine, 8};
    CHECK_STATUS(fs_nccl_gather(engine, stream, &piece, 1), FS_EINVAL);
    EXPECT_WORDS("'gather'", "piece 0 is of rank 2, of 2");
    piece = (fs_engine_piece){rank, NULL, mine, 8};
    CHECK_STATUS(fs_nccl_gather(engine, stream, &piece, 1), FS_EINVAL);
    EXPECT_WORDS("own piece 0: 8 bytes at NULL");
    piece = (fs_engine_piece){1 - rank, NULL, NULL, 8};
    CHECK_STATUS(fs_nccl_gather(engine, stream, &piece, 1), FS_EINVAL);
    CHECK_STATUS(fs_nccl_gather(engine, NULL, &piece, 0), FS_EINVAL);
    fs_engine_part part = {-1, mine, 8}, own = {rank, mine, 8}, less = {rank, mine, 7};
    CHECK_STATUS(fs_nccl_alltoall(engine, stream, &part, 1, NULL, 0), FS_EINVAL);
    EXPECT_WORDS("send 0 is of rank -1");
    CHECK_STATUS(fs_nccl_alltoall(engine, stream, NULL, 0, &part, 1), FS_EINVAL);
    CHECK_STATUS(fs_nccl_alltoall(engine, stream, &own, 1, &less, 1), FS_EINVAL);
    EXPECT_WORDS("8 bytes for itself meet 7 from itself");
    CHECK_STATUS(fs_nccl_alltoall(engine, stream, &own, 1, NULL, 0), FS_EINVAL);
    CHECK_STATUS(fs_nccl_reduce_scatter(engine, stream, FS_DTYPE_COUNT, mine, 1, mine), FS_ETYPE);
    CHECK_STATUS(fs_nccl_reduce_scatter(engine, stream, FS_F32, NULL, 1, mine), FS_EINVAL);
    CHECK_OK(fs_nccl_reduce_scatter(engine, stream, FS_F32, NULL, 0, NULL));
    CHECK_OK(fs_nccl_check(engine)); /* nothing was given: it is as good as before */
    fs_nccl_close(engine);
    CHECK_OK(fs_cuda_stream_close(stream));
    CHECK_OK(fs_cuda_device_use(0));
}

static void
test_wrong_calls(void)
{
    shared_case shared = {.seed = 1};
    fs_sim_reset(1, FS_SIM_SHUFFLED, DEVICE_NBYTES);
    run_ranks(2, call_wrongly, &shared);
}

// ---- what the stand-in finds --------------------------------------------------------------------

/* Rank 1 brings another size. */
static void
differ(fs_world *world, void *ctx)
{
    shared_case *shared = ctx;
    place p;
    fs_engine *engine = open_engine(world, shared, 0, "gather");
    open_place(&p, 800);
    upload(&p);
    CHECK_OK(gather_once(world, engine, &p, 100));
    (void)gather_once(world, engine, &p, fs_world_rank(world) == 1 ? 99 : 100);
    meet(world);
    CHECK_STATUS(fs_nccl_check(engine), FS_ESTATE);
    EXPECT_WORDS("'gather'", "invalid usage", "ncclAllGather(99", "ncclAllGather(100");
    meet(world);
    fs_nccl_close(engine);
    close_place(&p);
    CHECK_OK(fs_cuda_device_use(0));
}

/* Two communicators; where shared->flag is set, rank 1 uses them the other way round. */
static void
use_two(fs_world *world, void *ctx)
{
    shared_case *shared = ctx;
    place p[2];
    fs_engine *engines[2];
    bool swap = atomic_load(&shared->flag) != 0 && fs_world_rank(world) == 1;
    for (int c = 0; c < 2; c++) {
        engines[c] = open_engine(world, shared, c, c == 0 ? "gather" : "reduce");
        open_place(&p[c], 800);
        upload(&p[c]);
        CHECK_OK(gather_once(world, engines[c], &p[c], 10)); /* their first time */
    }
    for (int c = 0; c < 2; c++) {
        int which = swap ? 1 - c : c;
        CHECK_OK(gather_once(world, engines[which], &p[which], 10));
    }
    for (int c = 0; c < 2; c++) {
        CHECK_OK(fs_cuda_stream_wait(p[c].move));
        fs_nccl_close(engines[c]);
        close_place(&p[c]);
    }
    CHECK_OK(fs_cuda_device_use(0));
}

/* Without being asked to, the stand-in tolerates nothing. */
static void
end_by_size(void)
{
    shared_case shared = {.seed = 1};
    run_ranks(2, differ, &shared);
}

static void
end_by_order(void)
{
    shared_case shared = {.seed = 1, .flag = 1};
    run_ranks(2, use_two, &shared);
}

static void
overlap(fs_world *world, void *ctx)
{
    place p;
    fs_engine *engine = open_engine(world, ctx, 0, "gather");
    open_place(&p, 800);
    upload(&p);
    int peer = 1 - fs_world_rank(world);
    fs_engine_part send = {peer, p.device, 100}, receive = {peer, p.device + 99, 100};
    CHECK_OK(fs_nccl_alltoall(engine, p.move, &send, 1, &receive, 1));
}

static void
end_by_overlap(void)
{
    shared_case shared = {.seed = 1};
    run_ranks(2, overlap, &shared);
}

/* A stream that does not wait for what the communicator moves. */
static void
race(fs_world *world, void *ctx)
{
    place p;
    fs_engine *engine = open_engine(world, ctx, 0, "gather");
    open_place(&p, 800);
    upload(&p);
    CHECK_OK(gather_once(world, engine, &p, 100));
    CHECK_OK(fs_cuda_copy(p.read, p.host, p.device, p.nbytes));
}

static void
end_by_race(void)
{
    shared_case shared = {.seed = 1};
    run_ranks(2, race, &shared);
}

static void
test_ends(void)
{
#ifndef __SANITIZE_THREAD__ /* which does not go with a child that makes threads */
    check_ends(end_by_size, "meets rank");
    check_ends(end_by_order, "in different orders");
    check_ends(end_by_overlap, "buffers of one group overlap");
    check_ends(end_by_race, "race: copy on stream");
#else
    (void)check_ends;
    (void)end_by_size;
    (void)end_by_order;
    (void)end_by_overlap;
    (void)end_by_race;
#endif
}

static void
test_stand_in(void)
{
    for (uint64_t seed = 1; seed <= 5; seed++) {
        shared_case shared = {.seed = seed};
        fs_sim_reset(seed, seed % 2 == 0 ? FS_SIM_LATE : FS_SIM_SHUFFLED, DEVICE_NBYTES);
        fs_sim_tolerate_mismatches(true);
        run_ranks(2, differ, &shared);
        CHECK(fs_sim_mismatches() > 0, "seed %llu: another size was not seen",
              (unsigned long long)seed);
        fs_sim_tolerate_mismatches(true);
        run_ranks(3, use_two, &shared);
        CHECK(fs_sim_mismatches() == 0, "%s", fs_sim_latest_mismatch());
        atomic_store(&shared.flag, 1);
        run_ranks(3, use_two, &shared);
        CHECK(fs_sim_mismatches() > 0 && strstr(fs_sim_latest_mismatch(), "different orders"),
              "seed %llu: another order was not seen", (unsigned long long)seed);
        fs_sim_tolerate_mismatches(false);
    }
}

// ---- loading ------------------------------------------------------------------------------------

static void
test_loading(void)
{
    const char *found = NULL;
    fs_engine_id id;
    fs_engine_open open = {.size = 1, .name = "gather"};
    fs_engine *engine;
    CHECK_STATUS(fs_nccl_make_id(&id), FS_ESTATE);
    CHECK_STATUS(fs_nccl_open(&open, &engine), FS_ESTATE);
    CHECK(setenv("FLATSHARD_NCCL", "/nowhere/libnccl.so.2", 1) == 0, "setenv");
    CHECK_STATUS(fs_nccl_load(NULL, &found), FS_EUNSUPPORTED);
    EXPECT_WORDS("NCCL: FLATSHARD_NCCL=/nowhere/libnccl.so.2 does not load", "No such file");
    CHECK(setenv("FLATSHARD_NCCL", "libm.so.6", 1) == 0, "setenv");
    CHECK_STATUS(fs_nccl_load(NULL, &found), FS_EUNSUPPORTED);
    EXPECT_WORDS("libm.so.6", "has no ncclGetVersion", "2.18 or later");
    CHECK(unsetenv("FLATSHARD_NCCL") == 0, "unsetenv");
    fs_sim_set_nccl_version(21705);
    CHECK_STATUS(fs_nccl_load(NULL, &found), FS_EUNSUPPORTED);
    EXPECT_WORDS("this process is version 2.17.5, must be 2.18");
    fs_sim_set_nccl_version(22809);
    CHECK_OK(fs_nccl_load(NULL, &found));
    CHECK(strcmp(found, "NCCL 2.28.9 (this process)") == 0, "%s", found);
    CHECK_OK(fs_nccl_load(NULL, NULL));
}

int
main(void)
{
    test_loading();
    test_ends(); /* first: a child has none of its parent's threads */
    test_moves();
    test_peer_never_comes();
    test_failures();
    test_wrong_calls();
    test_stand_in();
    return 0;
}
