#define _GNU_SOURCE
#include "arena.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "checked.h"

static const char *const class_names[FS_MEM_CLASS_COUNT] = {
    [FS_MEM_WEIGHTS] = "weights",           [FS_MEM_POOL] = "pool",
    [FS_MEM_WIDENED] = "widened",           [FS_MEM_GRADIENTS] = "gradients",
    [FS_MEM_ACCUMULATORS] = "accumulators", [FS_MEM_MASTER] = "master",
    [FS_MEM_MOMENTS] = "moments",           [FS_MEM_ACTIVATIONS] = "activations",
    [FS_MEM_WORKSPACE] = "workspace",       [FS_MEM_WINDOWS] = "windows",
    [FS_MEM_SPILL] = "spill",               [FS_MEM_CACHE] = "cache",
    [FS_MEM_SCRATCH] = "scratch",
    [FS_MEM_CHECKPOINT] = "checkpoint",     [FS_MEM_BOOKKEEPING] = "bookkeeping",
};

const char *
fs_mem_class_name(fs_mem_class memory_class)
{
    return class_names[memory_class];
}

// ---- ledger -------------------------------------------------------------------------------------

void
fs_ledger_charge(fs_ledger *ledger, fs_mem_class memory_class, fs_home home, size_t nbytes)
{
    if (ledger == NULL || nbytes == 0) {
        return;
    }
    atomic_fetch_add(&ledger->nbytes[home][memory_class], nbytes);
    size_t now = 0;
    for (int h = 0; h < FS_HOME_COUNT; h++) {
        now += atomic_load(&ledger->nbytes[h][memory_class]);
    }
    size_t peak = atomic_load(&ledger->peak_nbytes[memory_class]);
    while (now > peak &&
           !atomic_compare_exchange_weak(&ledger->peak_nbytes[memory_class], &peak, now)) {
    }
}

void
fs_ledger_discharge(fs_ledger *ledger, fs_mem_class memory_class, fs_home home, size_t nbytes)
{
    if (ledger == NULL || nbytes == 0) {
        return;
    }
    atomic_fetch_sub(&ledger->nbytes[home][memory_class], nbytes);
}

// ---- failure injection --------------------------------------------------------------------------

static _Atomic size_t allocations;
static _Atomic size_t fail_at;

size_t
fs_alloc_fail_at(size_t nth)
{
    size_t made = atomic_exchange(&allocations, 0);
    atomic_store(&fail_at, nth);
    return made;
}

/* Counts one allocation; true when it is the one that must fail. */
static bool
injected_failure(void)
{
    size_t nth = atomic_fetch_add(&allocations, 1) + 1;
    size_t target = nth;
    return atomic_compare_exchange_strong(&fail_at, &target, 0);
}

// ---- arena --------------------------------------------------------------------------------------

void
fs_arena_init_counting(fs_arena *arena, fs_ledger *plan, fs_home home)
{
    *arena = (fs_arena){.ledger = plan, .home = home};
}

void
fs_arena_init_over(fs_arena *arena, fs_ledger *ledger, fs_home home, void *base, size_t capacity)
{
    *arena = (fs_arena){.ledger = ledger, .base = base, .capacity = capacity, .home = home};
}

#define HUGE_PAGE_NBYTES ((size_t)2 << 20)

fs_status
fs_arena_open(fs_arena *arena, fs_ledger *ledger, size_t capacity)
{
    *arena = (fs_arena){.ledger = ledger};
    if (capacity == 0) {
        return FS_OK;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t mapped;
    FS_TRY(fs_add_size(capacity, page - 1, &mapped));
    mapped &= ~(page - 1);
    void *base = injected_failure() ? MAP_FAILED
                                    : mmap(NULL, mapped, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        return FS_FAIL(FS_ENOMEM, "could not map %zu bytes of private memory", mapped);
    }
#ifdef MADV_HUGEPAGE
    if (mapped >= HUGE_PAGE_NBYTES) {
        (void)madvise(base, mapped, MADV_HUGEPAGE);
    }
#endif
    arena->base = base;
    arena->capacity = mapped;
    arena->mapped = true;
    return FS_OK;
}

fs_status
fs_arena_take(fs_arena *arena, fs_mem_class memory_class, size_t nbytes, void *out)
{
    size_t rounded;
    FS_TRY(fs_add_size(nbytes, FS_ARENA_ALIGN - 1, &rounded));
    rounded &= ~(size_t)(FS_ARENA_ALIGN - 1);
    size_t used;
    FS_TRY(fs_add_size(arena->used, rounded, &used));
    void *given = NULL;
    if (arena->base != NULL) {
        if (used > arena->capacity) {
            return FS_FAIL(FS_EINTERNAL, "arena of %zu bytes asked for %zu: plan and open differ",
                           arena->capacity, used);
        }
        given = arena->base + arena->used;
    }
    memcpy(out, &given, sizeof given);
    arena->used = used;
    arena->class_nbytes[memory_class] += rounded;
    fs_ledger_charge(arena->ledger, memory_class, arena->home, rounded);
    return FS_OK;
}

void
fs_arena_close(fs_arena *arena)
{
    for (int c = 0; c < FS_MEM_CLASS_COUNT; c++) {
        fs_ledger_discharge(arena->ledger, (fs_mem_class)c, arena->home, arena->class_nbytes[c]);
    }
    if (arena->mapped) {
        (void)munmap(arena->base, arena->capacity);
    }
    *arena = (fs_arena){0};
}

// ---- bookkeeping --------------------------------------------------------------------------------

fs_status
fs_calloc(size_t n, size_t nbytes, void *out)
{
    void *given = injected_failure() ? NULL : calloc(n ? n : 1, nbytes ? nbytes : 1);
    if (given == NULL) {
        return FS_FAIL(FS_ENOMEM, "could not allocate %zu x %zu bytes", n, nbytes);
    }
    memcpy(out, &given, sizeof given);
    return FS_OK;
}

fs_status
fs_grow(void *inout, size_t n, size_t nbytes)
{
    size_t total;
    FS_TRY(fs_mul_size(n, nbytes, &total));
    void *old;
    memcpy(&old, inout, sizeof old);
    void *given = injected_failure() ? NULL : realloc(old, total ? total : 1);
    if (given == NULL) {
        return FS_FAIL(FS_ENOMEM, "could not grow to %zu x %zu bytes", n, nbytes);
    }
    memcpy(inout, &given, sizeof given);
    return FS_OK;
}

fs_status
fs_strdup(const char *text, char **out)
{
    size_t nbytes = strlen(text) + 1;
    FS_TRY(fs_calloc(nbytes, 1, out));
    memcpy(*out, text, nbytes);
    return FS_OK;
}

void
fs_free(void *memory)
{
    free(memory);
}
