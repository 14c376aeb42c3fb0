/* Kernels, continued: what an optimizer step runs, the sum over ranks and the update. */
#include "py_kernels.h"

#include <string.h>

// ---- sum over ranks -----------------------------------------------------------------------------

static PyObject *
kernels_sum(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"acc", "sources", "accumulate", NULL};
    const fs_exec *exec = &((fs_py_kernels *)object)->exec;
    PyObject *acc_object, *sources, *result = NULL;
    int accumulate = 0;
    fs_buffer acc, src[FS_SOURCES_MAX];
    const void *data[FS_SOURCES_MAX];
    Py_ssize_t taken = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$p:sum", names, &acc_object, &sources,
                                     &accumulate)) {
        return NULL;
    }
    PyObject *list = PySequence_Fast(sources, "sources must be a sequence of arrays and None");
    if (list == NULL) {
        return NULL;
    }
    Py_ssize_t src_n = PySequence_Fast_GET_SIZE(list);
    if (fs_buffer_take(acc_object, "acc", true, &acc) < 0) {
        Py_DECREF(list);
        return NULL;
    }
    fs_sums found = {.bad_source = -1};
    fs_sum sum = {.src = data, .src_n = (size_t)src_n, .src_dtype = acc.dtype, .acc = acc.data,
                  .acc_dtype = acc.dtype, .accumulate = accumulate != 0, .n = acc.n,
                  .found = &found};
    fs_status st = fs_py_float_dtype(&acc, "acc");
    bool first = true;
    if (st == FS_OK && src_n > FS_SOURCES_MAX) {
        st = FS_FAIL(FS_EINVAL, "at most %d sources, not %zd", FS_SOURCES_MAX, src_n);
    }
    for (; st == FS_OK && taken < src_n; taken++) {
        PyObject *item = PySequence_Fast_GET_ITEM(list, taken);
        if (fs_py_take_optional(item, "sources", false, &src[taken]) < 0) {
            goto done;
        }
        data[taken] = src[taken].data;
        if (src[taken].array == NULL) {
            continue;
        }
        sum.src_dtype = first ? src[taken].dtype : sum.src_dtype;
        first = false;
        st = fs_py_same_length(&acc, &src[taken], "a source");
        if (st == FS_OK) {
            st = fs_py_float_dtype(&src[taken], "a source");
        }
        if (st == FS_OK && src[taken].dtype != sum.src_dtype) {
            st = FS_FAIL(FS_ETYPE, "sources are of several dtypes");
        }
    }
    if (st == FS_OK) {
        FS_OPERATE(exec->device->sum(exec, &sum));
        result = Py_BuildValue("(dNd)", found.sumsq, PyBool_FromLong(found.finite != 0),
                               found.absmax);
    } else {
        (void)fs_raise(st, NULL);
    }
done:
    while (taken-- > 0) {
        fs_py_drop_optional(&src[taken]);
    }
    fs_buffer_drop(&acc);
    Py_DECREF(list);
    return result;
}

// ---- update -------------------------------------------------------------------------------------

enum {
    UPDATE_GRAD,
    UPDATE_WEIGHT,
    UPDATE_MASTER,
    UPDATE_READ,
    UPDATE_M1,
    UPDATE_M2,
    UPDATE_M3,
    UPDATE_ARRAYS
};

static const char *const update_arrays[UPDATE_ARRAYS] = {
    "grad", "weight", "master", "weight_read", "moment1", "moment2", "moment3",
};

static fs_status
rule_parse(const char *name, fs_rule *out)
{
    static const char *const names[FS_RULE_COUNT] = {
        [FS_RULE_SGD] = "sgd", [FS_RULE_ADAM] = "adam", [FS_RULE_ADAMW] = "adamw",
        [FS_RULE_LION] = "lion", [FS_RULE_ADAGRAD] = "adagrad",
    };
    for (int rule = 0; rule < FS_RULE_COUNT; rule++) {
        if (strcmp(name, names[rule]) == 0) {
            *out = (fs_rule)rule;
            return FS_OK;
        }
    }
    return FS_FAIL(FS_EINVAL, "rule is '%s', not sgd, adam, adamw, lion or adagrad", name);
}

/* Are these arrays ones that the operation takes together? */
static fs_status
update_check(fs_rule rule, const fs_buffer *arrays)
{
    for (int i = 0; i < UPDATE_ARRAYS; i++) {
        FS_TRY(fs_py_same_length(&arrays[UPDATE_GRAD], &arrays[i], update_arrays[i]));
        FS_TRY(fs_py_float_dtype(&arrays[i], update_arrays[i]));
    }
    const fs_buffer *m1 = &arrays[UPDATE_M1], *m2 = &arrays[UPDATE_M2], *m3 = &arrays[UPDATE_M3];
    bool adam = rule == FS_RULE_ADAM || rule == FS_RULE_ADAMW;
    if (adam && (m1->array == NULL || m2->array == NULL)) {
        return FS_FAIL(FS_EINVAL, "adam and adamw need moment1 and moment2");
    }
    if ((rule == FS_RULE_LION || rule == FS_RULE_ADAGRAD) && m1->array == NULL) {
        return FS_FAIL(FS_EINVAL, "lion and adagrad need moment1");
    }
    if (!adam && (m2->array != NULL || m3->array != NULL)) {
        return FS_FAIL(FS_EINVAL, "moment2 and moment3 are for adam and adamw");
    }
    for (int i = UPDATE_M2; i <= UPDATE_M3; i++) {
        if (m1->array != NULL && arrays[i].array != NULL && m1->dtype != arrays[i].dtype) {
            return FS_FAIL(FS_ETYPE, "moment1 is %s, %s %s", fs_dtype_name(m1->dtype),
                           update_arrays[i], fs_dtype_name(arrays[i].dtype));
        }
    }
    if (arrays[UPDATE_MASTER].array != NULL && arrays[UPDATE_MASTER].dtype != FS_F32) {
        return FS_FAIL(FS_ETYPE, "master is %s, not float32",
                       fs_dtype_name(arrays[UPDATE_MASTER].dtype));
    }
    if (arrays[UPDATE_MASTER].array == NULL && arrays[UPDATE_WEIGHT].array == NULL &&
        arrays[UPDATE_READ].array == NULL) {
        return FS_FAIL(FS_EINVAL, "one of master, weight and weight_read must be given");
    }
    return FS_OK;
}

static PyObject *
kernels_update(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rule",
                            "grad",
                            "weight",
                            "master",
                            "weight_read",
                            "moment1",
                            "moment2",
                            "moment3",
                            "grad_scale",
                            "lr",
                            "decay",
                            "beta1",
                            "beta2",
                            "one_minus_beta1",
                            "one_minus_beta2",
                            "eps",
                            "step_size",
                            "inv_sqrt_bc2",
                            "nesterov",
                            "first",
                            "stochastic",
                            "random_key",
                            "at",
                            NULL};
    const fs_exec *exec = &((fs_py_kernels *)object)->exec;
    PyObject *objects[UPDATE_ARRAYS] = {NULL};
    fs_buffer arrays[UPDATE_ARRAYS];
    const char *rule_name;
    int nesterov = 0, first = 0, stochastic = 0, taken = 0;
    unsigned long long random_key = 0, at = 0;
    fs_update u = {.grad_scale = 1.0f};
    fs_hyper *h = &u.hyper;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "sO|$OOOOOOffffffffffpppKK:update", names, &rule_name,
            &objects[UPDATE_GRAD], &objects[UPDATE_WEIGHT], &objects[UPDATE_MASTER],
            &objects[UPDATE_READ], &objects[UPDATE_M1], &objects[UPDATE_M2], &objects[UPDATE_M3],
            &u.grad_scale, &h->lr, &h->decay, &h->beta1, &h->beta2, &h->one_minus_beta1,
            &h->one_minus_beta2, &h->eps, &h->step_size, &h->inv_sqrt_bc2, &nesterov, &first,
            &stochastic, &random_key, &at)) {
        return NULL;
    }
    h->nesterov = nesterov != 0;
    h->first = first != 0;
    h->random_key = random_key;
    u.stochastic = stochastic != 0;
    u.first = at;
    fs_status st = rule_parse(rule_name, &h->rule);
    for (; st == FS_OK && taken < UPDATE_ARRAYS; taken++) {
        bool writeable = taken != UPDATE_GRAD && taken != UPDATE_READ;
        if (fs_py_take_optional(objects[taken], update_arrays[taken], writeable, &arrays[taken]) <
            0) {
            goto done;
        }
    }
    if (st == FS_OK) {
        st = update_check(h->rule, arrays);
    }
    if (st == FS_OK) {
        const fs_buffer *weight = &arrays[UPDATE_WEIGHT], *read = &arrays[UPDATE_READ];
        const fs_buffer *moment = &arrays[UPDATE_M1];
        u.grad = arrays[UPDATE_GRAD].data;
        u.grad_dtype = arrays[UPDATE_GRAD].dtype;
        u.master = arrays[UPDATE_MASTER].data;
        u.weight = weight->data;
        u.weight_read = read->data;
        u.weight_dtype = weight->array != NULL ? weight->dtype : read->dtype;
        u.moment1 = moment->data;
        u.moment2 = arrays[UPDATE_M2].data;
        u.moment3 = arrays[UPDATE_M3].data;
        u.moment_dtype = moment->array != NULL ? moment->dtype : FS_F32;
        u.n = arrays[UPDATE_GRAD].n;
        FS_OPERATE(exec->device->update(exec, &u));
    } else {
        (void)fs_raise(st, NULL);
    }
done:
    while (taken-- > 0) {
        fs_py_drop_optional(&arrays[taken]);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_RETURN_NONE;
}

// ---- methods ------------------------------------------------------------------------------------

const PyMethodDef fs_py_kernels_step_methods[] = {
    {"sum", FS_METHOD(kernels_sum), METH_VARARGS | METH_KEYWORDS,
     "sum($self, acc, sources, *, accumulate=False)\n--\n\n"
     "acc = (acc +) sum of sources in order; None is absent. Returns (sum of squares, finite, "
     "largest magnitude)."},
    {"update", FS_METHOD(kernels_update), METH_VARARGS | METH_KEYWORDS,
     "update($self, rule, grad, *, weight=None, master=None, weight_read=None, moment1=None, "
     "moment2=None, moment3=None, grad_scale=1.0, lr=0.0, decay=0.0, beta1=0.0, beta2=0.0, "
     "one_minus_beta1=0.0, "
     "one_minus_beta2=0.0, eps=0.0, step_size=0.0, inv_sqrt_bc2=0.0, nesterov=False, first=False, "
     "stochastic=False, random_key=0, at=0)"
     "\n--\n\nOne optimizer step; scalars are rounded to fp32."},
    {NULL, NULL, 0, NULL},
};
