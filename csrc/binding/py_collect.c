/* Collectives on arrays. Every method takes its arguments by position: the facade (world.py) has
 * names and defaults. Blocks are rows, that is, pieces of the first dimension. */
#include "py_world.h"

#include <string.h>

#include "../base/checked.h"

// ---- arguments ----------------------------------------------------------------------------------

static int
wrong_count(const char *name, Py_ssize_t expected, Py_ssize_t got)
{
    if (expected == got) {
        return 0;
    }
    (void)FS_FAIL(FS_ETYPE, "%s takes %zd arguments, got %zd", name, expected, got);
    (void)fs_raise(FS_ETYPE, NULL);
    return 1;
}

static int
fail(fs_status status)
{
    (void)fs_raise(status, NULL);
    return -1;
}

static int
take_op(PyObject *object, fs_reduce_op *out)
{
    static const char *const names[] = {"sum", "mean", "max", "min"};
    const char *text = PyUnicode_Check(object) ? PyUnicode_AsUTF8(object) : NULL;
    for (int i = 0; text != NULL && i < 4; i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = (fs_reduce_op)i;
            return 0;
        }
    }
    PyErr_Clear();
    return fail(FS_FAIL(FS_EINVAL, "op: expected 'sum', 'mean', 'max' or 'min', got %s",
                        text != NULL ? text : Py_TYPE(object)->tp_name));
}

/* Rows of an array (a scalar is one row) and elements of a row. */
static void
rows_of(const fs_buffer *x, size_t *out_rows, size_t *out_row_n)
{
    size_t row_n = 1;
    for (size_t d = 1; d < x->dims_n; d++) {
        row_n *= x->dims[d];
    }
    *out_rows = x->dims_n > 0 ? x->dims[0] : 1;
    *out_row_n = row_n;
}

/* Rows of every rank: the sequence given, or equal. counts: size entries, in rows. */
static int
take_counts(PyObject *object, const fs_world *world, size_t equal, size_t *counts)
{
    int size = fs_world_size(world);
    if (object == Py_None) {
        for (int r = 0; r < size; r++) {
            counts[r] = equal;
        }
        return 0;
    }
    PyObject *items =
        PySequence_Fast(object, "counts: expected a sequence of ints, one for each rank");
    if (items == NULL) {
        return -1;
    }
    int rc = 0;
    if (PySequence_Fast_GET_SIZE(items) != size) {
        rc = fail(FS_FAIL(FS_EINVAL, "counts: expected %d entries, one for each rank, got %zd",
                          size, PySequence_Fast_GET_SIZE(items)));
    }
    for (int r = 0; rc == 0 && r < size; r++) {
        PyObject *item = PyNumber_Index(PySequence_Fast_GET_ITEM(items, r));
        Py_ssize_t value = item != NULL ? PyLong_AsSsize_t(item) : -1;
        Py_XDECREF(item);
        if (value < 0) {
            rc = PyErr_Occurred() ? -1
                                  : fail(FS_FAIL(FS_EINVAL,
                                                 "counts: entry %d is %zd; a count is 0 or "
                                                 "more",
                                                 r, value));
        } else {
            counts[r] = (size_t)value;
        }
    }
    Py_DECREF(items);
    return rc;
}

/* The output: a new array of these dimensions, or the caller's, which must have them. */
static int
take_out(PyObject *object, fs_dtype dtype, size_t dims_n, const size_t *dims, fs_buffer *out)
{
    if (object == Py_None) {
        memset(out, 0, sizeof *out);
        out->array = fs_array_new(dtype, dims_n, dims, &out->data);
        return out->array != NULL ? 0 : -1;
    }
    if (fs_buffer_take_dtype(object, "out", true, dtype, out) < 0) {
        return -1;
    }
    bool same = out->dims_n == dims_n;
    for (size_t d = 0; same && d < dims_n; d++) {
        same = out->dims[d] == dims[d];
    }
    if (!same) {
        fs_buffer_drop(out);
        return fail(FS_FAIL(FS_EINVAL,
                            "out: has another shape than the result (first dimension %zu of "
                            "%zu dimensions)",
                            dims_n > 0 ? dims[0] : 1, dims_n));
    }
    return 0;
}

/* Hands the output to the caller, or raises. */
static PyObject *
finish(fs_status status, fs_world *world, fs_buffer *x, fs_buffer *out)
{
    PyObject *result = NULL;
    if (status == FS_OK) {
        result = Py_NewRef(out->array);
    } else {
        (void)fs_raise(status, world);
    }
    fs_buffer_drop(x);
    fs_buffer_drop(out);
    return result;
}

// ---- methods ------------------------------------------------------------------------------------

static PyObject *
barrier(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_world *world = fs_py_world_get(self);
    if (world == NULL) {
        return NULL;
    }
    fs_status st;
    FS_CALL(world, st, fs_barrier(world));
    if (st != FS_OK) {
        return fs_raise(st, world);
    }
    Py_RETURN_NONE;
}

static PyObject *
all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    fs_reduce_op op;
    fs_buffer x, out;
    fs_world *world = fs_py_world_get(self);
    if (world == NULL || wrong_count("all_reduce", 3, n) || take_op(args[1], &op) < 0 ||
        fs_buffer_take(args[0], "x", false, &x) < 0) {
        return NULL;
    }
    if (take_out(args[2], x.dtype, x.dims_n, x.dims, &out) < 0) {
        fs_buffer_drop(&x);
        return NULL;
    }
    fs_status st;
    FS_CALL(world, st, fs_all_reduce(world, x.dtype, op, x.data, out.data, x.n));
    return finish(st, world, &x, &out);
}

/* Counts in elements, from rows; FS_EINVAL if a product wraps. */
static fs_status
scale_counts(size_t *counts, int size, size_t row_n, size_t *out_rows)
{
    size_t rows = 0;
    for (int r = 0; r < size; r++) {
        FS_TRY(fs_add_size(rows, counts[r], &rows));
        FS_TRY(fs_mul_size(counts[r], row_n, &counts[r]));
    }
    *out_rows = rows;
    return FS_OK;
}

static PyObject *
all_gather(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    fs_buffer x, out;
    size_t counts[FS_RANKS_MAX], dims[32] = {0}, rows, row_n, total = 0;
    fs_world *world = fs_py_world_get(self);
    if (world == NULL || wrong_count("all_gather", 3, n) ||
        fs_buffer_take(args[0], "x", false, &x) < 0) {
        return NULL;
    }
    rows_of(&x, &rows, &row_n);
    if (take_counts(args[1], world, rows, counts) < 0) {
        fs_buffer_drop(&x);
        return NULL;
    }
    if (counts[fs_world_rank(world)] != rows) {
        (void)fail(FS_FAIL(FS_EINVAL, "counts: entry %d is %zu, but x of rank %d has %zu rows",
                           fs_world_rank(world), counts[fs_world_rank(world)], fs_world_rank(world),
                           rows));
        fs_buffer_drop(&x);
        return NULL;
    }
    fs_status st = scale_counts(counts, fs_world_size(world), row_n, &total);
    memcpy(dims, x.dims, x.dims_n * sizeof *dims);
    dims[0] = total;
    if (st != FS_OK || take_out(args[2], x.dtype, x.dims_n > 0 ? x.dims_n : 1, dims, &out) < 0) {
        fs_buffer_drop(&x);
        return st != FS_OK ? fs_raise(st, world) : NULL;
    }
    const size_t *uneven = args[1] != Py_None ? counts : NULL;
    FS_CALL(world, st, fs_all_gather(world, x.dtype, x.data, x.n, uneven, out.data));
    return finish(st, world, &x, &out);
}

static PyObject *
reduce_scatter(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    fs_reduce_op op;
    fs_buffer x, out;
    size_t counts[FS_RANKS_MAX], dims[32], rows, row_n, total = 0;
    fs_world *world = fs_py_world_get(self);
    if (world == NULL || wrong_count("reduce_scatter", 4, n) || take_op(args[1], &op) < 0 ||
        fs_buffer_take(args[0], "x", false, &x) < 0) {
        return NULL;
    }
    int size = fs_world_size(world), rank = fs_world_rank(world);
    rows_of(&x, &rows, &row_n);
    fs_status st = FS_OK;
    if (x.dims_n == 0) {
        st =
            FS_FAIL(FS_EINVAL, "x: a scalar cannot be scattered; pass an array with a row for each "
                               "rank");
    } else if (args[2] == Py_None && rows % (size_t)size != 0) {
        st = FS_FAIL(FS_EINVAL, "x: %zu rows do not divide by %d ranks; pass counts=", rows, size);
    }
    if (st != FS_OK || take_counts(args[2], world, rows / (size_t)size, counts) < 0) {
        fs_buffer_drop(&x);
        return st != FS_OK ? fs_raise(st, world) : NULL;
    }
    memcpy(dims, x.dims, x.dims_n * sizeof *dims);
    dims[0] = counts[rank];
    st = scale_counts(counts, size, row_n, &total);
    if (st == FS_OK && total != rows) {
        st = FS_FAIL(FS_EINVAL, "counts: the entries sum to %zu, but x has %zu rows", total, rows);
    }
    if (st != FS_OK || take_out(args[3], x.dtype, x.dims_n, dims, &out) < 0) {
        fs_buffer_drop(&x);
        return st != FS_OK ? fs_raise(st, world) : NULL;
    }
    FS_CALL(world, st, fs_reduce_scatter(world, x.dtype, op, x.data, counts, out.data));
    return finish(st, world, &x, &out);
}

/* The root reads x where it lies; the others write straight into out. */
static fs_status
broadcast_into(fs_world *world, fs_dtype dtype, int root, void *x, size_t n, void *out)
{
    bool mine = fs_world_rank(world) == root;
    FS_TRY(fs_broadcast(world, dtype, root, mine ? x : out, n));
    if (mine && out != x && n != 0) {
        memmove(out, x, n * fs_dtype_nbytes(dtype));
    }
    return FS_OK;
}

static PyObject *
broadcast(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    fs_buffer x, out;
    fs_world *world = fs_py_world_get(self);
    if (world == NULL || wrong_count("broadcast", 3, n)) {
        return NULL;
    }
    long root = PyLong_AsLong(args[1]);
    if (root == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (root < 0 || root >= fs_world_size(world)) {
        return fs_raise(FS_FAIL(FS_EINVAL, "root: rank %ld does not exist in a world of %d", root,
                                fs_world_size(world)), world);
    }
    if (fs_buffer_take(args[0], "x", false, &x) < 0) {
        return NULL;
    }
    if (take_out(args[2], x.dtype, x.dims_n, x.dims, &out) < 0) {
        fs_buffer_drop(&x);
        return NULL;
    }
    fs_status st;
    FS_CALL(world, st, broadcast_into(world, x.dtype, (int)root, x.data, x.n, out.data));
    return finish(st, world, &x, &out);
}

static PyObject *
all_to_all(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    fs_buffer x, out;
    size_t rows, row_n;
    fs_world *world = fs_py_world_get(self);
    if (world == NULL || wrong_count("all_to_all", 2, n) ||
        fs_buffer_take(args[0], "x", false, &x) < 0) {
        return NULL;
    }
    size_t size = (size_t)fs_world_size(world);
    rows_of(&x, &rows, &row_n);
    if (x.dims_n == 0 || rows % size != 0) {
        fs_buffer_drop(&x);
        return fs_raise(FS_FAIL(FS_EINVAL, "x: %zu rows do not divide by %zu ranks", rows, size),
                        world);
    }
    if (take_out(args[1], x.dtype, x.dims_n, x.dims, &out) < 0) {
        fs_buffer_drop(&x);
        return NULL;
    }
    fs_status st;
    FS_CALL(world, st, fs_all_to_all(world, x.dtype, x.data, rows / size * row_n, out.data));
    return finish(st, world, &x, &out);
}

// ---- world memory -------------------------------------------------------------------------------

/* Keeps a region open for the array that looks at it. */
typedef struct region_owner {
    fs_region *region;
    fs_py_world *world; /* its ledger holds the charge */
    size_t nbytes;
} region_owner;

static void
free_owner(PyObject *capsule)
{
    region_owner *owner = PyCapsule_GetPointer(capsule, "flatshard.region");
    if (owner->world->world != NULL) {
        fs_ledger_discharge(fs_world_ledger(owner->world->world), FS_MEM_WORKSPACE, FS_HOME_WORLD,
                            owner->nbytes);
    }
    fs_region_close(owner->region);
    Py_DECREF((PyObject *)owner->world);
    fs_free(owner);
}

/* Shape as an int or a sequence of ints; -1 with an exception. */
static int
take_shape(PyObject *object, size_t *dims, size_t *out_dims_n, size_t *out_n)
{
    PyObject *items = PyLong_Check(object) ? PyTuple_Pack(1, object)
                                           : PySequence_Tuple(object);
    if (items == NULL) {
        return -1;
    }
    Py_ssize_t dims_n = PyTuple_GET_SIZE(items);
    size_t n = 1;
    int rc =
        dims_n <= 32 ? 0 : fail(FS_FAIL(FS_EINVAL, "shape: %zd dimensions, at most 32", dims_n));
    for (Py_ssize_t d = 0; rc == 0 && d < dims_n; d++) {
        Py_ssize_t value = PyLong_AsSsize_t(PyTuple_GET_ITEM(items, d));
        if (value < 0) {
            rc = PyErr_Occurred() ? -1
                                  : fail(FS_FAIL(FS_EINVAL, "shape: dimension %zd is negative", d));
        } else {
            dims[d] = (size_t)value;
            fs_status st = fs_mul_size(n, dims[d], &n);
            rc = st == FS_OK ? 0 : fail(st);
        }
    }
    Py_DECREF(items);
    *out_dims_n = (size_t)dims_n;
    *out_n = n;
    return rc;
}

static PyObject *
symmetric(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    size_t dims[32], dims_n, numel, nbytes;
    fs_dtype dtype;
    fs_world *world = fs_py_world_get(self);
    if (world == NULL || wrong_count("symmetric", 3, n) ||
        take_shape(args[0], dims, &dims_n, &numel) < 0 || fs_dtype_take(args[1], &dtype) < 0) {
        return NULL;
    }
    const char *name = PyUnicode_AsUTF8(args[2]);
    if (name == NULL) {
        return NULL;
    }
    fs_status st = fs_mul_size(numel, fs_dtype_nbytes(dtype), &nbytes);
    region_owner *owner = NULL;
    if (st == FS_OK) {
        st = fs_calloc(1, sizeof *owner, &owner);
    }
    if (st == FS_OK) {
        FS_CALL(world, st, fs_region_open(world, name, nbytes, &owner->region));
    }
    if (st != FS_OK) {
        if (owner != NULL) {
            fs_region_close(owner->region);
            fs_free(owner);
        }
        return fs_raise(st, world);
    }
    owner->world = (fs_py_world *)Py_NewRef(self);
    owner->nbytes = fs_region_stride(owner->region);
    fs_ledger_charge(fs_world_ledger(world), FS_MEM_WORKSPACE, FS_HOME_WORLD, owner->nbytes);
    void *block = fs_region_block(owner->region, fs_world_rank(world));
    PyObject *capsule = PyCapsule_New(owner, "flatshard.region", free_owner);
    if (capsule == NULL) {
        fs_region_close(owner->region);
        Py_DECREF(self);
        fs_free(owner);
        return NULL;
    }
    return fs_array_view(dtype, dims_n, dims, block, true, capsule);
}

const PyMethodDef fs_py_collect_methods[] = {
    {"barrier", barrier, METH_NOARGS, "barrier($self, /)\n--\n\nWaits until every rank has come."},
    {"all_reduce", FS_METHOD(all_reduce), METH_FASTCALL,
     "all_reduce($self, x, op, out, /)\n--\n\nReduction of x over ranks, on every rank."},
    {"all_gather", FS_METHOD(all_gather), METH_FASTCALL,
     "all_gather($self, x, counts, out, /)\n--\n\nRows of every rank, in rank order."},
    {"reduce_scatter", FS_METHOD(reduce_scatter), METH_FASTCALL,
     "reduce_scatter($self, x, op, counts, out, /)\n--\n\nThis rank's rows of the reduction."},
    {"broadcast", FS_METHOD(broadcast), METH_FASTCALL,
     "broadcast($self, x, root, out, /)\n--\n\nThe root's x, on every rank."},
    {"all_to_all", FS_METHOD(all_to_all), METH_FASTCALL,
     "all_to_all($self, x, out, /)\n--\n\nBlock r of x goes to rank r; block r of the result came "
     "from it."},
    {"symmetric", FS_METHOD(symmetric), METH_FASTCALL,
     "symmetric($self, shape, dtype, name, /)\n--\n\nA zeroed array in world memory; collective."},
    {NULL, NULL, 0, NULL},
};
