#include "instances.h"
#include "narrow_sizes.h"
#include "table.cuh"

namespace paged_attn {
namespace {

template <typename... Sizes>
const void* narrow_kernel_among(const PrefillInstance& instance, bool all_scores) {
  return all_scores ? kernel_among<Fp16, true, PrefillNarrowSizes<Sizes>...>(instance)
                    : kernel_among<Fp16, false, PrefillNarrowSizes<Sizes>...>(instance);
}

}  // namespace

const void* prefill_kernel_narrow(const PrefillInstance& instance, bool all_scores) {
  return narrow_kernel_among<PrefillSizes64, PrefillSizes128, PrefillSizes192x128, PrefillSizes256>(instance,
                                                                                                    all_scores);
}

}  // namespace paged_attn
