// From sizes to the instance of the prefill kernel for one dtype.
#pragma once

#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {

template <typename Type, typename Sizes>
const void* prefill_kernel_of(bool all_scores) {
  using Shape = PrefillShape<Type, Sizes>;
  return all_scores ? reinterpret_cast<const void*>(&prefill_kernel<Shape, true>)
                    : reinterpret_cast<const void*>(&prefill_kernel<Shape, false>);
}

template <typename Type>
const void* find_prefill_kernel(const PrefillInstance& instance, bool all_scores) {
  // No tall tiles with softcap or ALiBi: a thread has no registers for them.
  if (instance.rows == TallPrefillSizes64::kRows)
    return reinterpret_cast<const void*>(&prefill_kernel<PrefillShape<Type, TallPrefillSizes64>, false>);
  if (instance.rows == TallPrefillSizes128::kRows && instance.head_dim == TallPrefillSizes128::kDim)
    return reinterpret_cast<const void*>(&prefill_kernel<PrefillShape<Type, TallPrefillSizes128>, false>);
  if (instance.rows == TallPrefillSizes96::kRows)
    return reinterpret_cast<const void*>(&prefill_kernel<PrefillShape<Type, TallPrefillSizes96>, false>);
  switch (instance.head_dim) {
    case 64: return prefill_kernel_of<Type, PrefillSizes64>(all_scores);
    case 96: return prefill_kernel_of<Type, PrefillSizes96>(all_scores);
    case 128: return prefill_kernel_of<Type, PrefillSizes128>(all_scores);
    case 192: return prefill_kernel_of<Type, PrefillSizes192>(all_scores);
    default: return prefill_kernel_of<Type, PrefillSizes256>(all_scores);
  }
}

}  // namespace paged_attn
