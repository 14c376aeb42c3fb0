/* Checkpoints from Python: catalogs of pieces, reading them into shards, saving, committing. What a
 * checkpoint means (which folder, which step, which names) is decided in flatshard/checkpoint.py.
 *
 * A catalog is described by a tuple: (folder, ((name, nbytes, crcs) ...), shapes), where crcs are
 * little-endian 32-bit checksums as bytes or None, and shapes is ((name, (dim ...)) ...) or None
 * when the files are not ours. */
#include "binding.h"

#include <string.h>

#include "../base/arena.h"
#include "../base/cpu.h"
#include "../io/commit.h"
#include "../io/pieces.h"

// ---- catalogs -----------------------------------------------------------------------------------

/* What one call knows of a catalog; pointers into the tuple, which outlives the call. */
typedef struct catalog_call {
    const char *folder;
    int files_n;
    fs_file_def *files;
    fs_blocks *blocks;
    bool ours;
    size_t shapes_n;
    fs_shape_def *shapes;
    fs_catalog *catalog;
} catalog_call;

static void
catalog_drop(catalog_call *call)
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

/* A tuple of sizes into dims. */
static int
take_dims(PyObject *tuple, const char *name, size_t max, size_t *dims, size_t *out_n)
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
take_shapes(PyObject *shapes, catalog_call *call)
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
            take_dims(dims, shape->name, FS_DIMS_MAX, shape->dims, &shape->dims_n) < 0) {
            return -1;
        }
    }
    call->shapes_n = n;
    call->ours = true;
    return 0;
}

/* Converter of a catalog's tuple. After success or failure the caller drops *call. */
static int
catalog_take(PyObject *tuple, catalog_call *call)
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

static fs_status
catalog_open(catalog_call *call, fs_ledger *ledger)
{
    return fs_catalog_open(call->folder, call->files, call->files_n, call->ours, call->shapes,
                           call->shapes_n, ledger, &call->catalog);
}

/* Takes and opens, without a world. */
static int
catalog_enter(PyObject *tuple, catalog_call *call)
{
    fs_status st;
    if (catalog_take(tuple, call) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    st = catalog_open(call, NULL);
    Py_END_ALLOW_THREADS
    if (st != FS_OK) {
        (void)fs_raise(st, NULL);
        return -1;
    }
    return 0;
}

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
    catalog_call call = {0};
    if (catalog_enter(tuple, &call) == 0 && (list = PyList_New(0)) != NULL) {
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
    catalog_drop(&call);
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
    catalog_call call = {0};
    if (catalog_enter(tuple, &call) == 0) {
        char words[FS_MESSAGE_NBYTES];
        fs_catalog_describe(call.catalog, file, (size_t)block, words, sizeof words);
        text = PyUnicode_DecodeUTF8(words, (Py_ssize_t)strlen(words), "replace");
    }
    catalog_drop(&call);
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
    catalog_call call = {0};
    if (begin < 0) {
        PyErr_Format(PyExc_ValueError, "begin is negative");
    } else if (catalog_enter(tuple, &call) == 0) {
        fs_fetcher fetcher = {.catalog = call.catalog};
        fs_isa isa = FS_ISA_BASELINE;
        fs_status st;
        Py_BEGIN_ALLOW_THREADS
        fs_fp_state fp = fs_fp_enter();
        st = fs_isa_choose(&isa);
        st = st == FS_OK ? fs_device_cpu(isa, &fetcher.device) : st;
        if (st == FS_OK) {
            st = fs_fetch_range(&fetcher, name, (fs_array)state, (size_t)begin,
                                (size_t)begin + buffer.n, buffer.data, buffer.dtype);
        }
        fs_fetcher_close(&fetcher);
        fs_fp_leave(fp);
        Py_END_ALLOW_THREADS
        result = st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, NULL);
    }
    catalog_drop(&call);
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

// ---- shards -------------------------------------------------------------------------------------

static PyObject *
io_catalog_read(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *shards_object, *tuple, *names_tuple;
    const char *skip;
    Py_ssize_t skip_n;
    int moments_n;
    if (!PyArg_ParseTuple(args, "OOO!z#i:catalog_read", &shards_object, &tuple, &PyTuple_Type,
                          &names_tuple, &skip, &skip_n, &moments_n)) {
        return NULL;
    }
    fs_shards *shards = fs_py_shards_enter(shards_object);
    if (shards == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    fs_world *world = fs_shards_world(shards);
    int params_n = fs_shards_layout(shards)->params_n;
    catalog_call call = {0};
    const char **names = NULL;
    fs_status st = fs_calloc((size_t)params_n, sizeof *names, &names);
    if (st != FS_OK) {
        (void)fs_raise(st, NULL);
        goto done;
    }
    if (PyTuple_GET_SIZE(names_tuple) != params_n || (skip != NULL && skip_n != params_n) ||
        moments_n < 0 || moments_n > fs_shards_moments_n(shards)) {
        PyErr_Format(PyExc_ValueError, "%zd names and %d moments for %d parameters",
                     PyTuple_GET_SIZE(names_tuple), moments_n, params_n);
        goto done;
    }
    for (int p = 0; p < params_n; p++) {
        if ((names[p] = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names_tuple, p))) == NULL) {
            goto done;
        }
    }
    if (catalog_take(tuple, &call) < 0) {
        goto done;
    }
    const fs_read_def def = {names, (const unsigned char *)skip, moments_n};
    /* Opening is this rank's own; how it went is told to all inside fs_read. */
    fs_status opened;
    Py_BEGIN_ALLOW_THREADS
    opened = catalog_open(&call, fs_world_ledger(world));
    Py_END_ALLOW_THREADS
    FS_CALL(world, st, fs_read(call.catalog, opened, shards, &def));
    result = st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, world);
done:
    fs_py_shards_leave(shards_object);
    catalog_drop(&call);
    fs_free(names);
    return result;
}

/* ((nbytes, crcs) ...) of every rank's file. */
static PyObject *
blocks_tuple(const fs_blocks *blocks, int n)
{
    PyObject *all = PyTuple_New(n);
    for (int f = 0; all != NULL && f < n; f++) {
        PyObject *item = Py_BuildValue("(ny#)", (Py_ssize_t)blocks[f].nbytes,
                                       blocks[f].n > 0 ? (const char *)blocks[f].crc : "",
                                       (Py_ssize_t)(4 * blocks[f].n));
        if (item == NULL) {
            Py_CLEAR(all);
            break;
        }
        PyTuple_SET_ITEM(all, f, item);
    }
    return all;
}

static PyObject *
io_shards_save(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *shards_object;
    const char *folder;
    int moments_n;
    if (!PyArg_ParseTuple(args, "Osi:shards_save", &shards_object, &folder, &moments_n)) {
        return NULL;
    }
    fs_shards *shards = fs_py_shards_enter(shards_object);
    if (shards == NULL) {
        return NULL;
    }
    fs_world *world = fs_shards_world(shards);
    int size = fs_world_size(world);
    fs_blocks *blocks = NULL;
    fs_status st;
    FS_CALL(world, st, fs_save(shards, folder, moments_n, &blocks));
    fs_py_shards_leave(shards_object);
    PyObject *result = st == FS_OK ? blocks_tuple(blocks, size) : fs_raise(st, world);
    /* A signal handler may raise after success: blocks are freed either way. */
    for (int r = 0; blocks != NULL && r < size; r++) {
        fs_blocks_free(&blocks[r]);
    }
    fs_free(blocks);
    return result;
}

// ---- behind the training ------------------------------------------------------------------------

#define SNAPSHOT_NAME "flatshard._core.Snapshot"

static void
snapshot_destroy(PyObject *capsule)
{
    fs_snapshot_close(PyCapsule_GetPointer(capsule, SNAPSHOT_NAME));
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule)); /* the world, and with it the ledger */
}

static PyObject *
io_shards_snapshot(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *shards_object;
    const char *folder;
    int moments_n;
    if (!PyArg_ParseTuple(args, "Osi:shards_snapshot", &shards_object, &folder, &moments_n)) {
        return NULL;
    }
    fs_shards *shards = fs_py_shards_enter(shards_object);
    if (shards == NULL) {
        return NULL;
    }
    fs_world *world = fs_shards_world(shards);
    fs_snapshot *snapshot = NULL;
    fs_status st;
    FS_CALL(world, st, fs_snapshot_open(shards, folder, moments_n, &snapshot));
    fs_py_shards_leave(shards_object);
    if (st != FS_OK) {
        fs_snapshot_close(snapshot);
        return fs_raise(st, world);
    }
    PyObject *capsule = PyCapsule_New(snapshot, SNAPSHOT_NAME, snapshot_destroy);
    if (capsule == NULL) {
        fs_snapshot_close(snapshot);
        return NULL;
    }
    PyObject *world_object = Py_NewRef(fs_py_shards_world(shards_object));
    if (PyCapsule_SetContext(capsule, world_object) != 0) {
        Py_DECREF(world_object);
        Py_DECREF(capsule);
        return NULL;
    }
    return capsule;
}

static PyObject *
io_snapshot_write(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    const char *folder;
    if (!PyArg_ParseTuple(args, "Os:snapshot_write", &capsule, &folder)) {
        return NULL;
    }
    fs_snapshot *snapshot = PyCapsule_GetPointer(capsule, SNAPSHOT_NAME);
    if (snapshot == NULL) {
        return NULL;
    }
    fs_blocks blocks = {0};
    fs_status st;
    Py_BEGIN_ALLOW_THREADS
    st = fs_snapshot_write(snapshot, folder, &blocks);
    Py_END_ALLOW_THREADS
    if (st != FS_OK) {
        return fs_raise(st, NULL);
    }
    PyObject *result = Py_BuildValue("(ny#)", (Py_ssize_t)blocks.nbytes, (const char *)blocks.crc,
                                     (Py_ssize_t)(4 * blocks.n));
    fs_blocks_free(&blocks);
    return result;
}

// ---- whole tensors ------------------------------------------------------------------------------

/* Tensors to write, each under a new name and dtype from a source. */
typedef struct export_call {
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

/* tensors: ((name, dtype, shape, source) ...), source a name or an index; metadata: dict of
 * texts. */
static int
export_take(PyObject *tensors, PyObject *metadata, bool by_name, export_call *call)
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
            take_dims(shape, def->name, FS_SAFETENSORS_DIMS_MAX, call->dims[t], &def->dims_n) < 0) {
            return -1;
        }
        def->dims = call->dims[t];
        if (by_name && (call->sources[t] = PyUnicode_AsUTF8(source)) == NULL) {
            return -1;
        }
        if (!by_name) {
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
    catalog_call from = {0};
    export_call call = {0};
    if (export_take(tensors, metadata, true, &call) == 0 && catalog_enter(tuple, &from) == 0) {
        fs_isa isa = FS_ISA_BASELINE;
        fs_status st;
        call.fetcher.catalog = from.catalog;
        Py_BEGIN_ALLOW_THREADS
        fs_fp_state fp = fs_fp_enter();
        st = fs_isa_choose(&isa);
        st = st == FS_OK ? fs_device_cpu(isa, &call.fetcher.device) : st;
        st = st == FS_OK ? export_stream(folder, name, &call, from_catalog, NULL) : st;
        fs_fp_leave(fp);
        Py_END_ALLOW_THREADS
        result = st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, NULL);
    }
    export_drop(&call);
    catalog_drop(&from);
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
    if (export_take(tensors, metadata, false, &call) == 0) {
        fs_status st;
        FS_CALL(world, st, export_stream(folder, name, &call, from_shards, fs_world_ledger(world)));
        result = st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, world);
    }
    fs_py_shards_leave(shards_object);
    export_drop(&call);
    return result;
}

// ---- together -----------------------------------------------------------------------------------

static PyObject *
io_commit(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *world_object;
    const char *folder, *final, *parent;
    Py_buffer text;
    if (!PyArg_ParseTuple(args, "Osssy*:io_commit", &world_object, &folder, &final, &parent,
                          &text)) {
        return NULL;
    }
    fs_world *world = fs_py_world_get(world_object);
    fs_status st = FS_OK;
    if (world != NULL) {
        FS_CALL(world, st, fs_commit(world, folder, final, parent, text.buf, (size_t)text.len));
    }
    PyBuffer_Release(&text);
    if (world == NULL) {
        return NULL;
    }
    return st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, world);
}

/* Every rank's bytes, as a list. */
static PyObject *
io_share(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *world_object;
    Py_buffer bytes;
    if (!PyArg_ParseTuple(args, "Oy*:io_share", &world_object, &bytes)) {
        return NULL;
    }
    fs_world *world = fs_py_world_get(world_object);
    PyObject *list = NULL;
    if (world != NULL) {
        char *all = NULL;
        size_t *counts = NULL;
        fs_status st;
        FS_CALL(world, st,
                fs_share(world, FS_OP_SAVE, FS_OK, bytes.buf, (size_t)bytes.len, &all, &counts));
        if (st != FS_OK) {
            (void)fs_raise(st, world);
        } else {
            const char *at = all;
            int size = fs_world_size(world);
            list = PyList_New(size);
            for (int r = 0; list != NULL && r < size; at += counts[r], r++) {
                PyObject *item = PyBytes_FromStringAndSize(at, (Py_ssize_t)counts[r]);
                if (item == NULL) {
                    Py_CLEAR(list);
                    break;
                }
                PyList_SET_ITEM(list, r, item);
            }
        }
        fs_free(all);
        fs_free(counts);
    }
    PyBuffer_Release(&bytes);
    return list;
}

static PyObject *
io_room_check(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "sn:io_room_check", &path, &nbytes)) {
        return NULL;
    }
    if (nbytes < 0) {
        PyErr_Format(PyExc_ValueError, "nbytes is negative");
        return NULL;
    }
    fs_status st;
    Py_BEGIN_ALLOW_THREADS
    st = fs_room_check(path, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    return st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, NULL);
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
    {"catalog_read", io_catalog_read, METH_VARARGS,
     "catalog_read($module, shards, catalog, names, skip, moments, /)\n--\n\nCollective: what this "
     "rank"
     " keeps, into shards."},
    {"catalog_export", io_catalog_export, METH_VARARGS,
     "catalog_export($module, catalog, folder, name, tensors, metadata, /)\n--\n\nWrites whole "
     "tensors of a"
     " catalog to a new safetensors file."},
    {"blocks_check", io_blocks_check, METH_VARARGS,
     "blocks_check($module, folder, file, /)\n--\n\nIndexes of damaged blocks of (name, nbytes, "
     "crcs)."},
    {"shards_save", io_shards_save, METH_VARARGS,
     "shards_save($module, shards, folder, moments, /)\n--\n\nCollective: one file per rank; "
     "((nbytes, crcs), ...)."},
    {"shards_snapshot", io_shards_snapshot, METH_VARARGS,
     "shards_snapshot($module, shards, folder, moments, /)\n--\n\nCollective: a copy of what this "
     "rank saves,"
     " for snapshot_write."},
    {"snapshot_write", io_snapshot_write, METH_VARARGS,
     "snapshot_write($module, snapshot, folder, /)\n--\n\nThis rank's file, from any thread; "
     "(nbytes, crcs)."},
    {"shards_export", io_shards_export, METH_VARARGS,
     "shards_export($module, shards, master, folder, name, tensors, metadata, /)\n--\n\nWrites "
     "whole"
     " parameters to a new safetensors file; called by one rank between two fences."},
    {"io_commit", io_commit, METH_VARARGS,
     "io_commit($module, world, folder, final, parent, text, /)\n--\n\nCollective: index.json, "
     "sync,"
     " rename, sync."},
    {"io_share", io_share, METH_VARARGS,
     "io_share($module, world, bytes, /)\n--\n\nCollective: every rank's bytes."},
    {"io_room_check", io_room_check, METH_VARARGS,
     "io_room_check($module, path, nbytes, /)\n--\n\nOSError when the file system has less room."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_checkpoint(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
