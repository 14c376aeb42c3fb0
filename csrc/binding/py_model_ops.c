/* The model's operations one by one, for tests and benchmarks: model_op(kernels, "norm", rows=...).
 * Fields have the names of model_ops.h; what is not passed is zero or NULL. */
#include "binding.h"

#include <stddef.h>
#include <string.h>

#include "../base/arena.h"
#include "../base/cpu.h"
#include "../base/threads.h"
#include "../device/device.h"

// ---- fields -------------------------------------------------------------------------------------

typedef enum kind {
    SIZE,
    U64,
    BOOL,
    NUMBER32,
    NUMBER64,
    TYPE, /* scalars */
    FLOATS,
    INTS,
    ANY, /* arrays that are read */
    OUT_FLOATS,
    OUT_DOUBLES /* arrays that are written */
} kind;

typedef struct field {
    const char *name;
    size_t offset;
    kind kind;
} field;

#define F(member, k)                                                                               \
    {                                                                                              \
#member, offsetof(OP, member), k                                                           \
    }

#define OP fs_embed
static const field embed_fields[] = {F(rows, SIZE),        F(width, SIZE),     F(vocab, SIZE),
                                     F(tokens, INTS),      F(scale, NUMBER32), F(table, ANY),
                                     F(table_dtype, TYPE), F(out, OUT_FLOATS), {NULL, 0, SIZE}};
#undef OP
#define OP fs_embed_grad
static const field embed_grad_fields[] = {
    F(rows, SIZE), F(width, SIZE),        F(vocab, SIZE), F(scale, NUMBER32), F(dy, FLOATS),
    F(add, BOOL),  F(dtable, OUT_FLOATS), F(first, INTS), F(sorted, INTS),    {NULL, 0, SIZE}};
#undef OP
#define OP fs_norm
static const field norm_fields[] = {F(rows, SIZE),      F(width, SIZE),      F(x, FLOATS),
                                    F(branch, FLOATS),  F(bias, FLOATS),     F(alpha, NUMBER32),
                                    F(sum, OUT_FLOATS), F(weight, FLOATS),   F(eps, NUMBER64),
                                    F(out, OUT_FLOATS), F(rstd, OUT_FLOATS), {NULL, 0, SIZE}};
#undef OP
#define OP fs_norm_grad
static const field norm_grad_fields[] = {
    F(rows, SIZE),          F(width, SIZE),       F(x, FLOATS),           F(rstd, FLOATS),
    F(weight, FLOATS),      F(dy, OUT_FLOATS),    F(dx, OUT_FLOATS),      F(dx_add, BOOL),
    F(dweight, OUT_FLOATS), F(dweight_add, BOOL), F(partial, OUT_FLOATS), {NULL, 0, SIZE}};
#undef OP
#define OP fs_heads
static const field heads_fields[] = {F(batch, SIZE),       F(length, SIZE),     F(q_heads, SIZE),
                                     F(kv_heads, SIZE),    F(head_dim, SIZE),   F(padded_dim, SIZE),
                                     F(kv_rows, SIZE),     F(cosines, FLOATS),  F(sines, FLOATS),
                                     F(q_bias, FLOATS),    F(k_bias, FLOATS),   F(v_bias, FLOATS),
                                     F(q_scale, NUMBER32), F(rows, OUT_FLOATS), F(q, OUT_FLOATS),
                                     F(k, OUT_FLOATS),     F(v, OUT_FLOATS),    {NULL, 0, SIZE}};
#undef OP
#define OP fs_attention
static const field attention_fields[] = {F(batch, SIZE),
                                         F(length, SIZE),
                                         F(q_heads, SIZE),
                                         F(kv_heads, SIZE),
                                         F(head_dim, SIZE),
                                         F(padded_dim, SIZE),
                                         F(window, SIZE),
                                         F(past, SIZE),
                                         F(kv_rows, SIZE),
                                         F(q, FLOATS),
                                         F(k, FLOATS),
                                         F(v, FLOATS),
                                         F(out, OUT_FLOATS),
                                         F(lse, OUT_FLOATS),
                                         F(k_turned, OUT_FLOATS),
                                         F(v_turned, OUT_FLOATS),
                                         F(dout, FLOATS),
                                         F(dout_packed, OUT_FLOATS),
                                         F(delta, OUT_FLOATS),
                                         F(dq, OUT_FLOATS),
                                         F(dk, OUT_FLOATS),
                                         F(dv, OUT_FLOATS),
                                         {NULL, 0, SIZE}};
#undef OP
#define OP fs_swiglu
static const field swiglu_fields[] = {F(rows, SIZE),      F(width, SIZE),      F(gate_bias, FLOATS),
                                      F(up_bias, FLOATS), F(gate, OUT_FLOATS), F(up, OUT_FLOATS),
                                      F(act, OUT_FLOATS), {NULL, 0, SIZE}};
#undef OP
#define OP fs_xent
static const field xent_fields[] = {F(rows, SIZE),         F(vocab, SIZE),
                                    F(logits, OUT_FLOATS), F(targets, INTS),
                                    F(scale, NUMBER32),    F(dlogits, OUT_FLOATS),
                                    F(factor, NUMBER32),   F(loss, OUT_DOUBLES),
                                    {NULL, 0, SIZE}};
#undef OP
#define OP fs_column_sum
static const field column_sum_fields[] = {F(rows, SIZE),  F(width, SIZE),     F(stride, SIZE),
                                          F(x, FLOATS),   F(out, OUT_FLOATS), F(add, BOOL),
                                          {NULL, 0, SIZE}};
#undef OP
#define OP fs_normal
static const field normal_fields[] = {F(seed, U64),   F(stream, U64),   F(first, U64),
                                      F(n, SIZE),     F(std, NUMBER32), F(out, OUT_FLOATS),
                                      {NULL, 0, SIZE}};
#undef OP

#define OP fs_scale
static const field scale_fields[] = {F(out, OUT_FLOATS), F(x, FLOATS), F(alpha, NUMBER32),
                                     F(add, BOOL),       F(n, SIZE),   {NULL, 0, SIZE}};
#undef OP

// ---- operations ---------------------------------------------------------------------------------

typedef union call {
    fs_embed embed;
    fs_embed_grad embed_grad;
    fs_norm norm;
    fs_norm_grad norm_grad;
    fs_heads heads;
    fs_attention attention;
    fs_swiglu swiglu;
    fs_xent xent;
    fs_column_sum column_sum;
    fs_normal normal;
    fs_scale scale;
} call;

#define RUN(op, member)                                                                            \
    static void run_##op(const fs_exec *exec, const call *c)                                       \
    {                                                                                              \
        exec->device->model.op(exec, &c->member);                                                  \
    }
RUN(embed, embed)
RUN(embed_grad, embed_grad)
RUN(norm, norm)
RUN(norm_grad, norm_grad)
RUN(heads, heads)
RUN(heads_grad, heads)
RUN(attention, attention)
RUN(attention_grad, attention)
RUN(swiglu, swiglu)
RUN(swiglu_grad, swiglu)
RUN(xent, xent)
RUN(column_sum, column_sum)
RUN(scale, scale)
RUN(normal, normal)

typedef struct operation {
    const char *name;
    const field *fields;
    void (*run)(const fs_exec *exec, const call *c);
} operation;

static const operation operations[] = {
    {"embed", embed_fields, run_embed},
    {"embed_grad", embed_grad_fields, run_embed_grad},
    {"norm", norm_fields, run_norm},
    {"norm_grad", norm_grad_fields, run_norm_grad},
    {"heads", heads_fields, run_heads},
    {"heads_grad", heads_fields, run_heads_grad},
    {"attention", attention_fields, run_attention},
    {"attention_grad", attention_fields, run_attention_grad},
    {"swiglu", swiglu_fields, run_swiglu},
    {"swiglu_grad", swiglu_fields, run_swiglu_grad},
    {"xent", xent_fields, run_xent},
    {"column_sum", column_sum_fields, run_column_sum},
    {"scale", scale_fields, run_scale},
    {"normal", normal_fields, run_normal},
};

// ---- arguments ----------------------------------------------------------------------------------

#define FIELDS_MAX 32

static int
take_array(PyObject *value, const field *f, char *at, fs_buffer *buffer)
{
    static const fs_dtype dtypes[] = {[FLOATS] = FS_F32,
                                      [INTS] = FS_I32,
                                      [OUT_FLOATS] = FS_F32,
                                      [OUT_DOUBLES] = FS_F64};
    bool writeable = f->kind >= OUT_FLOATS;
    int failed = f->kind == ANY
                     ? fs_buffer_take(value, f->name, writeable, buffer)
                     : fs_buffer_take_dtype(value, f->name, writeable, dtypes[f->kind], buffer);
    if (failed < 0) {
        return -1;
    }
    memcpy(at, &buffer->data, sizeof buffer->data);
    return 0;
}

static int
take_scalar(PyObject *value, const field *f, char *at)
{
    switch (f->kind) {
    case SIZE: {
        size_t x = PyLong_AsSize_t(value);
        memcpy(at, &x, sizeof x);
        break;
    }
    case U64: {
        uint64_t x = PyLong_AsUnsignedLongLong(value);
        memcpy(at, &x, sizeof x);
        break;
    }
    case BOOL: {
        bool x = PyObject_IsTrue(value) == 1;
        memcpy(at, &x, sizeof x);
        break;
    }
    case NUMBER32: {
        float x = (float)PyFloat_AsDouble(value);
        memcpy(at, &x, sizeof x);
        break;
    }
    case NUMBER64: {
        double x = PyFloat_AsDouble(value);
        memcpy(at, &x, sizeof x);
        break;
    }
    default: {
        fs_dtype x;
        if (fs_dtype_take(value, &x) < 0) {
            return -1;
        }
        memcpy(at, &x, sizeof x);
        break;
    }
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Fills c from the keywords; buffers[0 .. return value) are held. -1: an exception is set. */
static int
take_fields(const operation *op, PyObject *keywords, call *c, fs_buffer *buffers)
{
    int held = 0;
    Py_ssize_t used = 0;
    for (const field *f = op->fields; f->name != NULL; f++) {
        PyObject *value = keywords == NULL ? NULL : PyDict_GetItemString(keywords, f->name);
        if (value == NULL) {
            continue;
        }
        used++;
        char *at = (char *)c + f->offset;
        int failed = f->kind >= FLOATS ? take_array(value, f, at, &buffers[held])
                                       : take_scalar(value, f, at);
        if (failed < 0) {
            goto fail;
        }
        held += f->kind >= FLOATS;
    }
    if (keywords != NULL && used != PyDict_Size(keywords)) {
        (void)PyErr_Format(PyExc_TypeError, "%s has no such field among %R", op->name, keywords);
        goto fail;
    }
    return held;
fail:
    while (held > 0) {
        fs_buffer_drop(&buffers[--held]);
    }
    return -1;
}

static PyObject *
model_op(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    PyObject *kernels;
    const char *name;
    if (!PyArg_ParseTuple(args, "Os:model_op", &kernels, &name)) {
        return NULL;
    }
    const fs_exec *exec = fs_py_kernels_exec(kernels);
    if (exec == NULL) {
        return NULL;
    }
    const operation *op = NULL;
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        op = strcmp(operations[i].name, name) == 0 ? &operations[i] : op;
    }
    if (op == NULL) {
        return PyErr_Format(PyExc_ValueError, "the model has no operation %s", name);
    }
    call c;
    memset(&c, 0, sizeof c);
    fs_buffer buffers[FIELDS_MAX];
    int held = take_fields(op, keywords, &c, buffers);
    if (held < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS fs_fp_state saved = fs_fp_enter();
    op->run(exec, &c);
    fs_fp_leave(saved);
    Py_END_ALLOW_THREADS while (held > 0)
    {
        fs_buffer_drop(&buffers[--held]);
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"model_op", FS_METHOD(model_op), METH_VARARGS | METH_KEYWORDS,
     "model_op($module, kernels, name, /, **fields)\n--\n\n"
     "Runs one operation of the model's table on arrays, which it trusts to be large enough."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_model_ops(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
