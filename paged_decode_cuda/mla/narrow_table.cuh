// The instances of the kernel for one dtype of 8-bit caches.
#pragma once

#include "instances.h"
#include "narrow_kernel.cuh"

namespace paged_attn {

template <typename Kv>
const void* find_narrow_mla_kernel(bool few_rows, bool all_scores) {
  if (few_rows)
    return all_scores ? reinterpret_cast<const void*>(&narrow_mla_kernel<Kv, NarrowFewRowsSizes, true>)
                      : reinterpret_cast<const void*>(&narrow_mla_kernel<Kv, NarrowFewRowsSizes, false>);
  return all_scores ? reinterpret_cast<const void*>(&narrow_mla_kernel<Kv, NarrowMlaSizes, true>)
                    : reinterpret_cast<const void*>(&narrow_mla_kernel<Kv, NarrowMlaSizes, false>);
}

}  // namespace paged_attn
