/* What py_shards.c (life, weights, layout), py_gather.c (units as arrays) and py_step.c (gradients,
 * the step) share. */
#ifndef FS_BINDING_PY_SHARDS_H
#define FS_BINDING_PY_SHARDS_H

#include "binding.h"

#include "../shard/shard.h"

typedef struct fs_py_shards {
    PyObject_HEAD
    PyObject *world_object; /* keeps the world's memory until the shards are gone */
    fs_world *world;
    fs_shards *shards; /* NULL: closed */
    size_t *exports;   /* [units_n] arrays of gathered units that are alive */
    int units_n;
    bool busy; /* a method runs without the GIL */
} fs_py_shards;

/* Marks the object as in use: the object, or NULL with an exception. */
fs_py_shards *fs_py_shards_take(PyObject *self);

/* Runs one call of the core between enter and leave; evaluates to its status. */
#define SHARDS_CALL(object, status, call)         \
    do {                                          \
        FS_CALL((object)->world, (status), call); \
        (object)->busy = false;                   \
    } while (0)

/* None, or the exception of status. */
PyObject *fs_py_shards_answer(fs_py_shards *object, fs_status status);

/* Is there such a unit or parameter? -1 with an exception. */
int fs_py_shards_check_unit(fs_py_shards *object, int unit);
int fs_py_shards_check_param(fs_py_shards *object, int param);

/* The methods of py_gather.c and py_step.c, ended by a NULL name; py_shards.c puts them into the
 * type. */
extern const PyMethodDef fs_py_gather_methods[];
extern const PyMethodDef fs_py_step_methods[];

/* The type under arrays of gathered units, which no caller sees. Called once, by py_shards.c. */
int fs_py_add_gather(PyObject *module);

#endif
