/* Catalogs of pieces from Python: what a folder holds, its damage, ranges of its tensors.
 *
 * A catalog is described by a tuple: (folder, ((name, nbytes, crcs) ...), shapes), where crcs are
 * little-endian 32-bit checksums as bytes or None, and shapes is ((name, (dim ...)) ...) or None
 * when the files are not ours. */
#include "py_catalog.h"

#include <string.h>

#include "../base/arena.h"
#include "../base/cpu.h"

// ---- the tuple ----------------------------------------------------------------------------------

void
fs_py_catalog_drop(fs_py_catalog *call)
{
    fs_catalog_close(call->catalog);
    for (int f = 0; call->blocks != NULL && f < call->files_n; f++) {
        fs_blocks_free(&call->blocks[f]);
    }
    fs_free(call->files);
    fs_free(call->blocks);
    fs_free(call->shapes);
}

/* (name, nbytes, crcs or None). */
static int
take_file(PyObject *item, fs_file_def *file, fs_blocks *blocks)
{
    Py_ssize_t nbytes;
    PyObject *crcs;
    if (!PyArg_ParseTuple(item, "snO", &file->name, &nbytes, &crcs)) {
        return -1;
    }
    if (crcs == Py_None) {
        return 0;
    }
    char *bytes;
    Py_ssize_t bytes_n;
    if (PyBytes_AsStringAndSize(crcs, &bytes, &bytes_n) < 0) {
        return -1;
    }
    if (nbytes < 0 || (size_t)bytes_n != 4 * fs_blocks_count((size_t)nbytes)) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes of checksums for a file of %zd bytes",
                     file->name, bytes_n, nbytes);
        return -1;
    }
    fs_status st = fs_calloc((size_t)bytes_n, 1, &blocks->crc);
    if (st != FS_OK) {
        (void)fs_raise(st, NULL);
        return -1;
    }
    memcpy(blocks->crc, bytes, (size_t)bytes_n);
    blocks->nbytes = (size_t)nbytes;
    blocks->n = (size_t)bytes_n / 4;
    file->blocks = blocks;
    return 0;
}

int
fs_py_dims_take(PyObject *tuple, const char *name, size_t max, size_t *dims, size_t *out_n)
{
    if (!PyTuple_Check(tuple) || (size_t)PyTuple_GET_SIZE(tuple) > max) {
        PyErr_Format(PyExc_ValueError, "%s: a shape of at most %zu sizes was expected", name, max);
        return -1;
    }
    *out_n = (size_t)PyTuple_GET_SIZE(tuple);
    for (size_t d = 0; d < *out_n; d++) {
        dims[d] = PyLong_AsSize_t(PyTuple_GET_ITEM(tuple, (Py_ssize_t)d));
        if (PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static int
take_shapes(PyObject *shapes, fs_py_catalog *call)
{
    size_t n = (size_t)PyTuple_GET_SIZE(shapes);
    fs_status st = fs_calloc(n, sizeof *call->shapes, &call->shapes);
    if (st != FS_OK) {
        (void)fs_raise(st, NULL);
        return -1;
    }
    for (size_t s = 0; s < n; s++) {
        fs_shape_def *shape = &call->shapes[s];
        PyObject *dims;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(shapes, (Py_ssize_t)s), "sO", &shape->name, &dims) ||
            fs_py_dims_take(dims, shape->name, FS_DIMS_MAX, shape->dims, &shape->dims_n) < 0) {
            return -1;
        }
    }
    call->shapes_n = n;
    call->ours = true;
    return 0;
}

int
fs_py_catalog_take(PyObject *tuple, fs_py_catalog *call)
{
    PyObject *files, *shapes;
    if (!PyTuple_Check(tuple)) {
        PyErr_Format(PyExc_TypeError, "a catalog is (folder, files, shapes)");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "sO!O", &call->folder, &PyTuple_Type, &files, &shapes)) {
        return -1;
    }
    if (shapes != Py_None && !PyTuple_Check(shapes)) {
        PyErr_Format(PyExc_TypeError, "shapes: a tuple or None was expected");
        return -1;
    }
    int n = (int)PyTuple_GET_SIZE(files);
    fs_status st = fs_calloc((size_t)n, sizeof *call->files, &call->files);
    st = st == FS_OK ? fs_calloc((size_t)n, sizeof *call->blocks, &call->blocks) : st;
    if (st != FS_OK) {
        (void)fs_raise(st, NULL);
        return -1;
    }
    call->files_n = n;
    for (int f = 0; f < n; f++) {
        if (take_file(PyTuple_GET_ITEM(files, f), &call->files[f], &call->blocks[f]) < 0) {
            return -1;
        }
    }
    return shapes == Py_None ? 0 : take_shapes(shapes, call);
}

fs_status
fs_py_catalog_open(fs_py_catalog *call, fs_ledger *ledger)
{
    return fs_catalog_open(call->folder, call->files, call->files_n, call->ours, call->shapes,
                           call->shapes_n, ledger, &call->catalog);
}

int
fs_py_catalog_enter(PyObject *tuple, fs_py_catalog *call)
{
    fs_status st;
    if (fs_py_catalog_take(tuple, call) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    st = fs_py_catalog_open(call, NULL);
    Py_END_ALLOW_THREADS
    if (st != FS_OK) {
        (void)fs_raise(st, NULL);
        return -1;
    }
    return 0;
}

// ---- what it holds ------------------------------------------------------------------------------

/* (name, state, dtype, begin, end, shape, file). */
static PyObject *
piece_tuple(const fs_piece *piece)
{
    PyObject *shape = fs_shape_tuple(piece->dims_n, piece->dims);
    if (shape == NULL) {
        return NULL;
    }
    return Py_BuildValue("(sssnnNi)", piece->name, fs_state_name(piece->state), piece->dtype_name,
                         (Py_ssize_t)piece->begin, (Py_ssize_t)piece->end, shape, piece->file);
}

/* The pieces of a catalog, or (file, block given) the parts of them in a block. */
static PyObject *
io_catalog_pieces(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tuple, *list = NULL;
    int file = -1;
    Py_ssize_t block = 0;
    if (!PyArg_ParseTuple(args, "O|in:catalog_pieces", &tuple, &file, &block)) {
        return NULL;
    }
    fs_py_catalog call = {0};
    if (fs_py_catalog_enter(tuple, &call) == 0 && (list = PyList_New(0)) != NULL) {
        for (size_t p = 0; p < call.catalog->pieces_n; p++) {
            fs_piece piece = call.catalog->pieces[p];
            if (file >= 0 && (piece.file != file || !fs_piece_in_block(&call.catalog->pieces[p],
                                                                       (size_t)block, &piece))) {
                continue;
            }
            PyObject *item = piece_tuple(&piece);
            if (item == NULL || PyList_Append(list, item) < 0) {
                Py_XDECREF(item);
                Py_CLEAR(list);
                break;
            }
            Py_DECREF(item);
        }
    }
    fs_py_catalog_drop(&call);
    return list;
}

static PyObject *
io_catalog_describe(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tuple, *text = NULL;
    int file;
    Py_ssize_t block;
    if (!PyArg_ParseTuple(args, "Oin:catalog_describe", &tuple, &file, &block)) {
        return NULL;
    }
    fs_py_catalog call = {0};
    if (fs_py_catalog_enter(tuple, &call) == 0) {
        char words[FS_MESSAGE_NBYTES];
        fs_catalog_describe(call.catalog, file, (size_t)block, words, sizeof words);
        text = PyUnicode_DecodeUTF8(words, (Py_ssize_t)strlen(words), "replace");
    }
    fs_py_catalog_drop(&call);
    return text;
}

/* Fetches one range into an array of its size. */
static PyObject *
io_catalog_fetch(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tuple, *array;
    const char *name;
    int state;
    Py_ssize_t begin;
    if (!PyArg_ParseTuple(args, "OsinO:catalog_fetch", &tuple, &name, &state, &begin, &array)) {
        return NULL;
    }
    fs_buffer buffer;
    if (fs_buffer_take(array, "array", true, &buffer) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    fs_py_catalog call = {0};
    if (begin < 0) {
        PyErr_Format(PyExc_ValueError, "begin is negative");
    } else if (fs_py_catalog_enter(tuple, &call) == 0) {
        fs_fetcher fetcher = {.catalog = call.catalog};
        fs_status st;
        Py_BEGIN_ALLOW_THREADS
        fs_fp_state fp = fs_fp_enter();
        st = fs_device_choose(&fetcher.device);
        if (st == FS_OK) {
            st = fs_fetch_range(&fetcher, name, (fs_array)state, (size_t)begin,
                                (size_t)begin + buffer.n, buffer.data, buffer.dtype);
        }
        fs_fetcher_close(&fetcher);
        fs_fp_leave(fp);
        Py_END_ALLOW_THREADS
        result = st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, NULL);
    }
    fs_py_catalog_drop(&call);
    fs_buffer_drop(&buffer);
    return result;
}

/* Indexes of the blocks of a file that do not match their checksums. */
static PyObject *
io_blocks_check(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *folder;
    PyObject *item, *list = NULL;
    if (!PyArg_ParseTuple(args, "sO!:blocks_check", &folder, &PyTuple_Type, &item)) {
        return NULL;
    }
    fs_file_def file = {0};
    fs_blocks blocks = {0};
    fs_reader reader = {0};
    if (take_file(item, &file, &blocks) < 0) {
        return NULL;
    }
    fs_status st = fs_name_check(folder, file.name);
    if (st == FS_OK) {
        Py_BEGIN_ALLOW_THREADS
        st = fs_reader_open(folder, file.name, file.blocks, NULL, &reader);
        Py_END_ALLOW_THREADS
    }
    if (st != FS_OK) {
        (void)fs_raise(st, NULL);
    } else if ((list = PyList_New(0)) != NULL) {
        for (size_t block = 0; list != NULL && block < blocks.n; block++) {
            const unsigned char *bytes;
            size_t begin = block * FS_BLOCK_NBYTES;
            size_t end = block + 1 == blocks.n ? blocks.nbytes : begin + FS_BLOCK_NBYTES;
            Py_BEGIN_ALLOW_THREADS
            st = fs_reader_get(&reader, begin, end, &bytes);
            Py_END_ALLOW_THREADS
            if (st == FS_OK) {
                continue;
            }
            PyObject *number = PyLong_FromSize_t(block);
            if (st != FS_ECORRUPT) {
                (void)fs_raise(st, NULL);
                Py_CLEAR(list);
            } else if (number == NULL || PyList_Append(list, number) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(number);
        }
        fs_reader_close(&reader);
    }
    fs_blocks_free(&blocks);
    return list;
}

static PyMethodDef functions[] = {
    {"catalog_pieces", io_catalog_pieces, METH_VARARGS,
     "catalog_pieces($module, catalog, file=-1, block=0, /)\n--\n\n[(name, state, dtype, begin, "
     "end, shape,"
     " file), ...], sorted; of one block of a file if given."},
    {"catalog_describe", io_catalog_describe, METH_VARARGS,
     "catalog_describe($module, catalog, file, block, /)\n--\n\nWhat lies in a block, in words."},
    {"catalog_fetch", io_catalog_fetch, METH_VARARGS,
     "catalog_fetch($module, catalog, name, state, begin, array, /)\n--\n\nFills an array from "
     "begin on."},
    {"blocks_check", io_blocks_check, METH_VARARGS,
     "blocks_check($module, folder, file, /)\n--\n\nIndexes of damaged blocks of (name, nbytes, "
     "crcs)."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_catalog(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
