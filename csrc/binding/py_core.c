/* Environment table, processor, build: what flatshard env and the facade ask before anything else. */
#include "binding.h"

#include "../base/cpu.h"
#include "../base/env.h"

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

static PyMethodDef functions[] = {
    {"env_table", env_table, METH_NOARGS,
     "env_table($module, /)\n--\n\nEvery FLATSHARD_* variable and its meaning, as a dict."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_core(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
