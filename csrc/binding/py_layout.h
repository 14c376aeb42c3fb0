/* Layouts and policies out of tuples, for shards, models and plans. */
#ifndef FS_BINDING_PY_LAYOUT_H
#define FS_BINDING_PY_LAYOUT_H

#include "binding.h"

#include "../shard/shard.h"

/* params: sequence of (name, tied name or None, shape tuple, unit, trainable, group); units:
 * sequence of (name, opens, publishes); policy: (partition, keep, slot_per_unit, weights,
 * pool_units, param, reduce, accumulate, master, moments, stochastic, seed, host_params,
 * host_grads, host_state, ring) with dtypes as names. -1 with an exception. */
int fs_py_layout_take(PyObject *params, PyObject *units, PyObject *policy_tuple, int size,
                      fs_layout **out_layout, fs_policy *out_policy);
/* The policy alone. */
int fs_py_policy_take(PyObject *policy_tuple, fs_partition *out_partition, fs_policy *out_policy);

/* {class: (private bytes, world bytes, peak bytes, device bytes)} of a ledger. */
PyObject *fs_py_ledger_dict(const fs_ledger *ledger);

int fs_py_add_layout(PyObject *module);

/* Appends value (stolen; NULL passes a failure on) to list. */
int fs_py_list_append(PyObject *list, PyObject *value);

#endif
