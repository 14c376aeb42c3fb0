/* The only user of NumPy's C API: arrays in as they are, arrays and views out. */
#include "binding.h"

#define PY_ARRAY_UNIQUE_SYMBOL flatshard_ARRAY_API
#include <numpy/arrayobject.h>
#include <string.h>

int
fs_numpy_import(void)
{
    import_array1(-1);
    return 0;
}

/* ml_dtypes.bfloat16 (borrowed), imported when first needed; NULL with an exception set. */
static PyObject *
bfloat16_type(int import)
{
    static PyObject *type; /* immortal: one per process, like the module itself */
    if (type == NULL) {
        PyObject *module = NULL;
        if (import) {
            module = PyImport_ImportModule("ml_dtypes");
        } else {
            /* Nobody can hold a bfloat16 array before the package is imported. */
            PyObject *modules = PyImport_GetModuleDict();
            module = PyDict_GetItemString(modules, "ml_dtypes");
            Py_XINCREF(module);
        }
        if (module == NULL) {
            return NULL;
        }
        type = PyObject_GetAttrString(module, "bfloat16");
        Py_DECREF(module);
    }
    return type;
}

/* Our dtype of a NumPy descriptor; 0 when it is none of ours (no exception set). */
static int
from_descr(PyArray_Descr *descr, fs_dtype *out)
{
    switch (descr->type_num) {
    case NPY_FLOAT32:
        *out = FS_F32;
        return 1;
    case NPY_FLOAT64:
        *out = FS_F64;
        return 1;
    case NPY_FLOAT16:
        *out = FS_F16;
        return 1;
    case NPY_UINT8:
        *out = FS_U8;
        return 1;
    default:
        break;
    }
    /* int, long and long long: by size, whatever the platform calls them. */
    if (PyTypeNum_ISSIGNED(descr->type_num) && PyTypeNum_ISINTEGER(descr->type_num)) {
        npy_intp nbytes = PyDataType_ELSIZE(descr);
        if (nbytes == 4 || nbytes == 8) {
            *out = nbytes == 4 ? FS_I32 : FS_I64;
            return 1;
        }
        return 0;
    }
    PyObject *bfloat16 = bfloat16_type(0);
    if (bfloat16 != NULL && (PyObject *)descr->typeobj == bfloat16) {
        *out = FS_BF16;
        return 1;
    }
    return 0;
}

/* A new reference to the NumPy descriptor of one of our dtypes. */
static PyArray_Descr *
to_descr(fs_dtype dtype)
{
    static const int numbers[FS_DTYPE_COUNT] = {
        [FS_F32] = NPY_FLOAT32, [FS_F64] = NPY_FLOAT64, [FS_F16] = NPY_FLOAT16,
        [FS_I32] = NPY_INT32,   [FS_I64] = NPY_INT64,   [FS_U8] = NPY_UINT8,
    };
    if (dtype != FS_BF16) {
        return PyArray_DescrFromType(numbers[dtype]);
    }
    PyObject *bfloat16 = bfloat16_type(1);
    PyArray_Descr *descr = NULL;
    if (bfloat16 != NULL && PyArray_DescrConverter(bfloat16, &descr) < 0) {
        return NULL;
    }
    return descr;
}

#define DTYPES "float32, float64, bfloat16, float16, int32, int64 or uint8"

int
fs_buffer_take(PyObject *object, const char *arg, bool writeable, fs_buffer *out)
{
    memset(out, 0, sizeof *out);
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a numpy.ndarray, got %s%s", arg,
                     Py_TYPE(object)->tp_name,
                     writeable ? "" : "; numpy.asarray() makes one of a list or a torch tensor");
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    if (!from_descr(PyArray_DESCR(array), &out->dtype)) {
        PyErr_Format(PyExc_TypeError, "%s: dtype %R is not " DTYPES, arg,
                     (PyObject *)PyArray_DESCR(array));
        return -1;
    }
    if (!PyArray_ISNOTSWAPPED(array)) {
        PyErr_Format(PyExc_TypeError, "%s: dtype %R is not in native byte order", arg,
                     (PyObject *)PyArray_DESCR(array));
        return -1;
    }
    if (!PyArray_IS_C_CONTIGUOUS(array) || !PyArray_ISALIGNED(array)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: the array is not C-contiguous and aligned; pass "
                     "numpy.ascontiguousarray(...) of it",
                     arg);
        return -1;
    }
    if (writeable && !PyArray_ISWRITEABLE(array)) {
        PyErr_Format(PyExc_ValueError, "%s: the array is read-only", arg);
        return -1;
    }
    int dims_n = PyArray_NDIM(array);
    if (dims_n > 32) {
        PyErr_Format(PyExc_ValueError, "%s: %d dimensions, at most 32", arg, dims_n);
        return -1;
    }
    Py_INCREF(object);
    out->array = object;
    out->data = PyArray_DATA(array);
    out->n = (size_t)PyArray_SIZE(array);
    out->dims_n = (size_t)dims_n;
    for (int d = 0; d < dims_n; d++) {
        out->dims[d] = (size_t)PyArray_DIM(array, d);
    }
    return 0;
}

int
fs_buffer_take_dtype(PyObject *object, const char *arg, bool writeable, fs_dtype dtype,
                     fs_buffer *out)
{
    if (fs_buffer_take(object, arg, writeable, out) < 0) {
        return -1;
    }
    if (out->dtype != dtype) {
        PyErr_Format(PyExc_TypeError, "%s: expected dtype %s, got %s", arg, fs_dtype_name(dtype),
                     fs_dtype_name(out->dtype));
        fs_buffer_drop(out);
        return -1;
    }
    return 0;
}

void
fs_buffer_drop(fs_buffer *buffer)
{
    Py_CLEAR(buffer->array);
    buffer->data = NULL;
}

/* Dimensions as NumPy wants them; -1 with an exception when one does not fit. */
static int
to_npy_dims(size_t dims_n, const size_t *dims, npy_intp *out)
{
    if (dims_n > 32) {
        PyErr_Format(PyExc_ValueError, "%zu dimensions, at most 32", dims_n);
        return -1;
    }
    for (size_t d = 0; d < dims_n; d++) {
        if (dims[d] > (size_t)NPY_MAX_INTP) {
            PyErr_Format(PyExc_OverflowError, "%zu elements do not fit an array", dims[d]);
            return -1;
        }
        out[d] = (npy_intp)dims[d];
    }
    return 0;
}

PyObject *
fs_array_new(fs_dtype dtype, size_t dims_n, const size_t *dims, void **out_data)
{
    npy_intp shape[32];
    if (to_npy_dims(dims_n, dims, shape) < 0) {
        return NULL;
    }
    PyArray_Descr *descr = to_descr(dtype);
    if (descr == NULL) {
        return NULL;
    }
    PyObject *array = PyArray_Empty((int)dims_n, shape, descr, 0); /* steals descr */
    if (array != NULL && out_data != NULL) {
        *out_data = PyArray_DATA((PyArrayObject *)array);
    }
    return array;
}

PyObject *
fs_array_view(fs_dtype dtype, size_t dims_n, const size_t *dims, void *data, bool writeable,
              PyObject *base)
{
    npy_intp shape[32];
    PyArray_Descr *descr = NULL;
    if (to_npy_dims(dims_n, dims, shape) < 0 || (descr = to_descr(dtype)) == NULL) {
        Py_DECREF(base);
        return NULL;
    }
    int flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | (writeable ? NPY_ARRAY_WRITEABLE : 0);
    PyObject *array =
        PyArray_NewFromDescr(&PyArray_Type, descr, (int)dims_n, shape, NULL, data, flags, NULL);
    if (array == NULL) {
        Py_DECREF(base);
        return NULL;
    }
    if (PyArray_SetBaseObject((PyArrayObject *)array, base) < 0) { /* steals base */
        Py_DECREF(array);
        return NULL;
    }
    return array;
}

int
fs_dtype_take(PyObject *object, fs_dtype *out)
{
    if (PyUnicode_Check(object)) {
        const char *name = PyUnicode_AsUTF8(object);
        if (name == NULL) {
            return -1;
        }
        if (fs_dtype_parse(name, out)) {
            return 0;
        }
        PyErr_Format(PyExc_TypeError, "dtype %R is not " DTYPES, object);
        return -1;
    }
    PyArray_Descr *descr = NULL;
    if (PyArray_DescrConverter(object, &descr) < 0) {
        return -1;
    }
    int found = from_descr(descr, out);
    if (!found) {
        PyErr_Format(PyExc_TypeError, "dtype %R is not " DTYPES, (PyObject *)descr);
    }
    Py_DECREF(descr);
    return found ? 0 : -1;
}

PyObject *
fs_shape_tuple(size_t dims_n, const size_t *dims)
{
    PyObject *shape = PyTuple_New((Py_ssize_t)dims_n);
    if (shape == NULL) {
        return NULL;
    }
    for (size_t d = 0; d < dims_n; d++) {
        PyObject *dim = PyLong_FromSize_t(dims[d]);
        if (dim == NULL) {
            Py_DECREF(shape);
            return NULL;
        }
        PyTuple_SET_ITEM(shape, (Py_ssize_t)d, dim);
    }
    return shape;
}
