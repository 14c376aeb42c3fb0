/* The arena: a counting run and a real run agree, the ledger follows, failures are clean. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "check.h"

/* A small placing function, as the library's own are: run twice. */
static fs_status
place(fs_arena *arena, unsigned char **out_weights, float **out_master)
{
    FS_TRY(fs_arena_take(arena, FS_MEM_WEIGHTS, 1001, out_weights));
    FS_TRY(fs_arena_take(arena, FS_MEM_MASTER, 77 * sizeof(float), out_master));
    return fs_arena_take(arena, FS_MEM_MASTER, 0, &(void *){NULL});
}

static void
test_plan_equals_ledger(void)
{
    fs_ledger plan = {0}, ledger = {0};
    unsigned char *weights = NULL;
    float *master = NULL;
    fs_arena counting, arena;
    fs_arena_init_counting(&counting, &plan, FS_HOME_PRIVATE);
    CHECK_OK(place(&counting, &weights, &master));
    CHECK(weights == NULL && master == NULL, "a counting arena gave memory");
    CHECK(counting.used == 1024 + 384, "%zu bytes", counting.used);

    CHECK_OK(fs_arena_open(&arena, &ledger, counting.used));
    CHECK_OK(place(&arena, &weights, &master));
    for (int c = 0; c < FS_MEM_CLASS_COUNT; c++) {
        CHECK(plan.nbytes[FS_HOME_PRIVATE][c] == ledger.nbytes[FS_HOME_PRIVATE][c],
              "%s: plan %zu, ledger %zu",
              fs_mem_class_name((fs_mem_class)c), (size_t)plan.nbytes[FS_HOME_PRIVATE][c],
              (size_t)ledger.nbytes[FS_HOME_PRIVATE][c]);
    }
    CHECK((uintptr_t)master % FS_ARENA_ALIGN == 0, "%p", (void *)master);
    for (size_t i = 0; i < 1001; i++) {
        CHECK(weights[i] == 0, "byte %zu is %d", i, weights[i]);
    }
    memset(weights, 1, 1001);
    memset(master, 1, 77 * sizeof *master);

    /* An allocation that the plan does not know shows in the ledger. */
    void *planted;
    CHECK_OK(fs_arena_take(&arena, FS_MEM_WORKSPACE, 256, &planted));
    CHECK(plan.nbytes[FS_HOME_PRIVATE][FS_MEM_WORKSPACE] !=
              ledger.nbytes[FS_HOME_PRIVATE][FS_MEM_WORKSPACE],
          "same");
    CHECK_STATUS(fs_arena_take(&arena, FS_MEM_WORKSPACE, 1 << 20, &planted), FS_EINTERNAL);

    fs_arena_close(&arena);
    fs_arena_close(&arena);
    fs_arena_close(&counting);
    for (int c = 0; c < FS_MEM_CLASS_COUNT; c++) {
        CHECK(ledger.nbytes[FS_HOME_PRIVATE][c] == 0, "%zu bytes left",
              (size_t)ledger.nbytes[FS_HOME_PRIVATE][c]);
    }
    CHECK(ledger.peak_nbytes[FS_MEM_MASTER] == 384, "%zu",
          (size_t)ledger.peak_nbytes[FS_MEM_MASTER]);
}

static void
test_overflow(void)
{
    fs_arena arena;
    size_t out;
    fs_arena_init_counting(&arena, NULL, FS_HOME_PRIVATE);
    void *memory;
    CHECK_STATUS(fs_arena_take(&arena, FS_MEM_WEIGHTS, SIZE_MAX, &memory), FS_EINVAL);
    CHECK_STATUS(fs_arena_open(&arena, NULL, SIZE_MAX), FS_EINVAL);
    CHECK_STATUS(fs_mul_size(SIZE_MAX / 2 + 1, 2, &out), FS_EINVAL);
    CHECK_STATUS(fs_calloc(SIZE_MAX / 2, 8, &memory), FS_ENOMEM);
}

static void
test_every_allocation_can_fail(void)
{
    (void)fs_alloc_fail_at(0);
    for (size_t nth = 1;; nth++) {
        (void)fs_alloc_fail_at(nth);
        fs_ledger ledger = {0};
        fs_arena arena = {0};
        char *name = NULL;
        size_t *list = NULL;
        fs_status status = fs_strdup("layers.0.mlp", &name);
        if (status == FS_OK) {
            status = fs_grow(&list, 10, sizeof *list);
        }
        if (status == FS_OK) {
            status = fs_arena_open(&arena, &ledger, 100);
        }
        fs_arena_close(&arena);
        fs_free(list);
        fs_free(name);
        if (status == FS_OK) {
            CHECK(nth == 4, "ran clean at %zu, not at the fourth", nth);
            CHECK(fs_alloc_fail_at(0) == 3, "allocations were not counted");
            return;
        }
        CHECK(status == FS_ENOMEM, "allocation %zu failed with status %d", nth, (int)status);
    }
}

static void *
charge_often(void *ledger)
{
    for (int i = 0; i < 10000; i++) {
        fs_ledger_charge(ledger, FS_MEM_SPILL, FS_HOME_PRIVATE, 64);
        fs_ledger_discharge(ledger, FS_MEM_SPILL, FS_HOME_PRIVATE, 64);
    }
    return NULL;
}

static void
test_ledger_is_atomic(void)
{
    fs_ledger ledger = {0};
    pthread_t threads[4];
    for (int t = 0; t < 4; t++) {
        CHECK(pthread_create(&threads[t], NULL, charge_often, &ledger) == 0, "no thread");
    }
    for (int t = 0; t < 4; t++) {
        CHECK(pthread_join(threads[t], NULL) == 0, "no join");
    }
    CHECK(ledger.nbytes[FS_HOME_PRIVATE][FS_MEM_SPILL] == 0, "%zu",
          (size_t)ledger.nbytes[FS_HOME_PRIVATE][FS_MEM_SPILL]);
    size_t peak = ledger.peak_nbytes[FS_MEM_SPILL];
    CHECK(peak >= 64 && peak <= 256, "peak %zu", peak);
}

// sanitizers: tsan
int
main(void)
{
    test_plan_equals_ledger();
    test_overflow();
    test_every_allocation_can_fail();
    test_ledger_is_atomic();
    return 0;
}
