#include "e4m3_sizes.h"
#include "instances.h"
#include "table.cuh"

namespace paged_attn {

const void* prefill_kernel_e4m3(const PrefillInstance& instance, bool all_scores) {
  if (all_scores) return kernel_among<E4m3, true, PrefillE4m3Sizes64, PrefillE4m3Sizes128>(instance);
  return kernel_among<E4m3, false, PrefillE4m3Sizes64, PrefillE4m3Sizes128, TallPrefillE4m3Sizes64,
                      TallPrefillE4m3Sizes128>(instance);
}

}  // namespace paged_attn
