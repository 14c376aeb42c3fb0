/* Layouts and policies out of tuples; the plan, which needs nothing else. */
#include "py_layout.h"

#include <stdatomic.h>

int
fs_py_policy_take(PyObject *policy_tuple, fs_partition *out_partition, fs_policy *out_policy)
{
    int partition, keep, slot_per_unit, weights, pool_units, master, stochastic;
    int host_params, host_grads, host_state, ring;
    unsigned long long seed;
    PyObject *param, *reduce, *accumulate, *moments;
    if (!PyTuple_Check(policy_tuple)) {
        PyErr_Format(PyExc_TypeError, "policy: expected a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(policy_tuple, "iipiiOOOiOpKpppp:policy", &partition, &keep,
                          &slot_per_unit, &weights, &pool_units, &param, &reduce, &accumulate,
                          &master, &moments, &stochastic, &seed, &host_params, &host_grads,
                          &host_state, &ring)) {
        return -1;
    }
    if (partition < 0 || partition > FS_PARTITION_PER_PARAMETER || weights < 0 ||
        weights > FS_WEIGHTS_SHARD || master < 0 || master > FS_MASTERS_SPLIT) {
        PyErr_Format(PyExc_ValueError, "policy: partition %d, weights %d, masters %d",
                     partition, weights, master);
        return -1;
    }
    *out_partition = (fs_partition)partition;
    *out_policy = (fs_policy){
        .keep = keep,
        .slot_per_unit = slot_per_unit != 0,
        .weights = (fs_weights)weights,
        .pool_units = pool_units,
        .precision.master = (fs_masters)master,
        .precision.stochastic = stochastic != 0,
        .precision.seed = seed,
        .on_host = {host_params != 0, host_grads != 0, host_state != 0},
        .ring = ring != 0,
    };
    fs_precision *precision = &out_policy->precision;
    if (fs_dtype_take(param, &precision->param) < 0 ||
        fs_dtype_take(reduce, &precision->reduce) < 0 ||
        fs_dtype_take(accumulate, &precision->accumulate) < 0 ||
        fs_dtype_take(moments, &precision->moments) < 0) {
        return -1;
    }
    return 0;
}

/* One parameter; its strings are borrowed from the tuple. */
static int
take_param(PyObject *item, fs_param_def *def)
{
    PyObject *shape;
    int trainable;
    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "params: expected tuples");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "szO!ipi:param", &def->name, &def->tied_name, &PyTuple_Type, &shape,
                          &def->unit, &trainable, &def->group)) {
        return -1;
    }
    Py_ssize_t dims_n = PyTuple_GET_SIZE(shape);
    if (dims_n > FS_DIMS_MAX) {
        PyErr_Format(PyExc_ValueError, "%s has %zd dimensions, at most %d", def->name, dims_n,
                     FS_DIMS_MAX);
        return -1;
    }
    def->trainable = trainable != 0;
    def->dims_n = (size_t)dims_n;
    for (Py_ssize_t d = 0; d < dims_n; d++) {
        def->dims[d] = PyLong_AsSize_t(PyTuple_GET_ITEM(shape, d));
        if (PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

int
fs_py_layout_take(PyObject *params, PyObject *units, PyObject *policy_tuple, int size,
                  fs_layout **out_layout, fs_policy *out_policy)
{
    int result = -1;
    fs_partition partition;
    fs_param_def *param_defs = NULL;
    fs_unit_def *unit_defs = NULL;
    PyObject *params_fast = PySequence_Fast(params, "params: expected a sequence");
    PyObject *units_fast = PySequence_Fast(units, "units: expected a sequence");
    if (params_fast == NULL || units_fast == NULL ||
        fs_py_policy_take(policy_tuple, &partition, out_policy) < 0) {
        goto done;
    }
    Py_ssize_t params_n = PySequence_Fast_GET_SIZE(params_fast);
    Py_ssize_t units_n = PySequence_Fast_GET_SIZE(units_fast);
    if (params_n > INT32_MAX || units_n > INT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "too many parameters");
        goto done;
    }
    param_defs = PyMem_Calloc((size_t)params_n + 1, sizeof *param_defs);
    unit_defs = PyMem_Calloc((size_t)units_n + 1, sizeof *unit_defs);
    if (param_defs == NULL || unit_defs == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t p = 0; p < params_n; p++) {
        if (take_param(PySequence_Fast_GET_ITEM(params_fast, p), &param_defs[p]) < 0) {
            goto done;
        }
    }
    for (Py_ssize_t u = 0; u < units_n; u++) {
        PyObject *item = PySequence_Fast_GET_ITEM(units_fast, u);
        if (!PyTuple_Check(item) ||
            !PyArg_ParseTuple(item, "sii:unit", &unit_defs[u].name, &unit_defs[u].opens,
                              &unit_defs[u].publishes)) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_TypeError, "units: expected tuples");
            }
            goto done;
        }
    }
    fs_status status = fs_layout_make(param_defs, (int)params_n, unit_defs, (int)units_n, size,
                                      partition, out_policy->slot_per_unit, out_layout);
    if (status != FS_OK) {
        fs_raise(status, NULL);
        goto done;
    }
    result = 0;
done:
    PyMem_Free(param_defs);
    PyMem_Free(unit_defs);
    Py_XDECREF(params_fast);
    Py_XDECREF(units_fast);
    return result;
}

PyObject *
fs_py_ledger_dict(const fs_ledger *ledger)
{
    PyObject *rows = PyDict_New();
    for (int c = 0; rows != NULL && c < FS_MEM_CLASS_COUNT; c++) {
        PyObject *row =
            Py_BuildValue("(nnnn)", (Py_ssize_t)atomic_load(&ledger->nbytes[FS_HOME_PRIVATE][c]),
                          (Py_ssize_t)atomic_load(&ledger->nbytes[FS_HOME_WORLD][c]),
                          (Py_ssize_t)atomic_load(&ledger->peak_nbytes[c]),
                          (Py_ssize_t)atomic_load(&ledger->nbytes[FS_HOME_DEVICE][c]));
        if (row == NULL ||
            PyDict_SetItemString(rows, fs_mem_class_name((fs_mem_class)c), row) < 0) {
            Py_CLEAR(rows);
        }
        Py_XDECREF(row);
    }
    return rows;
}

static PyObject *
shards_plan(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *params, *units, *policy_tuple;
    int size, rank, moments_n, device;
    if (!PyArg_ParseTuple(args, "OOOiiip:shards_plan", &params, &units, &policy_tuple, &size, &rank,
                          &moments_n, &device)) {
        return NULL;
    }
    fs_layout *layout;
    fs_policy policy;
    if (fs_py_layout_take(params, units, policy_tuple, size, &layout, &policy) < 0) {
        return NULL;
    }
    fs_ledger ledger = {0};
    fs_status status = fs_shards_plan(layout, &policy, moments_n, rank, device != 0, &ledger);
    fs_layout_free(layout);
    return status == FS_OK ? fs_py_ledger_dict(&ledger) : fs_raise(status, NULL);
}

int
fs_py_list_append(PyObject *list, PyObject *value)
{
    int result = value == NULL ? -1 : PyList_Append(list, value);
    Py_XDECREF(value);
    return result;
}

/* (params, segs, order, slots): everything that fs_layout_make decided, as lists of tuples. */
static PyObject *
layout_describe(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *params, *units, *policy_tuple;
    int size;
    if (!PyArg_ParseTuple(args, "OOOi:layout_describe", &params, &units, &policy_tuple, &size)) {
        return NULL;
    }
    fs_layout *layout;
    fs_policy policy;
    if (fs_py_layout_take(params, units, policy_tuple, size, &layout, &policy) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    PyObject *param_rows = PyList_New(0), *seg_rows = PyList_New(0);
    PyObject *order_rows = PyList_New(0), *slot_rows = PyList_New(0);
    if (param_rows == NULL || seg_rows == NULL || order_rows == NULL || slot_rows == NULL) {
        goto done;
    }
    for (int p = 0; p < layout->params_n; p++) {
        const fs_param *param = &layout->params[p];
        Py_ssize_t grad_n = param->grad_n == FS_FROZEN ? -1 : (Py_ssize_t)param->grad_n;
        PyObject *row = Py_BuildValue("(snn)", param->name, (Py_ssize_t)param->offset_n, grad_n);
        if (fs_py_list_append(param_rows, row) < 0) {
            goto done;
        }
    }
    for (size_t i = 0; i < layout->segs_n; i++) {
        const fs_seg *seg = &layout->segs[i];
        Py_ssize_t pos_n = seg->pos_n == FS_FROZEN ? -1 : (Py_ssize_t)seg->pos_n;
        PyObject *row = Py_BuildValue("(iiinnnnn)", seg->cut, seg->unit, seg->param,
                                      (Py_ssize_t)seg->begin, (Py_ssize_t)seg->end,
                                      (Py_ssize_t)seg->at_n, (Py_ssize_t)seg->own_n, pos_n);
        if (fs_py_list_append(seg_rows, row) < 0) {
            goto done;
        }
    }
    for (int k = 0; k < layout->order_n; k++) {
        const fs_unit_layout *unit = &layout->units[layout->order[k]];
        PyObject *row = Py_BuildValue("(iiii)", layout->order[k], unit->opens, unit->publishes,
                                      unit->slot);
        if (fs_py_list_append(order_rows, row) < 0) {
            goto done;
        }
    }
    for (int s = 0; s < layout->slots_n; s++) {
        if (fs_py_list_append(slot_rows, PyLong_FromSize_t(layout->slot_n[s])) < 0) {
            goto done;
        }
    }
    result = Py_BuildValue("(OOOO)", param_rows, seg_rows, order_rows, slot_rows);
done:
    Py_XDECREF(param_rows);
    Py_XDECREF(seg_rows);
    Py_XDECREF(order_rows);
    Py_XDECREF(slot_rows);
    fs_layout_free(layout);
    return result;
}

static PyMethodDef functions[] = {
    {"layout_describe", layout_describe, METH_VARARGS,
     "layout_describe($module, params, units, policy, size, /)\n--\n\n(params, segs, order, "
     "slots)."},
    {"shards_plan", shards_plan, METH_VARARGS,
     "shards_plan($module, params, units, policy, size, rank, moments_n, device, /)\n--\n\n"
     "{class: (private, world, peak, device)} bytes, without allocating them."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_layout(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
