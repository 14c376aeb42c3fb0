/* How fast this machine multiplies matrices. */
#include "binding.h"

#include "../base/cpu.h"
#include "../device/device.h"
#include "../device/measure.h"
#include "py_world.h"

static fs_status
measure(double seconds, Py_ssize_t threads, fs_dtype rounding, double *out_flops)
{
    fs_exec exec = {0};
    if (threads < 1 || !(seconds >= 0.0 && seconds <= 60.0)) {
        return FS_FAIL(FS_EINVAL, "gemm_flops: expected 0 to 60 seconds and at least one thread");
    }
    FS_TRY(fs_device_choose(&exec.device));
    FS_TRY(fs_pool_open((size_t)threads, &exec.pool));
    fs_status st = fs_gemm_measure(&exec, rounding, seconds, out_flops);
    fs_pool_close(exec.pool);
    return st;
}

static PyObject *
gemm_flops(PyObject *Py_UNUSED(module), PyObject *args)
{
    double seconds, flops = 0.0;
    Py_ssize_t threads;
    PyObject *name;
    fs_dtype rounding;
    fs_status st = FS_OK;
    if (!PyArg_ParseTuple(args, "dnO:gemm_flops", &seconds, &threads, &name) ||
        fs_dtype_take(name, &rounding) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    fs_fp_state saved = fs_fp_enter();
    st = measure(seconds, threads, rounding, &flops);
    fs_fp_leave(saved);
    Py_END_ALLOW_THREADS
    return st == FS_OK ? PyFloat_FromDouble(flops) : fs_raise(st, NULL);
}

static PyObject *
world_gemm_flops(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *object, *name;
    double seconds, flops = 0.0;
    fs_dtype dtype;
    fs_status st = FS_OK;
    if (!PyArg_ParseTuple(args, "OOd:world_gemm_flops", &object, &name, &seconds) ||
        fs_dtype_take(name, &dtype) < 0) {
        return NULL;
    }
    fs_world *world = fs_py_world_get(object);
    if (world == NULL) {
        return NULL;
    }
    const fs_exec *exec = fs_world_exec(world);
    if (exec->context == NULL || !fs_dtype_is_float(dtype) || dtype == FS_F64 ||
        !(seconds >= 0.0 && seconds <= 60.0)) {
        return PyErr_Format(PyExc_ValueError, "world_gemm_flops: expected a world on a device, a "
                                              "dtype it multiplies, and 0 to 60 seconds");
    }
    FS_CALL(world, st, fs_device_gemm_measure(exec, dtype, seconds, &flops));
    return st == FS_OK ? PyFloat_FromDouble(flops) : fs_raise(st, world);
}

static PyMethodDef functions[] = {
    {"gemm_flops", gemm_flops, METH_VARARGS,
     "gemm_flops($module, seconds, threads, dtype, /)\n--\n\n"
     "Best rate of products of this many threads within the seconds, FLOP/s, for a model that\n"
     "computes in the dtype."},
    {"world_gemm_flops", world_gemm_flops, METH_VARARGS,
     "world_gemm_flops($module, world, dtype, seconds, /)\n--\n\n"
     "Best rate of products of the dtype on the device of a world, FLOP/s."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_machine(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
