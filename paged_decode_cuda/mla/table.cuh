// The instances of the kernel for one dtype.
#pragma once

#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {

template <typename Type>
const void* find_mla_kernel(bool all_scores) {
  return all_scores ? reinterpret_cast<const void*>(&mla_kernel<MlaShape<Type>, true>)
                    : reinterpret_cast<const void*>(&mla_kernel<MlaShape<Type>, false>);
}

}  // namespace paged_attn
