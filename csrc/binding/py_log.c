/* The log of a world as Python objects. */
#include "py_world.h"

#include <string.h>

/* (op, control, unit, count, bytes, start, spent, waited), times in nanoseconds. */
static PyObject *
entry_tuple(const fs_log_entry *entry)
{
    PyObject *unit = PyUnicode_DecodeUTF8(entry->unit, (Py_ssize_t)strlen(entry->unit), "replace");
    if (unit == NULL) {
        return NULL;
    }
    return Py_BuildValue("(sNNKKKKK)", fs_op_name(entry->op),
                         PyBool_FromLong(fs_op_is_control(entry->op)), unit,
                         (unsigned long long)entry->count, (unsigned long long)entry->nbytes,
                         (unsigned long long)entry->start_ns, (unsigned long long)entry->spent_ns,
                         (unsigned long long)entry->waited_ns);
}

static PyObject *
entry_list(const fs_log_entry *entries, size_t n)
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list != NULL && i < n; i++) {
        PyObject *entry = entry_tuple(&entries[i]);
        if (entry == NULL) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, entry);
    }
    return list;
}

static PyObject *
world_log(PyObject *object, PyObject *arg)
{
    long rank = PyLong_AsLong(arg);
    fs_world *world = rank == -1 && PyErr_Occurred() ? NULL : fs_py_world_get(object);
    if (world == NULL) {
        return NULL;
    }
    if (rank < 0 || rank >= fs_world_size(world)) {
        (void)FS_FAIL(FS_EINVAL, "rank %ld does not exist in a world of %d", rank,
                      fs_world_size(world));
        return fs_raise(FS_EINVAL, NULL);
    }
    size_t most = FS_LOG_EVENTS > FS_LOG_TOTALS ? FS_LOG_EVENTS : FS_LOG_TOTALS;
    fs_log_entry *entries;
    fs_status st = fs_calloc(most, sizeof *entries, &entries);
    if (st != FS_OK) {
        return fs_raise(st, NULL);
    }
    uint64_t lost;
    PyObject *events = NULL, *result = NULL;
    size_t n = fs_log_read_totals(world, (int)rank, entries, FS_LOG_TOTALS);
    PyObject *totals = entry_list(entries, n);
    if (totals != NULL) {
        n = fs_log_read_events(world, (int)rank, entries, FS_LOG_EVENTS, &lost);
        events = entry_list(entries, n);
    }
    fs_free(entries);
    if (events != NULL) {
        result = Py_BuildValue("(OOK)", totals, events, (unsigned long long)lost);
    }
    Py_XDECREF(totals);
    Py_XDECREF(events);
    return result;
}

static PyObject *
log_set_off(PyObject *Py_UNUSED(module), PyObject *arg)
{
    int off = PyObject_IsTrue(arg);
    if (off < 0) {
        return NULL;
    }
    fs_log_set_off(off != 0);
    Py_RETURN_NONE;
}

const PyMethodDef fs_py_log_methods[] = {
    {"log", world_log, METH_O,
     "log($self, rank, /)\n--\n\n(totals, events, lost) of a rank of this world: each entry is "
     "(op, control, unit, count, bytes, start, spent, waited), times in nanoseconds."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef functions[] = {
    {"log_set_off", log_set_off, METH_O,
     "log_set_off($module, off, /)\n--\n\nTest hook: nothing is logged in this process."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_log(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
