/* The model's operations of the device table: everything in a Llama that is not a GEMM.
 * Activations are fp32 and row-major; a row is one token. See model/llama.c for how they compose. */
#ifndef FS_DEVICE_MODEL_OPS_H
#define FS_DEVICE_MODEL_OPS_H

#include <stddef.h>
#include <stdint.h>

struct fs_exec;

typedef struct fs_model_ops {
    void *reserved; /* filled in by the model's author */
} fs_model_ops;

#endif
