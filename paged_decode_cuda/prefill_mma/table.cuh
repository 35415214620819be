// From sizes to the instance of the prefill_mma kernel for one dtype.
#pragma once

#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {

template <typename Type, typename Sizes>
const void* prefill_mma_kernel_of() {
  return reinterpret_cast<const void*>(&prefill_mma_kernel<PrefillMmaShape<Type, Sizes>>);
}

template <typename Type>
const void* find_prefill_mma_kernel(int head_dim, int keys) {
  switch (head_dim) {
    case 64: return prefill_mma_kernel_of<Type, PrefillMmaSizes64>();
    case 96: return prefill_mma_kernel_of<Type, PrefillMmaSizes96>();
    case 128:
      return keys == PrefillMmaSizes128::kKeys ? prefill_mma_kernel_of<Type, PrefillMmaSizes128>()
                                               : prefill_mma_kernel_of<Type, PrefillMmaSmall128>();
    case 192: return prefill_mma_kernel_of<Type, PrefillMmaSizes192>();
    default:
      return keys == PrefillMmaSizes256::kKeys ? prefill_mma_kernel_of<Type, PrefillMmaSizes256>()
                                               : prefill_mma_kernel_of<Type, PrefillMmaSmall256>();
  }
}

template <typename Type>
const void* find_prefill_mma_widening(int head_dim) {
  switch (head_dim) {
    case 64: return prefill_mma_kernel_of<Type, PrefillMmaWidens64>();
    case 128: return prefill_mma_kernel_of<Type, PrefillMmaWidens128>();
    default: return prefill_mma_kernel_of<Type, PrefillMmaWidens256>();
  }
}

}  // namespace paged_attn
