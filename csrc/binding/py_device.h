/* Devices as Python objects: the library, and arrays in device memory. */
#ifndef FS_BINDING_PY_DEVICE_H
#define FS_BINDING_PY_DEVICE_H

#include "binding.h"

/* The table behind a _core.Device; NULL with an exception. It stays for the process's life. */
const fs_device *fs_py_device_get(PyObject *device);

/* A _core.DeviceArray over data, row-major, that base (stolen) keeps alive; NULL with an
 * exception. */
PyObject *fs_device_array_new(fs_dtype dtype, size_t dims_n, const size_t *dims, void *data,
                              int ordinal, PyObject *base);

/* Is it a _core.DeviceArray? */
bool fs_device_array_check(PyObject *object);

/* A _core.DeviceArray for a call in a world: it must lie on the device of that rank; what is behind
 * it as fs_buffer_take has it. -1 with an exception. */
int fs_device_array_take(PyObject *object, PyObject *world, const char *arg, fs_buffer *out);

#endif
