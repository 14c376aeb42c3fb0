/* Environment table, processor, build: what flatshard env and the facade ask before anything
 * else. */
#include "binding.h"

#include "../base/build.h"
#include "../base/cpu.h"
#include "../base/env.h"
#include "../device/device.h"

static PyObject *
env_table(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    PyObject *table = PyDict_New();
    if (table == NULL) {
        return NULL;
    }
    for (const fs_env_entry *entry = fs_env_table(); entry->name != NULL; entry++) {
        PyObject *meaning = PyUnicode_FromString(entry->meaning);
        if (meaning == NULL || PyDict_SetItemString(table, entry->name, meaning) < 0) {
            Py_XDECREF(meaning);
            Py_DECREF(table);
            return NULL;
        }
        Py_DECREF(meaning);
    }
    return table;
}

/* Names of the instruction sets that this build has and this processor runs. */
static PyObject *
cpu_isas(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    PyObject *names = PyList_New(0);
    for (int isa = 0; names != NULL && isa < FS_ISA_COUNT; isa++) {
        const fs_device *device;
        if (fs_device_cpu((fs_isa)isa, &device) != FS_OK) {
            continue;
        }
        PyObject *name = PyUnicode_FromString(fs_isa_name((fs_isa)isa));
        if (name == NULL || PyList_Append(names, name) < 0) {
            Py_CLEAR(names);
        }
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *
cpu_isa(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    fs_isa isa;
    fs_status st = fs_isa_choose(&isa);
    return st == FS_OK ? PyUnicode_FromString(fs_isa_name(isa)) : fs_raise(st, NULL);
}

static PyObject *
cpu_count(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    unsigned cpus;
    Py_BEGIN_ALLOW_THREADS
    cpus = fs_cpu_count();
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(cpus);
}

static PyObject *
build_id(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyUnicode_FromString(FS_BUILD_ID);
}

static PyObject *
gemm_load(PyObject *Py_UNUSED(module), PyObject *argument)
{
    PyObject *path;
    const char *description = NULL;
    if (!PyUnicode_FSConverter(argument, &path)) {
        return NULL;
    }
    fs_status st;
    Py_BEGIN_ALLOW_THREADS
    st = fs_gemm_load(PyBytes_AS_STRING(path), &description);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    return st == FS_OK ? PyUnicode_DecodeFSDefault(description) : fs_raise(st, NULL);
}

static PyObject *
gemm_is_loaded(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyBool_FromLong(fs_gemm_is_loaded());
}

static PyMethodDef functions[] = {
    {"env_table", env_table, METH_NOARGS,
     "env_table($module, /)\n--\n\nEvery FLATSHARD_* variable and its meaning, as a dict."},
    {"cpu_isas", cpu_isas, METH_NOARGS,
     "cpu_isas($module, /)\n--\n\nInstruction sets whose kernels are built and run here."},
    {"cpu_isa", cpu_isa, METH_NOARGS,
     "cpu_isa($module, /)\n--\n\nThe best of them, or the one FLATSHARD_CPU names."},
    {"cpu_count", cpu_count, METH_NOARGS,
     "cpu_count($module, /)\n--\n\nProcessors to use: affinity, capped by the control group."},
    {"build_id", build_id, METH_NOARGS,
     "build_id($module, /)\n--\n\nHash of the sources that this module was built from."},
    {"gemm_load", gemm_load, METH_O,
     "gemm_load($module, path, /)\n--\n\n"
     "Loads the CBLAS library for matrix products, once; returns its description."},
    {"gemm_is_loaded", gemm_is_loaded, METH_NOARGS,
     "gemm_is_loaded($module, /)\n--\n\nHas gemm_load succeeded in this process?"},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_core(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
