/* One call of the core: whose line it is, that it is the only one, and what signals do
 * meanwhile. */
#include "py_world.h"

#include <frameobject.h> /* PyFrame_GetBack: not in Python.h before 3.11 */
#include <string.h>

/* Folder of the package, with the separator: frames in it are ours, not the caller's. */
static char package_folder[1024];
static size_t package_folder_n;

void
fs_py_set_package_folder(PyObject *module)
{
    PyObject *file = PyModule_GetFilenameObject(module);
    const char *path = file != NULL ? PyUnicode_AsUTF8(file) : NULL;
    const char *slash = path != NULL ? strrchr(path, '/') : NULL;
    size_t n = slash != NULL ? (size_t)(slash - path) + 1 : 0;
    if (n != 0 && n < sizeof package_folder) {
        memcpy(package_folder, path, n);
        package_folder_n = n;
    }
    PyErr_Clear(); /* without it reports name our own lines */
    Py_XDECREF(file);
}

/* Python's own lines between a with statement and one of our context managers. */
static bool
is_contextlib(const char *file)
{
    static const char name[] = "/contextlib.py";
    size_t n = strlen(file);
    return n >= sizeof name - 1 && strcmp(file + n - (sizeof name - 1), name) == 0;
}

void
fs_py_note_caller(fs_world *world)
{
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        const char *file = PyUnicode_AsUTF8(code->co_filename);
        PyFrameObject *back = NULL;
        if (file == NULL) {
            PyErr_Clear();
        } else if ((package_folder_n != 0 &&
                    strncmp(file, package_folder, package_folder_n) == 0) ||
                   is_contextlib(file)) {
            back = PyFrame_GetBack(frame);
        } else {
            fs_world_note_line(world, file, PyFrame_GetLineNumber(frame));
        }
        Py_DECREF(code);
        Py_DECREF(frame);
        frame = back;
    }
}

/* Adds a frame's line; false when there is no room for it. */
static bool
add_frame(PyFrameObject *frame, char *lines, size_t nbytes, size_t *used)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    const char *file = PyUnicode_AsUTF8(code->co_filename);
    const char *function = PyUnicode_AsUTF8(code->co_name);
    int n = 0;
    if (file != NULL && function != NULL) {
        n = PyOS_snprintf(lines + *used, nbytes - *used, "  File \"%s\", line %d in %s\n", file,
                          PyFrame_GetLineNumber(frame), function);
    }
    PyErr_Clear();
    Py_DECREF(code);
    bool fits = n >= 0 && (size_t)n < nbytes - *used;
    *used += fits ? (size_t)n : 0;
    return fits;
}

size_t
fs_py_locate(int64_t thread, char *lines, size_t nbytes)
{
    size_t used = 0;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *type, *value, *traceback; /* a signal handler may have raised in this wait */
    PyErr_Fetch(&type, &value, &traceback);
    PyThreadState *found = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    while (found != NULL && found->thread_id != (unsigned long)thread) {
        found = PyThreadState_Next(found);
    }
    PyFrameObject *frame = found != NULL ? PyThreadState_GetFrame(found) : NULL;
    while (frame != NULL) {
        PyFrameObject *back =
            add_frame(frame, lines, nbytes, &used) ? PyFrame_GetBack(frame) : NULL;
        Py_DECREF(frame);
        frame = back;
    }
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(state);
    return used;
}

fs_status
fs_call_begin(fs_world *world)
{
    if (world == NULL) {
        return FS_OK;
    }
    if (!fs_world_enter(world)) {
        return FS_FAIL(FS_ESTATE,
                       "this world is in a call already: one thread of a rank uses it at a "
                       "time, and a signal handler not at all");
    }
    fs_py_note_caller(world);
    return FS_OK;
}

fs_status
fs_call_end(fs_world *world, fs_status status)
{
    if (world != NULL) {
        fs_world_exit(world);
    }
    return status == FS_OK && PyErr_Occurred()
               ? FS_FAIL(FS_ABORTED, "a signal handler raised during a wait")
               : status;
}

/* Runs Python's signal handlers (they run in the main thread only); true if one raised. */
bool
fs_py_check_signals(void *Py_UNUSED(ctx))
{
    PyGILState_STATE state = PyGILState_Ensure();
    bool stop = PyErr_Occurred() != NULL || PyErr_CheckSignals() < 0;
    PyGILState_Release(state);
    return stop;
}
