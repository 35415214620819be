// The kernels of queries in 16 bits.
#pragma once

#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {

template <typename Q, typename Kv>
const void* fallback_kernel_of(const FallbackInstance& instance) {
  return instance.row_tiles == 1 ? reinterpret_cast<const void*>(&fallback_kernel<Q, Kv, 1>)
                                 : reinterpret_cast<const void*>(&fallback_kernel<Q, Kv, 2>);
}

template <typename Q>
const void* fallback_kernel_of(const FallbackInstance& instance, DType cache) {
  switch (cache) {
    case DType::kFloat8E4M3: return fallback_kernel_of<Q, E4m3>(instance);
    case DType::kFloat8E5M2: return fallback_kernel_of<Q, E5m2>(instance);
    default: return fallback_kernel_of<Q, Q>(instance);
  }
}

}  // namespace paged_attn
