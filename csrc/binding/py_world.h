/* What py_call.c, py_job.c, py_world.c and py_collect.c (collectives) share. */
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
    int ordinal;      /* of exec's device */
    bool closes_late; /* ranks are threads, on devices: see py_closing.c */
    size_t threads;
    PyObject *on_event; /* called with the text of each event, or NULL */
} fs_py_world;

/* Of py_call.c. Frames in the folder of the package are ours, not the caller's. */
void fs_py_set_package_folder(PyObject *module);
/* Notes, for reports, the innermost Python line that is not ours. */
void fs_py_note_caller(fs_world *world);
/* The lines of a thread (its pthread_self) as faulthandler writes them. Takes the GIL. */
size_t fs_py_locate(int64_t thread, char *lines, size_t nbytes);
/* Runs Python's signal handlers (they run in the main thread only); true if one raised. */
bool fs_py_check_signals(void *ctx);

/* Of py_job.c. */
int fs_py_add_job(PyObject *module);
/* The job behind a _core.Job (not checked); NULL with an exception when closed. */
fs_job *fs_py_job_get(PyObject *job);

/* Job.world, of py_world.c. */
PyObject *fs_py_job_world(PyObject *job, PyObject *args, PyObject *keywords);

/* Of py_log.c. */
int fs_py_add_log(PyObject *module);

/* Methods of py_collect.c, py_log.c and py_world_device.c, ended by a NULL name; py_world.c puts
 * them into the type. */
extern const PyMethodDef fs_py_collect_methods[];
extern const PyMethodDef fs_py_device_methods[];
extern const PyMethodDef fs_py_log_methods[];

#endif
