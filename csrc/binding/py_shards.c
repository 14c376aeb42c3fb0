/* _core.Shards: how they begin and end, stores and loads, the layout. Policy and names live in
 * flatshard/shard.py and flatshard/optim.py. */
#include "py_shards.h"

#include "py_closing.h"
#include "py_layout.h"

static PyTypeObject *shards_type;

// ---- enter and leave ----------------------------------------------------------------------------

fs_py_shards *
fs_py_shards_take(PyObject *self)
{
    if (!PyObject_TypeCheck(self, shards_type)) {
        PyErr_Format(PyExc_TypeError, "expected shards, got %s", Py_TYPE(self)->tp_name);
        return NULL;
    }
    fs_py_shards *object = (fs_py_shards *)self;
    if (object->shards == NULL) {
        PyErr_Format(PyExc_RuntimeError, "these shards are closed");
        return NULL;
    }
    if (object->busy) {
        PyErr_Format(PyExc_RuntimeError, "these shards are in use by another Python thread");
        return NULL;
    }
    object->busy = true;
    return object;
}

struct fs_shards *
fs_py_shards_enter(PyObject *self)
{
    fs_py_shards *object = fs_py_shards_take(self);
    return object == NULL ? NULL : object->shards;
}

void
fs_py_shards_leave(PyObject *self)
{
    ((fs_py_shards *)self)->busy = false;
}

PyObject *
fs_py_shards_world(PyObject *self)
{
    return ((fs_py_shards *)self)->world_object;
}

PyObject *
fs_py_shards_answer(fs_py_shards *object, fs_status status)
{
    if (status != FS_OK) {
        return fs_raise(status, object->world);
    }
    Py_RETURN_NONE;
}

int
fs_py_shards_check_unit(fs_py_shards *object, int unit)
{
    if (unit < 0 || unit >= object->units_n) {
        PyErr_Format(PyExc_IndexError, "unit %d of %d", unit, object->units_n);
        return -1;
    }
    return 0;
}

int
fs_py_shards_check_param(fs_py_shards *object, int param)
{
    int params_n = fs_shards_layout(object->shards)->params_n;
    if (param < 0 || param >= params_n) {
        PyErr_Format(PyExc_IndexError, "parameter %d of %d", param, params_n);
        return -1;
    }
    return 0;
}

// ---- stores and loads ---------------------------------------------------------------------------

static PyObject *
shards_store_begin(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_py_shards *object = fs_py_shards_take(self);
    if (object == NULL) {
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_store_begin(object->shards));
    return fs_py_shards_answer(object, status);
}

static PyObject *
shards_store_end(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_py_shards *object = fs_py_shards_take(self);
    if (object == NULL) {
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_store_end(object->shards));
    return fs_py_shards_answer(object, status);
}

enum { WAY_STORE, WAY_LOAD, WAY_LOAD_KEPT };

/* store, load and load_kept, each (param, what, begin, array). */
static PyObject *
move(PyObject *self, PyObject *args, int way)
{
    static const char *const formats[] = {"iinO:store", "iinO:load", "iinO:load_kept"};
    bool store = way == WAY_STORE;
    int param, what;
    Py_ssize_t begin;
    PyObject *array;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, formats[way], &param, &what, &begin, &array) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    fs_buffer buffer;
    if (fs_py_shards_check_param(object, param) < 0 ||
        fs_buffer_take(array, "array", !store, &buffer) < 0) {
        object->busy = false;
        return NULL;
    }
    if (!fs_dtype_is_float(buffer.dtype) || what < 0 || what >= FS_ARRAY_COUNT || begin < 0) {
        PyErr_Format(PyExc_ValueError, "dtype %s, array kind %d, begin %zd",
                     fs_dtype_name(buffer.dtype), what, begin);
        fs_buffer_drop(&buffer);
        object->busy = false;
        return NULL;
    }
    fs_status status;
    size_t first = (size_t)begin, last = first + buffer.n;
    if (store) {
        SHARDS_CALL(object, status,
                    fs_store(object->shards, param, (fs_array)what, first, last, buffer.data,
                             buffer.dtype));
    } else if (way == WAY_LOAD) {
        SHARDS_CALL(
            object, status,
            fs_load(object->shards, param, (fs_array)what, first, last, buffer.data, buffer.dtype));
    } else {
        SHARDS_CALL(object, status,
                    fs_load_kept(object->shards, param, (fs_array)what, first, last, buffer.data,
                                 buffer.dtype));
    }
    fs_buffer_drop(&buffer);
    return fs_py_shards_answer(object, status);
}

static PyObject *
shards_store(PyObject *self, PyObject *args)
{
    return move(self, args, WAY_STORE);
}

static PyObject *
shards_load(PyObject *self, PyObject *args)
{
    return move(self, args, WAY_LOAD);
}

static PyObject *
shards_load_kept(PyObject *self, PyObject *args)
{
    return move(self, args, WAY_LOAD_KEPT);
}

// ---- layout -------------------------------------------------------------------------------------

/* range(param, cut) -> (begin, end) */
static PyObject *
shards_range(PyObject *self, PyObject *args)
{
    int param, cut;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "ii:range", &param, &cut) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    object->busy = false;
    const fs_layout *layout = fs_shards_layout(object->shards);
    if (fs_py_shards_check_param(object, param) < 0) {
        return NULL;
    }
    if (cut < 0 || cut >= layout->size) {
        PyErr_Format(PyExc_IndexError, "cut %d of %d", cut, layout->size);
        return NULL;
    }
    size_t begin, end;
    fs_shards_range(layout, param, cut, &begin, &end);
    return Py_BuildValue("(nn)", (Py_ssize_t)begin, (Py_ssize_t)end);
}

/* Fills an int64 array of FS_COPY_COUNT x segments. */
static PyObject *
shards_checksums(PyObject *self, PyObject *array)
{
    fs_buffer buffer;
    fs_py_shards *object = fs_py_shards_take(self);
    if (object == NULL) {
        return NULL;
    }
    if (fs_buffer_take_dtype(array, "array", true, FS_I64, &buffer) < 0) {
        object->busy = false;
        return NULL;
    }
    size_t segs_n = fs_shards_layout(object->shards)->segs_n;
    if (buffer.n != segs_n * FS_COPY_COUNT) {
        PyErr_Format(PyExc_ValueError, "array: %zu elements, expected %d x %zu", buffer.n,
                     (int)FS_COPY_COUNT, segs_n);
        fs_buffer_drop(&buffer);
        object->busy = false;
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_shards_checksums(object->shards, buffer.data));
    fs_buffer_drop(&buffer);
    return fs_py_shards_answer(object, status);
}

/* [(param, cut, begin, end)] */
static PyObject *
shards_segments(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_py_shards *object = fs_py_shards_take(self);
    if (object == NULL) {
        return NULL;
    }
    object->busy = false;
    const fs_layout *layout = fs_shards_layout(object->shards);
    PyObject *list = PyList_New((Py_ssize_t)layout->segs_n);
    for (size_t i = 0; list != NULL && i < layout->segs_n; i++) {
        const fs_seg *seg = &layout->segs[i];
        PyObject *row = Py_BuildValue("(iinn)", seg->param, seg->cut, (Py_ssize_t)seg->begin,
                                      (Py_ssize_t)seg->end);
        if (row == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, row);
    }
    return list;
}

// ---- life ---------------------------------------------------------------------------------------

static PyObject *
shards_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"world", "params", "units", "policy", NULL};
    PyObject *world_object, *params, *units, *policy_tuple;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO:Shards", names, &world_object, &params,
                                     &units, &policy_tuple)) {
        return NULL;
    }
    fs_world *world = fs_py_world_get(world_object);
    if (world == NULL) {
        return NULL;
    }
    fs_layout *layout;
    fs_policy policy;
    if (fs_py_layout_take(params, units, policy_tuple, fs_world_size(world), &layout, &policy) <
        0) {
        return NULL;
    }
    fs_py_shards *object = (fs_py_shards *)type->tp_alloc(type, 0);
    size_t *exports = PyMem_Calloc((size_t)layout->units_n + 1, sizeof *exports);
    if (object == NULL || exports == NULL) {
        PyErr_NoMemory();
        PyMem_Free(exports);
        fs_layout_free(layout);
        Py_XDECREF(object);
        return NULL;
    }
    object->units_n = layout->units_n;
    object->exports = exports;
    fs_py_close_due(world_object);
    fs_status status;
    FS_CALL(world, status, fs_shards_open(world, layout, &policy, &object->shards));
    if (status != FS_OK) {
        object->shards = NULL;
        Py_DECREF(object);
        return fs_raise(status, world);
    }
    Py_INCREF(world_object);
    object->world_object = world_object;
    object->world = world;
    return (PyObject *)object;
}

static void
close_shards(void *shards)
{
    fs_shards_close(shards);
}

static PyObject *
shards_close(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_py_shards *object = (fs_py_shards *)self;
    if (object->busy) {
        PyErr_Format(PyExc_RuntimeError, "these shards are in use by another Python thread");
        return NULL;
    }
    if (object->shards == NULL) {
        Py_RETURN_NONE;
    }
    for (int u = 0; fs_unit_region(object->shards) == NULL && u < object->units_n; u++) {
        if (object->exports[u] > 0) {
            PyErr_Format(PyExc_BufferError,
                         "shards are closed while %zu arrays of unit %s are in use",
                         object->exports[u], fs_shards_layout(object->shards)->units[u].name);
            return NULL;
        }
    }
    fs_shards *shards = object->shards;
    object->shards = NULL;
    fs_py_close(close_shards, shards);
    Py_RETURN_NONE;
}

static void
shards_dealloc(PyObject *self)
{
    fs_py_shards *object = (fs_py_shards *)self;
    PyTypeObject *type = Py_TYPE(self);
    /* Arrays of gathered units hold a reference: none are left. */
    PyObject *world = object->world_object;
    fs_py_close_collected(close_shards, object->shards, world, world);
    PyMem_Free(object->exports);
    type->tp_free(self);
    Py_DECREF(type);
}

static const PyMethodDef own_methods[] = {
    {"store_begin", shards_store_begin, METH_NOARGS,
     "store_begin($self, /)\n--\n\nOpens a batch of stores. Collective."},
    {"store_end", shards_store_end, METH_NOARGS,
     "store_end($self, /)\n--\n\nEnds a batch of stores. Collective."},
    {"store", shards_store, METH_VARARGS,
     "store($self, param, what, begin, array, /)\n--\n\nWrites elements from begin on; kept ones "
     "alone."},
    {"load", shards_load, METH_VARARGS,
     "load($self, param, what, begin, array, /)\n--\n\nReads elements from begin on."},
    {"load_kept", shards_load_kept, METH_VARARGS,
     "load_kept($self, param, what, begin, array, /)\n--\n\nReads elements that this rank keeps; "
     "never a collective."},
    {"checksums", shards_checksums, METH_O,
     "checksums($self, array, /)\n--\n\nOf every copy held here: [copy, segment], bit 32 where "
     "held."},
    {"segments", shards_segments, METH_NOARGS,
     "segments($self, /)\n--\n\n[(param, cut, begin, end)]."},
    {"range", shards_range, METH_VARARGS,
     "range($self, param, cut, /)\n--\n\n(begin, end) of a parameter in a cut."},
    {"close", shards_close, METH_NOARGS,
     "close($self, /)\n--\n\nGives the memory back. Never waits."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef shards_methods[64];

static PyType_Slot shards_slots[] = {
    {Py_tp_new, (void *)shards_new},
    {Py_tp_dealloc, (void *)shards_dealloc},
    {Py_tp_methods, shards_methods},
    {Py_tp_doc, "Shards(world, params, units, policy): collective. See flatshard.shard."},
    {0, NULL},
};

static PyType_Spec shards_spec = {
    .name = "flatshard._core.Shards",
    .basicsize = sizeof(fs_py_shards),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = shards_slots,
};

int
fs_py_add_shards(PyObject *module)
{
    const PyMethodDef *const parts[] = {own_methods, fs_py_gather_methods, fs_py_step_methods,
                                        NULL};
    if (fs_py_join_methods(parts, shards_methods,
                           sizeof shards_methods / sizeof shards_methods[0]) < 0) {
        return -1;
    }
    shards_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &shards_spec, NULL);
    if (shards_type == NULL || PyModule_AddType(module, shards_type) < 0 ||
        fs_py_add_gather(module) < 0) {
        return -1;
    }
    return fs_py_add_layout(module);
}
