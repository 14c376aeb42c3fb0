/* What the files of the binding share. The only folder that knows Python.
 *
 * A method is: parse, check, take buffers, note the caller's line, release the GIL, ONE call of the
 * core, take the GIL, release the buffers, turn the status into an exception. Nothing that can wait
 * runs with the GIL held. */
#ifndef FS_BINDING_BINDING_H
#define FS_BINDING_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "../base/dtype.h"
#include "../base/status.h"
#include "../base/cpu.h"
#include "../comm/comm.h"

/* Each file of the binding adds its types and functions here, called once by module.c. */
int fs_py_add_core(PyObject *module);    /* py_core.c: env, cpu, build, gemm library */
int fs_py_add_machine(PyObject *module); /* py_machine.c: how fast matrix products are */
int fs_py_add_kernels(PyObject *module); /* py_kernels.c: device table, for tests and benchmarks */
int fs_py_add_device(PyObject *module);  /* py_device.c: the library of a device */
int fs_py_add_device_array(PyObject *module); /* py_device_array.c: memory of a device */
int fs_py_add_world(PyObject *module);   /* py_world.c: Job, World, collectives */
int fs_py_add_hooks(PyObject *module);   /* py_hooks.c: faults on purpose, for tests */
int fs_py_add_shards(PyObject *module);  /* py_shards.c: Shards, step */
int fs_py_add_norms(PyObject *module);   /* py_norms.c: gradients by parameter */
int fs_py_add_llama(PyObject *module);   /* py_llama.c */
int fs_py_add_model_ops(PyObject *module); /* py_model_ops.c: for tests and benchmarks */
int fs_py_add_io(PyObject *module);      /* py_io.c: checksums, safetensors */
int fs_py_add_catalog(PyObject *module); /* py_catalog.c: what a folder of pieces holds */
int fs_py_add_checkpoint(PyObject *module); /* py_checkpoint.c: read, save, commit */
int fs_py_add_export(PyObject *module); /* py_export.c: whole tensors */

/* A function that takes keywords, or its arguments as an array, in a table of methods. */
#define FS_METHOD(function) ((PyCFunction)(void (*)(void))(function))

/* Puts tables of methods, each ended by a NULL name, end to end into out, which is of room entries;
 * parts ends with NULL. -1 with an exception where they do not fit. */
int fs_py_join_methods(const PyMethodDef *const *parts, PyMethodDef *out, size_t room);

/* The one place that turns a status into an exception: sets it and returns NULL. world may be NULL;
 * it is where FS_ABORTED finds its cause and report. */
PyObject *fs_raise(fs_status status, fs_world *world);
/* FS_ABORTED for a rank whose world never opened. */
PyObject *fs_raise_job(fs_job *job, int rank);

// ---- NumPy, wrapped so that its C API stays in py_numpy.c ---------------------------------------

/* An array that a call reads or writes. Holds a reference until fs_array_drop. */
typedef struct fs_buffer {
    PyObject *array; /* owner */
    void *data;
    fs_dtype dtype;
    size_t n; /* elements */
    size_t dims_n;
    size_t dims[32];
} fs_buffer;

/* Takes an array as it is: C-contiguous, aligned, native byte order, one of our dtypes, writeable
 * if asked. Anything else is a TypeError or ValueError that names arg; never a copy. */
int fs_buffer_take(PyObject *object, const char *arg, bool writeable, fs_buffer *out);
/* The same, and of this dtype. */
int fs_buffer_take_dtype(PyObject *object, const char *arg, bool writeable, fs_dtype dtype,
                         fs_buffer *out);
void fs_buffer_drop(fs_buffer *buffer);

/* A new array that owns its memory. */
PyObject *fs_array_new(fs_dtype dtype, size_t dims_n, const size_t *dims, void **out_data);
/* A view of memory that base (stolen) keeps alive. */
PyObject *fs_array_view(fs_dtype dtype, size_t dims_n, const size_t *dims, void *data,
                        bool writeable, PyObject *base);
/* "float32", "bfloat16" or a NumPy dtype object -> fs_dtype; sets an exception on failure. */
int fs_dtype_take(PyObject *object, fs_dtype *out);
/* A shape as a tuple of int; NULL with an exception. */
PyObject *fs_shape_tuple(size_t dims_n, const size_t *dims);
/* Called once by module.c. */
int fs_numpy_import(void);

/* One call of the core. Notes the Python line of the caller for reports, refuses a second call of
 * this world from another thread (or from a signal handler), releases the GIL around call, saves
 * and restores the floating-point state, takes the GIL. A signal handler that raised during a wait
 * makes the status a failure even where the core went on; fs_raise then hands out that exception.
 * world may be NULL. Use: FS_CALL(world, status, fs_barrier(world)); */
FS_NODISCARD fs_status
fs_call_begin(fs_world *world);
FS_NODISCARD fs_status
fs_call_end(fs_world *world, fs_status status);
#define FS_CALL(world, status, call)                      \
    do {                                                  \
        (status) = fs_call_begin(world);                  \
        if ((status) == FS_OK) {                          \
            Py_BEGIN_ALLOW_THREADS                        \
            fs_fp_state fs_call_fp_ = fs_fp_enter();      \
            (status) = (call);                            \
            fs_fp_leave(fs_call_fp_);                     \
            Py_END_ALLOW_THREADS                          \
            (status) = fs_call_end((world), (status));    \
        }                                                 \
    } while (0)

/* The C objects behind Python objects, for the other files; NULL with an exception when closed. */
const fs_exec *fs_py_kernels_exec(PyObject *kernels);
fs_world *fs_py_world_get(PyObject *world);
struct fs_shards;
/* A method that uses shards stands between enter and leave: a second call from another Python
 * thread while the first runs without the GIL is an error, not a race. enter returns NULL with an
 * exception. */
struct fs_shards *fs_py_shards_enter(PyObject *shards);
void fs_py_shards_leave(PyObject *shards);
/* The world object (borrowed) that shards were opened in. */
PyObject *fs_py_shards_world(PyObject *shards);

#endif
