// From sizes to the instance of the prefill kernel for one dtype.
#pragma once

#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {

// Of the kernels of these sizes the one that an instance names.
template <typename Type, bool kFull, typename... Sizes>
const void* kernel_among(const PrefillInstance& instance) {
  const void* kernel = nullptr;
  ((has_sizes<Sizes>(instance)
        ? void(kernel = reinterpret_cast<const void*>(&prefill_kernel<PrefillShape<Type, Sizes>, kFull>))
        : void()),
   ...);
  return kernel;
}

template <typename Type>
const void* find_prefill_kernel(const PrefillInstance& instance, bool all_scores) {
  if (all_scores)
    return kernel_among<Type, true, PrefillSizes64, PrefillSizes128, PrefillSizes192x128, PrefillSizes256>(instance);
  return kernel_among<Type, false, PrefillSizes64, PrefillSizes96, PrefillSizes128, PrefillSizes192x128,
                      PrefillSizes192, PrefillSizes256, TallPrefillSizes64, TallPrefillSizes96, TallPrefillSizes128>(
      instance);
}

}  // namespace paged_attn
