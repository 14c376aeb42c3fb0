/* Matrix products.
 *
 * cuBLAS knows columns where we know rows: a row-major matrix is, read by columns, its transpose.
 * So C = A B is asked for as C' = B' A', with the operands as they lie in memory: the two change
 * places, m and n with them, and whether one is stored transposed stays as it is. */
#include "cublas.cuh"

#include <cstdio>

/* A matrix in memory: rows of width elements, each ld after the last. */
static fs_status
check_matrix(const char *name, const void *at, size_t rows, size_t width, size_t ld,
             fs_dtype dtype)
{
    size_t n, nbytes;
    if (ld < width) {
        return FS_FAIL(FS_EINVAL, "gemm: %s has rows of %zu elements, %zu apart", name, width, ld);
    }
    if (fs_mul_size(rows, ld, &n) != FS_OK || fs_mul_size(n, fs_dtype_nbytes(dtype), &nbytes) ||
        nbytes > (size_t)INT64_MAX) {
        return FS_FAIL(FS_EINVAL, "gemm: %s of %zu rows, %zu elements apart, is too large", name,
                       rows, ld);
    }
    return at != NULL || rows == 0 || width == 0
               ? FS_OK
               : FS_FAIL(FS_EINVAL, "gemm: no memory for %s (%zu x %zu)", name, rows, width);
}

static fs_status
check(const fs_gemm *g)
{
    if (g->dtype != FS_F32 && g->dtype != FS_BF16 && g->dtype != FS_F16) {
        return FS_FAIL(FS_ETYPE, "gemm: operands are %s, must be float32, bfloat16 or float16",
                       fs_dtype_name(g->dtype));
    }
    if (g->c_dtype != g->dtype && g->c_dtype != FS_F32) {
        return FS_FAIL(FS_ETYPE, "gemm: a result of %s of operands of %s: must be that or float32",
                       fs_dtype_name(g->c_dtype), fs_dtype_name(g->dtype));
    }
    if (g->beta != 0.0f && g->beta != 1.0f) {
        return FS_FAIL(FS_EINVAL, "gemm: beta is %g, must be 0 or 1", (double)g->beta);
    }
    FS_TRY(check_matrix("A", g->a, g->trans_a ? g->k : g->m, g->trans_a ? g->m : g->k, g->lda,
                        g->dtype));
    FS_TRY(check_matrix("B", g->b, g->trans_b ? g->n : g->k, g->trans_b ? g->k : g->n, g->ldb,
                        g->dtype));
    return check_matrix("C", g->c, g->m, g->n, g->ldc, g->c_dtype);
}

static int
cublas_type(fs_dtype dtype)
{
    return dtype == FS_BF16  ? CUBLAS_TYPE_BF16
           : dtype == FS_F16 ? CUBLAS_TYPE_F16
                             : CUBLAS_TYPE_F32;
}

static fs_status
multiply(const fs_cublas *cublas, const fs_gemm *g)
{
    if (g->m == 0 || g->n == 0) {
        return FS_OK;
    }
    if (g->k == 0) {
        /* An empty sum: C = beta C. */
        size_t each = fs_dtype_nbytes(g->c_dtype);
        return g->beta != 0.0f ? FS_OK
                               : fs_cuda_check(cudaMemset2DAsync(g->c, g->ldc * each, 0,
                                                                 g->n * each, g->m, cublas->stream),
                                               "fill C with zeros");
    }
    float alpha = 1.0f;
    int type = cublas_type(g->dtype);
    int compute = g->dtype == FS_F32 ? CUBLAS_IN_F32_PEDANTIC : CUBLAS_IN_F32;
    int status = cublas->functions->gemm_ex(
        cublas->handle, g->trans_b ? CUBLAS_OP_TRANSPOSED : CUBLAS_OP_AS_STORED,
        g->trans_a ? CUBLAS_OP_TRANSPOSED : CUBLAS_OP_AS_STORED, (int64_t)g->n, (int64_t)g->m,
        (int64_t)g->k, &alpha, g->b, type, (int64_t)g->ldb, g->a, type, (int64_t)g->lda, &g->beta,
        g->c, cublas_type(g->c_dtype), (int64_t)g->ldc, compute, CUBLAS_ALGORITHM_DEFAULT);
    if (status == 0) {
        return FS_OK;
    }
    char what[160];
    (void)std::snprintf(what, sizeof what, "a product of %zu x %zu x %zu, %s to %s", g->m, g->k,
                        g->n, fs_dtype_name(g->dtype), fs_dtype_name(g->c_dtype));
    return fs_cublas_check(cublas->functions, status, what);
}

extern "C" fs_status
fs_cuda_gemms(fs_cublas *cublas, const fs_gemm *gemms, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        FS_TRY(check(&gemms[i]));
    }
    for (size_t i = 0; i < n; i++) {
        FS_TRY(multiply(cublas, &gemms[i]));
    }
    return FS_OK;
}

extern "C" fs_status
fs_cuda_gemm(fs_cublas *cublas, const fs_gemm *gemm)
{
    return fs_cuda_gemms(cublas, gemm, 1);
}
