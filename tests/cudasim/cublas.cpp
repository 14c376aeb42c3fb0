/* Stands in for cuBLAS: the functions that csrc/cuda uses, by the real ones' names and conventions.
 *
 * Matrices lie by columns; sizes, leading dimensions and types are checked as the real one does,
 * and refused by its numbers. A product is an operation of the handle's stream: it reads A and B,
 * writes C (which it reads only if beta is not 0) and the workspace, which holds NaN afterwards.
 * Sums are fp32, rounded once at the end. Setting a stream takes the workspace away, as the real
 * one does; a product without one ends the program: the real one would take memory of its own. */
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "block.h"
#include "cuda_runtime.h"
#include "numbers.h"
#include "sim.h"

enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { TYPE_F32 = 0, TYPE_F16 = 2, TYPE_BF16 = 14 };
enum { IN_F32 = 68, IN_F32_PEDANTIC = 69 };
enum { ON_HOST = 0, ON_DEVICE = 1 };

struct cublas_context {
    cudaStream_t stream = NULL;
    void *workspace = NULL;
    size_t workspace_nbytes = 0;
    int pointer_mode = ON_HOST;
};

static std::mutex handles_lock;
static std::map<cublas_context *, std::unique_ptr<cublas_context>> handles;
static int major_version = 13;

/* NULL where it was never created, or destroyed: a real one would read freed memory. */
static cublas_context *
find(void *handle)
{
    std::lock_guard<std::mutex> lock(handles_lock);
    auto found = handles.find(static_cast<cublas_context *>(handle));
    if (handle != NULL && found == handles.end()) {
        sim_die("cuBLAS: a handle that was destroyed");
    }
    return handle == NULL ? NULL : found->second.get();
}

// ---- numbers ------------------------------------------------------------------------------------

static float
read_as(int type, const void *at, size_t i)
{
    if (type == TYPE_F32) {
        return static_cast<const float *>(at)[i];
    }
    uint16_t bits = static_cast<const uint16_t *>(at)[i];
    return type == TYPE_BF16 ? sim_of_bfloat16(bits) : sim_of_half(bits);
}

static void
write_as(int type, void *at, size_t i, float value)
{
    if (type == TYPE_F32) {
        static_cast<float *>(at)[i] = value;
    } else {
        static_cast<uint16_t *>(at)[i] =
            type == TYPE_BF16 ? sim_to_bfloat16(value) : sim_to_half(value);
    }
}

static size_t
bytes_of(int type)
{
    return type == TYPE_F32 ? 4 : 2;
}

// ---- the product --------------------------------------------------------------------------------

struct product {
    bool trans_a, trans_b;
    size_t m, n, k;
    const void *alpha, *beta; /* device memory */
    float alpha_value, beta_value;
    bool scalars_on_device;
    const void *a, *b;
    int type;
    size_t lda, ldb, ldc;
    void *c;
    int c_type;
    void *workspace;
    size_t workspace_nbytes;
};

#define TILE 8
typedef float lanes __attribute__((vector_size(TILE * sizeof(float))));

/* op(X), with rows rows of k, as panels of TILE rows: panel after panel, in it column after column;
 * missing rows are 0. */
static std::vector<lanes>
pack(const void *x, int type, size_t ld, bool rows_apart, size_t rows, size_t k)
{
    std::vector<lanes> panels((rows + TILE - 1) / TILE * k, lanes{});
    for (size_t row = 0; row < rows; row++) {
        lanes *panel = &panels[row / TILE * k];
        for (size_t p = 0; p < k; p++) {
            panel[p][row % TILE] = read_as(type, x, rows_apart ? row * ld + p : p * ld + row);
        }
    }
    return panels;
}

static void
multiply(const product &op)
{
    float alpha = op.alpha_value, beta = op.beta_value;
    if (op.scalars_on_device) {
        std::memcpy(&alpha, op.alpha, sizeof alpha);
        std::memcpy(&beta, op.beta, sizeof beta);
    }
    std::vector<lanes> a = pack(op.a, op.type, op.lda, op.trans_a, op.m, op.k);
    std::vector<lanes> b = pack(op.b, op.type, op.ldb, !op.trans_b, op.n, op.k);
    for (size_t j = 0; j < op.n; j += TILE) {
        for (size_t i = 0; i < op.m; i += TILE) {
            const lanes *left = &a[i / TILE * op.k], *right = &b[j / TILE * op.k];
            lanes sums[TILE] = {};
            for (size_t p = 0; p < op.k; p++) {
                lanes column = left[p], row = right[p];
                for (size_t t = 0; t < TILE; t++) {
                    sums[t] += column * row[t];
                }
            }
            for (size_t t = 0; t < std::min<size_t>(TILE, op.n - j); t++) {
                for (size_t s = 0; s < std::min<size_t>(TILE, op.m - i); s++) {
                    size_t at = (j + t) * op.ldc + i + s;
                    float value = alpha * sums[t][s];
                    if (beta != 0.0f) {
                        value = value + beta * read_as(op.c_type, op.c, at);
                    }
                    write_as(op.c_type, op.c, at, value);
                }
            }
        }
    }
    /* Whoever expects anything of it finds NaN. Not all of it: it is large. */
    std::memset(op.workspace, 0xff, std::min<size_t>(op.workspace_nbytes, 65536));
}

/* Bytes of a matrix of columns: the last one ends with its last element. */
static size_t
extent(size_t rows, size_t columns, size_t ld, int type)
{
    return rows == 0 || columns == 0 ? 0 : ((columns - 1) * ld + rows) * bytes_of(type);
}

static bool
is_supported(int a_type, int b_type, int c_type, int compute)
{
    if (a_type != b_type || (c_type != a_type && c_type != TYPE_F32)) {
        return false;
    }
    bool half = a_type == TYPE_F16 || a_type == TYPE_BF16;
    return (compute == IN_F32 && (half || a_type == TYPE_F32)) ||
           (compute == IN_F32_PEDANTIC && (half || a_type == TYPE_F32));
}

// ---- by the real one's names --------------------------------------------------------------------

extern "C" {

int
cublasGetProperty(int which, int *value)
{
    if (value == NULL || which < 0 || which > 2) {
        return INVALID_VALUE;
    }
    *value = which == 0 ? major_version : 0;
    return SUCCESS;
}

const char *
cublasGetStatusString(int status)
{
    switch (status) {
    case SUCCESS:
        return "success";
    case NOT_INITIALIZED:
        return "the library was not initialized";
    case INVALID_VALUE:
        return "an unsupported value or parameter was passed to the function";
    case NOT_SUPPORTED:
        return "the requested functionality is not supported";
    default:
        return "an unknown status";
    }
}

int
cublasCreate_v2(void **handle)
{
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) {
        (void)cudaGetLastError();
        return NOT_INITIALIZED;
    }
    auto made = std::make_unique<cublas_context>();
    *handle = made.get();
    std::lock_guard<std::mutex> lock(handles_lock);
    handles[made.get()] = std::move(made);
    return SUCCESS;
}

int
cublasDestroy_v2(void *handle)
{
    cublas_context *context = find(handle);
    if (context == NULL) {
        return NOT_INITIALIZED;
    }
    if (context->stream != NULL) {
        (void)cudaStreamSynchronize(context->stream);
    }
    std::lock_guard<std::mutex> lock(handles_lock);
    handles.erase(context);
    return SUCCESS;
}

int
cublasSetStream_v2(void *handle, cudaStream_t stream)
{
    cublas_context *context = find(handle);
    if (context == NULL) {
        return NOT_INITIALIZED;
    }
    context->stream = stream;
    context->workspace = NULL;
    context->workspace_nbytes = 0;
    return SUCCESS;
}

int
cublasSetWorkspace_v2(void *handle, void *workspace, size_t nbytes)
{
    cublas_context *context = find(handle);
    if (context == NULL) {
        return NOT_INITIALIZED;
    }
    if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
        return INVALID_VALUE;
    }
    context->workspace = workspace;
    context->workspace_nbytes = nbytes;
    return SUCCESS;
}

int
cublasSetPointerMode_v2(void *handle, int mode)
{
    cublas_context *context = find(handle);
    if (context == NULL) {
        return NOT_INITIALIZED;
    }
    if (mode != ON_HOST && mode != ON_DEVICE) {
        return INVALID_VALUE;
    }
    context->pointer_mode = mode;
    return SUCCESS;
}

/* 3 would be TF32, which is not to be had here. */
int
cublasSetMathMode(void *handle, int mode)
{
    bool known = mode == 0 || mode == 2 || mode == 16;
    return find(handle) == NULL ? NOT_INITIALIZED : known ? SUCCESS : INVALID_VALUE;
}

int
cublasSetAtomicsMode(void *handle, int mode)
{
    bool known = mode == 0 || mode == 1;
    return find(handle) == NULL ? NOT_INITIALIZED : known ? SUCCESS : INVALID_VALUE;
}

int
cublasGemmEx_64(void *handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k,
                const void *alpha, const void *a, int a_type, int64_t lda, const void *b,
                int b_type, int64_t ldb, const void *beta, void *c, int c_type, int64_t ldc,
                int compute, int algorithm)
{
    cublas_context *context = find(handle);
    if (context == NULL) {
        return NOT_INITIALIZED;
    }
    bool known = (op_a == 0 || op_a == 1) && (op_b == 0 || op_b == 1) && algorithm == -1;
    if (!known || m < 0 || n < 0 || k < 0 || alpha == NULL || beta == NULL ||
        lda < std::max<int64_t>(1, op_a == 0 ? m : k) ||
        ldb < std::max<int64_t>(1, op_b == 0 ? k : n) || ldc < std::max<int64_t>(1, m)) {
        return INVALID_VALUE;
    }
    if (!is_supported(a_type, b_type, c_type, compute)) {
        return NOT_SUPPORTED;
    }
    if (m == 0 || n == 0) {
        return SUCCESS;
    }
    if (context->workspace == NULL) {
        sim_die("cuBLAS: a product without a workspace: it would take one that nobody counts");
    }
    product op = {op_a == 1, op_b == 1, static_cast<size_t>(m), static_cast<size_t>(n),
                  static_cast<size_t>(k), alpha, beta, 0.0f, 0.0f,
                  context->pointer_mode == ON_DEVICE, a, b, a_type, static_cast<size_t>(lda),
                  static_cast<size_t>(ldb), static_cast<size_t>(ldc), c, c_type,
                  context->workspace, context->workspace_nbytes};
    fs_sim_ranges ranges;
    if (op.scalars_on_device) {
        ranges.add(alpha, sizeof(float), false);
        ranges.add(beta, sizeof(float), false);
    } else {
        std::memcpy(&op.alpha_value, alpha, sizeof(float));
        std::memcpy(&op.beta_value, beta, sizeof(float));
    }
    ranges.add(a, extent(op.trans_a ? op.k : op.m, op.trans_a ? op.m : op.k, op.lda, a_type),
               false);
    ranges.add(b, extent(op.trans_b ? op.n : op.k, op.trans_b ? op.k : op.n, op.ldb, b_type),
               false);
    ranges.add(c, extent(op.m, op.n, op.ldc, c_type), true);
    ranges.add(op.workspace, op.workspace_nbytes, true);
    fs_sim_enqueue_call("a product of cuBLAS", context->stream, ranges, [op] { multiply(op); });
    return SUCCESS;
}

} // extern "C"

// ---- what tests ask -----------------------------------------------------------------------------

void
fs_sim_set_cublas_version(int major)
{
    major_version = major;
}

size_t
fs_sim_cublas_handles(void)
{
    std::lock_guard<std::mutex> lock(handles_lock);
    return handles.size();
}
