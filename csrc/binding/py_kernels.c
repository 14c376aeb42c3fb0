/* Kernels: the operations of the device table on arrays, for a chosen instruction set and number of
 * threads. For tests and benchmarks; training calls the table from C. */
#include "py_kernels.h"

#include <string.h>

#include "../base/threads.h"
#include "../device/cpu_ops.h"

static fs_status
isa_parse(const char *name, fs_isa *out)
{
    for (int isa = 0; isa < FS_ISA_COUNT; isa++) {
        if (strcmp(name, fs_isa_name((fs_isa)isa)) == 0) {
            *out = (fs_isa)isa;
            return FS_OK;
        }
    }
    return FS_FAIL(FS_EINVAL, "isa is '%s', not baseline, avx2, avx512 or neon", name);
}

static PyObject *
kernels_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"isa", "threads", NULL};
    const char *isa_name = NULL;
    Py_ssize_t threads = 1;
    fs_isa isa;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|z$n:Kernels", names, &isa_name, &threads)) {
        return NULL;
    }
    fs_py_kernels *self = (fs_py_kernels *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    fs_status st = isa_name != NULL ? isa_parse(isa_name, &isa) : fs_isa_choose(&isa);
    if (st == FS_OK) {
        st = fs_device_cpu(isa, &self->exec.device);
    }
    if (st == FS_OK) {
        st = fs_pool_open(threads < 0 ? 0 : (size_t)threads, &self->exec.pool);
    }
    if (st != FS_OK) {
        Py_DECREF(self);
        return fs_raise(st, NULL);
    }
    return (PyObject *)self;
}

static void
kernels_dealloc(PyObject *object)
{
    fs_py_kernels *self = (fs_py_kernels *)object;
    PyTypeObject *type = Py_TYPE(object);
    fs_pool *pool = self->exec.pool;
    if (pool != NULL) {
        Py_BEGIN_ALLOW_THREADS
        fs_pool_close(pool);
        Py_END_ALLOW_THREADS
    }
    type->tp_free(object);
    Py_DECREF(type);
}

const fs_exec *
fs_py_kernels_exec(PyObject *object)
{
    if (Py_TYPE(object)->tp_dealloc != kernels_dealloc) {
        (void)PyErr_Format(PyExc_TypeError, "Kernels expected, not %s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    return &((fs_py_kernels *)object)->exec;
}

// ---- what operations share ----------------------------------------------------------------------

int
fs_py_take_optional(PyObject *object, const char *arg, bool writeable, fs_buffer *out)
{
    memset(out, 0, sizeof *out);
    return object == NULL || object == Py_None ? 0 : fs_buffer_take(object, arg, writeable, out);
}

void
fs_py_drop_optional(fs_buffer *buffer)
{
    if (buffer->array != NULL) {
        fs_buffer_drop(buffer);
    }
}

fs_status
fs_py_same_length(const fs_buffer *a, const fs_buffer *b, const char *name)
{
    return b->array == NULL || a->n == b->n
               ? FS_OK
               : FS_FAIL(FS_EINVAL, "%s has %zu elements, not %zu", name, b->n, a->n);
}

fs_status
fs_py_float_dtype(const fs_buffer *buffer, const char *name)
{
    return buffer->array == NULL || fs_dtype_is_float(buffer->dtype)
               ? FS_OK
               : FS_FAIL(FS_ETYPE, "%s is %s, not a float array", name,
                         fs_dtype_name(buffer->dtype));
}

// ---- two arrays ---------------------------------------------------------------------------------

/* dst and src of copy, convert and combine. */
static int
take_pair(PyObject *first, PyObject *second, fs_buffer *dst, fs_buffer *src)
{
    if (fs_buffer_take(first, "dst", true, dst) < 0) {
        return -1;
    }
    if (fs_buffer_take(second, "src", false, src) < 0) {
        fs_buffer_drop(dst);
        return -1;
    }
    return 0;
}

static PyObject *
finish_pair(fs_status st, fs_buffer *dst, fs_buffer *src)
{
    fs_buffer_drop(src);
    fs_buffer_drop(dst);
    if (st != FS_OK) {
        return fs_raise(st, NULL);
    }
    Py_RETURN_NONE;
}

static PyObject *
kernels_copy(PyObject *object, PyObject *args)
{
    const fs_exec *exec = &((fs_py_kernels *)object)->exec;
    PyObject *first, *second;
    fs_buffer dst, src;
    if (!PyArg_ParseTuple(args, "OO:copy", &first, &second) ||
        take_pair(first, second, &dst, &src) < 0) {
        return NULL;
    }
    fs_status st = fs_py_same_length(&dst, &src, "src");
    if (st == FS_OK && dst.dtype != src.dtype) {
        st = FS_FAIL(FS_ETYPE, "dst is %s, src %s", fs_dtype_name(dst.dtype),
                     fs_dtype_name(src.dtype));
    }
    if (st == FS_OK) {
        size_t nbytes = dst.n * fs_dtype_nbytes(dst.dtype);
        FS_OPERATE(exec->device->copy(exec, dst.data, src.data, nbytes));
    }
    return finish_pair(st, &dst, &src);
}

static PyObject *
kernels_convert(PyObject *object, PyObject *args)
{
    const fs_exec *exec = &((fs_py_kernels *)object)->exec;
    PyObject *first, *second;
    fs_buffer dst, src;
    if (!PyArg_ParseTuple(args, "OO:convert", &first, &second) ||
        take_pair(first, second, &dst, &src) < 0) {
        return NULL;
    }
    fs_status st = fs_py_same_length(&dst, &src, "src");
    if (st == FS_OK) {
        st = fs_py_float_dtype(&dst, "dst");
    }
    if (st == FS_OK) {
        st = fs_py_float_dtype(&src, "src");
    }
    if (st == FS_OK) {
        FS_OPERATE(exec->device->convert(exec, dst.data, dst.dtype, src.data, src.dtype, dst.n));
    }
    return finish_pair(st, &dst, &src);
}

static PyObject *
kernels_combine(PyObject *object, PyObject *args)
{
    const fs_exec *exec = &((fs_py_kernels *)object)->exec;
    static const char *const names[] = {[FS_SUM] = "sum", [FS_MEAN] = "", [FS_MAX] = "max",
                                        [FS_MIN] = "min"};
    PyObject *first, *second;
    const char *name;
    fs_buffer dst, src;
    if (!PyArg_ParseTuple(args, "sOO:combine", &name, &first, &second) ||
        take_pair(first, second, &dst, &src) < 0) {
        return NULL;
    }
    int op = FS_MIN;
    while (op >= 0 && strcmp(name, names[op]) != 0) {
        op--;
    }
    fs_status st = fs_py_same_length(&dst, &src, "src");
    if (st == FS_OK && (op < 0 || name[0] == '\0')) {
        st = FS_FAIL(FS_EINVAL, "op is '%s', not sum, max or min", name);
    } else if (st == FS_OK && dst.dtype != src.dtype) {
        st = FS_FAIL(FS_ETYPE, "dst is %s, src %s", fs_dtype_name(dst.dtype),
                     fs_dtype_name(src.dtype));
    }
    if (st == FS_OK) {
        FS_OPERATE(exec->device->combine(exec, op, dst.dtype, dst.data, src.data, dst.n));
    }
    return finish_pair(st, &dst, &src);
}

// ---- one array ----------------------------------------------------------------------------------

static PyObject *
kernels_sumsq(PyObject *object, PyObject *argument)
{
    const fs_exec *exec = &((fs_py_kernels *)object)->exec;
    fs_buffer x;
    fs_sums found = {0};
    if (fs_buffer_take(argument, "x", false, &x) < 0) {
        return NULL;
    }
    fs_status st = fs_py_float_dtype(&x, "x");
    if (st == FS_OK) {
        FS_OPERATE(exec->device->sumsq(exec, x.data, x.dtype, x.n, &found));
    }
    fs_buffer_drop(&x);
    return st == FS_OK ? PyFloat_FromDouble(found.sumsq) : fs_raise(st, NULL);
}

static PyObject *
kernels_find_nonfinite(PyObject *object, PyObject *argument)
{
    const fs_exec *exec = &((fs_py_kernels *)object)->exec;
    fs_buffer x;
    uint64_t index = 0;
    if (fs_buffer_take(argument, "x", false, &x) < 0) {
        return NULL;
    }
    FS_OPERATE(exec->device->find_nonfinite(exec, x.data, x.dtype, x.n, &index));
    fs_buffer_drop(&x);
    return PyLong_FromUnsignedLongLong(index);
}

// ---- gemm ---------------------------------------------------------------------------------------

static fs_status
matrix_check(const fs_buffer *x, const char *name, size_t rows, size_t columns)
{
    return x->dims_n == 2 && x->dims[0] == rows && x->dims[1] == columns
               ? FS_OK
               : FS_FAIL(FS_EINVAL, "%s is not a (%zu, %zu) array", name, rows, columns);
}

static PyObject *
kernels_gemm(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"c", "a", "b", "trans_a", "trans_b", "add", "rounding", NULL};
    static const char *const arrays[] = {"c", "a", "b"};
    const fs_exec *exec = &((fs_py_kernels *)object)->exec;
    PyObject *objects[3], *dtype = NULL;
    fs_buffer x[3];
    fs_dtype rounding = FS_F32;
    int trans_a = 0, trans_b = 0, add = 0, taken = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$pppO:gemm", names, &objects[0],
                                     &objects[1], &objects[2], &trans_a, &trans_b, &add, &dtype) ||
        (dtype != NULL && fs_dtype_take(dtype, &rounding) < 0)) {
        return NULL;
    }
    for (; taken < 3; taken++) {
        if (fs_buffer_take_dtype(objects[taken], arrays[taken], taken == 0, FS_F32, &x[taken]) <
            0) {
            goto done;
        }
    }
    fs_status st = FS_OK;
    if (!fs_gemm_is_loaded()) {
        st = FS_FAIL(FS_ESTATE, "gemm_load(path) comes first");
    } else if (x[0].dims_n != 2 || x[1].dims_n != 2) {
        st = FS_FAIL(FS_EINVAL, "gemm takes two-dimensional arrays");
    }
    if (st == FS_OK) {
        size_t m = x[0].dims[0], n = x[0].dims[1], k = x[1].dims[trans_a ? 0 : 1];
        fs_gemm g = {.trans_a = trans_a != 0, .trans_b = trans_b != 0, .m = m, .n = n, .k = k,
                     .rounding = rounding, .a = x[1].data, .lda = x[1].dims[1], .b = x[2].data,
                     .ldb = trans_b ? k : n, .beta = add ? 1.0f : 0.0f, .c = x[0].data, .ldc = n};
        st = matrix_check(&x[1], "a", trans_a ? k : m, trans_a ? m : k);
        if (st == FS_OK) {
            st = matrix_check(&x[2], "b", trans_b ? n : k, trans_b ? k : n);
        }
        if (st == FS_OK) {
            FS_OPERATE(exec->device->gemm(exec, &g));
        }
    }
    if (st != FS_OK) {
        (void)fs_raise(st, NULL);
    }
done:
    while (taken-- > 0) {
        fs_buffer_drop(&x[taken]);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_RETURN_NONE;
}

// ---- stream -------------------------------------------------------------------------------------

static PyObject *
kernels_stream(PyObject *object, PyObject *args)
{
    const fs_exec *exec = &((fs_py_kernels *)object)->exec;
    PyObject *arrays;
    Py_ssize_t reads, updates, taken = 0;
    fs_buffer x[FS_SOURCES_MAX];
    uint32_t *data[FS_SOURCES_MAX], mixed = 0;
    unsigned char half[FS_SOURCES_MAX];
    unsigned int mask;
    int tiles;
    if (!PyArg_ParseTuple(args, "O!nnIp:stream", &PyTuple_Type, &arrays, &reads, &updates, &mask,
                          &tiles)) {
        return NULL;
    }
    Py_ssize_t arrays_n = PyTuple_GET_SIZE(arrays);
    fs_status st = FS_OK;
    if (arrays_n < 1 || arrays_n > FS_SOURCES_MAX || reads < 0 || updates < 0 ||
        reads > arrays_n - updates) {
        st = FS_FAIL(FS_EINVAL, "%zd arrays, %zd read, %zd updated", arrays_n, reads, updates);
    }
    for (; st == FS_OK && taken < arrays_n; taken++) {
        PyObject *item = PyTuple_GET_ITEM(arrays, taken);
        if (fs_buffer_take(item, "arrays", taken >= reads, &x[taken]) < 0) {
            goto done;
        }
        data[taken] = x[taken].data;
        half[taken] = fs_dtype_nbytes(x[taken].dtype) == 2;
        st = fs_py_same_length(&x[0], &x[taken], "an array");
        bool fits = half[taken] ? x[taken].n % 2 == 0 : x[taken].dtype == FS_F32;
        if (st == FS_OK && !fits) {
            st = FS_FAIL(FS_EINVAL, "%zu elements of %s: expected float32, or an even number of 2 "
                                    "bytes each",
                         x[taken].n, fs_dtype_name(x[taken].dtype));
        }
    }
    if (st == FS_OK) {
        fs_stream stream = {.arrays = data, .half = half, .arrays_n = (size_t)arrays_n,
                            .read_n = (size_t)reads, .update_n = (size_t)updates, .mask = mask,
                            .tiles = tiles != 0, .n = x[0].n};
        FS_OPERATE(mixed = fs_cpu_stream(exec, &stream));
    } else {
        (void)fs_raise(st, NULL);
    }
done:
    while (taken-- > 0) {
        fs_buffer_drop(&x[taken]);
    }
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(mixed);
}

// ---- the type -----------------------------------------------------------------------------------

static PyObject *
kernels_name(PyObject *object, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(((fs_py_kernels *)object)->exec.device->name);
}

static PyObject *
kernels_threads_used(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(fs_pool_threads_used(((fs_py_kernels *)object)->exec.pool));
}

static const PyMethodDef own_methods[] = {
    {"copy", kernels_copy, METH_VARARGS, "copy($self, dst, src, /)\n--\n\ndst = src."},
    {"convert", kernels_convert, METH_VARARGS,
     "convert($self, dst, src, /)\n--\n\ndst = src, each value rounded once to nearest even."},
    {"combine", kernels_combine, METH_VARARGS,
     "combine($self, op, acc, src, /)\n--\n\nacc = acc op src; op is sum, max or min."},
    {"sumsq", kernels_sumsq, METH_O,
     "sumsq($self, x, /)\n--\n\nSum of squares in fp64, 16 lanes and one partial per 1,024."},
    {"find_nonfinite", kernels_find_nonfinite, METH_O,
     "find_nonfinite($self, x, /)\n--\n\nIndex of the first element that is not finite, or "
     "len(x)."},
    {"gemm", FS_METHOD(kernels_gemm), METH_VARARGS | METH_KEYWORDS,
     "gemm($self, c, a, b, *, trans_a=False, trans_b=False, add=False, rounding='float32')\n--\n\n"
     "c = a b (+ c); rounding is what a and b may be rounded to."},
    {"stream", kernels_stream, METH_VARARGS,
     "stream($self, arrays, reads, updates, mask, tiles, /)\n--\n\n"
     "Reads the first arrays, flips bits of the next, writes mask to the rest."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef methods[24];

static PyGetSetDef attributes[] = {
    {"name", kernels_name, NULL, "Name of the table, such as cpu/avx512.", NULL},
    {"threads_used", kernels_threads_used, NULL, "Threads that have run at least one task.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot kernels_slots[] = {
    {Py_tp_new, (void *)kernels_new},
    {Py_tp_dealloc, (void *)kernels_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {Py_tp_doc,
     "Kernels(isa=None, *, threads=1)\n--\n\n"
     "Operations of the device table. isa: baseline, avx2, avx512, neon; None: the best."},
    {0, NULL},
};

static PyType_Spec kernels_spec = {
    .name = "flatshard._core.Kernels",
    .basicsize = sizeof(fs_py_kernels),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = kernels_slots,
};

int
fs_py_add_kernels(PyObject *module)
{
    const PyMethodDef *const parts[] = {own_methods, fs_py_kernels_step_methods, NULL};
    if (fs_py_join_methods(parts, methods, sizeof methods / sizeof methods[0]) < 0) {
        return -1;
    }
    PyObject *type = PyType_FromModuleAndSpec(module, &kernels_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int rc = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return rc;
}
