// What the dealing of work needs of a GPU: the place of a thread, and values passed between the lanes of a warp. A host
// that compiles balance.cuh, to test it, brings its own: tests/cuda/warp_on_host.h.
#pragma once

#ifdef __CUDACC__
#define PD_DEVICE static __device__ __forceinline__  // free functions
#define PD_MEMBER __device__ __forceinline__
#else
#define PD_DEVICE static inline
#define PD_MEMBER inline
#include "warp_on_host.h"
#endif
