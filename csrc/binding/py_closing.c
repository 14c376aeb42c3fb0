/* What is closed later. Giving device memory back waits for that device. Where ranks are threads,
 * the garbage collector may end an object of one rank in the thread of another, amid a step: it
 * would wait for a device that waits for what its own rank has not given yet. So objects of such
 * worlds that nobody closed are kept, and closed where no rank is amid anything. */
#include "py_closing.h"
#include "py_world.h"

typedef struct closing {
    struct closing *next;
    void (*close)(void *what);
    void *what;
    PyObject *owner; /* kept until then */
    PyObject *world; /* borrowed, compared only */
} closing;

/* Under the GIL, oldest first: a model before its shards, shards before their world. */
static closing *first;

void
fs_py_close(void (*close)(void *), void *what)
{
    Py_BEGIN_ALLOW_THREADS
    close(what);
    Py_END_ALLOW_THREADS
}

void
fs_py_close_collected(void (*close)(void *), void *what, PyObject *owner, PyObject *world)
{
    bool late = what != NULL && world != NULL && ((fs_py_world *)world)->closes_late;
    closing *entry = late ? PyMem_Malloc(sizeof *entry) : NULL;
    if (entry == NULL) {
        fs_py_close(close, what);
        Py_XDECREF(owner);
        return;
    }
    *entry = (closing){NULL, close, what, owner, world};
    closing **at = &first;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = entry;
}

/* Takes the oldest entry of world (or of all) out of the list; NULL when there is none. */
static closing *
take_due(PyObject *world)
{
    for (closing **at = &first; *at != NULL; at = &(*at)->next) {
        if (world == NULL || (*at)->world == world) {
            closing *entry = *at;
            *at = entry->next;
            return entry;
        }
    }
    return NULL;
}

void
fs_py_close_due(PyObject *world)
{
    closing *entry;
    while ((entry = take_due(world)) != NULL) {
        fs_py_close(entry->close, entry->what);
        PyObject *owner = entry->owner;
        PyMem_Free(entry);
        Py_XDECREF(owner); /* may add entries */
    }
}

static PyObject *
close_due(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    fs_py_close_due(NULL);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"close_due", close_due, METH_NOARGS,
     "close_due($module, /)\n--\n\nCloses what was collected unclosed in worlds of threads on "
     "devices. No rank may be running."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_closing(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
