// What the dealing of work needs of a GPU: the place of a thread, and values passed between the lanes of a warp. A host
// that compiles balance.cuh, to test it, brings its own: tests/cuda/warp_on_host.h.
#pragma once

#include "decode/sizes.h"

#ifdef __CUDACC__
#define PD_DEVICE static __device__ __forceinline__  // free functions
#define PD_MEMBER __device__ __forceinline__
#else
#define PD_DEVICE static inline
#define PD_MEMBER inline
#include "warp_on_host.h"
#endif

namespace paged_attn {

// The sum over the lanes up to this one. All lanes of a warp take part.
PD_DEVICE int inclusive_sum(int x) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

}  // namespace paged_attn
