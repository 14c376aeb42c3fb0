/* Element types. The numbers are part of the plugin interface and of shared records: append
 * only. */
#ifndef FS_BASE_DTYPE_H
#define FS_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

typedef enum fs_dtype {
    FS_F32 = 0,
    FS_F64 = 1,
    FS_BF16 = 2,
    FS_F16 = 3,
    FS_I32 = 4,
    FS_I64 = 5,
    FS_U8 = 6,
    FS_DTYPE_COUNT = 7
} fs_dtype;

/* Bytes of one element. */
size_t fs_dtype_nbytes(fs_dtype dtype);

/* "float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8". */
const char *fs_dtype_name(fs_dtype dtype);

/* The safetensors name: "F32", "F64", "BF16", "F16", "I32", "I64", "U8". */
const char *fs_dtype_safetensors(fs_dtype dtype);

/* Finds the dtype of a name of either kind; false if there is none. */
bool fs_dtype_parse(const char *name, fs_dtype *out);

bool fs_dtype_is_float(fs_dtype dtype);

#endif
