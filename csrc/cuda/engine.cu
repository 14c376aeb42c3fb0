/* NCCL as the device table's engine: its calls on a context's device and an exec's stream. */
#include "context.cuh"

extern "C" {
#include "engine.h"
#include "nccl.h"
}

/* call() with the context's device as the calling thread's. */
template <typename Call>
static fs_status
on_device(fs_context *context, Call call)
{
    int before;
    if (!fs_cuda_context_enter(context, &before)) {
        return fs_cuda_runtime.check(context);
    }
    fs_status status = call();
    fs_cuda_context_exit(context, before);
    return status;
}

static fs_status
make_id(fs_engine_id *out)
{
    FS_TRY(fs_nccl_load(fs_cuda_libraries()->nccl, NULL));
    return fs_nccl_make_id(out);
}

static fs_status
open_engine(fs_context *context, const fs_engine_open *open, fs_engine **out)
{
    *out = NULL;
    FS_TRY(fs_nccl_load(fs_cuda_libraries()->nccl, NULL));
    return on_device(context, [=] { return fs_nccl_open(open, out); });
}

static fs_status
gather(fs_engine *engine, const fs_exec *exec, const fs_engine_piece *pieces, size_t n)
{
    return on_device(exec->context, [=] {
        return fs_nccl_gather(engine, fs_cuda_exec_stream(exec), pieces, n);
    });
}

static fs_status
alltoall(fs_engine *engine, const fs_exec *exec, const fs_engine_part *sends, size_t sends_n,
         const fs_engine_part *receives, size_t receives_n)
{
    return on_device(exec->context, [=] {
        return fs_nccl_alltoall(engine, fs_cuda_exec_stream(exec), sends, sends_n, receives,
                                receives_n);
    });
}

static fs_status
reduce_scatter(fs_engine *engine, const fs_exec *exec, fs_dtype dtype, const void *in, size_t n,
               void *out)
{
    return on_device(exec->context, [=] {
        return fs_nccl_reduce_scatter(engine, fs_cuda_exec_stream(exec), dtype, in, n, out);
    });
}

extern "C" const fs_engine_ops fs_cuda_engine = {
    make_id, open_engine, gather, alltoall, reduce_scatter, fs_nccl_check, fs_nccl_abort,
    fs_nccl_close,
};
