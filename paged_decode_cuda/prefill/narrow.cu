#include "instances.h"
#include "narrow_sizes.h"
#include "table.cuh"

namespace paged_attn {
namespace {

template <bool kFull, typename... Sizes>
const void* narrow_kernel_among(const PrefillInstance& instance) {
  return kernel_among<Fp16, kFull, PrefillNarrowSizes<Sizes>...>(instance);
}

}  // namespace

const void* prefill_kernel_narrow(const PrefillInstance& instance, bool all_scores) {
  return all_scores ? narrow_kernel_among<true, PrefillSizes64, PrefillSizes128, PrefillSizes192x128, PrefillSizes256>(
                          instance)
                    : narrow_kernel_among<false, PrefillSizes64, PrefillSizes128, PrefillSizes192x128, PrefillSizes256>(
                          instance);
}

}  // namespace paged_attn
