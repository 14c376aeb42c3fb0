/* What a device says of itself. */
#include <cstdio>

#include "cuda_runtime.h"

cudaError_t
cudaGetDeviceProperties(cudaDeviceProp *properties, int device)
{
    (void)std::snprintf(properties->name, sizeof properties->name, "stand-in %d", device);
    return cudaSuccess;
}
