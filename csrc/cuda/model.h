/* The model's operations on a GPU, but for attention (attention.h): see device/model_ops.h for what
 * each does.
 *
 * Arrays are device memory; structs are read before the call returns. Sums run over the CPU's lanes
 * in the CPU's order, and exp is base/math.h's: given equal fp32 inputs results have the bits of
 * the CPU's tables. bf16 and fp16 are computed in fp32 and rounded once, when stored. Calls check
 * what they were given, start kernels and return. */
#ifndef FS_CUDA_MODEL_H
#define FS_CUDA_MODEL_H

#include "../base/status.h"
#include "../device/model_ops.h"
#include "kernels.h"

FS_NODISCARD fs_status
fs_cuda_embed(fs_cuda_stream stream, const fs_embed *op);

FS_NODISCARD fs_status
fs_cuda_embed_grad(fs_cuda_stream stream, const fs_embed_grad *op);

FS_NODISCARD fs_status
fs_cuda_norm(fs_cuda_stream stream, const fs_norm *op);

FS_NODISCARD fs_status
fs_cuda_norm_grad(fs_cuda_stream stream, const fs_norm_grad *op);

FS_NODISCARD fs_status
fs_cuda_heads(fs_cuda_stream stream, const fs_heads *op);

FS_NODISCARD fs_status
fs_cuda_heads_grad(fs_cuda_stream stream, const fs_heads *op);

FS_NODISCARD fs_status
fs_cuda_swiglu(fs_cuda_stream stream, const fs_swiglu *op);

FS_NODISCARD fs_status
fs_cuda_swiglu_grad(fs_cuda_stream stream, const fs_swiglu *op);

FS_NODISCARD fs_status
fs_cuda_xent(fs_cuda_stream stream, const fs_xent *op);

FS_NODISCARD fs_status
fs_cuda_column_sum(fs_cuda_stream stream, const fs_column_sum *op);

FS_NODISCARD fs_status
fs_cuda_scale(fs_cuda_stream stream, const fs_scale *op);

FS_NODISCARD fs_status
fs_cuda_normal(fs_cuda_stream stream, const fs_normal *op);

#endif
