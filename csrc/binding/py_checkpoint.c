/* Checkpoints from Python: reading a catalog into shards, saving, saving behind the training,
 * committing. What a checkpoint means (which folder, which step, which names) is decided in
 * flatshard/checkpoint.py; catalogs are in py_catalog.c, whole tensors in py_export.c. */
#include "py_catalog.h"
#include "py_layout.h"

#include "../base/arena.h"
#include "../io/commit.h"

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
    fs_py_catalog call = {0};
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
    if (fs_py_catalog_take(tuple, &call) < 0) {
        goto done;
    }
    const fs_read_def def = {names, (const unsigned char *)skip, moments_n};
    /* Opening is this rank's own; how it went is told to all inside fs_read. */
    fs_status opened;
    Py_BEGIN_ALLOW_THREADS
    opened = fs_py_catalog_open(&call, fs_world_ledger(world));
    Py_END_ALLOW_THREADS
    FS_CALL(world, st, fs_read(call.catalog, opened, shards, &def));
    result = st == FS_OK ? Py_NewRef(Py_None) : fs_raise(st, world);
done:
    fs_py_shards_leave(shards_object);
    fs_py_catalog_drop(&call);
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
io_snapshot_plan(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *params, *units, *policy_tuple;
    int size, rank, moments_n;
    if (!PyArg_ParseTuple(args, "OOOiii:snapshot_plan", &params, &units, &policy_tuple, &size,
                          &rank, &moments_n)) {
        return NULL;
    }
    fs_layout *layout;
    fs_policy policy;
    if (fs_py_layout_take(params, units, policy_tuple, size, &layout, &policy) < 0) {
        return NULL;
    }
    fs_ledger ledger = {0};
    fs_status st = fs_snapshot_plan(layout, &policy, moments_n, rank, &ledger);
    fs_layout_free(layout);
    return st == FS_OK ? fs_py_ledger_dict(&ledger) : fs_raise(st, NULL);
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
    bool alone = world_object == Py_None;
    fs_world *world = alone ? NULL : fs_py_world_get(world_object);
    fs_status st = FS_OK;
    if (alone) {
        Py_BEGIN_ALLOW_THREADS
        st = fs_commit(NULL, folder, final, parent, text.buf, (size_t)text.len);
        Py_END_ALLOW_THREADS
    } else if (world != NULL) {
        FS_CALL(world, st, fs_commit(world, folder, final, parent, text.buf, (size_t)text.len));
    }
    PyBuffer_Release(&text);
    if (world == NULL && !alone) {
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
    {"catalog_read", io_catalog_read, METH_VARARGS,
     "catalog_read($module, shards, catalog, names, skip, moments, /)\n--\n\nCollective: what this "
     "rank"
     " keeps, into shards."},
    {"shards_save", io_shards_save, METH_VARARGS,
     "shards_save($module, shards, folder, moments, /)\n--\n\nCollective: one file per rank; "
     "((nbytes, crcs), ...)."},
    {"shards_snapshot", io_shards_snapshot, METH_VARARGS,
     "shards_snapshot($module, shards, folder, moments, /)\n--\n\nCollective: a copy of what this "
     "rank saves,"
     " for snapshot_write."},
    {"snapshot_plan", io_snapshot_plan, METH_VARARGS,
     "snapshot_plan($module, params, units, policy, size, rank, moments_n, /)\n--\n\n"
     "As shards_plan, of a save in the background alone."},
    {"snapshot_write", io_snapshot_write, METH_VARARGS,
     "snapshot_write($module, snapshot, folder, /)\n--\n\nThis rank's file, from any thread; "
     "(nbytes, crcs)."},
    {"io_commit", io_commit, METH_VARARGS,
     "io_commit($module, world, folder, final, parent, text, /)\n--\n\nCollective: index.json, "
     "sync,"
     " rename, sync. world may be None: a program without ranks."},
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
