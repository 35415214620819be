#include "instances.h"
#include "kernel.cuh"
#include "narrow_sizes.h"

namespace paged_attn {
namespace {

template <typename Sizes>
const void* kernel_of(bool all_scores) {
  using Shape = PrefillShape<Fp16, PrefillNarrowSizes<Sizes>>;
  return all_scores ? reinterpret_cast<const void*>(&prefill_kernel<Shape, true>)
                    : reinterpret_cast<const void*>(&prefill_kernel<Shape, false>);
}

}  // namespace

const void* prefill_kernel_narrow(const PrefillInstance& instance, bool all_scores) {
  switch (instance.head_dim) {
    case 64: return kernel_of<PrefillSizes64>(all_scores);
    case 128: return kernel_of<PrefillSizes128>(all_scores);
    case 192: return kernel_of<PrefillSizes192>(all_scores);
    default: return kernel_of<PrefillSizes256>(all_scores);
  }
}

}  // namespace paged_attn
