#include "e4m3_sizes.h"
#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {
namespace {

template <bool kAllScores>
const void* kernel_of(int head_dim) {
  using Shape64 = PrefillShape<E4m3, PrefillE4m3Sizes64<kAllScores>>;
  using Shape128 = PrefillShape<E4m3, PrefillE4m3Sizes128<kAllScores>>;
  return head_dim == 64 ? reinterpret_cast<const void*>(&prefill_kernel<Shape64, kAllScores>)
                        : reinterpret_cast<const void*>(&prefill_kernel<Shape128, kAllScores>);
}

}  // namespace

const void* prefill_kernel_e4m3(const PrefillInstance& instance, bool all_scores) {
  return all_scores ? kernel_of<true>(instance.head_dim) : kernel_of<false>(instance.head_dim);
}

}  // namespace paged_attn
