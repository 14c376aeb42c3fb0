/* Giving work to a context's device from C++: see context.h. */
#ifndef FS_CUDA_CONTEXT_CUH
#define FS_CUDA_CONTEXT_CUH

extern "C" {
#include "context.h"
}

/* Gives call(stream) to exec's stream, on its device; the status is kept, and after a failure
 * nothing more is given. */
template <typename Call>
static inline void
fs_cuda_give(const fs_exec *exec, Call call)
{
    int before;
    if (fs_cuda_context_enter(exec->context, &before)) {
        fs_cuda_context_keep(exec->context, call(fs_cuda_exec_stream(exec)));
        fs_cuda_context_exit(exec->context, before);
    }
}

#endif
