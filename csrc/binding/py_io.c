/* Files from Python: checksums and safetensors. Checkpoints are in py_checkpoint.c, catalogs of
 * pieces in py_catalog.c. */
#include "binding.h"

#include "../base/arena.h"
#include "../base/checked.h"
#include "../base/crc32c.h"
#include "../io/safetensors.h"

// ---- checksums ----------------------------------------------------------------------------------

static PyObject *
crc_by(uint32_t (*function)(uint32_t, const void *, size_t), PyObject *args, const char *format)
{
    Py_buffer bytes;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, format, &bytes, &crc)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    crc = function(crc, bytes.buf, (size_t)bytes.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&bytes);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *
io_crc32c(PyObject *Py_UNUSED(module), PyObject *args)
{
    return crc_by(fs_crc32c, args, "y*|I:crc32c");
}

static PyObject *
io_crc32c_table(PyObject *Py_UNUSED(module), PyObject *args)
{
    return crc_by(fs_crc32c_table, args, "y*|I:crc32c_table");
}

static PyObject *
io_crc32c_name(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyUnicode_FromString(fs_crc32c_name());
}

// ---- reading a header ---------------------------------------------------------------------------

/* (name, dtype, shape, begin, end); NULL with an exception set. */
static PyObject *
tensor_tuple(const fs_tensor *tensor)
{
    PyObject *shape = fs_shape_tuple(tensor->dims_n, tensor->dims);
    if (shape == NULL) {
        return NULL;
    }
    return Py_BuildValue("(ssNnn)", tensor->name, tensor->dtype_name, shape,
                         (Py_ssize_t)tensor->begin, (Py_ssize_t)tensor->end);
}

static PyObject *
header_tuple(const fs_safetensors *found)
{
    PyObject *metadata = PyDict_New();
    PyObject *tensors = PyList_New(0);
    if (metadata == NULL || tensors == NULL) {
        goto fail;
    }
    for (size_t m = 0; m < found->metadata_n; m++) {
        PyObject *key = PyUnicode_FromString(found->metadata[m].key);
        PyObject *value = PyUnicode_FromString(found->metadata[m].value);
        int rc = key != NULL && value != NULL ? PyDict_SetItem(metadata, key, value) : -1;
        Py_XDECREF(key);
        Py_XDECREF(value);
        if (rc < 0) {
            goto fail;
        }
    }
    for (size_t t = 0; t < found->tensors_n; t++) {
        PyObject *tensor = tensor_tuple(&found->tensors[t]);
        if (tensor == NULL || PyList_Append(tensors, tensor) < 0) {
            Py_XDECREF(tensor);
            goto fail;
        }
        Py_DECREF(tensor);
    }
    return Py_BuildValue("(NN)", metadata, tensors);
fail:
    Py_XDECREF(metadata);
    Py_XDECREF(tensors);
    return NULL;
}

static PyObject *
io_safetensors_header(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path;
    if (!PyArg_ParseTuple(args, "O&:safetensors_header", PyUnicode_FSConverter, &path)) {
        return NULL;
    }
    fs_reader reader = {0};
    fs_safetensors found = {0};
    fs_status st;
    Py_BEGIN_ALLOW_THREADS
    st = fs_reader_open(NULL, PyBytes_AS_STRING(path), NULL, NULL, &reader);
    if (st == FS_OK) {
        st = fs_safetensors_open(&reader, NULL, &found);
        fs_reader_close(&reader);
    }
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    if (st != FS_OK) {
        return fs_raise(st, NULL);
    }
    PyObject *header = header_tuple(&found);
    fs_safetensors_close(&found);
    return header;
}

// ---- writing arrays -----------------------------------------------------------------------------

/* What one call of safetensors_write holds on to. */
typedef struct write_call {
    size_t n, metadata_n;
    fs_tensor_def *defs;
    fs_buffer *buffers;
    fs_text_pair *metadata;
} write_call;

static void
write_call_drop(write_call *call)
{
    for (size_t i = 0; i < call->n; i++) {
        fs_buffer_drop(&call->buffers[i]);
    }
    fs_free(call->defs);
    fs_free(call->buffers);
    fs_free(call->metadata);
}

/* names and arrays are tuples, metadata a dict of texts; all outlive the call. */
static int
write_call_take(PyObject *names, PyObject *arrays, PyObject *metadata, write_call *call)
{
    size_t n = (size_t)PyTuple_GET_SIZE(names), m = (size_t)PyDict_Size(metadata);
    if (n != (size_t)PyTuple_GET_SIZE(arrays)) {
        PyErr_Format(PyExc_ValueError, "%zu names for %zd arrays", n, PyTuple_GET_SIZE(arrays));
        return -1;
    }
    fs_status st = fs_calloc(n, sizeof *call->defs, &call->defs);
    st = st == FS_OK ? fs_calloc(n, sizeof *call->buffers, &call->buffers) : st;
    st = st == FS_OK ? fs_calloc(m, sizeof *call->metadata, &call->metadata) : st;
    if (st != FS_OK) {
        (void)fs_raise(st, NULL);
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, (Py_ssize_t)i));
        fs_buffer *buffer = &call->buffers[i];
        if (name == NULL ||
            fs_buffer_take(PyTuple_GET_ITEM(arrays, (Py_ssize_t)i), name, false, buffer) < 0) {
            return -1;
        }
        call->n = i + 1;
        call->defs[i] = (fs_tensor_def){name, buffer->dtype, buffer->dims_n, buffer->dims};
    }
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(metadata, &at, &key, &value)) {
        const char *key_text = PyUnicode_AsUTF8(key), *value_text = PyUnicode_AsUTF8(value);
        if (key_text == NULL || value_text == NULL) {
            return -1;
        }
        call->metadata[call->metadata_n++] = (fs_text_pair){key_text, value_text};
    }
    return 0;
}

static fs_status
write_arrays(const char *path, const write_call *call)
{
    fs_header header = {0};
    fs_writer writer = {.file = FS_FILE_CLOSED};
    fs_blocks blocks = {0};
    fs_status st;
    FS_TRY(fs_header_make(call->defs, call->n, call->metadata, call->metadata_n, &header));
    FS_TRY_GOTO(fs_writer_open(NULL, path, NULL, &writer), st, done);
    FS_TRY_GOTO(fs_writer_put(&writer, header.bytes, header.nbytes), st, done);
    for (size_t i = 0; i < call->n; i++) {
        const fs_buffer *buffer = &call->buffers[i];
        FS_TRY_GOTO(
            fs_writer_put(&writer, buffer->data, buffer->n * fs_dtype_nbytes(buffer->dtype)), st,
            done);
    }
    st = fs_writer_finish(&writer, &blocks);
done:
    fs_blocks_free(&blocks);
    fs_writer_discard(&writer);
    fs_header_free(&header);
    return st;
}

static PyObject *
io_safetensors_write(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path, *names, *arrays, *metadata;
    if (!PyArg_ParseTuple(args, "O&O!O!O!:safetensors_write", PyUnicode_FSConverter, &path,
                          &PyTuple_Type, &names, &PyTuple_Type, &arrays, &PyDict_Type, &metadata)) {
        return NULL;
    }
    write_call call = {0};
    PyObject *result = NULL;
    if (write_call_take(names, arrays, metadata, &call) == 0) {
        fs_status st;
        Py_BEGIN_ALLOW_THREADS
        st = write_arrays(PyBytes_AS_STRING(path), &call);
        Py_END_ALLOW_THREADS
        result = st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, NULL);
    }
    write_call_drop(&call);
    Py_DECREF(path);
    return result;
}

static PyMethodDef functions[] = {
    {"crc32c", io_crc32c, METH_VARARGS,
     "crc32c($module, bytes, crc=0, /)\n--\n\nCRC-32C of bytes that continue a text with checksum "
     "crc."},
    {"crc32c_table", io_crc32c_table, METH_VARARGS,
     "crc32c_table($module, bytes, crc=0, /)\n--\n\nThe same by table, on any processor."},
    {"crc32c_name", io_crc32c_name, METH_NOARGS,
     "crc32c_name($module, /)\n--\n\nWhat crc32c uses here: sse4.2, armv8-crc or table."},
    {"safetensors_header", io_safetensors_header, METH_VARARGS,
     "safetensors_header($module, path, /)\n--\n\n(metadata, [(name, dtype, shape, begin, end), "
     "...]) of a"
     " file, strictly checked; sorted by name, begin and end in bytes of the file."},
    {"safetensors_write", io_safetensors_write, METH_VARARGS,
     "safetensors_write($module, path, names, arrays, metadata, /)\n--\n\nWrites a new file of "
     "these"
     " arrays in this order (wider dtypes first) and syncs it."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_io(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
