/* Methods of _core.World about its rank's device: its order with streams of others, and copies. */
#include "py_device.h"
#include "py_world.h"

/* A stream as other libraries number it; 0 is the default one. */
static PyObject *
order_stream(PyObject *object, PyObject *arg, fs_status (*order)(fs_world *, void *))
{
    void *stream = PyLong_AsVoidPtr(arg);
    fs_world *world = PyErr_Occurred() ? NULL : fs_py_world_get(object);
    if (world == NULL) {
        return NULL;
    }
    fs_status st;
    FS_CALL(world, st, order(world, stream));
    if (st != FS_OK) {
        return fs_raise(st, world);
    }
    Py_RETURN_NONE;
}

static PyObject *
world_after_stream(PyObject *object, PyObject *arg)
{
    return order_stream(object, arg, fs_world_after_stream);
}

static PyObject *
world_stream_after(PyObject *object, PyObject *arg)
{
    return order_stream(object, arg, fs_world_stream_after);
}

/* n elements of from to to, of one dtype; takes both. */
static PyObject *
move(fs_world *world, fs_buffer *to, const char *arg, fs_buffer *from,
     fs_status (*copy)(fs_world *, void *, const void *, size_t))
{
    fs_status st = FS_OK;
    if (to->n != from->n || to->dtype != from->dtype) {
        st = FS_FAIL(FS_EINVAL, "%s: %zu elements of %s, expected %zu of %s", arg, to->n,
                     fs_dtype_name(to->dtype), from->n, fs_dtype_name(from->dtype));
    } else {
        size_t nbytes = to->n * fs_dtype_nbytes(to->dtype);
        FS_CALL(world, st, copy(world, to->data, from->data, nbytes));
    }
    fs_buffer_drop(from);
    fs_buffer_drop(to);
    if (st != FS_OK) {
        return fs_raise(st, world);
    }
    Py_RETURN_NONE;
}

/* fetch(device_array, array): device memory into an array of the host. */
static PyObject *
world_fetch(PyObject *object, PyObject *args)
{
    PyObject *there, *array;
    fs_buffer from, to;
    fs_world *world = fs_py_world_get(object);
    if (world == NULL || !PyArg_ParseTuple(args, "OO:fetch", &there, &array) ||
        fs_device_array_take(there, object, "array", &from) < 0) {
        return NULL;
    }
    if (fs_buffer_take_dtype(array, "out", true, from.dtype, &to) < 0) {
        fs_buffer_drop(&from);
        return NULL;
    }
    return move(world, &to, "out", &from, fs_world_fetch);
}

/* copy(to, array): between two places in the memory of this rank's device. */
static PyObject *
world_copy(PyObject *object, PyObject *args)
{
    PyObject *to_object, *from_object;
    fs_buffer from, to;
    fs_world *world = fs_py_world_get(object);
    if (world == NULL || !PyArg_ParseTuple(args, "OO:copy", &to_object, &from_object) ||
        fs_device_array_take(to_object, object, "to", &to) < 0) {
        return NULL;
    }
    if (fs_device_array_take(from_object, object, "array", &from) < 0) {
        fs_buffer_drop(&to);
        return NULL;
    }
    return move(world, &to, "to", &from, fs_world_copy);
}

static PyObject *
world_device_memory(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    fs_world *world = fs_py_world_get(object);
    fs_device_memory memory = {0};
    if (world == NULL) {
        return NULL;
    }
    fs_status st = fs_world_device_memory(world, &memory);
    if (st != FS_OK) {
        return fs_raise(st, world);
    }
    return Py_BuildValue("nnn", (Py_ssize_t)memory.total, (Py_ssize_t)memory.free,
                         (Py_ssize_t)memory.held);
}

const PyMethodDef fs_py_device_methods[] = {
    {"after_stream", world_after_stream, METH_O,
     "after_stream($self, stream, /)\n--\n\nWhat the rank's device is given from now on comes "
     "after what the stream was given."},
    {"stream_after", world_stream_after, METH_O,
     "stream_after($self, stream, /)\n--\n\nThe other way round."},
    {"device_memory", world_device_memory, METH_NOARGS,
     "device_memory($self, /)\n--\n\n(total, free, held by this process) bytes of the device."},
    {"copy", world_copy, METH_VARARGS,
     "copy($self, to, array, /)\n--\n\nDevice memory into device memory; does not wait."},
    {"fetch", world_fetch, METH_VARARGS,
     "fetch($self, array, out, /)\n--\n\nDevice memory into an array of the host; waits."},
    {NULL, NULL, 0, NULL},
};
