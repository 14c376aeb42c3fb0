/* Jobs as Python objects: how ranks come together, and what ended them. */
#include "py_world.h"

#include <limits.h>
#include <string.h>

static PyTypeObject *job_type; /* one module per process, which is never unloaded */

static PyObject *
new_job(fs_job *job, int data_fd, int lock_fd)
{
    fs_py_job *self = PyObject_New(fs_py_job, job_type);
    if (self == NULL) {
        fs_job_close(job);
        return NULL;
    }
    self->job = job;
    self->data_fd = data_fd;
    self->lock_fd = lock_fd;
    return (PyObject *)self;
}

/* An int; -1 with an exception when it does not fit. */
static int
to_int(PyObject *object)
{
    long value = PyLong_AsLong(object);
    if (value > INT_MAX || value < INT_MIN) {
        value = INT_MAX; /* refused below like any number of ranks that is too large */
    }
    return (int)value;
}

static PyObject *
job_threads(PyObject *Py_UNUSED(module), PyObject *arg)
{
    int n = to_int(arg);
    if (n == -1 && PyErr_Occurred()) {
        return NULL;
    }
    fs_job *job;
    fs_status st = fs_job_threads(n, &job);
    if (st == FS_OK) {
        fs_job_set_locate(job, fs_py_locate);
    }
    return st == FS_OK ? new_job(job, -1, -1) : fs_raise(st, NULL);
}

static PyObject *
job_create(PyObject *Py_UNUSED(module), PyObject *arg)
{
    int n = to_int(arg), data_fd, lock_fd;
    if (n == -1 && PyErr_Occurred()) {
        return NULL;
    }
    fs_job *job;
    fs_status st = fs_job_create(n, &job, &data_fd, &lock_fd);
    return st == FS_OK ? new_job(job, data_fd, lock_fd) : fs_raise(st, NULL);
}

static PyObject *
job_join(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static char *names[] = {"rank",    "size",    "name",    "parent", "folder",
                            "data_fd", "lock_fd", "timeout", NULL};
    fs_join join = {.interrupted = fs_py_check_signals};
    long long parent;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iisLziid:job_join", names, &join.rank,
                                     &join.size, &join.name, &parent, &join.folder, &join.data_fd,
                                     &join.lock_fd, &join.timeout_s)) {
        return NULL;
    }
    join.parent = parent;
    fs_job *job = NULL;
    fs_status st;
    FS_CALL(NULL, st, fs_job_join(&join, &job));
    if (st != FS_OK) {
        fs_job_close(job);
        return fs_raise(st, NULL);
    }
    fs_job_set_interrupted(job, fs_py_check_signals, NULL);
    return new_job(job, -1, -1);
}

static void
job_dealloc(PyObject *object)
{
    fs_py_job *self = (fs_py_job *)object;
    PyTypeObject *type = Py_TYPE(object);
    fs_job_close(self->job);
    type->tp_free(object);
    Py_DECREF(type);
}

fs_job *
fs_py_job_get(PyObject *object)
{
    fs_job *job = ((fs_py_job *)object)->job;
    if (job == NULL) {
        (void)FS_FAIL(FS_ESTATE, "the job is closed");
        (void)fs_raise(FS_ESTATE, NULL);
    }
    return job;
}

static PyObject *
job_leave(PyObject *self, PyObject *args)
{
    int rank, failed;
    const char *text;
    if (!PyArg_ParseTuple(args, "ipz:leave", &rank, &failed, &text)) {
        return NULL;
    }
    fs_job_leave(((fs_py_job *)self)->job, rank, failed != 0, text);
    Py_RETURN_NONE;
}

static PyObject *
job_say(PyObject *self, PyObject *args)
{
    int rank;
    const char *text;
    if (!PyArg_ParseTuple(args, "is:say", &rank, &text)) {
        return NULL;
    }
    fs_job *job = ((fs_py_job *)self)->job;
    if (job != NULL) {
        fs_job_say(job, rank, text);
    }
    Py_RETURN_NONE;
}

static PyObject *
job_answer_open(PyObject *self, PyObject *arg)
{
    int number = to_int(arg), fd = -1;
    fs_job *job = number == -1 && PyErr_Occurred() ? NULL : fs_py_job_get(self);
    if (job == NULL) {
        return NULL;
    }
    fs_status st = fs_job_answer_open(job, number, &number, &fd);
    return st == FS_OK ? Py_BuildValue("(ii)", number, fd) : fs_raise(st, NULL);
}

static PyObject *
job_answer_ready(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_job *job = fs_py_job_get(self);
    if (job == NULL) {
        return NULL;
    }
    fs_job_answer_ready(job);
    Py_RETURN_NONE;
}

static PyObject *
job_answer_on_top(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    const fs_job *job = ((fs_py_job *)self)->job;
    return PyBool_FromLong(job != NULL && fs_job_answer_is_on_top(job));
}

static PyObject *
job_answer_close(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    if (((fs_py_job *)self)->job != NULL) {
        fs_job_answer_close(((fs_py_job *)self)->job);
    }
    Py_RETURN_NONE;
}

static PyObject *
job_locate(PyObject *self, PyObject *arg)
{
    double patience = PyFloat_AsDouble(arg);
    fs_job *job = patience == -1.0 && PyErr_Occurred() ? NULL : fs_py_job_get(self);
    if (job == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    fs_job_locate(job, patience);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *
job_interrupt(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    if (((fs_py_job *)self)->job != NULL) {
        fs_job_interrupt(((fs_py_job *)self)->job);
    }
    Py_RETURN_NONE;
}

static PyObject *
job_close(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    fs_py_job *self = (fs_py_job *)object;
    fs_job_close(self->job);
    self->job = NULL;
    Py_RETURN_NONE;
}

static PyObject *
job_report(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_job *job = fs_py_job_get(self);
    if (job == NULL) {
        return NULL;
    }
    char text[FS_REPORT_NBYTES];
    fs_job_report(job, text, sizeof text);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *
job_cause(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    static const char *const names[] = {
        [FS_CAUSE_DIED] = "died",         [FS_CAUSE_LEFT] = "left",
        [FS_CAUSE_TIMEOUT] = "timeout",   [FS_CAUSE_MISMATCH] = "mismatch",
        [FS_CAUSE_INTERRUPTED] = "interrupted", [FS_CAUSE_ERROR] = "error",
    };
    fs_job *job = fs_py_job_get(self);
    if (job == NULL) {
        return NULL;
    }
    fs_cause cause = fs_job_cause(job);
    if (cause.kind == FS_CAUSE_NONE) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(si)", names[cause.kind], cause.rank);
}

static PyObject *
job_files(PyObject *object, void *Py_UNUSED(closure))
{
    fs_py_job *self = (fs_py_job *)object;
    return Py_BuildValue("(ii)", self->data_fd, self->lock_fd);
}

// ---- type ---------------------------------------------------------------------------------------

static PyMethodDef job_methods[] = {
    {"world", FS_METHOD(fs_py_job_world), METH_VARARGS | METH_KEYWORDS,
     "world($self, /, rank, ranks, timeout, report_after, threads, device=None, ordinal=0)\n--\n\n"
     "This rank's world of the whole job; collective. threads 0: this rank's share of ranks."},
    {"leave", job_leave, METH_VARARGS,
     "leave($self, rank, failed, text, /)\n--\n\nMarks a rank as gone, and says how."},
    {"say", job_say, METH_VARARGS,
     "say($self, rank, text, /)\n--\n\nKeeps a line of a rank's log for reports."},
    {"answer_open", job_answer_open, METH_O,
     "answer_open($self, signal, /)\n--\n\n(signal, descriptor) for the lines of a late rank; "
     "(0, -1): not to be had."},
    {"answer_ready", job_answer_ready, METH_NOARGS,
     "answer_ready($self, /)\n--\n\nThis rank may be asked where it is."},
    {"answer_on_top", job_answer_on_top, METH_NOARGS,
     "answer_on_top($self, /)\n--\n\nDoes the signal still reach the handler of the lines?"},
    {"answer_close", job_answer_close, METH_NOARGS,
     "answer_close($self, /)\n--\n\nThis rank is not asked any more."},
    {"interrupt", job_interrupt, METH_NOARGS,
     "interrupt($self, /)\n--\n\nEnds every wait of the job."},
    {"locate", job_locate, METH_O,
     "locate($self, patience, /)\n--\n\nAsks the ranks that do not wait where they are, for the "
     "report; seconds."},
    {"report", job_report, METH_NOARGS,
     "report($self, /)\n--\n\nWho has come, who has not, and why."},
    {"cause", job_cause, METH_NOARGS,
     "cause($self, /)\n--\n\n(kind, rank) of what ended the job, or None."},
    {"close", job_close, METH_NOARGS, "close($self, /)\n--\n\nDrops this reference."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef job_getset[] = {
    {"files", job_files, NULL, "(data, locks): descriptors for children of job_create", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot job_slots[] = {
    {Py_tp_dealloc, (void *)job_dealloc},
    {Py_tp_methods, job_methods},
    {Py_tp_getset, job_getset},
    {Py_tp_doc, "The ranks' shared fate. Made by job_threads, job_create or job_join."},
    {0, NULL},
};

static PyType_Spec job_spec = {
    .name = "flatshard._core.Job",
    .basicsize = sizeof(fs_py_job),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = job_slots,
};

static PyMethodDef functions[] = {
    {"job_threads", job_threads, METH_O,
     "job_threads($module, n, /)\n--\n\nA job whose n ranks are threads of this process."},
    {"job_create", job_create, METH_O,
     "job_create($module, size, /)\n--\n\nThe state of a job of processes, for a launcher."},
    {"job_join", FS_METHOD(job_join), METH_VARARGS | METH_KEYWORDS,
     "job_join($module, /, rank, size, name, parent, folder, data_fd, lock_fd, timeout)\n--\n\n"
     "Joins a job of processes of this host."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_job(PyObject *module)
{
    job_type = (PyTypeObject *)PyType_FromSpec(&job_spec);
    if (job_type == NULL || PyModule_AddObjectRef(module, "Job", (PyObject *)job_type) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
