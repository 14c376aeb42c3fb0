#include "dtype.h"

#include <string.h>

static const struct {
    size_t nbytes;
    const char *name;
    const char *safetensors;
    bool is_float;
} table[FS_DTYPE_COUNT] = {
    [FS_F32] = {4, "float32", "F32", true},     [FS_F64] = {8, "float64", "F64", true},
    [FS_BF16] = {2, "bfloat16", "BF16", true},  [FS_F16] = {2, "float16", "F16", true},
    [FS_I32] = {4, "int32", "I32", false},      [FS_I64] = {8, "int64", "I64", false},
    [FS_U8] = {1, "uint8", "U8", false},
};

size_t
fs_dtype_nbytes(fs_dtype dtype)
{
    return table[dtype].nbytes;
}

const char *
fs_dtype_name(fs_dtype dtype)
{
    return table[dtype].name;
}

const char *
fs_dtype_safetensors(fs_dtype dtype)
{
    return table[dtype].safetensors;
}

bool
fs_dtype_parse(const char *name, fs_dtype *out)
{
    for (int d = 0; d < FS_DTYPE_COUNT; d++) {
        if (strcmp(name, table[d].name) == 0 || strcmp(name, table[d].safetensors) == 0) {
            *out = (fs_dtype)d;
            return true;
        }
    }
    return false;
}

bool
fs_dtype_is_float(fs_dtype dtype)
{
    return table[dtype].is_float;
}
