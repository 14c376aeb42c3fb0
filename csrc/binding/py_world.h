/* What py_world.c (life of jobs and worlds) and py_collect.c (collectives) share. */
#ifndef FS_BINDING_PY_WORLD_H
#define FS_BINDING_PY_WORLD_H

#include "binding.h"

typedef struct fs_py_job {
    PyObject_HEAD
    fs_job *job; /* NULL: closed */
    int data_fd, lock_fd; /* of a job made for children, else -1 */
} fs_py_job;

typedef struct fs_py_world {
    PyObject_HEAD
    fs_world *world;  /* NULL: closed */
    PyObject *parent; /* the job, or the world that was split; keeps exec alive */
    fs_exec exec;     /* unused in a part: that one uses its parent's */
    size_t threads;
    PyObject *on_event; /* called with the text of each event, or NULL */
} fs_py_world;

/* The methods of py_collect.c, ended by a NULL name; py_world.c puts them into the type. */
extern const PyMethodDef fs_py_collect_methods[];

#endif
