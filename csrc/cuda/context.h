/* A rank's use of a GPU (fs_context), inside this library: what the files that fill the table and
 * the engine's need of it. See device/runtime.h for what it is. */
#ifndef FS_CUDA_CONTEXT_H
#define FS_CUDA_CONTEXT_H

#include <stddef.h>

#include "../base/status.h"
#include "../device/device.h"
#include "../device/plugin.h"
#include "cublas.h"
#include "device.h"

/* Its device's number. */
int fs_cuda_context_ordinal(const fs_context *context);

/* The stream that exec's operations go to. */
fs_cuda_stream fs_cuda_exec_stream(const fs_exec *exec);

/* That stream's scratch, as reserved; *out_nbytes may be 0, and then it is NULL. */
void *fs_cuda_exec_scratch(const fs_exec *exec, size_t *out_nbytes);

/* That stream's handle for products, opened when it is first asked for, with cuBLAS itself. */
FS_NODISCARD fs_status
fs_cuda_exec_cublas(const fs_exec *exec, fs_cublas **out);

/* Where packages keep what is loaded when it is first needed; the first call counts. */
void fs_cuda_set_libraries(const fs_plugin_libraries *libraries);
const fs_plugin_libraries *fs_cuda_libraries(void);

/* Keeps the first status that is not FS_OK, with its text, for fs_runtime.check. */
void fs_cuda_context_keep(fs_context *context, fs_status status);
bool fs_cuda_context_has_failed(const fs_context *context);

/* Makes the context's device the calling thread's; *out_before is what fs_cuda_context_exit gives
 * back, so that other libraries of the process find their own device again. Failures are kept. */
bool fs_cuda_context_enter(fs_context *context, int *out_before);
void fs_cuda_context_exit(const fs_context *context, int before);

/* fs_runtime's functions. */
extern const fs_runtime fs_cuda_runtime;

#endif
