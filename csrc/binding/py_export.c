/* Whole tensors from Python: out of a catalog or out of shards into a new safetensors file. */
#include "py_catalog.h"

#include <string.h>

#include "../base/arena.h"
#include "../base/cpu.h"

/* Tensors to write, each under a new name and dtype from a source. */
typedef struct export_call {
    PyObject *read;        /* a Python source; called with the GIL, which is released around it */
    PyThreadState *thread; /* while it is released */
    size_t n;
    fs_tensor_def *defs;
    size_t (*dims)[FS_SAFETENSORS_DIMS_MAX];
    const char **sources; /* names in a catalog */
    int *params;          /* or indexes of a layout */
    fs_text_pair metadata[16];
    size_t metadata_n;
    fs_shards *shards;
    fs_array array;
    fs_fetcher fetcher;
} export_call;

static void
export_drop(export_call *call)
{
    fs_fetcher_close(&call->fetcher);
    fs_free(call->defs);
    fs_free(call->dims);
    fs_free(call->sources);
    fs_free(call->params);
}

/* Where tensors come from: a name in a catalog, an index of a layout, or a Python callable. */
typedef enum source_kind { BY_NAME, BY_INDEX, BY_CALL } source_kind;

/* tensors: ((name, dtype, shape, source) ...), source a name or an index; metadata: dict of
 * texts. */
static int
export_take(PyObject *tensors, PyObject *metadata, source_kind kind, export_call *call)
{
    size_t n = (size_t)PyTuple_GET_SIZE(tensors);
    fs_status st = fs_calloc(n, sizeof *call->defs, &call->defs);
    st = st == FS_OK ? fs_calloc(n, sizeof *call->dims, &call->dims) : st;
    st = st == FS_OK ? fs_calloc(n, sizeof *call->sources, &call->sources) : st;
    st = st == FS_OK ? fs_calloc(n, sizeof *call->params, &call->params) : st;
    if (st != FS_OK) {
        (void)fs_raise(st, NULL);
        return -1;
    }
    for (size_t t = 0; t < n; t++) {
        fs_tensor_def *def = &call->defs[t];
        PyObject *dtype, *shape, *source;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tensors, (Py_ssize_t)t), "sOOO", &def->name, &dtype,
                              &shape, &source) ||
            fs_dtype_take(dtype, &def->dtype) < 0 ||
            fs_py_dims_take(shape, def->name, FS_SAFETENSORS_DIMS_MAX, call->dims[t],
                            &def->dims_n) < 0) {
            return -1;
        }
        def->dims = call->dims[t];
        if (kind == BY_NAME && (call->sources[t] = PyUnicode_AsUTF8(source)) == NULL) {
            return -1;
        }
        if (kind == BY_INDEX) {
            call->params[t] = (int)PyLong_AsLong(source);
            if (PyErr_Occurred()) {
                return -1;
            }
        }
    }
    call->n = n;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(metadata, &at, &key, &value)) {
        const char *key_text = PyUnicode_AsUTF8(key), *value_text = PyUnicode_AsUTF8(value);
        if (key_text == NULL || value_text == NULL) {
            return -1;
        }
        if (call->metadata_n == sizeof call->metadata / sizeof call->metadata[0]) {
            PyErr_Format(PyExc_ValueError, "too many metadata entries");
            return -1;
        }
        call->metadata[call->metadata_n++] = (fs_text_pair){key_text, value_text};
    }
    return 0;
}

static fs_status
from_catalog(void *ctx, size_t index, size_t begin, size_t end, void *dst, fs_dtype dtype)
{
    export_call *call = ctx;
    return fs_fetch_range(&call->fetcher, call->sources[index], FS_WEIGHT, begin, end, dst, dtype);
}

static fs_status
from_shards(void *ctx, size_t index, size_t begin, size_t end, void *dst, fs_dtype dtype)
{
    export_call *call = ctx;
    return fs_load(call->shards, call->params[index], call->array, begin, end, dst, dtype);
}

/* The bytes of a range of elements, as read(index, begin, end) gives them. Copied at once: what is
 * written to never leaves for Python. FS_EINVAL with a Python exception set, where it failed. */
static fs_status
from_python(void *ctx, size_t index, size_t begin, size_t end, void *dst, fs_dtype dtype)
{
    export_call *call = ctx;
    size_t nbytes = (end - begin) * fs_dtype_nbytes(dtype);
    fs_status st = FS_OK;
    Py_buffer bytes;
    PyEval_RestoreThread(call->thread);
    PyObject *found = PyObject_CallFunction(call->read, "nnn", (Py_ssize_t)index, (Py_ssize_t)begin,
                                            (Py_ssize_t)end);
    if (found == NULL || PyObject_GetBuffer(found, &bytes, PyBUF_SIMPLE) < 0) {
        st = FS_FAIL(FS_EINVAL, "tensor %zu could not be read", index);
    } else {
        if ((size_t)bytes.len == nbytes) {
            memcpy(dst, bytes.buf, nbytes);
        } else {
            st = FS_FAIL(FS_EINVAL, "tensor %zu: %zd bytes were given for elements %zu to %zu",
                         index, bytes.len, begin, end);
        }
        PyBuffer_Release(&bytes);
    }
    Py_XDECREF(found);
    call->thread = PyEval_SaveThread();
    return st;
}

static fs_status
export_stream(const char *folder, const char *name, export_call *call, fs_source source,
              fs_ledger *ledger)
{
    fs_blocks blocks = {0};
    fs_status st = fs_stream(folder, name, call->defs, call->n, call->metadata, call->metadata_n,
                             source, call, ledger, &blocks);
    fs_blocks_free(&blocks);
    return st;
}

static PyObject *
io_catalog_export(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tuple, *tensors, *metadata, *result = NULL;
    const char *folder, *name;
    if (!PyArg_ParseTuple(args, "OssO!O!:catalog_export", &tuple, &folder, &name, &PyTuple_Type,
                          &tensors, &PyDict_Type, &metadata)) {
        return NULL;
    }
    fs_py_catalog from = {0};
    export_call call = {0};
    if (export_take(tensors, metadata, BY_NAME, &call) == 0 &&
        fs_py_catalog_enter(tuple, &from) == 0) {
        fs_status st;
        call.fetcher.catalog = from.catalog;
        Py_BEGIN_ALLOW_THREADS
        fs_fp_state fp = fs_fp_enter();
        st = fs_device_choose(&call.fetcher.device);
        st = st == FS_OK ? export_stream(folder, name, &call, from_catalog, NULL) : st;
        fs_fp_leave(fp);
        Py_END_ALLOW_THREADS
        result = st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, NULL);
    }
    export_drop(&call);
    fs_py_catalog_drop(&from);
    return result;
}

static PyObject *
io_shards_export(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *shards_object, *tensors, *metadata, *result = NULL;
    const char *folder, *name;
    int master;
    if (!PyArg_ParseTuple(args, "OpssO!O!:shards_export", &shards_object, &master, &folder, &name,
                          &PyTuple_Type, &tensors, &PyDict_Type, &metadata)) {
        return NULL;
    }
    fs_shards *shards = fs_py_shards_enter(shards_object);
    if (shards == NULL) {
        return NULL;
    }
    fs_world *world = fs_shards_world(shards);
    export_call call = {.shards = shards, .array = master ? FS_MASTER : FS_WEIGHT};
    if (export_take(tensors, metadata, BY_INDEX, &call) == 0) {
        fs_status st;
        FS_CALL(world, st, export_stream(folder, name, &call, from_shards, fs_world_ledger(world)));
        result = st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, world);
    }
    fs_py_shards_leave(shards_object);
    export_drop(&call);
    return result;
}

/* (nbytes, crcs) of a new file whose tensors Python gives. */
static PyObject *
io_stream_write(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensors, *metadata, *result = NULL;
    const char *folder, *name;
    export_call call = {0};
    if (!PyArg_ParseTuple(args, "ssO!O!O:stream_write", &folder, &name, &PyTuple_Type, &tensors,
                          &PyDict_Type, &metadata, &call.read)) {
        return NULL;
    }
    if (export_take(tensors, metadata, BY_CALL, &call) == 0) {
        fs_blocks blocks = {0};
        call.thread = PyEval_SaveThread();
        fs_status st = fs_stream(folder, name, call.defs, call.n, call.metadata, call.metadata_n,
                                 from_python, &call, NULL, &blocks);
        PyEval_RestoreThread(call.thread);
        if (st == FS_OK) {
            result = Py_BuildValue("(ny#)", (Py_ssize_t)blocks.nbytes,
                                   blocks.n > 0 ? (const char *)blocks.crc : "",
                                   (Py_ssize_t)(4 * blocks.n));
        } else if (!PyErr_Occurred()) {
            (void)fs_raise(st, NULL);
        }
        fs_blocks_free(&blocks);
    }
    export_drop(&call);
    return result;
}

static PyMethodDef functions[] = {
    {"catalog_export", io_catalog_export, METH_VARARGS,
     "catalog_export($module, catalog, folder, name, tensors, metadata, /)\n--\n\nWrites whole "
     "tensors of a"
     " catalog to a new safetensors file."},
    {"shards_export", io_shards_export, METH_VARARGS,
     "shards_export($module, shards, master, folder, name, tensors, metadata, /)\n--\n\nWrites "
     "whole"
     " parameters to a new safetensors file; called by one rank between two fences."},
    {"stream_write", io_stream_write, METH_VARARGS,
     "stream_write($module, folder, name, tensors, metadata, read, /)\n--\n\nWrites a new "
     "safetensors file of the bytes that read(index, begin, end) gives; (nbytes, crcs)."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_export(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
