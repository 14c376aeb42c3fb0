/* The one allocator, and the ledger that counts what it gave.
 *
 * Everything large is placed by a function that only bumps an arena and is run twice: once on an
 * arena without memory (base NULL), which yields the size and the rows of the plan, and once on one
 * with memory. The plan therefore has no formulas of its own, and equals the ledger by
 * construction; an allocation the placing function does not know shows up as a difference between
 * the two.
 *
 * Small bookkeeping (lists of parameters, names) comes from fs_calloc; it is counted too, under
 * FS_MEM_BOOKKEEPING, and is not part of the plan's promise. */
#ifndef FS_BASE_ARENA_H
#define FS_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

/* Classes of memory: the rows of the plan and of memory(). */
typedef enum fs_mem_class {
    FS_MEM_WEIGHTS = 0,  /* compute copies: shared, whole or the owned shard */
    FS_MEM_POOL,         /* gathered units (gather="copy") */
    FS_MEM_WIDENED,      /* fp32 image of a low-precision unit, for GEMMs */
    FS_MEM_GRADIENTS,    /* slots: gradients as produced, until every rank has summed them */
    FS_MEM_ACCUMULATORS, /* the owned shard of the summed gradient */
    FS_MEM_MASTER,       /* fp32 weights behind low-precision ones */
    FS_MEM_MOMENTS,      /* optimizer state */
    FS_MEM_ACTIVATIONS,  /* what forward keeps for backward */
    FS_MEM_WORKSPACE,    /* scratch of the model, logits slices, rotary tables, transfers */
    FS_MEM_SCRATCH,      /* scratch of a device's streams: partial sums, products' workspace */
    FS_MEM_WINDOWS,      /* half windows of collectives over private memory, control pages, log */
    FS_MEM_SPILL,        /* gradients that came out of turn, held privately */
    FS_MEM_CACHE,        /* keys and values while a model generates */
    FS_MEM_CHECKPOINT,   /* buffers of a save or load while it runs */
    FS_MEM_BOOKKEEPING,  /* small lists */
    FS_MEM_CLASS_COUNT
} fs_mem_class;

/* "weights", "pool", ... */
const char *fs_mem_class_name(fs_mem_class memory_class);

/* Whose memory it is: of this process alone; shared with other ranks (each byte charged to the rank
 * that owns it); or of the rank's device. */
typedef enum fs_home { FS_HOME_PRIVATE = 0, FS_HOME_WORLD, FS_HOME_DEVICE, FS_HOME_COUNT } fs_home;

/* Bytes charged to one rank, by home and class. Counters are atomic: pool workers and background
 * saves may charge too. One ledger per world; a plan has its own. */
typedef struct fs_ledger {
    _Atomic size_t nbytes[FS_HOME_COUNT][FS_MEM_CLASS_COUNT];
    _Atomic size_t peak_nbytes[FS_MEM_CLASS_COUNT]; /* of all homes together, since open */
} fs_ledger;

/* Counts bytes that were taken, or given back. Thread-safe; a NULL ledger counts nothing. */
void fs_ledger_charge(fs_ledger *ledger, fs_mem_class memory_class, fs_home home, size_t nbytes);
void fs_ledger_discharge(fs_ledger *ledger, fs_mem_class memory_class, fs_home home,
                         size_t nbytes);

/* Rows are rounded to this, so that any row may start a vector load or a BLAS operand. */
#define FS_ARENA_ALIGN 128

/* A stretch of memory handed out front to back. Owner: whoever opened it. */
typedef struct fs_arena {
    fs_ledger *ledger;   /* charged by take; may be NULL (tests) */
    unsigned char *base; /* NULL while counting */
    size_t used;         /* bytes handed out */
    size_t capacity;     /* bytes behind base */
    size_t class_nbytes[FS_MEM_CLASS_COUNT]; /* what close gives back to the ledger */
    fs_home home;
    bool mapped;         /* base is ours to unmap */
} fs_arena;

/* An arena without memory: take only counts. */
void fs_arena_init_counting(fs_arena *arena, fs_ledger *plan, fs_home home);

/* Maps capacity bytes of private zeroed memory (page rounded; huge pages advised from 2 MiB). */
FS_NODISCARD fs_status
fs_arena_open(fs_arena *arena, fs_ledger *ledger, size_t capacity);

/* An arena over memory that somebody else owns: a region's block, or device memory, which is never
 * touched here. */
void fs_arena_init_over(fs_arena *arena, fs_ledger *ledger, fs_home home, void *base,
                        size_t capacity);

/* Hands out nbytes (rounded up to FS_ARENA_ALIGN) of zeroed memory. *out is a void pointer of any
 * type, set to NULL while counting. Fails with FS_EINTERNAL when an arena with memory is full: the
 * counting pass and the real one differ, which is our fault. */
FS_NODISCARD fs_status
fs_arena_take(fs_arena *arena, fs_mem_class memory_class, size_t nbytes, void *out);

/* Gives the memory back (if it is ours) and discharges the ledger. Safe on a zeroed struct,
 * twice. */
void fs_arena_close(fs_arena *arena);

/* Zeroed bookkeeping of n elements of nbytes each; FS_ENOMEM on failure or overflow. out as
 * above. */
FS_NODISCARD fs_status
fs_calloc(size_t n, size_t nbytes, void *out);

/* Like realloc: grows *inout to n elements; new bytes are not zeroed. */
FS_NODISCARD fs_status
fs_grow(void *inout, size_t n, size_t nbytes);

FS_NODISCARD fs_status
fs_strdup(const char *text, char **out);

/* Frees what fs_calloc, fs_grow or fs_strdup gave; NULL is fine. */
void fs_free(void *memory);

/* Test hook: the nth allocation of this process from now on (1 = the next) fails, once; 0 = off.
 * Returns how many allocations were made since the last call. */
size_t fs_alloc_fail_at(size_t nth);

#endif
