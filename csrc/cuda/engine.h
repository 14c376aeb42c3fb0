/* What moves data between GPUs, as the device table has it. */
#ifndef FS_CUDA_ENGINE_H
#define FS_CUDA_ENGINE_H

#include "../device/engine.h"

extern const fs_engine_ops fs_cuda_engine;

#endif
