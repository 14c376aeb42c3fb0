/* cuBLAS: loading it, and handles. */
#include "cublas.cuh"

#include <cstdio>
#include <mutex>
#include <new>

extern "C" {
#include "../base/library.h"
}

/* The first version with 64-bit sizes, and the first whose functions nobody has read yet. */
#define OLDEST_MAJOR 12
#define TOO_NEW_MAJOR 14

static const char *const LIBRARIES[] = {"libcublas.so.13", "libcublas.so.12", NULL};

static std::mutex load_lock;
static bool loaded;
static cublas_functions functions;
static char description[512];

fs_status
fs_cublas_check(const cublas_functions *of, int status, const char *what)
{
    if (status == 0) {
        return FS_OK;
    }
    /* 3: the resource allocation failed. */
    return FS_FAIL(status == 3 ? FS_ENOMEM : FS_ESTATE, "cuBLAS: %s: %s (status %d)", what,
                   of->status_string(status), status);
}

// ---- loading ------------------------------------------------------------------------------------

static fs_status
find_functions(void *library, const char *where, cublas_functions *out)
{
    const struct {
        const char *name;
        void *out;
    } all[] = {
        {"cublasGetProperty", &out->get_property},
        {"cublasGetStatusString", &out->status_string},
        {"cublasCreate_v2", &out->create},
        {"cublasDestroy_v2", &out->destroy},
        {"cublasSetStream_v2", &out->set_stream},
        {"cublasSetWorkspace_v2", &out->set_workspace},
        {"cublasSetPointerMode_v2", &out->set_pointer_mode},
        {"cublasSetMathMode", &out->set_math_mode},
        {"cublasSetAtomicsMode", &out->set_atomics_mode},
        {"cublasGemmEx_64", &out->gemm_ex},
    };
    for (const auto &function : all) {
        if (fs_library_symbol(library, function.name, function.out) != FS_OK) {
            return FS_FAIL(FS_EUNSUPPORTED,
                           "cuBLAS: %s has no %s: it is not cuBLAS of CUDA 12 or 13", where,
                           function.name);
        }
    }
    return FS_OK;
}

static fs_status
load(const char *const *paths)
{
    void *library = NULL;
    char where[256] = "";
    cublas_functions found;
    int version[3] = {0, 0, 0};
    fs_library_search search = {"cuBLAS", "FLATSHARD_CUBLAS", "cublasGemmEx_64", LIBRARIES, paths};
    FS_TRY(fs_library_find(&search, &library, where, sizeof where));
    FS_TRY(find_functions(library, where, &found));
    for (int i = CUBLAS_MAJOR_VERSION; i <= CUBLAS_PATCH_VERSION; i++) {
        FS_TRY(fs_cublas_check(&found, found.get_property(i, &version[i]), "its version"));
    }
    if (version[0] < OLDEST_MAJOR || version[0] >= TOO_NEW_MAJOR) {
        return FS_FAIL(FS_EUNSUPPORTED, "cuBLAS: %s is version %d.%d.%d, must be 12 or 13", where,
                       version[0], version[1], version[2]);
    }
    (void)std::snprintf(description, sizeof description, "cuBLAS %d.%d.%d (%s)", version[0],
                        version[1], version[2], where);
    functions = found;
    loaded = true;
    return FS_OK;
}

extern "C" fs_status
fs_cublas_load(const char *const *paths, const char **out_description)
{
    std::lock_guard<std::mutex> lock(load_lock);
    if (!loaded) {
        FS_TRY(load(paths));
    }
    if (out_description != NULL) {
        *out_description = description;
    }
    return FS_OK;
}

// ---- handles ------------------------------------------------------------------------------------

extern "C" size_t
fs_cublas_workspace_nbytes(int capability)
{
    return capability >= 90 ? FS_GEMM_SCRATCH_NBYTES : (size_t)4 << 20;
}

/* The stream first: setting it takes the workspace away again. */
static fs_status
set_up(const fs_cublas *cublas, void *workspace, size_t workspace_nbytes)
{
    const cublas_functions *f = cublas->functions;
    cublas_handle handle = cublas->handle;
    FS_TRY(fs_cublas_check(f, f->set_stream(handle, cublas->stream), "set the stream"));
    FS_TRY(fs_cublas_check(f, f->set_workspace(handle, workspace, workspace_nbytes),
                           "set the workspace"));
    FS_TRY(fs_cublas_check(f, f->set_pointer_mode(handle, CUBLAS_SCALARS_OF_HOST),
                           "set the pointer mode"));
    FS_TRY(fs_cublas_check(f, f->set_math_mode(handle, CUBLAS_NO_REDUCED_REDUCTION),
                           "set the math mode"));
    return fs_cublas_check(f, f->set_atomics_mode(handle, CUBLAS_ATOMICS_OFF), "turn atomics off");
}

extern "C" fs_status
fs_cublas_open(fs_cuda_stream stream, void *workspace, size_t workspace_nbytes, fs_cublas **out)
{
    *out = NULL;
    FS_TRY(fs_cuda_check_stream(stream, "cuBLAS"));
    {
        std::lock_guard<std::mutex> lock(load_lock);
        if (!loaded) {
            return FS_FAIL(FS_ESTATE, "cuBLAS: a handle before the library was loaded");
        }
    }
    if (workspace == NULL || workspace_nbytes == 0 || (uintptr_t)workspace % 256 != 0) {
        return FS_FAIL(FS_EINVAL, "cuBLAS: a workspace of %zu bytes at %p: must be some, aligned "
                                  "to 256 bytes",
                       workspace_nbytes, workspace);
    }
    fs_cublas *cublas = new (std::nothrow) fs_cublas{&functions, NULL, (cudaStream_t)stream};
    if (cublas == NULL) {
        return FS_FAIL(FS_ENOMEM, "no memory for a handle of cuBLAS");
    }
    fs_status st = fs_cublas_check(&functions, functions.create(&cublas->handle), "create");
    if (st == FS_OK) {
        st = set_up(cublas, workspace, workspace_nbytes);
        if (st != FS_OK) {
            (void)functions.destroy(cublas->handle);
        }
    }
    if (st != FS_OK) {
        delete cublas;
        return st;
    }
    *out = cublas;
    return FS_OK;
}

extern "C" fs_status
fs_cublas_close(fs_cublas *cublas)
{
    if (cublas == NULL) {
        return FS_OK;
    }
    cublas_handle handle = cublas->handle;
    delete cublas;
    return fs_cublas_check(&functions, functions.destroy(handle), "destroy");
}
