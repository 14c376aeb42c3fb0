/* The machine from Python: processor, kernels, matrix library. Starts nothing at import. */
#include "binding.h"

#include "../base/build.h"
#include "../base/cpu.h"
#include "../device/device.h"
#include "../device/measure.h"

static PyObject *
machine(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    fs_isa chosen;
    fs_status st = fs_isa_choose(&chosen);
    if (st != FS_OK) {
        return fs_raise(st, NULL);
    }
    PyObject *runs = PyList_New(0);
    if (runs == NULL) {
        return NULL;
    }
    for (int isa = 0; isa < (int)FS_ISA_COUNT; isa++) {
        const fs_device *device;
        if (fs_device_cpu((fs_isa)isa, &device) != FS_OK) {
            continue;
        }
        PyObject *name = PyUnicode_FromString(fs_isa_name((fs_isa)isa));
        if (name == NULL || PyList_Append(runs, name) < 0) {
            Py_XDECREF(name);
            Py_DECREF(runs);
            return NULL;
        }
        Py_DECREF(name);
    }
    return Py_BuildValue("{s:s,s:N,s:I,s:s}", "isa", fs_isa_name(chosen), "isas", runs, "cores",
                         fs_cpu_count(), "build", FS_BUILD_ID);
}

static PyObject *
blas_load(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path;
    const char *description = NULL;
    fs_status st = FS_OK;
    if (!PyArg_ParseTuple(args, "O&:blas_load", PyUnicode_FSConverter, &path)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    st = fs_gemm_load(PyBytes_AS_STRING(path), &description);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    return st == FS_OK ? PyUnicode_FromString(description) : fs_raise(st, NULL);
}

static fs_status
measure(double seconds, Py_ssize_t threads, double *out_flops)
{
    fs_isa isa;
    fs_exec exec = {0};
    if (threads < 1 || !(seconds >= 0.0 && seconds <= 60.0)) {
        return FS_FAIL(FS_EINVAL, "blas_flops: expected 0 to 60 seconds and at least one thread");
    }
    FS_TRY(fs_isa_choose(&isa));
    FS_TRY(fs_device_cpu(isa, &exec.device));
    FS_TRY(fs_pool_open((size_t)threads, &exec.pool));
    fs_status st = fs_gemm_measure(&exec, seconds, out_flops);
    fs_pool_close(exec.pool);
    return st;
}

static PyObject *
blas_flops(PyObject *Py_UNUSED(module), PyObject *args)
{
    double seconds, flops = 0.0;
    Py_ssize_t threads;
    fs_status st = FS_OK;
    if (!PyArg_ParseTuple(args, "dn:blas_flops", &seconds, &threads)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    fs_fp_state saved = fs_fp_enter();
    st = measure(seconds, threads, &flops);
    fs_fp_leave(saved);
    Py_END_ALLOW_THREADS
    return st == FS_OK ? PyFloat_FromDouble(flops) : fs_raise(st, NULL);
}

static PyMethodDef functions[] = {
    {"machine", machine, METH_NOARGS,
     "machine($module, /)\n--\n\n"
     "Instruction set in use, those that run here, cores this process may use, build id."},
    {"blas_load", blas_load, METH_VARARGS,
     "blas_load($module, path, /)\n--\n\n"
     "Loads a CBLAS library, once per process; returns its description and core."},
    {"blas_flops", blas_flops, METH_VARARGS,
     "blas_flops($module, seconds, threads, /)\n--\n\n"
     "Best sgemm rate of this many threads within the seconds, FLOP/s."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_machine(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
