/* Arrays in device memory: what a device's gathered units are given out as, and other libraries'
 * arrays read where they lie, by DLPack's structs (v1 and what came before). */
#include "py_device.h"
#include "py_world.h"

#include <string.h>

// ---- DLPack -------------------------------------------------------------------------------------

#define DL_CUDA 2
#define DL_INT 0
#define DL_UINT 1
#define DL_FLOAT 2
#define DL_BFLOAT 4
#define DL_READ_ONLY 1u

typedef struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* in elements; strides may be NULL: row-major */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *ctx;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

typedef struct dl_versioned {
    uint32_t major, minor;
    void *ctx;
    void (*deleter)(struct dl_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_versioned;

static const struct {
    fs_dtype dtype;
    uint8_t code, bits;
} dl_dtypes[] = {
    {FS_F32, DL_FLOAT, 32}, {FS_F64, DL_FLOAT, 64}, {FS_BF16, DL_BFLOAT, 16},
    {FS_F16, DL_FLOAT, 16}, {FS_I32, DL_INT, 32},   {FS_I64, DL_INT, 64},
    {FS_U8, DL_UINT, 8},
};
#define DL_DTYPES (sizeof dl_dtypes / sizeof dl_dtypes[0])

// ---- the array ----------------------------------------------------------------------------------

#define DIMS_MAX 32

typedef struct py_device_array {
    PyObject_HEAD
    PyObject *base; /* keeps the memory */
    void *data;
    fs_dtype dtype;
    int ordinal;
    size_t dims_n;
    int64_t dims[DIMS_MAX], strides[DIMS_MAX];
} py_device_array;

static PyTypeObject *array_type;

PyObject *
fs_device_array_new(fs_dtype dtype, size_t dims_n, const size_t *dims, void *data, int ordinal,
                    PyObject *base)
{
    py_device_array *self = dims_n <= DIMS_MAX ? PyObject_New(py_device_array, array_type) : NULL;
    if (self == NULL) {
        if (dims_n > DIMS_MAX) {
            PyErr_Format(PyExc_ValueError, "%zu dimensions, %d are the most", dims_n, DIMS_MAX);
        }
        Py_DECREF(base);
        return NULL;
    }
    self->base = base;
    self->data = data;
    self->dtype = dtype;
    self->ordinal = ordinal;
    self->dims_n = dims_n;
    int64_t stride = 1;
    for (size_t i = dims_n; i-- > 0;) {
        self->dims[i] = (int64_t)dims[i];
        self->strides[i] = stride;
        stride *= (int64_t)dims[i];
    }
    return (PyObject *)self;
}

static size_t
count_elements(const py_device_array *self)
{
    size_t n = 1;
    for (size_t i = 0; i < self->dims_n; i++) {
        n *= (size_t)self->dims[i];
    }
    return n;
}

bool
fs_device_array_check(PyObject *object)
{
    return PyObject_TypeCheck(object, array_type);
}

int
fs_device_array_take(PyObject *object, PyObject *world, const char *arg, fs_buffer *out)
{
    if (!fs_device_array_check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a device array, got %s", arg,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    const py_device_array *self = (py_device_array *)object;
    const fs_py_world *of = (fs_py_world *)world;
    fs_world *there = fs_py_world_get(world);
    if (there == NULL) {
        return -1;
    }
    if (fs_world_exec(there)->context == NULL) {
        PyErr_Format(PyExc_ValueError, "rank %d: %s lies on cuda:%d, and the rank computes on the "
                                       "CPU", fs_world_rank(there), arg, self->ordinal);
        return -1;
    }
    if (self->ordinal != of->ordinal) {
        PyErr_Format(PyExc_ValueError, "rank %d: %s lies on cuda:%d, and the rank's device is "
                                       "cuda:%d", fs_world_rank(there), arg, self->ordinal,
                     of->ordinal);
        return -1;
    }
    *out = (fs_buffer){.array = Py_NewRef(object), .data = self->data, .dtype = self->dtype,
                       .n = count_elements(self), .dims_n = self->dims_n};
    for (size_t i = 0; i < self->dims_n; i++) {
        out->dims[i] = (size_t)self->dims[i];
    }
    return 0;
}

static void
array_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((py_device_array *)object)->base);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *
array_shape(PyObject *object, void *Py_UNUSED(closure))
{
    const py_device_array *self = (py_device_array *)object;
    size_t dims[DIMS_MAX];
    for (size_t i = 0; i < self->dims_n; i++) {
        dims[i] = (size_t)self->dims[i];
    }
    return fs_shape_tuple(self->dims_n, dims);
}

static PyObject *
array_dtype(PyObject *object, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(fs_dtype_name(((py_device_array *)object)->dtype));
}

static PyObject *
array_pointer(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromVoidPtr(((py_device_array *)object)->data);
}

static PyObject *
array_ordinal(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(((py_device_array *)object)->ordinal);
}

// ---- out ----------------------------------------------------------------------------------------

/* Whoever took the tensor calls this on any thread, at any time. */
static void
drop_owner(void *owner)
{
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF((PyObject *)owner);
        PyGILState_Release(state);
    }
}

static void
delete_managed(dl_managed *self)
{
    void *owner = self->ctx;
    PyMem_RawFree(self);
    drop_owner(owner);
}

static void
delete_versioned(dl_versioned *self)
{
    void *owner = self->ctx;
    PyMem_RawFree(self);
    drop_owner(owner);
}

/* A capsule that nobody took: its name was not changed. */
static void
free_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        delete_managed(PyCapsule_GetPointer(capsule, "dltensor"));
    } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    }
}

static dl_tensor
describe(py_device_array *self)
{
    dl_tensor tensor = {.data = self->data, .device_type = DL_CUDA, .device_id = self->ordinal,
                        .ndim = (int32_t)self->dims_n, .lanes = 1, .shape = self->dims,
                        .strides = self->strides};
    for (size_t i = 0; i < DL_DTYPES; i++) {
        if (dl_dtypes[i].dtype == self->dtype) {
            tensor.code = dl_dtypes[i].code;
            tensor.bits = dl_dtypes[i].bits;
        }
    }
    return tensor;
}

static PyObject *
array_dlpack(PyObject *object, PyObject *arg)
{
    int versioned = PyObject_IsTrue(arg);
    if (versioned < 0) {
        return NULL;
    }
    PyObject *capsule;
    void *made;
    if (versioned) {
        dl_versioned *managed = PyMem_RawCalloc(1, sizeof *managed);
        if (managed == NULL) {
            return PyErr_NoMemory();
        }
        *managed = (dl_versioned){.major = 1, .ctx = object, .deleter = delete_versioned,
                                  .flags = DL_READ_ONLY,
                                  .tensor = describe((py_device_array *)object)};
        made = managed;
        capsule = PyCapsule_New(managed, "dltensor_versioned", free_capsule);
    } else {
        dl_managed *managed = PyMem_RawCalloc(1, sizeof *managed);
        if (managed == NULL) {
            return PyErr_NoMemory();
        }
        *managed = (dl_managed){.tensor = describe((py_device_array *)object), .ctx = object,
                                .deleter = delete_managed};
        made = managed;
        capsule = PyCapsule_New(managed, "dltensor", free_capsule);
    }
    if (capsule == NULL) {
        PyMem_RawFree(made);
        return NULL;
    }
    Py_INCREF(object);
    return capsule;
}

// ---- in -----------------------------------------------------------------------------------------

/* (pointer, dtype or None, shape, device type, device id, is it row-major?) */
static PyObject *
dlpack_read(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    const dl_tensor *tensor = NULL;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        const dl_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (managed->major != 1) {
            PyErr_Format(PyExc_BufferError, "DLPack %u.%u, version 1 is understood here",
                         managed->major, managed->minor);
            return NULL;
        }
        tensor = &managed->tensor;
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        tensor = &((const dl_managed *)PyCapsule_GetPointer(capsule, "dltensor"))->tensor;
    }
    if (tensor == NULL || tensor->ndim < 0 || tensor->ndim > DIMS_MAX) {
        PyErr_Format(PyExc_BufferError, "not a DLPack tensor of at most %d dimensions", DIMS_MAX);
        return NULL;
    }
    const char *dtype = NULL;
    for (size_t i = 0; i < DL_DTYPES; i++) {
        if (dl_dtypes[i].code == tensor->code && dl_dtypes[i].bits == tensor->bits &&
            tensor->lanes == 1) {
            dtype = fs_dtype_name(dl_dtypes[i].dtype);
        }
    }
    size_t dims[DIMS_MAX];
    int64_t stride = 1;
    bool row_major = true;
    for (int i = tensor->ndim; i-- > 0;) {
        dims[i] = (size_t)tensor->shape[i];
        row_major = row_major && (tensor->strides == NULL || tensor->shape[i] <= 1 ||
                                  tensor->strides[i] == stride);
        stride *= tensor->shape[i];
    }
    PyObject *shape = fs_shape_tuple((size_t)tensor->ndim, dims);
    if (shape == NULL) {
        return NULL;
    }
    PyObject *pointer = PyLong_FromVoidPtr((char *)tensor->data + tensor->byte_offset);
    return Py_BuildValue("(NzNiiO)", pointer, dtype, shape, tensor->device_type,
                         tensor->device_id, row_major || stride == 0 ? Py_True : Py_False);
}

/* device_array(pointer, dtype, shape, ordinal, owner) */
static PyObject *
device_array(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *pointer, *dtype_object, *shape, *owner;
    int ordinal;
    fs_dtype dtype;
    size_t dims[DIMS_MAX];
    if (!PyArg_ParseTuple(args, "OOO!iO:device_array", &pointer, &dtype_object, &PyTuple_Type,
                          &shape, &ordinal, &owner)) {
        return NULL;
    }
    void *data = PyLong_AsVoidPtr(pointer);
    if (PyErr_Occurred() || fs_dtype_take(dtype_object, &dtype) < 0) {
        return NULL;
    }
    Py_ssize_t dims_n = PyTuple_GET_SIZE(shape);
    if (dims_n > DIMS_MAX) {
        PyErr_Format(PyExc_ValueError, "%zd dimensions, %d are the most", dims_n, DIMS_MAX);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < dims_n; i++) {
        dims[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(shape, i));
        if (PyErr_Occurred()) {
            return NULL;
        }
    }
    return fs_device_array_new(dtype, (size_t)dims_n, dims, data, ordinal, Py_NewRef(owner));
}

// ---- type ---------------------------------------------------------------------------------------

static PyMethodDef array_methods[] = {
    {"dlpack", array_dlpack, METH_O,
     "dlpack($self, versioned, /)\n--\n\nA DLPack capsule, read-only where it can say so."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef array_getset[] = {
    {"shape", array_shape, NULL, "of whole arrays, row-major", NULL},
    {"dtype", array_dtype, NULL, "name of the dtype", NULL},
    {"pointer", array_pointer, NULL, "address in device memory", NULL},
    {"ordinal", array_ordinal, NULL, "number of the device", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot array_slots[] = {
    {Py_tp_dealloc, (void *)array_dealloc},
    {Py_tp_methods, array_methods},
    {Py_tp_getset, array_getset},
    {Py_tp_doc, "Memory of a device, seen as an array."},
    {0, NULL},
};

static PyType_Spec array_spec = {
    .name = "flatshard._core.DeviceArray",
    .basicsize = sizeof(py_device_array),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = array_slots,
};

static PyMethodDef functions[] = {
    {"device_array", device_array, METH_VARARGS,
     "device_array($module, pointer, dtype, shape, ordinal, owner, /)\n--\n\nDevice memory of "
     "somebody else's, row-major, that owner keeps."},
    {"dlpack_read", dlpack_read, METH_O,
     "dlpack_read($module, capsule, /)\n--\n\n(pointer, dtype or None, shape, device type, device "
     "id, row-major?) of a capsule that stays the caller's."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_device_array(PyObject *module)
{
    array_type = (PyTypeObject *)PyType_FromSpec(&array_spec);
    if (array_type == NULL ||
        PyModule_AddObjectRef(module, "DeviceArray", (PyObject *)array_type) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
