/* The part of cuBLAS that is used: its functions by our own prototypes, its numbers by our names.
 *
 * Written from NVIDIA's documentation; nothing of its headers is copied. A status of 0 is success.
 * Functions whose names end in _64 take 64-bit sizes, and exist since CUDA 12. */
#ifndef FS_CUDA_CUBLAS_CUH
#define FS_CUDA_CUBLAS_CUH

#include "common.cuh"

extern "C" {
#include "cublas.h"
}

typedef void *cublas_handle;

enum { CUBLAS_OP_AS_STORED = 0, CUBLAS_OP_TRANSPOSED = 1 };
/* Types of elements (cudaDataType). */
enum { CUBLAS_TYPE_F32 = 0, CUBLAS_TYPE_F16 = 2, CUBLAS_TYPE_BF16 = 14 };
/* How a product is computed: in fp32, with or without the freedom to do it otherwise. */
enum { CUBLAS_IN_F32 = 68, CUBLAS_IN_F32_PEDANTIC = 69 };
enum { CUBLAS_SCALARS_OF_HOST = 0 };
/* No sums over parts of k in a 16-bit C. */
enum { CUBLAS_NO_REDUCED_REDUCTION = 16 };
enum { CUBLAS_ATOMICS_OFF = 0 };
enum { CUBLAS_ALGORITHM_DEFAULT = -1 };
enum { CUBLAS_MAJOR_VERSION = 0, CUBLAS_MINOR_VERSION = 1, CUBLAS_PATCH_VERSION = 2 };

struct cublas_functions {
    int (*get_property)(int which, int *value);
    const char *(*status_string)(int status);
    int (*create)(cublas_handle *handle);
    int (*destroy)(cublas_handle handle);
    int (*set_stream)(cublas_handle handle, cudaStream_t stream);
    int (*set_workspace)(cublas_handle handle, void *workspace, size_t nbytes);
    int (*set_pointer_mode)(cublas_handle handle, int mode);
    int (*set_math_mode)(cublas_handle handle, int mode);
    int (*set_atomics_mode)(cublas_handle handle, int mode);
    int (*gemm_ex)(cublas_handle handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k,
                   const void *alpha, const void *a, int a_type, int64_t lda, const void *b,
                   int b_type, int64_t ldb, const void *beta, void *c, int c_type, int64_t ldc,
                   int compute, int algorithm);
};

struct fs_cublas {
    const cublas_functions *functions;
    cublas_handle handle;
    cudaStream_t stream;
};

/* A status of cuBLAS as one of ours; what: the call, for the message. */
FS_NODISCARD fs_status
fs_cublas_check(const cublas_functions *functions, int status, const char *what);

#endif
