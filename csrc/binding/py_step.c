/* The part of _core.Shards that trains: gradients in, the step and its verdict. */
#include "py_device.h"
#include "py_shards.h"

#include "../shard/optim.h"

// ---- gradients ----------------------------------------------------------------------------------

static PyObject *
shards_grad_put(PyObject *self, PyObject *args)
{
    int param;
    PyObject *array;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "iO:grad_put", &param, &array) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    fs_buffer buffer;
    if (fs_py_shards_check_param(object, param) < 0 ||
        (fs_device_array_check(array)
             ? fs_device_array_take(array, object->world_object, "gradient", &buffer)
             : fs_buffer_take(array, "gradient", false, &buffer)) < 0) {
        object->busy = false;
        return NULL;
    }
    const fs_param *p = &fs_shards_layout(object->shards)->params[param];
    if (buffer.n != p->numel || !fs_dtype_is_float(buffer.dtype)) {
        PyErr_Format(PyExc_ValueError,
                     "gradient of %s: %zu elements of %s, expected %zu of a float dtype", p->name,
                     buffer.n, fs_dtype_name(buffer.dtype), p->numel);
        fs_buffer_drop(&buffer);
        object->busy = false;
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_grad_put(object->shards, param, buffer.data, buffer.dtype));
    fs_buffer_drop(&buffer);
    return fs_py_shards_answer(object, status);
}

static PyObject *
shards_grad_publish(PyObject *self, PyObject *args)
{
    int unit, keep_local;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "ip:grad_publish", &unit, &keep_local) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    if (fs_py_shards_check_unit(object, unit) < 0) {
        object->busy = false;
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_grad_publish(object->shards, unit, keep_local != 0));
    return fs_py_shards_answer(object, status);
}

static PyObject *
shards_round_end(PyObject *self, PyObject *args)
{
    long long count;
    int keep_local;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "Lp:round_end", &count, &keep_local) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_round_end(object->shards, count, keep_local != 0));
    return fs_py_shards_answer(object, status);
}

/* freeze(flags): a byte for each parameter. */
static PyObject *
shards_freeze(PyObject *self, PyObject *args)
{
    Py_buffer flags;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "y*:freeze", &flags)) {
        return NULL;
    }
    if ((object = fs_py_shards_take(self)) == NULL) {
        PyBuffer_Release(&flags);
        return NULL;
    }
    int params_n = fs_shards_layout(object->shards)->params_n;
    if (flags.len != params_n) {
        PyErr_Format(PyExc_ValueError, "%zd flags for %d parameters", flags.len, params_n);
        object->busy = false;
        PyBuffer_Release(&flags);
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_shards_freeze(object->shards, flags.buf));
    PyBuffer_Release(&flags);
    return fs_py_shards_answer(object, status);
}

static PyObject *
shards_grad_drop(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_py_shards *object = fs_py_shards_take(self);
    if (object == NULL) {
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_grad_drop(object->shards));
    return fs_py_shards_answer(object, status);
}

// ---- step ---------------------------------------------------------------------------------------

static PyObject *
shards_open_moments(PyObject *self, PyObject *args)
{
    int moments_n;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "i:open_moments", &moments_n) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    fs_status status;
    SHARDS_CALL(object, status, fs_shards_open_moments(object->shards, moments_n));
    return fs_py_shards_answer(object, status);
}

static PyObject *
shards_set_loss_scale(PyObject *self, PyObject *args)
{
    double scale;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "d:set_loss_scale", &scale) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    object->busy = false;
    return fs_py_shards_answer(object, fs_shards_set_loss_scale(object->shards, scale));
}

static PyObject *
shards_agree(PyObject *self, PyObject *args)
{
    double max_norm;
    int norm, skip;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "dip:agree", &max_norm, &norm, &skip) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    if (norm < 0 || norm >= FS_NORM_COUNT) {
        object->busy = false;
        return PyErr_Format(PyExc_ValueError, "norm %d of %d", norm, (int)FS_NORM_COUNT);
    }
    fs_verdict v;
    fs_status status;
    SHARDS_CALL(object, status,
                fs_step_agree(object->shards, max_norm, (fs_grad_norm)norm, skip != 0, &v));
    if (status != FS_OK) {
        return fs_raise(status, object->world);
    }
    return Py_BuildValue("(Niddiil)", PyBool_FromLong(v.applied), (int)v.reason, v.norm, v.clip,
                         v.bad_param, v.bad_rank, (long)v.count);
}

/* A list of (lr, beta1, beta2, eps, weight_decay, momentum, nesterov, lr_decay). */
static fs_group *
take_groups(PyObject *list, Py_ssize_t *out_n)
{
    PyObject *fast = PySequence_Fast(list, "groups: expected a sequence");
    if (fast == NULL) {
        return NULL;
    }
    Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    fs_group *groups = PyMem_Calloc((size_t)n + 1, sizeof *groups);
    if (groups == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t g = 0; groups != NULL && g < n; g++) {
        fs_group *group = &groups[g];
        PyObject *row = PySequence_Fast_GET_ITEM(fast, g);
        int nesterov = 0;
        if (!PyTuple_Check(row)) {
            PyErr_Format(PyExc_TypeError, "groups[%zd]: expected a tuple, got %s", g,
                         Py_TYPE(row)->tp_name);
            PyMem_Free(groups);
            groups = NULL;
            break;
        }
        if (!PyArg_ParseTuple(row, "ddddddpd", &group->lr,
                              &group->beta1, &group->beta2, &group->eps, &group->weight_decay,
                              &group->momentum, &nesterov, &group->lr_decay)) {
            PyMem_Free(groups);
            groups = NULL;
            break;
        }
        group->nesterov = nesterov != 0;
    }
    Py_DECREF(fast);
    *out_n = n;
    return groups;
}

/* Steps as an optimizer counts them. Written in the call that ends the step: a Ctrl-C on its heels
 * finds the books balanced. */
enum { BOOK_APPLIED, BOOK_SKIPPED, BOOK_SKIPS_IN_ROW, BOOK_LAST_REASON, BOOK_COUNT };

static void
keep_books(int64_t *books, fs_reason reason)
{
    if (reason == FS_APPLIED) {
        books[BOOK_APPLIED]++;
        books[BOOK_SKIPS_IN_ROW] = 0;
    } else if (reason != FS_SKIP_NO_GRADIENT) {
        books[BOOK_SKIPPED]++;
        books[BOOK_SKIPS_IN_ROW]++;
    }
    books[BOOK_LAST_REASON] = (int64_t)reason + 1; /* 0: seen */
}

static PyObject *
shards_finish(PyObject *self, PyObject *args)
{
    int rule, reason;
    PyObject *groups_list, *group_of_array, *steps_array, *books_array;
    fs_py_shards *object;
    if (!PyArg_ParseTuple(args, "iOOOOi:finish", &rule, &groups_list, &group_of_array,
                          &steps_array, &books_array, &reason) ||
        (object = fs_py_shards_take(self)) == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    fs_buffer group_of = {0}, steps = {0}, books = {0};
    Py_ssize_t groups_n = 0;
    fs_group *groups = take_groups(groups_list, &groups_n);
    size_t params_n = (size_t)fs_shards_layout(object->shards)->params_n;
    if (groups == NULL ||
        fs_buffer_take_dtype(group_of_array, "group_of", false, FS_I32, &group_of) < 0 ||
        fs_buffer_take_dtype(steps_array, "steps", true, FS_I64, &steps) < 0 ||
        fs_buffer_take_dtype(books_array, "books", true, FS_I64, &books) < 0) {
        goto done;
    }
    if (group_of.n != params_n || steps.n != params_n || rule < 0 || rule >= FS_RULE_COUNT ||
        books.n != BOOK_COUNT) {
        PyErr_Format(PyExc_ValueError,
                     "rule %d, %zu groups and %zu steps for %zu parameters, %zu books", rule,
                     group_of.n, steps.n, params_n, books.n);
        goto done;
    }
    for (size_t p = 0; p < params_n; p++) {
        int group = ((const int *)group_of.data)[p];
        if (group < 0 || group >= groups_n) {
            PyErr_Format(PyExc_ValueError, "parameter %zu is in group %d of %zd", p, group,
                         groups_n);
            goto done;
        }
    }
    fs_status status;
    SHARDS_CALL(
        object, status,
        fs_optimizer_finish(object->shards, (fs_rule)rule, groups, group_of.data, steps.data));
    if (!fs_step_agreed(object->shards)) { /* also where a signal handler has raised meanwhile */
        keep_books(books.data, (fs_reason)reason);
    }
    result = fs_py_shards_answer(object, status);
done:
    object->busy = false;
    fs_buffer_drop(&group_of);
    fs_buffer_drop(&steps);
    fs_buffer_drop(&books);
    PyMem_Free(groups);
    return result;
}

/* Was a step agreed on and not finished? */
static PyObject *
shards_agreed(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_py_shards *object = fs_py_shards_take(self);
    if (object == NULL) {
        return NULL;
    }
    object->busy = false;
    return PyBool_FromLong(fs_step_agreed(object->shards));
}

/* Which parameters had a gradient in the step agreed on, as bytes. */
static PyObject *
shards_had(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_py_shards *object = fs_py_shards_take(self);
    if (object == NULL) {
        return NULL;
    }
    object->busy = false;
    return PyBytes_FromStringAndSize((const char *)fs_step_had(object->shards),
                                     fs_shards_layout(object->shards)->params_n);
}

static PyObject *
shards_check_whole(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    fs_py_shards *object = fs_py_shards_take(self);
    if (object == NULL) {
        return NULL;
    }
    object->busy = false;
    return fs_py_shards_answer(object, fs_shards_whole(object->shards));
}

// ---- methods ------------------------------------------------------------------------------------

const PyMethodDef fs_py_step_methods[] = {
    {"grad_put", shards_grad_put, METH_VARARGS,
     "grad_put($self, param, array, /)\n--\n\nCopies or adds a whole gradient into its slot."},
    {"grad_publish", shards_grad_publish, METH_VARARGS,
     "grad_publish($self, unit, keep_local, /)\n--\n\nThe unit's gradient is complete."},
    {"round_end", shards_round_end, METH_VARARGS,
     "round_end($self, count, keep_local, /)\n--\n\nEnds a micro-batch; count -1: none given."},
    {"grad_drop", shards_grad_drop, METH_NOARGS,
     "grad_drop($self, /)\n--\n\nForgets this step's gradients. Collective."},
    {"freeze", shards_freeze, METH_VARARGS,
     "freeze($self, flags, /)\n--\n\nA byte for each parameter: is it frozen for now? Collective."},
    {"open_moments", shards_open_moments, METH_VARARGS,
     "open_moments($self, n, /)\n--\n\nAllocates n moments of each kept element. Collective."},
    {"set_loss_scale", shards_set_loss_scale, METH_VARARGS,
     "set_loss_scale($self, scale, /)\n--\n\nBy what gradients come multiplied; 0: nothing."},
    {"agree", shards_agree, METH_VARARGS,
     "agree($self, max_norm, norm, skip, /)\n--\n\n"
     "(applied, reason, norm, clip, bad_param, bad_rank, count). Collective."},
    {"finish", shards_finish, METH_VARARGS,
     "finish($self, rule, groups, group_of, steps, books, reason, /)\n--\n\n"
     "Updates, publishes, and counts in books: applied, skipped, skips in a row, last reason + 1. "
     "Collective."},
    {"agreed", shards_agreed, METH_NOARGS,
     "agreed($self, /)\n--\n\nWas a step agreed on and not finished?"},
    {"had", shards_had, METH_NOARGS,
     "had($self, /)\n--\n\nA byte for each parameter: did it have a gradient?"},
    {"check_whole", shards_check_whole, METH_NOARGS,
     "check_whole($self, /)\n--\n\nRaises RuntimeError after a torn step."},
    {NULL, NULL, 0, NULL},
};
