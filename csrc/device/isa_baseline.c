/* The kernels for any processor of this architecture: what the compiler uses without being told.
 * See isa.h. */
#include "isa.h"

#define FS_ISA baseline
#define FS_ISA_FLOATS 4

#include "kernels.inc"
