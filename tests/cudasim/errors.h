/* The error that a thread's calls of the stand-in leave behind. */
#ifndef FS_CUDASIM_ERRORS_H
#define FS_CUDASIM_ERRORS_H

#include "cuda_runtime.h"

/* Keeps code for cudaGetLastError, and returns it. */
cudaError_t sim_fail(cudaError_t code);

#endif
