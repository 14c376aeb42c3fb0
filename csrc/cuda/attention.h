/* Causal softmax attention on a GPU: see fs_attention in device/model_ops.h for what it computes.
 *
 * Elements are of op->dtype: FS_F32, FS_BF16 or FS_F16, arrays aligned to 16 bytes; lse and delta
 * are fp32. Sums, softmax and statistics are fp32. 16-bit heads of up to 128 go through tensor
 * cores, where probabilities (and in the gradient their derivatives) are rounded to the dtype
 * before a product; everything else through plain multiply-add in fp32.
 *
 * Beside the operands there is delta alone. No float is added by two blocks: given equal inputs,
 * results have equal bits. Calls check what they were given, start kernels and return. */
#ifndef FS_CUDA_ATTENTION_H
#define FS_CUDA_ATTENTION_H

#include "../base/status.h"
#include "../device/model_ops.h"
#include "kernels.h"

/* See fs_model_ops.attention. */
FS_NODISCARD fs_status
fs_cuda_attention(fs_cuda_stream stream, const fs_attention *op);

/* See fs_model_ops.attention_grad. */
FS_NODISCARD fs_status
fs_cuda_attention_grad(fs_cuda_stream stream, const fs_attention *op);

#endif
