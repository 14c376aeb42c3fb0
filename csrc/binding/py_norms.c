/* Gradients looked at and changed by parameter, before a step: functions over _core.Shards. */
#include "binding.h"

#include "../shard/shard.h"

static PyObject *
norms_grad_sums(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *object, *array;
    if (!PyArg_ParseTuple(args, "OO:grad_sums", &object, &array)) {
        return NULL;
    }
    fs_shards *shards = fs_py_shards_enter(object);
    if (shards == NULL) {
        return NULL;
    }
    size_t params_n = (size_t)fs_shards_layout(shards)->params_n;
    fs_buffer out;
    if (fs_buffer_take_dtype(array, "array", true, FS_F64, &out) < 0) {
        fs_py_shards_leave(object);
        return NULL;
    }
    if (out.n != 2 * params_n) {
        PyErr_Format(PyExc_ValueError, "an array of %zu for %zu parameters, expected two rows",
                     out.n, params_n);
        fs_buffer_drop(&out);
        fs_py_shards_leave(object);
        return NULL;
    }
    fs_world *world = fs_shards_world(shards);
    double *sums = out.data;
    fs_status st;
    FS_CALL(world, st, fs_grad_sums(shards, sums, sums + params_n));
    fs_buffer_drop(&out);
    fs_py_shards_leave(object);
    if (st != FS_OK) {
        return fs_raise(st, world);
    }
    Py_RETURN_NONE;
}

static PyObject *
norms_grad_scale(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *object;
    int param;
    double factor;
    if (!PyArg_ParseTuple(args, "Oid:grad_scale", &object, &param, &factor)) {
        return NULL;
    }
    fs_shards *shards = fs_py_shards_enter(object);
    if (shards == NULL) {
        return NULL;
    }
    fs_status st = fs_grad_scale(shards, param, factor);
    fs_py_shards_leave(object);
    if (st != FS_OK) {
        return fs_raise(st, fs_shards_world(shards));
    }
    Py_RETURN_NONE;
}

static PyObject *
norms_grad_forget(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *object;
    int param;
    if (!PyArg_ParseTuple(args, "Oi:grad_forget", &object, &param)) {
        return NULL;
    }
    fs_shards *shards = fs_py_shards_enter(object);
    if (shards == NULL) {
        return NULL;
    }
    fs_status st = fs_grad_forget(shards, param);
    fs_py_shards_leave(object);
    if (st != FS_OK) {
        return fs_raise(st, fs_shards_world(shards));
    }
    Py_RETURN_NONE;
}

static PyObject *
norms_grad_replaced(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *object;
    int param;
    if (!PyArg_ParseTuple(args, "Oi:grad_replaced", &object, &param)) {
        return NULL;
    }
    fs_shards *shards = fs_py_shards_enter(object);
    if (shards == NULL) {
        return NULL;
    }
    fs_world *world = fs_shards_world(shards);
    fs_status st;
    FS_CALL(world, st, fs_grad_replaced(shards, param));
    fs_py_shards_leave(object);
    if (st != FS_OK) {
        return fs_raise(st, world);
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"grad_sums", norms_grad_sums, METH_VARARGS,
     "grad_sums($module, shards, array, /)\n--\n\nA row of sums of squares and one of largest "
     "magnitudes, of this rank's cut. Collective."},
    {"grad_scale", norms_grad_scale, METH_VARARGS,
     "grad_scale($module, shards, param, factor, /)\n--\n\nScales a gradient before the step."},
    {"grad_forget", norms_grad_forget, METH_VARARGS,
     "grad_forget($module, shards, param, /)\n--\n\nThe parameter has no gradient after all."},
    {"grad_replaced", norms_grad_replaced, METH_VARARGS,
     "grad_replaced($module, shards, param, /)\n--\n\nA gradient was stored: its norm anew."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_norms(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
