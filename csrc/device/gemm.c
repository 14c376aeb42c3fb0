/* Matrix products: a fixed grid over a CBLAS library that is loaded at run time, or over the
 * products of gemm_bf16.c.
 *
 * The library is told to use one thread right after it is loaded: its own threads would change the
 * bits with their number (not every core of it computes the same rows alike in differently sized
 * calls), and would compete with ours. The grid depends on the shape alone. */
#include "cpu_ops.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "../base/checked.h"
#include "../base/library.h"

enum { CBLAS_ROW_MAJOR = 101, CBLAS_NO_TRANS = 111, CBLAS_TRANS = 112 };

typedef void (*sgemm_fn)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                         const float *a, int lda, const float *b, int ldb, float beta, float *c,
                         int ldc);
typedef void (*set_threads_fn)(int threads);
typedef char *(*text_fn)(void);

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(sgemm_fn) loaded_sgemm;
static char description[512];

/* The first of names that the library has; NULL-ended list. */
static fs_status
find_symbol(void *handle, const char *const *names, void *out)
{
    fs_status st = FS_EUNSUPPORTED;
    for (; *names != NULL && st != FS_OK; names++) {
        st = fs_library_symbol(handle, *names, out);
    }
    return st;
}

static fs_status
load_locked(const char *path)
{
    static const char *const sgemm_names[] = {"scipy_cblas_sgemm", "cblas_sgemm", NULL};
    static const char *const threads_names[] = {"scipy_openblas_set_num_threads",
                                                "openblas_set_num_threads", NULL};
    static const char *const config_names[] = {"scipy_openblas_get_config", "openblas_get_config",
                                               NULL};
    static const char *const core_names[] = {"scipy_openblas_get_corename",
                                             "openblas_get_corename", NULL};
    void *handle;
    sgemm_fn sgemm;
    set_threads_fn set_threads;
    text_fn config, core;
    FS_TRY(fs_library_open(path, &handle));
    if (find_symbol(handle, sgemm_names, &sgemm) != FS_OK) {
        return FS_FAIL(FS_EUNSUPPORTED, "%s is not a CBLAS library: it has neither "
                       "scipy_cblas_sgemm nor cblas_sgemm", path);
    }
    /* Without this call another CBLAS may still thread inside one tile, and thread counts would
     * show in the bits: say no instead. */
    if (find_symbol(handle, threads_names, &set_threads) != FS_OK) {
        return FS_FAIL(FS_EUNSUPPORTED, "%s is not OpenBLAS: it has no openblas_set_num_threads, "
                       "so it cannot be held to one thread", path);
    }
    set_threads(1);
    const char *config_text = find_symbol(handle, config_names, &config) == FS_OK ? config() : "";
    const char *core_text = find_symbol(handle, core_names, &core) == FS_OK ? core() : "";
    (void)snprintf(description, sizeof description, "%.300s core %.100s",
                   config_text[0] != '\0' ? config_text : path,
                   core_text[0] != '\0' ? core_text : "unknown");
    atomic_store_explicit(&loaded_sgemm, sgemm, memory_order_release);
    return FS_OK;
}

fs_status
fs_gemm_load(const char *path, const char **out_description)
{
    fs_status st = FS_OK;
    (void)pthread_mutex_lock(&load_lock);
    if (atomic_load_explicit(&loaded_sgemm, memory_order_relaxed) == NULL) {
        st = load_locked(path);
    }
    (void)pthread_mutex_unlock(&load_lock);
    if (st == FS_OK && out_description != NULL) {
        *out_description = description;
    }
    return st;
}

bool
fs_gemm_is_loaded(void)
{
    return atomic_load_explicit(&loaded_sgemm, memory_order_acquire) != NULL;
}

static void
library_tile(const fs_gemm *g, size_t index)
{
    size_t row = index * FS_GEMM_ROWS;
    size_t rows = fs_min_size(g->m - row, FS_GEMM_ROWS);
    /* Row r of op(A) starts at a + r * lda, or, stored transposed, at a + r. */
    const float *a = (const float *)g->a + (g->trans_a ? row : row * g->lda);
    sgemm_fn sgemm = atomic_load_explicit(&loaded_sgemm, memory_order_acquire);
    sgemm(CBLAS_ROW_MAJOR, g->trans_a ? CBLAS_TRANS : CBLAS_NO_TRANS,
          g->trans_b ? CBLAS_TRANS : CBLAS_NO_TRANS, (int)rows, (int)g->n, (int)g->k, 1.0f, a,
          (int)g->lda, g->b, (int)g->ldb, g->beta, (float *)g->c + row * g->ldc, (int)g->ldc);
}

/* An empty sum: C = beta C. Some libraries return early without touching C. */
static void
gemm_without_terms(const fs_gemm *g)
{
    if (g->beta == 0.0f) {
        for (size_t row = 0; row < g->m; row++) {
            memset((float *)g->c + row * g->ldc, 0, g->n * sizeof(float));
        }
    }
}

/* Tiles of one product; 0 where there is nothing to multiply. */
static size_t
tiles_of(const fs_gemm *gemm)
{
    bool empty = gemm->m == 0 || gemm->n == 0 || gemm->k == 0;
    return empty ? 0 : (gemm->m - 1) / FS_GEMM_ROWS + 1;
}

typedef void (*tile_fn)(const fs_gemm *g, size_t index);

typedef struct gemm_list {
    const fs_gemm *gemms;
    size_t n;
    tile_fn tile;
} gemm_list;

/* Tile index of the products laid end to end. */
static void
gemms_task(void *opaque, size_t index)
{
    const gemm_list *list = opaque;
    for (size_t i = 0; i < list->n; i++) {
        size_t tiles = tiles_of(&list->gemms[i]);
        if (index < tiles) {
            list->tile(&list->gemms[i], index);
            return;
        }
        index -= tiles;
    }
}

static void
multiply(const fs_exec *exec, const fs_gemm *gemms, size_t n, tile_fn tile)
{
    gemm_list list = {gemms, n, tile};
    size_t tiles = 0;
    for (size_t i = 0; i < n; i++) {
        tiles += tiles_of(&gemms[i]);
        if (gemms[i].k == 0) {
            gemm_without_terms(&gemms[i]);
        }
    }
    fs_parallel(exec->pool, tiles, gemms_task, &list);
}

void
fs_cpu_gemms(const fs_exec *exec, const fs_gemm *gemms, size_t n)
{
    multiply(exec, gemms, n, library_tile);
}

void
fs_cpu_gemm(const fs_exec *exec, const fs_gemm *gemm)
{
    fs_cpu_gemms(exec, gemm, 1);
}

#if defined(__x86_64__)

static void
bf16_tile(const fs_gemm *g, size_t index)
{
    if (g->rounding == FS_BF16) {
        size_t row = index * FS_GEMM_ROWS;
        fs_cpu_gemm_tile_bf16(g, row, fs_min_size(g->m - row, FS_GEMM_ROWS));
    } else {
        library_tile(g, index);
    }
}

void
fs_cpu_gemms_bf16(const fs_exec *exec, const fs_gemm *gemms, size_t n)
{
    multiply(exec, gemms, n, bf16_tile);
}

void
fs_cpu_gemm_bf16(const fs_exec *exec, const fs_gemm *gemm)
{
    fs_cpu_gemms_bf16(exec, gemm, 1);
}

#endif
