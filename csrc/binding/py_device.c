/* _core.Device: a library that fills the device table, loaded at run time. */
#include "py_device.h"

#include "../device/plugin.h"

static PyTypeObject *device_type;

typedef struct fs_py_device {
    PyObject_HEAD
    const fs_device *table;
} fs_py_device;

/* A list of file names as C has it. The library keeps it: it is never freed, nor are the names. */
static const char *const *
names_take(PyObject *list, const char *arg)
{
    PyObject *files = PySequence_Tuple(list);
    Py_ssize_t n = files != NULL ? PyTuple_GET_SIZE(files) : 0;
    const char **names = files != NULL ? PyMem_Calloc((size_t)n + 1, sizeof *names) : NULL;
    if (files != NULL && names == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; names != NULL && i < n; i++) {
        PyObject *name;
        if (!PyUnicode_FSConverter(PyTuple_GET_ITEM(files, i), &name)) {
            PyErr_Format(PyExc_TypeError, "%s: expected a list of paths", arg);
            PyMem_Free(names);
            names = NULL;
            break;
        }
        names[i] = PyBytes_AS_STRING(name);
    }
    Py_XDECREF(files);
    return names;
}

static PyObject *
device_load(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path, *cublas, *nccl;
    fs_plugin_libraries libraries;
    if (!PyArg_ParseTuple(args, "O&OO:device_load", PyUnicode_FSConverter, &path, &cublas, &nccl)) {
        return NULL;
    }
    fs_py_device *self = NULL;
    fs_status st = FS_OK;
    const fs_device *table = NULL;
    if ((libraries.cublas = names_take(cublas, "cublas")) == NULL ||
        (libraries.nccl = names_take(nccl, "nccl")) == NULL) {
        Py_DECREF(path);
        return NULL;
    }
    FS_CALL(NULL, st, fs_plugin_load(PyBytes_AS_STRING(path), &libraries, &table));
    Py_DECREF(path);
    if (st != FS_OK) {
        return fs_raise(st, NULL);
    }
    self = PyObject_New(fs_py_device, device_type);
    if (self != NULL) {
        self->table = table;
    }
    return (PyObject *)self;
}

const fs_device *
fs_py_device_get(PyObject *object)
{
    if (!PyObject_TypeCheck(object, device_type)) {
        PyErr_Format(PyExc_TypeError, "expected a device, got %s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    return ((fs_py_device *)object)->table;
}

static PyObject *
device_count(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    int n = 0;
    fs_status st;
    FS_CALL(NULL, st, ((fs_py_device *)object)->table->runtime->count(&n));
    return st == FS_OK ? PyLong_FromLong(n) : fs_raise(st, NULL);
}

static PyObject *
device_describe(PyObject *object, PyObject *arg)
{
    char text[256];
    fs_status st;
    int ordinal = (int)PyLong_AsLong(arg);
    if (ordinal == -1 && PyErr_Occurred()) {
        return NULL;
    }
    FS_CALL(NULL, st,
            ((fs_py_device *)object)->table->runtime->describe(ordinal, text, sizeof text));
    return st == FS_OK ? PyUnicode_FromString(text) : fs_raise(st, NULL);
}

static PyObject *
device_library(PyObject *object, PyObject *arg)
{
    char text[FS_MESSAGE_NBYTES];
    fs_status st;
    const char *name = PyUnicode_AsUTF8(arg);
    if (name == NULL) {
        return NULL;
    }
    FS_CALL(NULL, st,
            ((fs_py_device *)object)->table->runtime->library(name, text, sizeof text));
    return st == FS_OK ? PyUnicode_DecodeFSDefault(text) : fs_raise(st, NULL);
}

static PyObject *
device_name(PyObject *object, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(((fs_py_device *)object)->table->name);
}

static void
device_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object); /* the library stays */
    Py_DECREF(type);
}

static PyMethodDef device_methods[] = {
    {"count", device_count, METH_NOARGS,
     "count($self, /)\n--\n\nDevices that this process may use; an error says why none."},
    {"describe", device_describe, METH_O,
     "describe($self, ordinal, /)\n--\n\nName, architecture and memory of a device."},
    {"library", device_library, METH_O,
     "library($self, name, /)\n--\n\nLoads 'cublas' or 'nccl'; its version, and where it was."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef device_getset[] = {
    {"name", device_name, NULL, "of the table: 'cuda'", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_dealloc, (void *)device_dealloc},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_getset},
    {Py_tp_doc, "A device library. Made by device_load."},
    {0, NULL},
};

static PyType_Spec device_spec = {
    .name = "flatshard._core.Device",
    .basicsize = sizeof(fs_py_device),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = device_slots,
};

static PyMethodDef functions[] = {
    {"device_load", device_load, METH_VARARGS,
     "device_load($module, path, cublas, nccl, /)\n--\n\nLoads a device library, for good; cublas "
     "and nccl: where packages keep these, for when they are needed."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_device(PyObject *module)
{
    device_type = (PyTypeObject *)PyType_FromSpec(&device_spec);
    if (device_type == NULL ||
        PyModule_AddObjectRef(module, "Device", (PyObject *)device_type) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
