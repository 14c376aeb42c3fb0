/* What a configuration of a Llama comes to: parameters, units, and the bytes of a micro-batch. */
#include "py_llama.h"

#include "py_layout.h"

int
fs_py_llama_config_take(PyObject *tuple, fs_llama_config *out)
{
    Py_ssize_t sizes[9], original;
    int rope_kind, attention_bias, mlp_bias, tied;
    fs_llama_config config = {0};
    if (!PyTuple_Check(tuple)) {
        (void)PyErr_Format(PyExc_TypeError, "config: a tuple expected, not %s",
                           Py_TYPE(tuple)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "nnnnnnnnnddidddnpppdddd:config", &sizes[0], &sizes[1], &sizes[2],
                          &sizes[3], &sizes[4], &sizes[5], &sizes[6], &sizes[7], &sizes[8],
                          &config.rms_norm_eps, &config.rope_theta, &rope_kind, &config.rope_factor,
                          &config.rope_low_freq_factor, &config.rope_high_freq_factor, &original,
                          &attention_bias, &mlp_bias, &tied, &config.embedding_multiplier,
                          &config.residual_multiplier, &config.attention_multiplier,
                          &config.logits_scaling)) {
        return -1;
    }
    for (int i = 0; i < 9; i++) { /* a negative size is as wrong as zero */
        sizes[i] = sizes[i] < 0 ? 0 : sizes[i];
    }
    config.vocab_size = (size_t)sizes[0];
    config.hidden_size = (size_t)sizes[1];
    config.intermediate_size = (size_t)sizes[2];
    config.num_hidden_layers = (size_t)sizes[3];
    config.num_attention_heads = (size_t)sizes[4];
    config.num_key_value_heads = (size_t)sizes[5];
    config.head_dim = (size_t)sizes[6];
    config.max_position_embeddings = (size_t)sizes[7];
    config.sliding_window = (size_t)sizes[8];
    config.rope_kind = (fs_rope_kind)rope_kind;
    config.rope_original_max_position = original < 0 ? 0 : (size_t)original;
    config.attention_bias = attention_bias != 0;
    config.mlp_bias = mlp_bias != 0;
    config.tie_word_embeddings = tied != 0;
    *out = config;
    return 0;
}

static PyObject *
defs_to_python(const fs_llama_defs *defs)
{
    PyObject *params = PyList_New(0), *units = PyList_New(0), *result = NULL;
    if (params == NULL || units == NULL) {
        goto done;
    }
    for (int p = 0; p < defs->params_n; p++) {
        const fs_param_def *def = &defs->params[p];
        PyObject *shape = def->dims_n == 1 ? Py_BuildValue("(n)", (Py_ssize_t)def->dims[0])
                                           : Py_BuildValue("(nn)", (Py_ssize_t)def->dims[0],
                                                           (Py_ssize_t)def->dims[1]);
        if (shape == NULL) {
            goto done;
        }
        PyObject *row = Py_BuildValue("(szNi)", def->name, def->tied_name, shape, def->unit);
        if (fs_py_list_append(params, row) < 0) {
            goto done;
        }
    }
    for (int u = 0; u < defs->units_n; u++) {
        const fs_unit_def *def = &defs->units[u];
        PyObject *row = Py_BuildValue("(sii)", def->name, def->opens, def->publishes);
        if (fs_py_list_append(units, row) < 0) {
            goto done;
        }
    }
    result = PyTuple_Pack(2, params, units);
done:
    Py_XDECREF(params);
    Py_XDECREF(units);
    return result;
}

static PyObject *
llama_define(PyObject *Py_UNUSED(module), PyObject *tuple)
{
    fs_llama_config config;
    fs_llama_defs defs;
    if (fs_py_llama_config_take(tuple, &config) < 0) {
        return NULL;
    }
    fs_status status = fs_llama_define(&config, &defs);
    if (status != FS_OK) {
        return fs_raise(status, NULL);
    }
    PyObject *result = defs_to_python(&defs);
    fs_llama_defs_free(&defs);
    return result;
}

static PyObject *
llama_plan(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tuple, *params, *units, *policy_tuple;
    int size, checkpointing, device;
    Py_ssize_t batch, length;
    if (!PyArg_ParseTuple(args, "OOOOipnnp:llama_plan", &tuple, &params, &units, &policy_tuple,
                          &size, &checkpointing, &batch, &length, &device)) {
        return NULL;
    }
    fs_llama_config config;
    fs_layout *layout;
    fs_policy policy;
    if (batch < 1 || length < 1) {
        return PyErr_Format(PyExc_ValueError, "a micro-batch of %zd x %zd tokens is empty", batch,
                            length);
    }
    if (fs_py_llama_config_take(tuple, &config) < 0 ||
        fs_py_layout_take(params, units, policy_tuple, size, &layout, &policy) < 0) {
        return NULL;
    }
    fs_ledger ledger = {0};
    fs_status status = fs_llama_plan(&config, layout, &policy, checkpointing != 0, device != 0,
                                     (size_t)batch, (size_t)length, &ledger);
    fs_layout_free(layout);
    return status == FS_OK ? fs_py_ledger_dict(&ledger) : fs_raise(status, NULL);
}

static PyMethodDef functions[] = {
    {"llama_define", llama_define, METH_O,
     "llama_define($module, config, /)\n--\n\n"
     "([(name, tied name or None, shape, unit)], [(unit, opens, publishes)]) of a configuration."},
    {"llama_plan", llama_plan, METH_VARARGS,
     "llama_plan($module, config, params, units, policy, size, checkpointing, batch, length, "
     "device, /)\n--\n\n"
     "{class: (private, world, peak, device)} bytes that forward and backward of a micro-batch "
     "hold."},
    {NULL, NULL, 0, NULL},
};

int
fs_py_add_llama_config(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
