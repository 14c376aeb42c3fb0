/* Devices as Python objects: the library, and arrays in device memory. */
#ifndef FS_BINDING_PY_DEVICE_H
#define FS_BINDING_PY_DEVICE_H

#include "binding.h"

/* The table behind a _core.Device; NULL with an exception. It stays for the process's life. */
const fs_device *fs_py_device_get(PyObject *device);

#endif
