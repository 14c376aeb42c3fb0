/* Collectives on threads: every operation, through windows and in place, in one round and in
 * many, with uneven and empty parts, with delays between the fences. Values are small integers,
 * so every sum is exact and order does not matter. */
// sanitizers: tsan
// flavours: threads
#include <stdint.h>

#include "base/arena.h"
#include "ranks.h"

/* Element i of rank r's operand. */
static float
value(int r, size_t i)
{
    return (float)((i * 7 + (size_t)r * 13) % 31) - 9.0f;
}

static float
expected(fs_reduce_op op, int size, size_t i)
{
    float all = value(0, i);
    for (int r = 1; r < size; r++) {
        float x = value(r, i);
        switch (op) {
        case FS_SUM:
        case FS_MEAN:
            all += x;
            break;
        case FS_MAX:
            all = x > all ? x : all;
            break;
        case FS_MIN:
            all = x < all ? x : all;
            break;
        }
    }
    return op == FS_MEAN ? all / (float)size : all;
}

/* Where inputs lie: private memory, world memory, or private on rank 0 and world memory
 * elsewhere. */
typedef enum place { PRIVATE, WORLD, MIXED } place;

typedef struct operands {
    float *in, *out;
    float *memory;
    fs_region *region;
} operands;

static operands
make_operands(fs_world *world, place where, size_t in_n, size_t out_n, size_t most_n)
{
    operands o = {0};
    CHECK_OK(fs_calloc(in_n + out_n + 1, sizeof(float), &o.memory));
    o.in = o.memory;
    o.out = o.memory + in_n;
    if (where != PRIVATE) {
        CHECK_OK(fs_region_open(world, "operands", most_n * sizeof(float) + 1, &o.region));
        if (where == WORLD || fs_world_rank(world) != 0) {
            o.in = (float *)(void *)fs_region_block(o.region, fs_world_rank(world));
        }
    }
    for (size_t i = 0; i < in_n; i++) {
        o.in[i] = value(fs_world_rank(world), i);
    }
    for (size_t i = 0; i < out_n; i++) {
        o.out[i] = -1e9f;
    }
    return o;
}

static void
drop_operands(operands *o)
{
    fs_region_close(o->region);
    fs_free(o->memory);
}

typedef struct trial {
    place where;
    size_t n; /* elements of a rank */
} trial;

static void
reduce_scatter_body(fs_world *world, const trial *t, bool uneven)
{
    int size = fs_world_size(world), rank = fs_world_rank(world);
    size_t counts[8], offset = 0, total = 0;
    for (int r = 0; r < size; r++) {
        counts[r] = uneven ? (r == 1 ? 0 : t->n + (size_t)r) : t->n;
        offset += r < rank ? counts[r] : 0;
        total += counts[r];
    }
    for (int op = FS_SUM; op <= FS_MIN; op++) {
        operands o = make_operands(world, t->where, total, counts[rank] + 1, total);
        CHECK_OK(fs_reduce_scatter(world, FS_F32, (fs_reduce_op)op, o.in, counts, o.out));
        for (size_t i = 0; i < counts[rank]; i++) {
            float want = expected((fs_reduce_op)op, size, offset + i);
            CHECK(o.out[i] == want, "n %zu op %d element %zu: %g, not %g", t->n, op, i,
                  (double)o.out[i], (double)want);
        }
        CHECK(o.out[counts[rank]] == -1e9f, "written past the end");
        drop_operands(&o);
    }
}

static void
all_gather_body(fs_world *world, const trial *t, bool uneven)
{
    int size = fs_world_size(world), rank = fs_world_rank(world);
    size_t counts[8], total = 0;
    for (int r = 0; r < size; r++) {
        counts[r] = uneven ? (r == 1 ? 0 : t->n + (size_t)r) : t->n;
        total += counts[r];
    }
    operands o = make_operands(world, t->where, counts[rank], total + 1, t->n + 8);
    CHECK_OK(fs_all_gather(world, FS_F32, o.in, counts[rank], uneven ? counts : NULL, o.out));
    size_t at = 0;
    for (int r = 0; r < size; r++) {
        for (size_t i = 0; i < counts[r]; i++, at++) {
            CHECK(o.out[at] == value(r, i), "n %zu rank %d element %zu", t->n, r, i);
        }
    }
    CHECK(o.out[total] == -1e9f, "written past the end");
    drop_operands(&o);
}

static void
all_reduce_body(fs_world *world, const trial *t, bool in_place)
{
    int size = fs_world_size(world);
    for (int op = FS_SUM; op <= FS_MIN; op++) {
        operands o = make_operands(world, t->where, t->n, t->n + 1, t->n);
        float *out = in_place ? o.in : o.out;
        CHECK_OK(fs_all_reduce(world, FS_F32, (fs_reduce_op)op, o.in, out, t->n));
        for (size_t i = 0; i < t->n; i++) {
            float want = expected((fs_reduce_op)op, size, i);
            CHECK(out[i] == want, "n %zu op %d element %zu: %g, not %g", t->n, op, i,
                  (double)out[i], (double)want);
        }
        CHECK(o.out[t->n] == -1e9f, "written past the end");
        drop_operands(&o);
    }
}

static void
others_body(fs_world *world, const trial *t)
{
    int size = fs_world_size(world), rank = fs_world_rank(world), root = size - 1;
    operands o = make_operands(world, t->where, t->n, 0, t->n);
    CHECK_OK(fs_broadcast(world, FS_F32, root, o.in, t->n));
    for (size_t i = 0; i < t->n; i++) {
        CHECK(o.in[i] == value(root, i), "broadcast of %zu, element %zu", t->n, i);
    }
    drop_operands(&o);

    o = make_operands(world, t->where, t->n * (size_t)size, t->n * (size_t)size,
                      t->n * (size_t)size);
    CHECK_OK(fs_all_to_all(world, FS_F32, o.in, t->n, o.out));
    for (int r = 0; r < size; r++) {
        for (size_t i = 0; i < t->n; i++) {
            CHECK(o.out[(size_t)r * t->n + i] == value(r, (size_t)rank * t->n + i),
                  "all_to_all of %zu, rank %d, element %zu", t->n, r, i);
        }
    }
    drop_operands(&o);
}

static void
body(fs_world *world, void *ctx)
{
    const trial *t = ctx;
    for (int flag = 0; flag < 2; flag++) {
        reduce_scatter_body(world, t, flag);
        all_gather_body(world, t, flag);
        all_reduce_body(world, t, flag);
    }
    others_body(world, t);
}

/* Sums of 16-bit operands are rounded once, integers wrap, a mean of integers is refused. */
static void
dtypes_body(fs_world *world, void *ctx)
{
    (void)ctx;
    int size = fs_world_size(world), rank = fs_world_rank(world);
    const fs_exec *exec = fs_world_exec(world);
    enum { N = 70000 };
    /* 256 and some ones, in steps of two, ties to even. */
    static const float rounded[] = {256.0f, 256.0f, 258.0f, 260.0f};
    static float ones[N];
    uint16_t *halves, *sums;
    float *wide;
    CHECK_OK(fs_calloc(N, sizeof *halves, &halves));
    CHECK_OK(fs_calloc(N, sizeof *sums, &sums));
    CHECK_OK(fs_calloc(N, sizeof *wide, &wide));
    for (size_t n = 1; n <= N; n *= N - 1) {
        for (size_t i = 0; i < n; i++) {
            /* Rounded at each addition it would stay 256. */
            wide[i] = rank == 0 ? 256.0f : 1.0f;
        }
        exec->device->convert(exec, halves, FS_BF16, wide, FS_F32, n);
        CHECK_OK(fs_all_reduce(world, FS_BF16, FS_SUM, halves, sums, n));
        exec->device->convert(exec, wide, FS_F32, sums, FS_BF16, n);
        for (size_t i = 0; i < n; i++) {
            CHECK(wide[i] == rounded[size - 1], "%g", (double)wide[i]);
        }
    }
    uint8_t bytes[3] = {200, (uint8_t)rank, 1};
    CHECK_OK(fs_all_reduce(world, FS_U8, FS_SUM, bytes, bytes, 3));
    CHECK(bytes[0] == (uint8_t)(200 * size) && bytes[2] == size, "%d", bytes[0]);
    int64_t big[2] = {INT64_MAX - rank, rank};
    CHECK_OK(fs_all_reduce(world, FS_I64, FS_MIN, big, big, 2));
    CHECK(big[0] == INT64_MAX - (size - 1) && big[1] == 0, "min");
    CHECK_STATUS(fs_all_reduce(world, FS_I64, FS_MEAN, big, big, 2), FS_EINVAL);
    CHECK_STATUS(fs_all_reduce(world, FS_F32, FS_SUM, ones, ones + 1, 10), FS_EINVAL);
    CHECK_STATUS(fs_broadcast(world, FS_F32, size, ones, 1), FS_EINVAL);
    CHECK_STATUS(fs_all_to_all(world, FS_F64, ones, SIZE_MAX / 4, ones), FS_EINVAL);
    CHECK_OK(fs_barrier(world));
    fs_free(halves);
    fs_free(sums);
    fs_free(wide);
}

int
main(void)
{
    static const size_t sizes[] = {0, 1, 2, 17, 1024, 1025, 5000, 140000};
    for (int size = 1; size <= 4; size++) {
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            for (int where = PRIVATE; where <= MIXED; where++) {
                if (sizes[s] > 5000 && size == 4) {
                    continue;
                }
                trial t = {(place)where, sizes[s]};
                run_ranks(size, body, &t);
            }
        }
        run_ranks(size, dtypes_body, NULL);
    }
    fs_wait_set_delay(3, 100);
    trial t = {MIXED, 5000};
    run_ranks(3, body, &t);
    t.where = WORLD;
    t.n = 40000;
    run_ranks(3, body, &t);
    fs_wait_set_delay(0, 0);
    return 0;
}
