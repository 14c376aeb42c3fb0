/* _core.Shards, continued: units as arrays, from gather to release. */
#include "py_shards.h"

#include "py_device.h"
#include "py_world.h"

static PyTypeObject *export_type;

/* The base of an array of a gathered unit: counts it, and keeps the memory under it. */
typedef struct py_export {
    PyObject_HEAD
    fs_py_shards *owner;
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
export_param(fs_py_shards *object, const fs_param *param, const unsigned char *unit_weights,
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
    if (fs_world_exec(object->world)->context != NULL) {
        int ordinal = ((fs_py_world *)object->world_object)->ordinal;
        return fs_device_array_new(dtype, param->dims_n, param->dims,
                                   (void *)(uintptr_t)(unit_weights + at), ordinal,
                                   (PyObject *)base);
    }
    /* Writeable is for front ends whose tensors know no read-only memory and that watch for writes
     * themselves: every rank would see one. */
    return fs_array_view(dtype, param->dims_n, param->dims, (void *)(uintptr_t)(unit_weights + at),
                         writeable, (PyObject *)base);
}

static PyObject *
shards_gather(PyObject *self, PyObject *args)
{
    int unit, writeable = 0;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "i|p:gather", &unit, &writeable) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    if (fs_py_shards_check_unit(object, unit) < 0) {
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
shards_gathers(PyObject *self, PyObject *args)
{
    int unit;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "i:gathers", &unit)) {
        return NULL;
    }
    if (((fs_py_shards *)self)->shards == NULL) {
        return PyLong_FromLong(0); /* what is closed holds nothing */
    }
    if ((object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    object->busy = false;
    return fs_py_shards_check_unit(object, unit) < 0
               ? NULL
               : PyLong_FromLong(fs_unit_gathers(object->shards, unit));
}

static PyObject *
shards_release(PyObject *self, PyObject *args)
{
    int unit, force = 0; /* force: an exception's frames may still refer to arrays of the unit */
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "i|p:release", &unit, &force) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    object->busy = false;
    if (fs_py_shards_check_unit(object, unit) < 0) {
        return NULL;
    }
    if (!force && fs_unit_region(object->shards) == NULL && object->exports[unit] > 0) {
        PyErr_Format(
            PyExc_BufferError,
            "unit %s is released while %zu of its arrays are still in use; copy what you keep",
            fs_shards_layout(object->shards)->units[unit].name, object->exports[unit]);
        return NULL;
    }
    return fs_py_shards_answer(object, fs_unit_release(object->shards, unit));
}

const PyMethodDef fs_py_gather_methods[] = {
    {"gather", shards_gather, METH_VARARGS,
     "gather($self, unit, writeable=False, /)\n--\n\nIts parameters as arrays, read-only unless "
     "asked; counted."},
    {"gathers", shards_gathers, METH_VARARGS,
     "gathers($self, unit, /)\n--\n\nGathers that were not yet released."},
    {"release", shards_release, METH_VARARGS,
     "release($self, unit, force=False, /)\n--\n\nGives them back; force: arrays may be left."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_gather(PyObject *module)
{
    export_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &export_spec, NULL);
    return export_type == NULL ? -1 : 0;
}
