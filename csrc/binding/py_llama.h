/* What py_llama.c (the model) and py_llama_config.c (its configuration) share. */
#ifndef FS_BINDING_PY_LLAMA_H
#define FS_BINDING_PY_LLAMA_H

#include "binding.h"

#include "../model/llama.h"

/* Takes a configuration as models/config.py writes it: (vocab_size, hidden_size, intermediate_size,
 * layers, heads, key heads, head_dim, positions, window, eps, theta, rope kind, factor, low, high,
 * original positions, attention_bias, mlp_bias, tied, embedding, residual, attention multiplier,
 * logits_scaling). -1 with an exception where it is no such tuple; the core checks the sizes. */
int fs_py_llama_config_take(PyObject *tuple, fs_llama_config *out);

/* llama_define and llama_plan. Called once, by py_llama.c. */
int fs_py_add_llama_config(PyObject *module);

#endif
