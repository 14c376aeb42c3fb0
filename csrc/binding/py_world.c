/* Worlds as Python objects: how they begin and end, and what can be asked of them. */
#include "py_world.h"

#include <stdlib.h>
#include <string.h>

#include "../base/arena.h"
#include "../base/cpu.h"
#include "../base/env.h"
#include "py_closing.h"
#include "py_device.h"
#include "py_layout.h"

static PyTypeObject *world_type; /* one module per process, which is never unloaded */

// ---- events -------------------------------------------------------------------------------------

static void
deliver_events(fs_py_world *self)
{
    char text[FS_REPORT_NBYTES];
    while (fs_world_next_event(self->world, text, sizeof text)) {
        if (self->on_event == NULL) {
            continue;
        }
        /* It may have been cut in the middle of a character. */
        PyObject *whole = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
        PyObject *result =
            whole != NULL ? PyObject_CallOneArg(self->on_event, whole) : NULL;
        if (result == NULL) {
            PyErr_WriteUnraisable(self->on_event);
        }
        Py_XDECREF(result);
        Py_XDECREF(whole);
    }
}

/* The same for a world, whose reports go to the logger while it still waits. */
static bool
look_up(void *ctx)
{
    PyGILState_STATE state = PyGILState_Ensure();
    bool stop = PyErr_Occurred() != NULL;
    if (!stop) {
        deliver_events(ctx);
        stop = PyErr_CheckSignals() < 0;
    }
    PyGILState_Release(state);
    return stop;
}

// ---- world --------------------------------------------------------------------------------------

/* Threads of this rank when the caller does not say: FLATSHARD_THREADS, else its share. */
static int
choose_threads(long asked, int ranks, size_t *out)
{
    const char *text = fs_env_get("FLATSHARD_THREADS");
    if (asked > 0) {
        *out = (size_t)asked;
    } else if (text != NULL) {
        char *end;
        long value = strtol(text, &end, 10);
        if (*end != '\0' || value < 1 || value > 4096) {
            (void)FS_FAIL(FS_EINVAL, "FLATSHARD_THREADS=%s is not a number of threads, 1 to 4096",
                          text);
            (void)fs_raise(FS_EINVAL, NULL);
            return -1;
        }
        *out = (size_t)value;
    } else {
        unsigned share = fs_cpu_count() / (unsigned)ranks;
        *out = share > 0 ? share : 1;
    }
    return 0;
}

PyObject *
fs_py_job_world(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"rank",   "ranks",   "timeout", "report_after", "threads",
                            "device", "ordinal", NULL};
    PyObject *device = Py_None;
    int rank, ranks, ordinal = 0;
    long threads = 0;
    fs_deadlines deadlines;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiddl|Oi:world", names, &rank, &ranks,
                                     &deadlines.timeout_s, &deadlines.report_after_s, &threads,
                                     &device, &ordinal)) {
        return NULL;
    }
    const fs_device *table = device != Py_None ? fs_py_device_get(device) : NULL;
    if (device != Py_None && table == NULL) {
        return NULL;
    }
    fs_job *job = fs_py_job_get(object);
    if (job == NULL) {
        return NULL;
    }
    fs_py_world *self = PyObject_New(fs_py_world, world_type);
    if (self == NULL) {
        return NULL;
    }
    self->world = NULL;
    self->parent = Py_NewRef(object);
    self->exec = (fs_exec){0};
    self->closes_late = table != NULL && fs_job_is_threads(job);
    self->on_event = NULL;
    if (choose_threads(threads, ranks > 0 ? ranks : 1, &self->threads) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->ordinal = ordinal;
    fs_status st;
    if (table != NULL) {
        self->exec.device = table;
        FS_CALL(NULL, st, table->runtime->context_open(ordinal, &self->exec.context));
    } else {
        st = fs_device_choose(&self->exec.device);
    }
    if (st == FS_OK) {
        st = fs_pool_open(self->threads, &self->exec.pool);
    }
    if (st == FS_OK) {
        FS_CALL(NULL, st, fs_world_open(job, rank, &self->exec, &deadlines, &self->world));
    }
    if (st != FS_OK) {
        fs_world *world = self->world;
        self->world = NULL;
        if (st == FS_ABORTED && world == NULL) {
            (void)fs_raise_job(job, rank);
        } else {
            (void)fs_raise(st, world);
        }
        fs_world_close(world);
        Py_DECREF(self);
        return NULL;
    }
    fs_world_set_interrupted(self->world, look_up, self);
    if (!fs_job_is_threads(job)) {
        fs_py_note_caller(self->world); /* of init(): all that is known until the first operation */
    }
    return (PyObject *)self;
}

fs_world *
fs_py_world_get(PyObject *object)
{
    if (!PyObject_TypeCheck(object, world_type)) {
        (void)FS_FAIL(FS_ETYPE, "expected a world, got %s", Py_TYPE(object)->tp_name);
        (void)fs_raise(FS_ETYPE, NULL);
        return NULL;
    }
    fs_world *world = ((fs_py_world *)object)->world;
    if (world == NULL) {
        (void)FS_FAIL(FS_ESTATE, "the world is closed");
        (void)fs_raise(FS_ESTATE, NULL);
    }
    return world;
}

static void
world_end(fs_py_world *self)
{
    if (self->world != NULL) {
        deliver_events(self);
        fs_world_close(self->world);
        self->world = NULL;
    }
}

/* What closes a context: it outlives its world's object where that is closed late. */
typedef struct context_end {
    const fs_runtime *runtime;
    fs_context *context;
} context_end;

static void
close_context(void *what)
{
    context_end *end = what;
    end->runtime->context_close(end->context);
    fs_free(end);
}

static void
end_context(fs_py_world *self)
{
    context_end *end;
    if (self->exec.context == NULL) {
        return;
    }
    if (fs_calloc(1, sizeof *end, &end) != FS_OK) {
        self->exec.device->runtime->context_close(self->exec.context);
        return;
    }
    *end = (context_end){self->exec.device->runtime, self->exec.context};
    fs_py_close_collected(close_context, end, NULL, (PyObject *)self);
}

static void
world_dealloc(PyObject *object)
{
    fs_py_world *self = (fs_py_world *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *type_, *value, *traceback;
    PyErr_Fetch(&type_, &value, &traceback);
    world_end(self);
    fs_pool_close(self->exec.pool);
    end_context(self);
    Py_XDECREF(self->on_event);
    Py_XDECREF(self->parent);
    PyErr_Restore(type_, value, traceback);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *
world_close(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    fs_py_world *self = (fs_py_world *)object;
    if (self->world != NULL && self->exec.context != NULL) {
        fs_status finished;
        FS_CALL(self->world, finished, fs_world_finish(self->world));
        (void)finished; /* the job is over: its end was told where it was met */
    }
    if (self->world != NULL && !fs_world_enter(self->world)) {
        (void)FS_FAIL(FS_ESTATE, "the world is in a call of another thread");
        return fs_raise(FS_ESTATE, NULL);
    }
    if (self->world != NULL) {
        deliver_events(self); /* may run Python, so still in the call */
        fs_world_exit(self->world); /* shards that outlive it are told that it is closed */
    }
    world_end(self);
    Py_RETURN_NONE;
}

static PyObject *
world_leave(PyObject *object, PyObject *args)
{
    int failed;
    const char *text;
    fs_world *world = fs_py_world_get(object);
    if (world == NULL || !PyArg_ParseTuple(args, "ps:leave", &failed, &text)) {
        return NULL;
    }
    fs_job_leave(fs_world_job(world), fs_world_job_rank(world), failed != 0, text);
    Py_RETURN_NONE;
}

static PyObject *
world_split(PyObject *object, PyObject *args)
{
    long long color, key;
    fs_world *world = fs_py_world_get(object), *part = NULL;
    if (world == NULL || !PyArg_ParseTuple(args, "LL:split", &color, &key)) {
        return NULL;
    }
    fs_status st;
    FS_CALL(world, st, fs_world_split(world, color, key, &part));
    if (st != FS_OK) {
        fs_world_close(part);
        return fs_raise(st, world);
    }
    if (part == NULL) {
        Py_RETURN_NONE;
    }
    fs_py_world *self = PyObject_New(fs_py_world, world_type);
    if (self == NULL) {
        fs_world_close(part);
        return NULL;
    }
    const fs_py_world *parent = (fs_py_world *)object;
    self->world = part;
    self->parent = Py_NewRef(object);
    self->exec = (fs_exec){0};
    self->closes_late = ((fs_py_world *)object)->closes_late;
    self->ordinal = parent->ordinal;
    self->threads = parent->threads;
    self->on_event = Py_XNewRef(parent->on_event);
    fs_world_set_interrupted(part, look_up, self);
    return (PyObject *)self;
}

static PyObject *
world_usable(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    fs_world *world = fs_py_world_get(object);
    if (world == NULL) {
        return NULL;
    }
    fs_status st = fs_world_usable(world);
    if (st != FS_OK) {
        return fs_raise(st, world);
    }
    Py_RETURN_NONE;
}

static PyObject *
world_set_deadlines(PyObject *object, PyObject *args)
{
    fs_deadlines deadlines;
    fs_world *world = fs_py_world_get(object);
    if (world == NULL || !PyArg_ParseTuple(args, "dd:set_deadlines", &deadlines.timeout_s,
                                           &deadlines.report_after_s)) {
        return NULL;
    }
    fs_world_set_deadlines(world, &deadlines);
    Py_RETURN_NONE;
}

static PyObject *
world_deadlines(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    fs_world *world = fs_py_world_get(object);
    if (world == NULL) {
        return NULL;
    }
    fs_deadlines deadlines = fs_world_deadlines(world);
    return Py_BuildValue("(dd)", deadlines.timeout_s, deadlines.report_after_s);
}

static PyObject *
world_note(PyObject *object, PyObject *args)
{
    const char *unit;
    long long step;
    fs_world *world = fs_py_world_get(object);
    if (world == NULL || !PyArg_ParseTuple(args, "zL:note", &unit, &step)) {
        return NULL;
    }
    fs_world_note_unit(world, unit, step);
    Py_RETURN_NONE;
}

static PyObject *
world_memory(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    fs_world *world = fs_py_world_get(object);
    return world != NULL ? fs_py_ledger_dict(fs_world_ledger(world)) : NULL;
}

static PyObject *
world_threads_used(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    fs_world *world = fs_py_world_get(object);
    return world != NULL ? PyLong_FromSize_t(fs_pool_threads_used(fs_world_exec(world)->pool))
                         : NULL;
}

static PyObject *
world_get_number(PyObject *object, void *closure)
{
    static int (*const getters[])(const fs_world *) = {fs_world_rank, fs_world_size,
                                                       fs_world_job_rank};
    fs_world *world = fs_py_world_get(object);
    return world != NULL ? PyLong_FromLong(getters[(intptr_t)closure](world)) : NULL;
}

static PyObject *
world_get_threads(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((fs_py_world *)object)->threads);
}

static PyObject *
world_get_is_threads(PyObject *object, void *Py_UNUSED(closure))
{
    fs_world *world = fs_py_world_get(object);
    return world != NULL ? PyBool_FromLong(fs_world_is_threads(world)) : NULL;
}

static PyObject *
world_get_device(PyObject *object, void *Py_UNUSED(closure))
{
    fs_world *world = fs_py_world_get(object);
    return world != NULL ? PyUnicode_FromString(fs_world_exec(world)->device->name) : NULL;
}

static PyObject *
world_get_ordinal(PyObject *object, void *Py_UNUSED(closure))
{
    fs_world *world = fs_py_world_get(object);
    if (world == NULL) {
        return NULL;
    }
    return fs_world_exec(world)->context != NULL
               ? PyLong_FromLong(((fs_py_world *)object)->ordinal)
               : Py_NewRef(Py_None);
}

static PyObject *
world_get_on_event(PyObject *object, void *Py_UNUSED(closure))
{
    PyObject *on_event = ((fs_py_world *)object)->on_event;
    return Py_NewRef(on_event != NULL ? on_event : Py_None);
}

static int
world_set_on_event(PyObject *object, PyObject *value, void *Py_UNUSED(closure))
{
    Py_XSETREF(((fs_py_world *)object)->on_event,
               value != NULL && value != Py_None ? Py_NewRef(value) : NULL);
    return 0;
}

// ---- type ---------------------------------------------------------------------------------------

static const PyMethodDef life_methods[] = {
    {"leave", world_leave, METH_VARARGS,
     "leave($self, failed, text, /)\n--\n\nThis rank is gone, and how; its peers learn it."},
    {"split", world_split, METH_VARARGS,
     "split($self, color, key, /)\n--\n\nThe world of the ranks with this color; None for color < "
     "0."},
    {"usable", world_usable, METH_NOARGS,
     "usable($self, /)\n--\n\nRaises if the world is poisoned."},
    {"set_deadlines", world_set_deadlines, METH_VARARGS,
     "set_deadlines($self, timeout, report_after, /)\n--\n\nSeconds, from the next wait on."},
    {"deadlines", world_deadlines, METH_NOARGS,
     "deadlines($self, /)\n--\n\n(timeout, report_after)."},
    {"note", world_note, METH_VARARGS,
     "note($self, unit, step, /)\n--\n\nWhat reports say this rank is doing."},
    {"memory", world_memory, METH_NOARGS,
     "memory($self, /)\n--\n\nclass -> (private, world, peak) bytes of this rank."},
    {"threads_used", world_threads_used, METH_NOARGS,
     "threads_used($self, /)\n--\n\nThreads that have run at least one task."},
    {"close", world_close, METH_NOARGS,
     "close($self, /)\n--\n\nLeaves. Waits for the rank's device; on the CPU for nothing."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef world_getset[] = {
    {"rank", world_get_number, NULL, "this rank in the world", (void *)0},
    {"size", world_get_number, NULL, "ranks of the world", (void *)1},
    {"job_rank", world_get_number, NULL, "this rank in the whole job", (void *)2},
    {"threads", world_get_threads, NULL, "compute threads of this rank", NULL},
    {"is_threads", world_get_is_threads, NULL, "are ranks threads of one process?", NULL},
    {"device", world_get_device, NULL, "name of the device table", NULL},
    {"ordinal", world_get_ordinal, NULL, "number of the rank's device, or None on the CPU", NULL},
    {"on_event", world_get_on_event, world_set_on_event, "called with the text of each event",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef world_methods[64];

static PyType_Slot world_slots[] = {
    {Py_tp_dealloc, (void *)world_dealloc},
    {Py_tp_methods, world_methods},
    {Py_tp_getset, world_getset},
    {Py_tp_doc, "One rank's part in a world."},
    {0, NULL},
};

static PyType_Spec world_spec = {
    .name = "flatshard._core.World",
    .basicsize = sizeof(fs_py_world),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = world_slots,
};

int
fs_py_add_world(PyObject *module)
{
    fs_py_set_package_folder(module);
    const PyMethodDef *const parts[] = {life_methods, fs_py_collect_methods, fs_py_log_methods,
                                        fs_py_device_methods, NULL};
    if (fs_py_join_methods(parts, world_methods,
                           sizeof world_methods / sizeof world_methods[0]) < 0) {
        return -1;
    }
    world_type = (PyTypeObject *)PyType_FromSpec(&world_spec);
    if (world_type == NULL ||
        PyModule_AddObjectRef(module, "World", (PyObject *)world_type) < 0 ||
        fs_py_add_job(module) < 0) {
        return -1;
    }
    return fs_py_add_log(module);
}
