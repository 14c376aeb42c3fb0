/* What py_kernels.c (the type, elementwise operations, products) and py_kernels_step.c (sums over
 * ranks, updates) share. */
#ifndef FS_BINDING_PY_KERNELS_H
#define FS_BINDING_PY_KERNELS_H

#include "binding.h"

#include "../device/device.h"

typedef struct fs_py_kernels {
    PyObject_HEAD
    fs_exec exec;
} fs_py_kernels;

/* Releases the GIL around one operation of the table. */
#define FS_OPERATE(statement)             \
    do {                                  \
        Py_BEGIN_ALLOW_THREADS            \
        fs_fp_state fp_ = fs_fp_enter();  \
        statement;                        \
        fs_fp_leave(fp_);                 \
        Py_END_ALLOW_THREADS              \
    } while (0)

/* Arrays that one call takes at the most. */
#define FS_SOURCES_MAX 64

/* Takes an array, or leaves out zeroed for None and NULL; drop takes both. */
int fs_py_take_optional(PyObject *object, const char *arg, bool writeable, fs_buffer *out);
void fs_py_drop_optional(fs_buffer *buffer);
/* Has b, called name, as many elements as a? None fits. */
FS_NODISCARD fs_status
fs_py_same_length(const fs_buffer *a, const fs_buffer *b, const char *name);
/* Is it of a float dtype? None is. */
FS_NODISCARD fs_status
fs_py_float_dtype(const fs_buffer *buffer, const char *name);

/* The methods of py_kernels_step.c, ended by a NULL name; py_kernels.c puts them into the type. */
extern const PyMethodDef fs_py_kernels_step_methods[];

#endif
