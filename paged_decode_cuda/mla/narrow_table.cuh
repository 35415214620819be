// The instances of the kernel for one dtype of 8-bit caches.
#pragma once

#include "instances.h"
#include "narrow_kernel.cuh"

namespace paged_attn {

template <typename Kv>
const void* find_narrow_mla_kernel(bool all_scores) {
  return all_scores ? reinterpret_cast<const void*>(&narrow_mla_kernel<Kv, true>)
                    : reinterpret_cast<const void*>(&narrow_mla_kernel<Kv, false>);
}

}  // namespace paged_attn
