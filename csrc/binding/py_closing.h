/* Objects that are closed later than they are collected; see py_closing.c. */
#ifndef FS_BINDING_PY_CLOSING_H
#define FS_BINDING_PY_CLOSING_H

#include "binding.h"

/* Calls close(what) without the GIL: a device may wait for ranks that are threads. NULL is fine. */
void fs_py_close(void (*close)(void *), void *what);

/* What a collected object of world (a _core.World, or NULL: none) leaves to close: at once, or when
 * fs_py_close_due comes. owner is stolen (may be NULL) and let go after that. */
void fs_py_close_collected(void (*close)(void *), void *what, PyObject *owner, PyObject *world);

/* Closes what waits of this world (the caller is its rank's thread, at a fence), or, with NULL, of
 * all: no rank thread may be running. */
void fs_py_close_due(PyObject *world);

int fs_py_add_closing(PyObject *module);

#endif
