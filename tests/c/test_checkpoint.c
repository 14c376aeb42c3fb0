// sanitizers: tsan
// flavours: threads
/* Saved at one shape, read at others, bit for bit; damage is named; one rank's failure is
 * everyone's. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "io/commit.h"
#include "io/pieces.h"
#include "ranks.h"

enum { PARAMS = 6, UNITS = 3, RANKS = 5, BIG_ROWS = 701, BIG_COLUMNS = 999 };

static char root[] = "/tmp/fs_checkpoint_XXXXXX";

/* A tie, a scalar, one frozen, one of several blocks, fewer elements than ranks. */
static const fs_param_def params[PARAMS] = {
    {"embed.weight", "head.weight", 2, {13, 5}, 0, true, 0},
    {"layer.big", NULL, 2, {BIG_ROWS, BIG_COLUMNS}, 1, true, 0},
    {"layer.frozen", NULL, 2, {7, 3}, 1, false, 0},
    {"layer.scalar", NULL, 0, {0}, 1, true, 0},
    {"norm.weight", NULL, 1, {3}, 2, true, 0},
    {"norm.empty", NULL, 2, {0, 4}, 2, true, 0},
};
static const fs_unit_def units[UNITS] = {{"embed", 0, 2}, {"layer", 1, 1}, {"norm", 0, 0}};

typedef struct shape {
    int size;
    fs_partition partition;
    int keep; /* 0: all ranks */
    fs_weights weights;
    fs_dtype param;
    bool master;
} shape;

/* Every array of every parameter has its own values, which no rounding to bf16 may touch unseen. */
static float
value_of(int param, fs_array array, size_t e)
{
    uint32_t mixed = (uint32_t)e * 2654435761u + (uint32_t)param * 97u + (uint32_t)array * 7919u;
    return (float)(int32_t)(mixed & 0xffffff) / 65536.0f - 100.0f;
}

static fs_shards *
open_shards(fs_world *world, const shape *s)
{
    int keep = s->keep > 0 ? s->keep : s->size;
    const fs_policy policy = {
        .keep = keep, .slot_per_unit = keep == s->size, .weights = s->weights, .pool_units = 1,
        .precision = {.param = s->param, .reduce = FS_F32, .accumulate = FS_F32,
                      .master = s->master, .moments = FS_F32}};
    fs_layout *layout;
    fs_shards *shards;
    CHECK_OK(fs_layout_make(params, PARAMS, units, UNITS, s->size, s->partition,
                            policy.slot_per_unit, &layout));
    CHECK_OK(fs_shards_open(world, layout, &policy, &shards));
    CHECK_OK(fs_shards_open_moments(shards, 2));
    return shards;
}

static size_t
numel_of(int param)
{
    size_t n = 1;
    for (size_t d = 0; d < params[param].dims_n; d++) {
        n *= params[param].dims[d];
    }
    return n;
}

static const fs_array arrays[] = {FS_MASTER, FS_MOMENT1, FS_MOMENT2};

static void
fill(fs_shards *shards)
{
    CHECK_OK(fs_store_begin(shards));
    for (int p = 0; p < PARAMS; p++) {
        size_t n = numel_of(p);
        float *values = malloc((n + 1) * sizeof *values);
        for (int a = 0; a < (params[p].trainable ? 3 : 1); a++) {
            for (size_t e = 0; e < n; e++) {
                values[e] = value_of(p, arrays[a], e);
            }
            CHECK_OK(fs_store(shards, p, arrays[a], 0, n, values, FS_F32));
        }
        free(values);
    }
    CHECK_OK(fs_store_end(shards));
}

/* Loads whole arrays as fp32 and compares with the values, rounded to dtype where it is
 * narrower. */
static void
compare(fs_shards *shards, const shape *s, bool moments)
{
    const fs_exec *exec = serial_exec();
    for (int p = 0; p < PARAMS; p++) {
        size_t n = numel_of(p);
        float *got = malloc((n + 1) * sizeof *got), *want = malloc((n + 1) * sizeof *want);
        uint16_t *half = malloc((n + 1) * sizeof *half);
        for (int a = -1; a < (params[p].trainable && moments ? 3 : 1); a++) {
            fs_array array = a < 0 ? FS_WEIGHT : arrays[a];
            CHECK_OK(fs_load(shards, p, array, 0, n, got, FS_F32));
            for (size_t e = 0; e < n; e++) {
                want[e] = value_of(p, array == FS_WEIGHT ? FS_MASTER : array, e);
            }
            bool exact = (array == FS_MASTER && s->master && params[p].trainable) || a > 0;
            if (!exact && s->param == FS_BF16) {
                exec->device->convert(exec, half, FS_BF16, want, FS_F32, n);
                exec->device->convert(exec, want, FS_F32, half, FS_BF16, n);
            }
            CHECK(memcmp(got, want, n * sizeof *got) == 0, "%s array %d differs", params[p].name,
                  (int)array);
        }
        free(got);
        free(want);
        free(half);
    }
    CHECK_OK(fs_barrier(fs_shards_world(shards)));
}

// ---- save ---------------------------------------------------------------------------------------

static fs_blocks saved_blocks[RANKS];

typedef struct call {
    const shape *shape;
    const char *folder;
    int saved_size; /* ranks that saved */
    fs_status expected;
    fs_status got[RANKS];
    char words[RANKS][1024];
} call;

static void
save_body(fs_world *world, void *ctx)
{
    const call *c = ctx;
    fs_shards *shards = open_shards(world, c->shape);
    fs_blocks *blocks;
    fill(shards);
    CHECK_OK(fs_save(shards, c->folder, 2, &blocks));
    CHECK(fs_world_ledger(world)->nbytes[FS_HOME_PRIVATE][FS_MEM_CHECKPOINT] == 0,
          "buffers are given back");
    for (int r = 0; r < c->shape->size; r++) {
        if (fs_world_rank(world) == 0) {
            saved_blocks[r] = blocks[r];
        } else {
            fs_blocks_free(&blocks[r]);
        }
    }
    fs_free(blocks);
    CHECK_OK(fs_barrier(world));
    fs_shards_close(shards);
}

static void
make_folder(char *folder, const char *name)
{
    (void)snprintf(folder, 256, "%s/%s", root, name);
    char words[300];
    (void)snprintf(words, sizeof words, "mkdir -p %s", folder);
    CHECK(system(words) == 0, "%s", words);
}

static void
save(const shape *s, const char *folder)
{
    call c = {.shape = s, .folder = folder};
    run_ranks(s->size, save_body, &c);
}

static void
free_saved(int size)
{
    for (int r = 0; r < size; r++) {
        fs_blocks_free(&saved_blocks[r]);
    }
}

// ---- load ---------------------------------------------------------------------------------------

static fs_status
read_all(fs_shards *shards, const char *folder, int saved_size)
{
    const char *names[PARAMS];
    fs_shape_def shapes[PARAMS];
    fs_file_def files[RANKS];
    char file_names[RANKS][64];
    for (int p = 0; p < PARAMS; p++) {
        names[p] = params[p].name;
        shapes[p].name = params[p].name;
        shapes[p].dims_n = params[p].dims_n;
        memcpy(shapes[p].dims, params[p].dims, sizeof shapes[p].dims);
    }
    for (int r = 0; r < saved_size; r++) {
        fs_rank_file_name(r, saved_size, file_names[r]);
        files[r] = (fs_file_def){file_names[r], &saved_blocks[r]};
    }
    const fs_read_def def = {names, NULL, 2};
    fs_catalog *catalog = NULL;
    fs_ledger *ledger = fs_world_ledger(fs_shards_world(shards));
    fs_status st =
        fs_catalog_open(folder, files, saved_size, true, shapes, PARAMS, ledger, &catalog);
    st = fs_read(catalog, st, shards, &def);
    fs_catalog_close(catalog);
    return st;
}

static void
load_body(fs_world *world, void *ctx)
{
    call *c = ctx;
    int rank = fs_world_rank(world);
    fs_shards *shards = open_shards(world, c->shape);
    c->got[rank] = read_all(shards, c->folder, c->saved_size);
    (void)snprintf(c->words[rank], sizeof c->words[rank], "%s", fs_status_message());
    CHECK(fs_world_ledger(world)->nbytes[FS_HOME_PRIVATE][FS_MEM_CHECKPOINT] == 0,
          "buffers are given back");
    if (c->expected == FS_OK) {
        CHECK(c->got[rank] == FS_OK, "%s", c->words[rank]);
        compare(shards, c->shape, true);
    }
    CHECK_OK(fs_barrier(world));
    fs_shards_close(shards);
}

static void
test_any_shape(void)
{
    static const shape saved[] = {
        {1, FS_PARTITION_FLAT, 1, FS_WEIGHTS_SHARED, FS_F32, false},
        {2, FS_PARTITION_FLAT, 1, FS_WEIGHTS_SHARED, FS_BF16, true},
        {3, FS_PARTITION_PER_PARAMETER, 0, FS_WEIGHTS_SHARED, FS_F32, false},
        {4, FS_PARTITION_FLAT, 2, FS_WEIGHTS_WHOLE, FS_F32, false},
        {5, FS_PARTITION_PER_PARAMETER, 1, FS_WEIGHTS_SHARD, FS_BF16, true},
    };
    static const shape loaded[] = {
        {1, FS_PARTITION_PER_PARAMETER, 1, FS_WEIGHTS_SHARED, FS_F32, false},
        {2, FS_PARTITION_PER_PARAMETER, 0, FS_WEIGHTS_WHOLE, FS_BF16, true},
        {3, FS_PARTITION_FLAT, 1, FS_WEIGHTS_SHARD, FS_BF16, true},
        {4, FS_PARTITION_PER_PARAMETER, 2, FS_WEIGHTS_SHARED, FS_F32, false},
        {5, FS_PARTITION_FLAT, 0, FS_WEIGHTS_SHARED, FS_F32, false},
    };
    for (size_t i = 0; i < sizeof saved / sizeof saved[0]; i++) {
        char folder[256], name[16];
        (void)snprintf(name, sizeof name, "any%zu", i);
        make_folder(folder, name);
        save(&saved[i], folder);
        for (size_t j = 0; j < sizeof loaded / sizeof loaded[0]; j++) {
            if (UNDER_TSAN && j != i && j != (i + 2) % 5) {
                continue; /* every shape on both sides; the other flavours run every pair */
            }
            shape to = loaded[j];
            /* A frozen weight was rounded when it was saved from bf16: compare in bf16. */
            to.param = saved[i].param;
            to.master = saved[i].master;
            call c = {.shape = &to, .folder = folder, .saved_size = saved[i].size};
            run_ranks(to.size, load_body, &c);
        }
        free_saved(saved[i].size);
    }
}

// ---- damage -------------------------------------------------------------------------------------

static void
flip(const char *folder, int rank, int size, long at)
{
    char path[400], name[64];
    fs_rank_file_name(rank, size, name);
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r+b");
    CHECK(file != NULL && fseek(file, at, SEEK_SET) == 0, "%s", path);
    int c = fgetc(file);
    CHECK(fseek(file, at, SEEK_SET) == 0 && fputc(c ^ 16, file) != EOF && fclose(file) == 0, "%s",
          path);
}

static void
test_damage(void)
{
    static const shape s = {2, FS_PARTITION_PER_PARAMETER, 1, FS_WEIGHTS_SHARED, FS_F32, false};
    char folder[256];
    make_folder(folder, "damage");
    save(&s, folder);
    call c = {.shape = &s, .folder = folder, .saved_size = 2, .expected = FS_ECORRUPT};
    flip(folder, 1, 2, (1 << 20) + 5000); /* in the weights of layer.big, second block */
    run_ranks(2, load_body, &c);
    for (int r = 0; r < 2; r++) {
        CHECK(c.got[r] == FS_ECORRUPT, "rank %d: %d", r, (int)c.got[r]);
        CHECK(strstr(c.words[r], "block 1 is damaged: layer.big rows ") != NULL &&
              strstr(c.words[r], ", rank 1") != NULL, "%s", c.words[r]);
    }
    flip(folder, 1, 2, (1 << 20) + 5000);
    flip(folder, 0, 2, 20); /* a header */
    run_ranks(2, load_body, &c);
    CHECK(c.got[0] == FS_ECORRUPT && c.got[1] == FS_ECORRUPT, "%d %d", (int)c.got[0],
          (int)c.got[1]);
    CHECK(strstr(c.words[1], "block 0 is damaged: header, ") != NULL, "%s", c.words[1]);
    flip(folder, 0, 2, 20);
    c.expected = FS_OK;
    run_ranks(2, load_body, &c);
    /* A file that is gone. */
    char path[400], name[64];
    fs_rank_file_name(1, 2, name);
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    CHECK(unlink(path) == 0, "%s", path);
    c.expected = FS_ESYS;
    run_ranks(2, load_body, &c);
    CHECK(c.got[0] == FS_ESYS && c.got[1] == FS_ESYS, "%d %d", (int)c.got[0], (int)c.got[1]);
    CHECK(strstr(c.words[0], name) != NULL, "%s", c.words[0]);
    free_saved(2);
}

// ---- one for all --------------------------------------------------------------------------------

static void
agree_body(fs_world *world, void *ctx)
{
    (void)ctx;
    int rank = fs_world_rank(world), size = fs_world_size(world);
    uint64_t values[RANKS] = {0};
    CHECK_OK(fs_agree(world, FS_OP_SAVE, FS_OK, (uint64_t)rank * 10, values));
    for (int r = 0; r < size; r++) {
        CHECK(values[r] == (uint64_t)r * 10, "%d", r);
    }
    fs_status mine = FS_OK;
    if (rank == 2) {
        errno = ENOSPC;
        mine = FS_FAIL_ERRNO("/disk/file: could not write");
    }
    fs_status st = fs_agree(world, FS_OP_SAVE, mine, 0, NULL);
    CHECK(st == FS_ESYS && fs_status_errno() == ENOSPC, "%d", (int)st);
    CHECK(strcmp(fs_status_message(), rank == 2 ? "rank 2: /disk/file: could not write: "
                                                  "No space left on device"
                                                : "rank 2 failed: /disk/file: could not write: "
                                                  "No space left on device") == 0,
          "%s", fs_status_message());
    /* Uneven bytes of every rank. */
    char bytes[RANKS] = {'a', 'b', 'c', 'd', 'e'}, *all;
    size_t *counts;
    CHECK_OK(fs_share(world, FS_OP_SAVE, FS_OK, bytes, (size_t)rank, &all, &counts));
    CHECK(counts[0] == 0 && counts[2] == 2 && memcmp(all, "aab", 3) == 0, "%zu", counts[2]);
    fs_free(all);
    fs_free(counts);
}

static void
commit_body(fs_world *world, void *ctx)
{
    const char *folder = ctx;
    char final[300], index[320];
    (void)snprintf(final, sizeof final, "%s-committed", folder);
    (void)snprintf(index, sizeof index, "%s/index.json", final);
    CHECK_OK(fs_commit(world, folder, final, root, "{}", 2));
    CHECK(access(folder, F_OK) != 0 && access(index, F_OK) == 0, "%s", index);
    fs_status st = fs_commit(world, folder, final, root, "{}", 2);
    CHECK(st == FS_ESYS && fs_status_errno() == ENOENT, "%d: %s", (int)st, fs_status_message());
}

/* An operation whose nth allocation (of all ranks together) fails; call.saved_size is n. */
typedef fs_status (*operation)(fs_shards *shards, const call *c);

static fs_status
save_once(fs_shards *shards, const call *c)
{
    fs_blocks *blocks = NULL;
    fs_status st = fs_save(shards, c->folder, 2, &blocks);
    for (int r = 0; st == FS_OK && r < c->shape->size; r++) {
        fs_blocks_free(&blocks[r]);
    }
    fs_free(st == FS_OK ? blocks : NULL);
    return st;
}

static fs_status
read_once(fs_shards *shards, const call *c)
{
    return read_all(shards, c->folder, c->shape->size);
}

static fs_status
snapshot_once(fs_shards *shards, const call *c)
{
    fs_world *world = fs_shards_world(shards);
    fs_snapshot *snapshot = NULL;
    fs_blocks blocks = {0};
    fs_status st = fs_snapshot_open(shards, c->folder, 2, &snapshot);
    if (st == FS_OK) {
        st = fs_agree(world, FS_OP_SAVE, fs_snapshot_write(snapshot, c->folder, &blocks), 0, NULL);
    }
    fs_blocks_free(&blocks);
    fs_snapshot_close(snapshot);
    return st;
}

static operation under_test;

static void
allocation_body(fs_world *world, void *ctx)
{
    call *c = ctx;
    int rank = fs_world_rank(world);
    fs_shards *shards = open_shards(world, c->shape);
    CHECK_OK(fs_barrier(world));
    if (rank == 0) {
        (void)fs_alloc_fail_at((size_t)c->saved_size);
    }
    CHECK_OK(fs_barrier(world));
    c->got[rank] = under_test(shards, c);
    CHECK_OK(fs_barrier(world));
    if (rank == 0) {
        (void)fs_alloc_fail_at(0);
    }
    CHECK(fs_world_ledger(world)->nbytes[FS_HOME_PRIVATE][FS_MEM_CHECKPOINT] == 0,
          "buffers are given back");
    fs_shards_close(shards);
}

/* For every n: it fails for all ranks alike, leaks nothing, and keeps nobody waiting. */
static void
test_allocations(operation what, int size)
{
    const shape s = {size, FS_PARTITION_FLAT, 1, FS_WEIGHTS_SHARED, FS_F32, false};
    char folder[256], name[32];
    under_test = what;
    (void)snprintf(name, sizeof name, "alloc%d", size);
    make_folder(folder, name);
    if (what == read_once) {
        save(&s, folder);
    }
    for (int nth = 1;; nth++) {
        if (what != read_once) {
            (void)snprintf(name, sizeof name, "%s%d-%d", what == save_once ? "s" : "n", size, nth);
            make_folder(folder, name);
        }
        call c = {.shape = &s, .folder = folder, .saved_size = nth};
        run_ranks(s.size, allocation_body, &c);
        for (int r = 1; r < size; r++) {
            CHECK(c.got[r] == c.got[0], "%d on rank %d, %d on rank 0", (int)c.got[r], r,
                  (int)c.got[0]);
        }
        if (c.got[0] == FS_OK) {
            CHECK(nth > 20, "only %d allocations", nth);
            break;
        }
        CHECK(c.got[0] == FS_ENOMEM, "%d", (int)c.got[0]);
    }
    if (what == read_once) {
        free_saved(size);
    }
}

int
main(void)
{
    char words[300], folder[256];
    CHECK(mkdtemp(root) != NULL, "%s", root);
    test_any_shape();
    test_damage();
    run_ranks(4, agree_body, NULL);
    make_folder(folder, "hidden");
    run_ranks(2, commit_body, folder);
    for (int size = UNDER_TSAN ? 2 : 1; size <= 2; size++) { /* one thread races with nobody */
        test_allocations(save_once, size);
        test_allocations(snapshot_once, size);
        test_allocations(read_once, size);
    }
    (void)snprintf(words, sizeof words, "rm -r %s", root);
    CHECK(system(words) == 0, "%s", words);
    return 0;
}
