/* What the cores, or a device, reach in matrix products: the denominator of model FLOP
 * utilisation. */
#ifndef FS_DEVICE_MEASURE_H
#define FS_DEVICE_MEASURE_H

#include "device.h"

/* Multiplies (512 x threads, 512, 512) for about seconds and gives the best rate of one product,
 * FLOP/s, of fp32 operands that may be rounded to rounding. Holds about 3 MB while it runs.
 * FS_ESTATE before fs_gemm_load. */
FS_NODISCARD fs_status
fs_gemm_measure(const fs_exec *exec, fs_dtype rounding, double seconds, double *out_flops);

/* The same on the device of exec: square products of dtype (fp32, bf16, fp16), as large as takes a
 * while, up to 8192, summed in fp32. For nobody else's use of exec meanwhile. */
FS_NODISCARD fs_status
fs_device_gemm_measure(const fs_exec *exec, fs_dtype dtype, double seconds, double *out_flops);

#endif
