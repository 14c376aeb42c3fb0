/* flatshard._core: the module object. Types and functions live in the other files of this
 * folder. */
#include "binding.h"

#include <string.h>

#include "py_closing.h"

int
fs_py_join_methods(const PyMethodDef *const *parts, PyMethodDef *out, size_t room)
{
    size_t n = 0;
    for (; *parts != NULL; parts++) {
        for (const PyMethodDef *method = *parts; method->ml_name != NULL; method++) {
            if (n + 1 >= room) {
                PyErr_Format(PyExc_SystemError, "no room for method %s behind %zu others",
                             method->ml_name, n);
                return -1;
            }
            out[n++] = *method;
        }
    }
    memset(&out[n], 0, sizeof out[n]);
    return 0;
}

static int
add_all(PyObject *module)
{
    static int (*const parts[])(PyObject *) = {
        fs_py_add_core,
        fs_py_add_kernels,
        fs_py_add_shards,
        fs_py_add_io,
        fs_py_add_catalog,
        fs_py_add_checkpoint,
        fs_py_add_norms,
        fs_py_add_export,
        fs_py_add_machine,
        fs_py_add_model_ops,
        fs_py_add_llama,
        fs_py_add_world,
        fs_py_add_hooks,
        fs_py_add_device,
        fs_py_add_device_array,
        fs_py_add_closing,
    };
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        /* Types and worlds belong to the process; so do NumPy's, on which we stand. */
        PyErr_Format(PyExc_ImportError,
                     "flatshard works in the main interpreter alone, not in subinterpreters");
        return -1;
    }
    if (fs_numpy_import() < 0) {
        return -1;
    }
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (parts[i](module) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)add_all},
#if PY_VERSION_HEX >= 0x030c0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "flatshard._core",
    .m_doc = "The C core of flatshard. Private: use the flatshard package.",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
