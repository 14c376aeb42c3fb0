/* _core.Llama: forward, backward, loss and logits of a Llama over shards. Sizes by name, Hugging
 * Face's files and generation live in flatshard/models/. */
#include "py_llama.h"

#include "py_closing.h"

// ---- the object ---------------------------------------------------------------------------------

typedef struct py_llama {
    PyObject_HEAD PyObject *shards_object; /* kept until the model is gone */
    fs_llama *llama;                       /* NULL: closed */
    bool busy;                             /* a method runs without the GIL */
    size_t vocab_size;
    size_t cache_batch; /* sequences of the open cache, 0: none */
} py_llama;

static PyObject *
llama_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"shards", "config", "checkpointing", NULL};
    PyObject *shards_object, *tuple;
    int checkpointing;
    fs_llama_config config;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOp:Llama", names, &shards_object, &tuple,
                                     &checkpointing) ||
        fs_py_llama_config_take(tuple, &config) < 0) {
        return NULL;
    }
    py_llama *self = (py_llama *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    fs_shards *shards = fs_py_shards_enter(shards_object);
    if (shards == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    fs_status status = fs_llama_open(&config, shards, checkpointing != 0, &self->llama);
    fs_world *world = fs_shards_world(shards);
    fs_py_shards_leave(shards_object);
    if (status != FS_OK) {
        self->llama = NULL;
        Py_DECREF(self);
        return fs_raise(status, world);
    }
    Py_INCREF(shards_object);
    self->shards_object = shards_object;
    self->vocab_size = config.vocab_size;
    return (PyObject *)self;
}

static void
close_llama(void *llama)
{
    fs_llama_close(llama);
}

static void
llama_dealloc(PyObject *object)
{
    py_llama *self = (py_llama *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *shards = self->shards_object;
    PyObject *world = shards != NULL ? fs_py_shards_world(shards) : NULL;
    fs_py_close_collected(close_llama, self->llama, shards, world);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *
llama_close(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    py_llama *self = (py_llama *)object;
    if (self->busy) {
        return fs_raise(FS_FAIL(FS_ESTATE, "this model is in a call of another thread"), NULL);
    }
    fs_llama *llama = self->llama;
    self->llama = NULL;
    fs_py_close(close_llama, llama);
    Py_RETURN_NONE;
}

/* The world of an open model that nobody else is using, both marked as in use; or NULL. */
static fs_world *
enter(py_llama *self)
{
    if (self->llama == NULL) {
        (void)fs_raise(FS_FAIL(FS_ESTATE, "this model is closed"), NULL);
        return NULL;
    }
    fs_shards *shards = fs_py_shards_enter(self->shards_object);
    if (shards == NULL) {
        return NULL;
    }
    self->busy = true;
    return fs_shards_world(shards);
}

static void
leave(py_llama *self)
{
    self->busy = false;
    fs_py_shards_leave(self->shards_object);
}

// ---- calls --------------------------------------------------------------------------------------

static PyObject *
llama_init(PyObject *object, PyObject *args)
{
    py_llama *self = (py_llama *)object;
    unsigned long long seed;
    double std;
    fs_world *world;
    if (!PyArg_ParseTuple(args, "Kd:init", &seed, &std) || (world = enter(self)) == NULL) {
        return NULL;
    }
    fs_status status;
    FS_CALL(world, status, fs_llama_init(self->llama, seed, std));
    leave(self);
    if (status != FS_OK) {
        return fs_raise(status, world);
    }
    Py_RETURN_NONE;
}

/* What one call reads and writes. */
typedef struct call {
    fs_buffer tokens, targets, logits;
    bool has_targets, has_logits;
    size_t batch, length;
} call;

static void
drop_call(call *c)
{
    fs_buffer_drop(&c->tokens);
    if (c->has_targets) {
        fs_buffer_drop(&c->targets);
    }
    if (c->has_logits) {
        fs_buffer_drop(&c->logits);
    }
}

/* tokens (batch, length) int32; targets the same or None; logits writeable fp32 or None. */
static int
take_call(py_llama *self, PyObject *tokens, PyObject *targets, PyObject *logits, bool last_only,
          call *out)
{
    *out = (call){.has_targets = false};
    if (fs_buffer_take_dtype(tokens, "inputs", false, FS_I32, &out->tokens) < 0) {
        return -1;
    }
    if (targets != Py_None) {
        if (fs_buffer_take_dtype(targets, "targets", false, FS_I32, &out->targets) < 0) {
            goto fail;
        }
        out->has_targets = true;
    }
    if (logits != Py_None) {
        if (fs_buffer_take_dtype(logits, "logits", true, FS_F32, &out->logits) < 0) {
            goto fail;
        }
        out->has_logits = true;
    }
    if (out->tokens.dims_n != 2 ||
        (out->has_targets &&
         (out->targets.dims_n != 2 || out->targets.dims[0] != out->tokens.dims[0] ||
          out->targets.dims[1] != out->tokens.dims[1]))) {
        (void)fs_raise(FS_FAIL(FS_EINVAL,
                               "inputs and targets need two dimensions, (batch, length), "
                               "and the same"),
                       NULL);
        goto fail;
    }
    out->batch = out->tokens.dims[0];
    out->length = out->tokens.dims[1];
    size_t rows = last_only ? out->batch : out->tokens.n;
    if (out->has_logits && out->logits.n / self->vocab_size != rows) {
        (void)PyErr_Format(PyExc_ValueError, "logits hold %zu elements, not %zu rows of %zu",
                           out->logits.n, rows, self->vocab_size);
        goto fail;
    }
    return 0;
fail:
    drop_call(out);
    return -1;
}

/* (sum of this rank's token losses, its tokens, sum over all ranks, tokens of all ranks) */
static PyObject *
losses(const fs_loss *mine, const fs_loss *all)
{
    return Py_BuildValue("(dLdL)", mine->sum, (long long)mine->tokens, all->sum,
                         (long long)all->tokens);
}

static fs_status
forward_backward(fs_llama *llama, const call *c, long long count, bool keep_local, fs_loss *mine,
                 fs_loss *all)
{
    FS_TRY(fs_llama_forward_backward(llama, c->tokens.data, c->targets.data, c->batch, c->length,
                                     count, keep_local, mine));
    return fs_llama_loss_sum(llama, mine, all);
}

static PyObject *
llama_forward_backward(PyObject *object, PyObject *args)
{
    py_llama *self = (py_llama *)object;
    PyObject *tokens, *targets;
    long long count;
    int keep_local;
    call c;
    if (!PyArg_ParseTuple(args, "OOLp:forward_backward", &tokens, &targets, &count, &keep_local)) {
        return NULL;
    }
    if (targets == Py_None) {
        return fs_raise(FS_FAIL(FS_ETYPE, "targets are needed for a backward"), NULL);
    }
    if (take_call(self, tokens, targets, Py_None, false, &c) < 0) {
        return NULL;
    }
    fs_world *world = enter(self);
    if (world == NULL) {
        drop_call(&c);
        return NULL;
    }
    fs_loss mine, all;
    fs_status status;
    FS_CALL(world, status, forward_backward(self->llama, &c, count, keep_local != 0, &mine, &all));
    leave(self);
    drop_call(&c);
    return status == FS_OK ? losses(&mine, &all) : fs_raise(status, world);
}

static fs_status
forward(fs_llama *llama, const call *c, bool last_only, fs_loss *mine, fs_loss *all)
{
    FS_TRY(fs_llama_forward(llama, c->tokens.data, c->has_targets ? c->targets.data : NULL,
                            c->batch, c->length, last_only, c->has_logits ? c->logits.data : NULL,
                            mine));
    return c->has_targets ? fs_llama_loss_sum(llama, mine, all) : FS_OK;
}

static PyObject *
llama_forward(PyObject *object, PyObject *args)
{
    py_llama *self = (py_llama *)object;
    PyObject *tokens, *targets, *logits;
    int last_only;
    call c;
    if (!PyArg_ParseTuple(args, "OOOp:forward", &tokens, &targets, &logits, &last_only) ||
        take_call(self, tokens, targets, logits, last_only != 0, &c) < 0) {
        return NULL;
    }
    fs_world *world = enter(self);
    if (world == NULL) {
        drop_call(&c);
        return NULL;
    }
    fs_loss mine = {0}, all = {0};
    fs_status status;
    FS_CALL(world, status, forward(self->llama, &c, last_only != 0, &mine, &all));
    leave(self);
    drop_call(&c);
    return status == FS_OK ? losses(&mine, &all) : fs_raise(status, world);
}

static PyObject *
llama_cache_begin(PyObject *object, PyObject *args)
{
    py_llama *self = (py_llama *)object;
    Py_ssize_t batch, capacity;
    fs_world *world;
    if (!PyArg_ParseTuple(args, "nn:cache_begin", &batch, &capacity) ||
        (world = enter(self)) == NULL) {
        return NULL;
    }
    fs_status status;
    FS_CALL(world, status,
            fs_llama_cache_begin(self->llama, batch < 0 ? 0 : (size_t)batch,
                                 capacity < 0 ? 0 : (size_t)capacity));
    leave(self);
    self->cache_batch = status == FS_OK ? (size_t)batch : 0;
    if (status != FS_OK) {
        return fs_raise(status, world);
    }
    Py_RETURN_NONE;
}

static PyObject *
llama_cache_extend(PyObject *object, PyObject *args)
{
    py_llama *self = (py_llama *)object;
    PyObject *tokens, *logits;
    call c;
    if (!PyArg_ParseTuple(args, "OO:cache_extend", &tokens, &logits) ||
        take_call(self, tokens, Py_None, logits, true, &c) < 0) {
        return NULL;
    }
    if (!c.has_logits || c.batch != self->cache_batch) {
        drop_call(&c);
        return fs_raise(FS_FAIL(FS_EINVAL, "the cache is of %zu sequences", self->cache_batch),
                        NULL);
    }
    fs_world *world = enter(self);
    if (world == NULL) {
        drop_call(&c);
        return NULL;
    }
    fs_status status;
    FS_CALL(world, status,
            fs_llama_cache_extend(self->llama, c.tokens.data, c.length, c.logits.data));
    leave(self);
    drop_call(&c);
    if (status != FS_OK) {
        return fs_raise(status, world);
    }
    Py_RETURN_NONE;
}

static PyObject *
llama_cache_end(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    py_llama *self = (py_llama *)object;
    if (self->busy) {
        return fs_raise(FS_FAIL(FS_ESTATE, "this model is in a call of another thread"), NULL);
    }
    if (self->llama != NULL) {
        fs_llama_cache_end(self->llama);
        self->cache_batch = 0;
    }
    Py_RETURN_NONE;
}

// ---- type ---------------------------------------------------------------------------------------

static PyMethodDef methods[] = {
    {"init", llama_init, METH_VARARGS,
     "init($self, seed, std, /)\n--\n\nInitial weights. Collective."},
    {"forward_backward", llama_forward_backward, METH_VARARGS,
     "forward_backward($self, inputs, targets, count, keep_local, /)\n--\n\n"
     "(loss sum, tokens, loss sum of all ranks, tokens of all ranks). count -1: tokens. "
     "Collective."},
    {"forward", llama_forward, METH_VARARGS,
     "forward($self, inputs, targets, logits, last_only, /)\n--\n\n"
     "The same without gradients; targets and logits (written) may be None. Collective with "
     "targets."},
    {"cache_begin", llama_cache_begin, METH_VARARGS,
     "cache_begin($self, batch, capacity, /)\n--\n\nMakes room for keys and values of a "
     "generation."},
    {"cache_extend", llama_cache_extend, METH_VARARGS,
     "cache_extend($self, ids, logits, /)\n--\n\nNext tokens of every sequence; logits (written) "
     "are "
     "those of the last ones."},
    {"cache_end", llama_cache_end, METH_NOARGS, "cache_end($self, /)\n--\n\nGives the room back."},
    {"close", llama_close, METH_NOARGS, "close($self, /)\n--\n\nGives buffers back. Never waits."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot llama_slots[] = {
    {Py_tp_new, (void *)llama_new},
    {Py_tp_dealloc, (void *)llama_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Llama(shards, config, checkpointing)\n--\n\nSee flatshard.models.llama."},
    {0, NULL},
};

static PyType_Spec llama_spec = {
    .name = "flatshard._core.Llama",
    .basicsize = sizeof(py_llama),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = llama_slots,
};

int
fs_py_add_llama(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &llama_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result < 0 ? -1 : fs_py_add_llama_config(module);
}
