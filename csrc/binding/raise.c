/* The one place that turns a status into a Python exception. */
#include "binding.h"

#include <errno.h>
#include <string.h>

/* A class of flatshard.errors; new reference, NULL with an exception set. */
static PyObject *
error_class(const char *name)
{
    PyObject *errors = PyImport_ImportModule("flatshard.errors");
    if (errors == NULL) {
        return NULL;
    }
    PyObject *found = PyObject_GetAttrString(errors, name);
    Py_DECREF(errors);
    return found;
}

/* The text may have been cut in the middle of a character. */
static void
raise_ours(const char *name, const char *text)
{
    PyObject *type = error_class(name);
    PyObject *whole =
        type != NULL ? PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace") : NULL;
    if (whole != NULL) {
        PyErr_SetObject(type, whole);
    }
    Py_XDECREF(whole);
    Py_XDECREF(type);
}

/* The same, of a WorldError: whose rank it is about, -1: nobody's in particular. */
static void
raise_about(const char *name, const char *text, int rank)
{
    raise_ours(name, text);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *number = rank >= 0 ? PyLong_FromLong(rank) : Py_NewRef(Py_None);
    if (value == NULL || number == NULL || PyObject_SetAttrString(value, "rank", number) < 0) {
        PyErr_Clear(); /* the text says it too */
    }
    Py_XDECREF(number);
    PyErr_Restore(type, value, traceback);
}

/* Through the package's log, and on stderr whatever that does. */
static void
tell(int rank, const char *report)
{
    PyObject *log = PyImport_ImportModule("flatshard._log");
    PyObject *text = PyUnicode_DecodeUTF8(report, (Py_ssize_t)strlen(report), "replace");
    PyObject *done =
        log != NULL && text != NULL ? PyObject_CallMethod(log, "tell", "iO", rank, text) : NULL;
    if (done == NULL) {
        PyErr_Clear();
        PySys_FormatStderr("flatshard error (rank %d): %s\n", rank, report);
    }
    Py_XDECREF(done);
    Py_XDECREF(text);
    Py_XDECREF(log);
}

/* What ended the job, as the exception that names it. A launcher may kill survivors within a
 * tenth of a second of a death, so a process says it on stderr first; ranks that are threads
 * share the caller's, and raise only. */
static void
raise_cause(fs_job *job, int rank, int threads)
{
    static const char *const names[] = {
        [FS_CAUSE_NONE] = "WorldError",         [FS_CAUSE_DIED] = "PeerLost",
        [FS_CAUSE_LEFT] = "PeerLost",           [FS_CAUSE_TIMEOUT] = "CollectiveTimeout",
        [FS_CAUSE_MISMATCH] = "CollectiveMismatch", [FS_CAUSE_INTERRUPTED] = "PeerLost",
        [FS_CAUSE_ERROR] = "PeerLost",
    };
    fs_cause cause = fs_job_cause(job);
    if (cause.kind == FS_CAUSE_INTERRUPTED && cause.rank == rank) {
        PyErr_SetNone(PyExc_KeyboardInterrupt);
        return;
    }
    char report[FS_REPORT_NBYTES];
    fs_job_report(job, report, sizeof report);
    if (!threads && fs_job_tell_once(job)) {
        tell(rank, report);
    }
    raise_about(names[cause.kind], report, cause.rank);
}

PyObject *
fs_raise(fs_status status, fs_world *world)
{
    if (PyErr_Occurred()) {
        return NULL; /* a signal handler raised during the wait: that exception is the answer */
    }
    const char *text = fs_status_message();
    switch (status) {
    case FS_EINVAL:
        PyErr_SetString(PyExc_ValueError, text);
        break;
    case FS_ETYPE:
        PyErr_SetString(PyExc_TypeError, text);
        break;
    case FS_ENOMEM:
        PyErr_SetString(PyExc_MemoryError, text);
        break;
    case FS_EBUDGET:
        raise_ours("MemoryBudgetError", text);
        break;
    case FS_ESYS: {
        PyObject *arguments = Py_BuildValue("(is)", fs_status_errno(), text);
        if (arguments != NULL) {
            PyErr_SetObject(PyExc_OSError, arguments);
            Py_DECREF(arguments);
        }
        break;
    }
    case FS_ABORTED:
        if (world != NULL) {
            raise_cause(fs_world_job(world), fs_world_job_rank(world), fs_world_is_threads(world));
        } else {
            raise_ours("CollectiveTimeout", text); /* a rank did not come to the job at all */
        }
        break;
    case FS_ECORRUPT:
        raise_ours("CheckpointError", text);
        break;
    case FS_EUNSUPPORTED:
        PyErr_SetString(PyExc_NotImplementedError, text);
        break;
    case FS_ENONFINITE:
        raise_ours("NonFiniteError", text);
        break;
    case FS_ESTATE:
        PyErr_SetString(PyExc_RuntimeError, text);
        break;
    case FS_OK:
    case FS_EINTERNAL:
        PyErr_Format(PyExc_SystemError, "flatshard: internal fault: %s", text);
        break;
    }
    return NULL;
}

PyObject *
fs_raise_job(fs_job *job, int rank)
{
    if (!PyErr_Occurred()) {
        raise_cause(job, rank, fs_job_is_threads(job));
    }
    return NULL;
}
