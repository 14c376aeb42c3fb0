/* Matrix products whose fp32 operands are rounded to bf16 on the way in: twice the rate of fp32 on
 * processors with AVX512_BF16, whose one instruction multiplies pairs of terms and adds both in
 * fp32.
 *
 * A tile packs what it reads into panels of pairs, two neighbouring terms of k in 32 bits, rounded
 * to nearest even; the instruction takes subnormals for zeros. Each element of C is the sum over
 * its terms in order, in blocks of BLOCK_TERMS: its bits depend on its row of A, its column of B
 * and k, and not on where tiles begin or how many rows there are.
 *
 * For one block of terms a tile packs its rows of A once, and B in strips that stay in the second
 * cache: MICRO_ROWS x MICRO_COLUMNS of C are 24 registers of sums, for each pair two loads of B and
 * twelve scalars of A. The way of K. Goto and R. van de Geijn, "Anatomy of high-performance matrix
 * multiplication", ACM TOMS 34 (2008). */
#include "cpu_ops.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "../base/build.h"
#include "../base/checked.h"

#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx,avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
    apply_to = function)
#pragma clang attribute push(__attribute__((min_vector_width(512))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx,avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

enum {
    FLOATS = 16, /* of a register, and pairs of one */
    MICRO_ROWS = 12,
    MICRO_COLUMNS = 2 * FLOATS,
    BLOCK_TERMS = 256, /* of k: the strips of a micro-product fit the first cache */
    BLOCK_PAIRS = BLOCK_TERMS / 2,
    BLOCK_COLUMNS = 64, /* of B that are packed at a time */
    A_ROWS = FS_GEMM_ROWS + FLOATS, /* with what the last strip reads beyond */
};

/* The first n (at least 0) of a register's elements. */
static inline __mmask16
first(size_t n)
{
    return (__mmask16)(n >= FLOATS ? 0xffffu : (1u << n) - 1u);
}

// ---- packing ------------------------------------------------------------------------------------

/* Up to 32 floats that lie together, as 16 pairs. */
static inline __m512i
pairs_along(const float *x, size_t n)
{
    __m512 low = _mm512_maskz_loadu_ps(first(n), x);
    __m512 high = n > FLOATS ? _mm512_maskz_loadu_ps(first(n - FLOATS), x + FLOATS)
                             : _mm512_setzero_ps();
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* 16 pairs of an element of x and one of next, a row below; next may be NULL: zeros. */
static inline __m512i
pairs_across(const float *x, const float *next, __mmask16 mask)
{
    __m256i low = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x));
    __m512i pairs = _mm512_cvtepu16_epi32(low);
    if (next != NULL) {
        __m256i high = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, next));
        pairs = _mm512_or_si512(pairs, _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
    }
    return pairs;
}

/* Turns a square of 32-bit elements. */
static inline void
turn(__m512i rows[FLOATS])
{
    __m512i t[FLOATS];
    for (int i = 0; i < FLOATS; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < FLOATS; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* Where a rank-2 operand has its pairs: those of row (or column) r begin at r * line, one after the
 * other at a distance of step. */
#define A_LINE BLOCK_PAIRS /* of A as it is: row after row */
#define A_TURNED_STEP A_ROWS /* of A stored turned: pair after pair, all rows of each */

static void
pack_a(uint32_t *out, const float *a, size_t lda, size_t rows, size_t terms)
{
    for (size_t r = 0; r < rows; r++) {
        for (size_t k = 0; k < terms; k += MICRO_COLUMNS) {
            _mm512_store_si512(out + r * A_LINE + k / 2, pairs_along(a + r * lda + k, terms - k));
        }
    }
}

static void
pack_a_turned(uint32_t *out, const float *a, size_t lda, size_t rows, size_t terms)
{
    for (size_t k = 0; k < terms; k += 2) {
        const float *x = a + k * lda;
        for (size_t r = 0; r < rows; r += FLOATS) {
            _mm512_store_si512(out + k / 2 * A_TURNED_STEP + r,
                               pairs_across(x + r, k + 1 < terms ? x + lda + r : NULL,
                                            first(rows - r)));
        }
    }
}

/* Where a strip of 16 columns begins: the micro-product reads two side by side. */
static inline uint32_t *
strip(uint32_t *out, size_t column)
{
    return out + column / MICRO_COLUMNS * (BLOCK_PAIRS * MICRO_COLUMNS) + column % MICRO_COLUMNS;
}

static void
pack_b(uint32_t *out, const float *b, size_t ldb, size_t terms, size_t columns)
{
    for (size_t k = 0; k < terms; k += 2) {
        const float *x = b + k * ldb;
        for (size_t j = 0; j < columns; j += FLOATS) {
            _mm512_store_si512(strip(out, j) + k / 2 * MICRO_COLUMNS,
                               pairs_across(x + j, k + 1 < terms ? x + ldb + j : NULL,
                                            first(columns - j)));
        }
    }
}

static void
pack_b_turned(uint32_t *out, const float *b, size_t ldb, size_t terms, size_t columns)
{
    for (size_t j = 0; j < columns; j += FLOATS) {
        size_t here = fs_min_size(columns - j, FLOATS);
        for (size_t k = 0; k < terms; k += MICRO_COLUMNS) {
            __m512i pairs[FLOATS];
            for (size_t i = 0; i < FLOATS; i++) {
                pairs[i] = i < here ? pairs_along(b + (j + i) * ldb + k, terms - k)
                                    : _mm512_setzero_si512();
            }
            turn(pairs);
            for (size_t i = 0; i < FLOATS; i++) {
                _mm512_store_si512(strip(out, j) + (k / 2 + i) * MICRO_COLUMNS, pairs[i]);
            }
        }
    }
}

// ---- multiplying --------------------------------------------------------------------------------

/* c (rows x columns, at most MICRO_ROWS x MICRO_COLUMNS) = (add ? c : 0) + A B over pairs. Reads
 * MICRO_ROWS of A and MICRO_COLUMNS of B whatever is wanted; what they hold beyond is dropped. */
static inline __attribute__((always_inline)) void
micro_product(const uint32_t *a, const size_t line, const size_t step, const uint32_t *b,
              size_t pairs, float *c, size_t ldc, size_t rows, size_t columns, bool add)
{
    __m512 sum[MICRO_ROWS][2];
#pragma GCC unroll 12
    for (size_t r = 0; r < MICRO_ROWS; r++) {
        sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    }
    for (size_t p = 0; p < pairs; p++) {
        __m512bh left = (__m512bh)_mm512_load_si512(b + p * MICRO_COLUMNS);
        __m512bh right = (__m512bh)_mm512_load_si512(b + p * MICRO_COLUMNS + FLOATS);
#pragma GCC unroll 12
        for (size_t r = 0; r < MICRO_ROWS; r++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[r * line + p * step]);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], x, left);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], x, right);
        }
    }
    __mmask16 left = first(columns), right = columns > FLOATS ? first(columns - FLOATS) : 0;
#pragma GCC unroll 12
    for (size_t r = 0; r < MICRO_ROWS; r++) {
        if (r < rows) {
            float *at = c + r * ldc;
            if (add) {
                sum[r][0] = _mm512_add_ps(_mm512_maskz_loadu_ps(left, at), sum[r][0]);
                sum[r][1] = _mm512_add_ps(_mm512_maskz_loadu_ps(right, at + FLOATS), sum[r][1]);
            }
            _mm512_mask_storeu_ps(at, left, sum[r][0]);
            _mm512_mask_storeu_ps(at + FLOATS, right, sum[r][1]);
        }
    }
}

/* A strip of C, MICRO_COLUMNS wide at most and as high as the tile. */
static void
strip_product(const uint32_t *a, bool a_turned, const uint32_t *b, size_t pairs, float *c,
              size_t ldc, size_t rows, size_t columns, bool add)
{
    for (size_t r = 0; r < rows; r += MICRO_ROWS) {
        size_t here = fs_min_size(rows - r, MICRO_ROWS);
        if (a_turned) {
            micro_product(a + r, 1, A_TURNED_STEP, b, pairs, c + r * ldc, ldc, here, columns, add);
        } else {
            micro_product(a + r * A_LINE, A_LINE, 1, b, pairs, c + r * ldc, ldc, here, columns,
                          add);
        }
    }
}

void
fs_cpu_gemm_tile_bf16(const fs_gemm *g, size_t row, size_t rows)
{
    /* Some 300 KB of the stack: a thread's own, and nothing that can fail. */
    _Alignas(64) uint32_t a[A_ROWS * BLOCK_PAIRS];
    _Alignas(64) uint32_t b[BLOCK_COLUMNS * BLOCK_PAIRS];
    const float *a_all = g->a, *b_all = g->b;
    float *c = (float *)g->c + row * g->ldc;
    for (size_t k = 0; k < g->k; k += BLOCK_TERMS) {
        size_t terms = fs_min_size(g->k - k, BLOCK_TERMS);
        bool add = k > 0 || g->beta != 0.0f;
        if (g->trans_a) {
            pack_a_turned(a, a_all + k * g->lda + row, g->lda, rows, terms);
        } else {
            pack_a(a, a_all + row * g->lda + k, g->lda, rows, terms);
        }
        for (size_t j = 0; j < g->n; j += BLOCK_COLUMNS) {
            size_t columns = fs_min_size(g->n - j, BLOCK_COLUMNS);
            if (g->trans_b) {
                pack_b_turned(b, b_all + j * g->ldb + k, g->ldb, terms, columns);
            } else {
                pack_b(b, b_all + k * g->ldb + j, g->ldb, terms, columns);
            }
            for (size_t i = 0; i < columns; i += MICRO_COLUMNS) {
                strip_product(a, g->trans_a, strip(b, i), (terms + 1) / 2, c + j + i, g->ldc, rows,
                              fs_min_size(columns - i, MICRO_COLUMNS), add);
            }
        }
    }
}

#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
