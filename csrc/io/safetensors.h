/* safetensors: 8 bytes of header length, a JSON header, and the tensors end to end.
 *
 * Reading is strict, because files come from strangers: fs_safetensors_open is the one place where
 * sizes, offsets and names of a file are checked, and nothing of a file is used before. What it
 * gives has a header of at most 100 MB inside the file, unique names, and tensors that fill the
 * rest of the file without hole or overlap, each exactly as long as its shape and dtype say.
 *
 * Format: github.com/huggingface/safetensors, README, "Format". */
#ifndef FS_IO_SAFETENSORS_H
#define FS_IO_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>

#include "../base/arena.h"
#include "../base/dtype.h"
#include "../base/status.h"
#include "blocks.h"
#include "file.h"

#define FS_SAFETENSORS_HEADER_MAX 100000000u
#define FS_SAFETENSORS_DIMS_MAX 32

// ---- reading ------------------------------------------------------------------------------------

typedef struct fs_tensor {
    const char *name;       /* NUL ended, valid UTF-8, no control characters */
    const char *dtype_name; /* as in the file: "F32", "I8", ... */
    int dtype;              /* fs_dtype, or -1: a type of the format that is none of ours */
    size_t dims_n;
    const size_t *dims;
    size_t numel;
    size_t begin, end; /* bytes of the file */
} fs_tensor;

typedef struct fs_text_pair {
    const char *key, *value; /* NUL ended */
} fs_text_pair;

/* Owner: whoever opened it. All pointers above point into it. */
typedef struct fs_safetensors {
    fs_arena text; /* the header, decoded in place; charged as FS_MEM_CHECKPOINT */
    fs_tensor *tensors; /* sorted by name */
    size_t tensors_n;
    fs_text_pair *metadata; /* sorted by key */
    size_t metadata_n;
    size_t *dims;
    size_t data_begin; /* bytes before the first tensor */
} fs_safetensors;

/* Reads and checks the header of the reader's file (block checksums first, where there are any).
 * FS_ECORRUPT names the path and what is wrong; *out is untouched then. */
FS_NODISCARD fs_status
fs_safetensors_open(fs_reader *reader, fs_ledger *ledger, fs_safetensors *out);

/* The same for header_nbytes of JSON at text (written to) in front of data_nbytes of tensors: what
 * fs_safetensors_open does after reading. text must outlive *out and is not freed by close. */
FS_NODISCARD fs_status
fs_safetensors_parse(const char *path, char *text, size_t header_nbytes, size_t data_nbytes,
                     fs_safetensors *out);

/* Gives back what open and parse took; fine on zeros, and twice. The reader stays open. */
void fs_safetensors_close(fs_safetensors *safetensors);

/* The tensor of that name, or NULL. */
const fs_tensor *fs_safetensors_find(const fs_safetensors *safetensors, const char *name);

// ---- writing ------------------------------------------------------------------------------------

typedef struct fs_tensor_def {
    const char *name;
    fs_dtype dtype;
    size_t dims_n;
    const size_t *dims;
} fs_tensor_def;

/* Header bytes, length included. */
typedef struct fs_header {
    unsigned char *bytes; /* free with fs_header_free */
    size_t nbytes;        /* a multiple of 64: data begins aligned */
    size_t data_nbytes;   /* of all tensors together */
} fs_header;

/* The header of a file that holds these tensors in this order. Wider dtypes must come before
 * narrower ones (then every tensor begins aligned). FS_EINVAL: a name twice, not UTF-8 or with
 * control characters, an order that does not align, or a header over 100 MB. */
FS_NODISCARD fs_status
fs_header_make(const fs_tensor_def *defs, size_t defs_n, const fs_text_pair *metadata,
               size_t metadata_n, fs_header *out);
void fs_header_free(fs_header *header);

#endif
