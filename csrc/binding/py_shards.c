/* _core.Shards: units, gather and release, stores and loads, gradients, the step. Policy and names
 * live in flatshard/shard.py and flatshard/optim.py. */
#include "binding.h"

#include <stddef.h>

#include "../shard/optim.h"
#include "../shard/shard.h"
#include "py_layout.h"

typedef struct py_shards {
    PyObject_HEAD
    PyObject *world_object; /* keeps the world's memory until the shards are gone */
    fs_world *world;
    fs_shards *shards; /* NULL: closed */
    size_t *exports;   /* [units_n] arrays of gathered units that are alive */
    int units_n;
    bool busy; /* a method runs without the GIL */
} py_shards;

static PyTypeObject *shards_type;
static PyTypeObject *export_type;

// ---- enter and leave ----------------------------------------------------------------------------

static py_shards *
enter(PyObject *self)
{
    if (!PyObject_TypeCheck(self, shards_type)) {
        PyErr_Format(PyExc_TypeError, "expected shards, got %s", Py_TYPE(self)->tp_name);
        return NULL;
    }
    py_shards *object = (py_shards *)self;
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
    py_shards *object = enter(self);
    return object == NULL ? NULL : object->shards;
}

void
fs_py_shards_leave(PyObject *self)
{
    ((py_shards *)self)->busy = false;
}

PyObject *
fs_py_shards_world(PyObject *self)
{
    return ((py_shards *)self)->world_object;
}

/* Runs one call of the core between enter and leave; evaluates to its status. */
#define SHARDS_CALL(object, status, call)         \
    do {                                          \
        FS_CALL((object)->world, (status), call); \
        (object)->busy = false;                   \
    } while (0)

/* None, or the exception of status. */
static PyObject *
none_or_raise(py_shards *object, fs_status status)
{
    if (status != FS_OK) {
        return fs_raise(status, object->world);
    }
    Py_RETURN_NONE;
}

static int
check_unit(py_shards *object, int unit)
{
    if (unit < 0 || unit >= object->units_n) {
        PyErr_Format(PyExc_IndexError, "unit %d of %d", unit, object->units_n);
        return -1;
    }
    return 0;
}

static int
check_param(py_shards *object, int param)
{
    int params_n = fs_shards_layout(object->shards)->params_n;
    if (param < 0 || param >= params_n) {
        PyErr_Format(PyExc_IndexError, "parameter %d of %d", param, params_n);
        return -1;
    }
    return 0;
}

// ---- arrays of gathered units -------------------------------------------------------------------

/* The base of an array of a gathered unit: counts it, and keeps the memory under it. */
typedef struct py_export {
    PyObject_HEAD
    py_shards *owner;
    fs_region *region; /* or NULL: pool memory */
    int unit;
} py_export;

static void
export_dealloc(PyObject *self)
{
    py_export *export = (py_export *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (export->owner != NULL) {
        export->owner->exports[export->unit]--;
        fs_region_close(export->region);
        Py_DECREF(export->owner);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot export_slots[] = {
    {Py_tp_dealloc, (void *)export_dealloc},
    {0, NULL},
};

static PyType_Spec export_spec = {
    .name = "flatshard._core._Export",
    .basicsize = sizeof(py_export),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = export_slots,
};

/* An array of one parameter of a gathered unit; read-only unless asked. */
static PyObject *
export_param(py_shards *object, const fs_param *param, const unsigned char *unit_weights,
             bool writeable)
{
    fs_dtype dtype = fs_shards_policy(object->shards)->precision.param;
    py_export *base = PyObject_New(py_export, export_type);
    if (base == NULL) {
        return NULL;
    }
    Py_INCREF(object);
    base->owner = object;
    base->unit = param->unit;
    base->region = fs_unit_region(object->shards);
    if (base->region != NULL) {
        fs_region_retain(base->region);
    }
    object->exports[param->unit]++;
    size_t at = param->offset_n * fs_dtype_nbytes(dtype);
    /* Writeable is for front ends whose tensors know no read-only memory and that watch for writes
     * themselves: every rank would see one. */
    return fs_array_view(dtype, param->dims_n, param->dims, (void *)(uintptr_t)(unit_weights + at),
                         writeable, (PyObject *)base);
}

static PyObject *
shards_gather(PyObject *self, PyObject *args)
{
    int unit, writeable = 0;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "i|p:gather", &unit, &writeable) ||
        (object = enter(self)) == NULL) {
        return NULL;
    }
    if (check_unit(object, unit) < 0) {
        object->busy = false;
        return NULL;
    }
    const void *weights = NULL;
    fs_status status;
    SHARDS_CALL(object, status, fs_unit_gather(object->shards, unit, &weights));
    if (status != FS_OK) {
        return fs_raise(status, object->world);
    }
    const fs_layout *layout = fs_shards_layout(object->shards);
    const fs_unit_layout *u = &layout->units[unit];
    PyObject *arrays = PyList_New(u->end - u->first);
    for (int p = u->first; arrays != NULL && p < u->end; p++) {
        PyObject *array = export_param(object, &layout->params[p], weights, writeable != 0);
        if (array == NULL) {
            Py_CLEAR(arrays);
            break;
        }
        PyList_SET_ITEM(arrays, p - u->first, array);
    }
    return arrays;
}

static PyObject *
shards_release(PyObject *self, PyObject *args)
{
    int unit;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "i:release", &unit) || (object = enter(self)) == NULL) {
        return NULL;
    }
    object->busy = false;
    if (check_unit(object, unit) < 0) {
        return NULL;
    }
    if (fs_unit_region(object->shards) == NULL && object->exports[unit] > 0) {
        PyErr_Format(
            PyExc_BufferError,
            "unit %s is released while %zu of its arrays are still in use; copy what you keep",
            fs_shards_layout(object->shards)->units[unit].name, object->exports[unit]);
        return NULL;
    }
    return none_or_raise(object, fs_unit_release(object->shards, unit));
}

// ---- stores and loads ---------------------------------------------------------------------------

static PyObject *
shards_store_begin(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    py_shards *object = enter(self);
    if (object == NULL) {
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_store_begin(object->shards));
    return none_or_raise(object, status);
}

static PyObject *
shards_store_end(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    py_shards *object = enter(self);
    if (object == NULL) {
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_store_end(object->shards));
    return none_or_raise(object, status);
}

/* store(param, what, begin, array) and load(param, what, begin, array). */
static PyObject *
move(PyObject *self, PyObject *args, bool store)
{
    int param, what;
    Py_ssize_t begin;
    PyObject *array;
    py_shards *object;
    if (!PyArg_ParseTuple(args, store ? "iinO:store" : "iinO:load", &param, &what, &begin,
                          &array) ||
        (object = enter(self)) == NULL) {
        return NULL;
    }
    fs_buffer buffer;
    if (check_param(object, param) < 0 || fs_buffer_take(array, "array", !store, &buffer) < 0) {
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
    } else {
        SHARDS_CALL(
            object, status,
            fs_load(object->shards, param, (fs_array)what, first, last, buffer.data, buffer.dtype));
    }
    fs_buffer_drop(&buffer);
    return none_or_raise(object, status);
}

static PyObject *
shards_store(PyObject *self, PyObject *args)
{
    return move(self, args, true);
}

static PyObject *
shards_load(PyObject *self, PyObject *args)
{
    return move(self, args, false);
}

// ---- gradients ----------------------------------------------------------------------------------

static PyObject *
shards_grad_put(PyObject *self, PyObject *args)
{
    int param;
    PyObject *array;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "iO:grad_put", &param, &array) || (object = enter(self)) == NULL) {
        return NULL;
    }
    fs_buffer buffer;
    if (check_param(object, param) < 0 || fs_buffer_take(array, "gradient", false, &buffer) < 0) {
        object->busy = false;
        return NULL;
    }
    const fs_param *p = &fs_shards_layout(object->shards)->params[param];
    if (buffer.n != p->numel || !fs_dtype_is_float(buffer.dtype)) {
        PyErr_Format(PyExc_ValueError,
                     "gradient of %s: %zu elements of %s, expected %zu of a float dtype", p->name,
                     buffer.n, fs_dtype_name(buffer.dtype), p->numel);
        fs_buffer_drop(&buffer);
        object->busy = false;
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_grad_put(object->shards, param, buffer.data, buffer.dtype));
    fs_buffer_drop(&buffer);
    return none_or_raise(object, status);
}

static PyObject *
shards_grad_publish(PyObject *self, PyObject *args)
{
    int unit, keep_local;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "ip:grad_publish", &unit, &keep_local) ||
        (object = enter(self)) == NULL) {
        return NULL;
    }
    if (check_unit(object, unit) < 0) {
        object->busy = false;
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_grad_publish(object->shards, unit, keep_local != 0));
    return none_or_raise(object, status);
}

static PyObject *
shards_round_end(PyObject *self, PyObject *args)
{
    long long count;
    int keep_local;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "Lp:round_end", &count, &keep_local) ||
        (object = enter(self)) == NULL) {
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_round_end(object->shards, count, keep_local != 0));
    return none_or_raise(object, status);
}

/* freeze(flags): a byte for each parameter. */
static PyObject *
shards_freeze(PyObject *self, PyObject *args)
{
    Py_buffer flags;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "y*:freeze", &flags)) {
        return NULL;
    }
    if ((object = enter(self)) == NULL) {
        PyBuffer_Release(&flags);
        return NULL;
    }
    int params_n = fs_shards_layout(object->shards)->params_n;
    if (flags.len != params_n) {
        PyErr_Format(PyExc_ValueError, "%zd flags for %d parameters", flags.len, params_n);
        object->busy = false;
        PyBuffer_Release(&flags);
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_shards_freeze(object->shards, flags.buf));
    PyBuffer_Release(&flags);
    return none_or_raise(object, status);
}

static PyObject *
shards_grad_drop(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    py_shards *object = enter(self);
    if (object == NULL) {
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_grad_drop(object->shards));
    return none_or_raise(object, status);
}

// ---- step ---------------------------------------------------------------------------------------

static PyObject *
shards_open_moments(PyObject *self, PyObject *args)
{
    int moments_n;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "i:open_moments", &moments_n) || (object = enter(self)) == NULL) {
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_shards_open_moments(object->shards, moments_n));
    return none_or_raise(object, status);
}

static PyObject *
shards_set_loss_scale(PyObject *self, PyObject *args)
{
    double scale;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "d:set_loss_scale", &scale) || (object = enter(self)) == NULL) {
        return NULL;
    }
    object->busy = false;
    return none_or_raise(object, fs_shards_set_loss_scale(object->shards, scale));
}

static PyObject *
shards_agree(PyObject *self, PyObject *args)
{
    double max_norm;
    int norm, skip;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "dip:agree", &max_norm, &norm, &skip) ||
        (object = enter(self)) == NULL) {
        return NULL;
    }
    if (norm < 0 || norm >= FS_NORM_COUNT) {
        object->busy = false;
        return PyErr_Format(PyExc_ValueError, "norm %d of %d", norm, (int)FS_NORM_COUNT);
    }
    fs_verdict v;
    fs_status status;
    SHARDS_CALL(object, status,
                fs_step_agree(object->shards, max_norm, (fs_grad_norm)norm, skip != 0, &v));
    if (status != FS_OK) {
        return fs_raise(status, object->world);
    }
    return Py_BuildValue("(Niddiil)", PyBool_FromLong(v.applied), (int)v.reason, v.norm, v.clip,
                         v.bad_param, v.bad_rank, (long)v.count);
}

/* A list of (lr, beta1, beta2, eps, weight_decay, momentum, nesterov, lr_decay). */
static fs_group *
take_groups(PyObject *list, Py_ssize_t *out_n)
{
    PyObject *fast = PySequence_Fast(list, "groups: expected a sequence");
    if (fast == NULL) {
        return NULL;
    }
    Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    fs_group *groups = PyMem_Calloc((size_t)n + 1, sizeof *groups);
    if (groups == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t g = 0; groups != NULL && g < n; g++) {
        fs_group *group = &groups[g];
        int nesterov = 0;
        if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(fast, g), "ddddddpd", &group->lr,
                              &group->beta1, &group->beta2, &group->eps, &group->weight_decay,
                              &group->momentum, &nesterov, &group->lr_decay)) {
            PyMem_Free(groups);
            groups = NULL;
            break;
        }
        group->nesterov = nesterov != 0;
    }
    Py_DECREF(fast);
    *out_n = n;
    return groups;
}

static PyObject *
shards_finish(PyObject *self, PyObject *args)
{
    int rule;
    PyObject *groups_list, *group_of_array, *steps_array;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "iOOO:finish", &rule, &groups_list, &group_of_array,
                          &steps_array) ||
        (object = enter(self)) == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    fs_buffer group_of = {0}, steps = {0};
    Py_ssize_t groups_n = 0;
    fs_group *groups = take_groups(groups_list, &groups_n);
    size_t params_n = (size_t)fs_shards_layout(object->shards)->params_n;
    if (groups == NULL ||
        fs_buffer_take_dtype(group_of_array, "group_of", false, FS_I32, &group_of) < 0 ||
        fs_buffer_take_dtype(steps_array, "steps", true, FS_I64, &steps) < 0) {
        goto done;
    }
    if (group_of.n != params_n || steps.n != params_n || rule < 0 || rule >= FS_RULE_COUNT) {
        PyErr_Format(PyExc_ValueError, "rule %d, %zu groups and %zu steps for %zu parameters", rule,
                     group_of.n, steps.n, params_n);
        goto done;
    }
    for (size_t p = 0; p < params_n; p++) {
        int group = ((const int *)group_of.data)[p];
        if (group < 0 || group >= groups_n) {
            PyErr_Format(PyExc_ValueError, "parameter %zu is in group %d of %zd", p, group,
                         groups_n);
            goto done;
        }
    }
    fs_status status;
    SHARDS_CALL(
        object, status,
        fs_optimizer_finish(object->shards, (fs_rule)rule, groups, group_of.data, steps.data));
    result = none_or_raise(object, status);
done:
    object->busy = false;
    fs_buffer_drop(&group_of);
    fs_buffer_drop(&steps);
    PyMem_Free(groups);
    return result;
}

/* Which parameters had a gradient in the step agreed on, as bytes. */
static PyObject *
shards_had(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    py_shards *object = enter(self);
    if (object == NULL) {
        return NULL;
    }
    object->busy = false;
    return PyBytes_FromStringAndSize((const char *)fs_step_had(object->shards),
                                     fs_shards_layout(object->shards)->params_n);
}

static PyObject *
shards_check_whole(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    py_shards *object = enter(self);
    if (object == NULL) {
        return NULL;
    }
    object->busy = false;
    return none_or_raise(object, fs_shards_whole(object->shards));
}

// ---- layout -------------------------------------------------------------------------------------

/* range(param, cut) -> (begin, end) */
static PyObject *
shards_range(PyObject *self, PyObject *args)
{
    int param, cut;
    py_shards *object;
    if (!PyArg_ParseTuple(args, "ii:range", &param, &cut) || (object = enter(self)) == NULL) {
        return NULL;
    }
    object->busy = false;
    const fs_layout *layout = fs_shards_layout(object->shards);
    if (check_param(object, param) < 0) {
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
    py_shards *object = enter(self);
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
    return none_or_raise(object, status);
}

/* [(param, cut, begin, end)] */
static PyObject *
shards_segments(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    py_shards *object = enter(self);
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
    py_shards *object = (py_shards *)type->tp_alloc(type, 0);
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

static PyObject *
shards_close(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    py_shards *object = (py_shards *)self;
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
    fs_shards_close(object->shards);
    object->shards = NULL;
    Py_RETURN_NONE;
}

static void
shards_dealloc(PyObject *self)
{
    py_shards *object = (py_shards *)self;
    PyTypeObject *type = Py_TYPE(self);
    fs_shards_close(object->shards); /* arrays of gathered units hold a reference: none are left */
    PyMem_Free(object->exports);
    Py_XDECREF(object->world_object);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef shards_methods[] = {
    {"gather", shards_gather, METH_VARARGS,
     "gather($self, unit, writeable=False, /)\n--\n\nIts parameters as arrays, read-only unless "
     "asked; counted."},
    {"release", shards_release, METH_VARARGS, "release($self, unit, /)\n--\n\nGives them back."},
    {"store_begin", shards_store_begin, METH_NOARGS,
     "store_begin($self, /)\n--\n\nOpens a batch of stores. Collective."},
    {"store_end", shards_store_end, METH_NOARGS,
     "store_end($self, /)\n--\n\nEnds a batch of stores. Collective."},
    {"store", shards_store, METH_VARARGS,
     "store($self, param, what, begin, array, /)\n--\n\nWrites elements from begin on; kept ones "
     "alone."},
    {"load", shards_load, METH_VARARGS,
     "load($self, param, what, begin, array, /)\n--\n\nReads elements from begin on."},
    {"grad_put", shards_grad_put, METH_VARARGS,
     "grad_put($self, param, array, /)\n--\n\nCopies or adds a whole gradient into its slot."},
    {"grad_publish", shards_grad_publish, METH_VARARGS,
     "grad_publish($self, unit, keep_local, /)\n--\n\nThe unit's gradient is complete."},
    {"round_end", shards_round_end, METH_VARARGS,
     "round_end($self, count, keep_local, /)\n--\n\nEnds a micro-batch; count -1: none given."},
    {"grad_drop", shards_grad_drop, METH_NOARGS,
     "grad_drop($self, /)\n--\n\nForgets this step's gradients. Collective."},
    {"freeze", shards_freeze, METH_VARARGS,
     "freeze($self, flags, /)\n--\n\nA byte for each parameter: is it frozen for now? Collective."},
    {"open_moments", shards_open_moments, METH_VARARGS,
     "open_moments($self, n, /)\n--\n\nAllocates n moments of each kept element. Collective."},
    {"set_loss_scale", shards_set_loss_scale, METH_VARARGS,
     "set_loss_scale($self, scale, /)\n--\n\nBy what gradients come multiplied; 0: nothing."},
    {"agree", shards_agree, METH_VARARGS,
     "agree($self, max_norm, norm, skip, /)\n--\n\n"
     "(applied, reason, norm, clip, bad_param, bad_rank, count). Collective."},
    {"finish", shards_finish, METH_VARARGS,
     "finish($self, rule, groups, group_of, steps, /)\n--\n\nUpdates and publishes. Collective."},
    {"had", shards_had, METH_NOARGS,
     "had($self, /)\n--\n\nA byte for each parameter: did it have a gradient?"},
    {"check_whole", shards_check_whole, METH_NOARGS,
     "check_whole($self, /)\n--\n\nRaises RuntimeError after a torn step."},
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

static PyType_Slot shards_slots[] = {
    {Py_tp_new, (void *)shards_new},
    {Py_tp_dealloc, (void *)shards_dealloc},
    {Py_tp_methods, shards_methods},
    {Py_tp_doc, "Shards(world, params, units, policy): collective. See flatshard.shard."},
    {0, NULL},
};

static PyType_Spec shards_spec = {
    .name = "flatshard._core.Shards",
    .basicsize = sizeof(py_shards),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = shards_slots,
};

int
fs_py_add_shards(PyObject *module)
{
    shards_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &shards_spec, NULL);
    export_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &export_spec, NULL);
    if (shards_type == NULL || export_type == NULL || PyModule_AddType(module, shards_type) < 0) {
        return -1;
    }
    return fs_py_add_layout(module);
}
