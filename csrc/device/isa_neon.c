/* The kernels for NEON, which every 64-bit Arm processor has. See isa.h. */
#include "isa.h"

#if defined(__aarch64__)

#define FS_ISA neon
#define FS_ISA_FLOATS 4

#include "kernels.inc"

#endif
