/* Test hooks: faults in waits and allocations, on purpose. */
#include "binding.h"

#include "../base/arena.h"

static PyObject *
wait_fault_at(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t nth;
    int what;
    if (!PyArg_ParseTuple(args, "ni:wait_fault_at", &nth, &what)) {
        return NULL;
    }
    return PyLong_FromSize_t(fs_wait_fault_at((size_t)nth, what));
}

static PyObject *
wait_set_delay(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned seed, max_us;
    if (!PyArg_ParseTuple(args, "II:wait_set_delay", &seed, &max_us)) {
        return NULL;
    }
    fs_wait_set_delay(seed, max_us);
    Py_RETURN_NONE;
}

static PyObject *
alloc_fail_at(PyObject *Py_UNUSED(module), PyObject *arg)
{
    Py_ssize_t nth = PyLong_AsSsize_t(arg);
    if (nth == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromSize_t(fs_alloc_fail_at((size_t)nth));
}

static PyMethodDef functions[] = {
    {"wait_fault_at", wait_fault_at, METH_VARARGS,
     "wait_fault_at($module, nth, what, /)\n--\n\nTest hook: the nth wait kills (1), stops (2) or "
     "fails (3). Returns waits since the last call."},
    {"wait_set_delay", wait_set_delay, METH_VARARGS,
     "wait_set_delay($module, seed, max_us, /)\n--\n\nTest hook: waits sleep a random time first."},
    {"alloc_fail_at", alloc_fail_at, METH_O,
     "alloc_fail_at($module, nth, /)\n--\n\nTest hook: the nth allocation fails. Returns "
     "allocations since the last call."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_hooks(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
