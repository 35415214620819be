#include "e4m3_sizes.h"
#include "instances.h"
#include "kernel.cuh"

namespace paged_attn {
namespace {

template <typename Sizes>
const void* kernel_of(bool all_scores) {
  using Shape = PrefillShape<E4m3, Sizes>;
  return all_scores ? reinterpret_cast<const void*>(&prefill_kernel<Shape, true>)
                    : reinterpret_cast<const void*>(&prefill_kernel<Shape, false>);
}

}  // namespace

const void* prefill_kernel_e4m3(const PrefillInstance& instance, bool all_scores) {
  // No tall tiles with softcap or ALiBi, as in 16 bits.
  if (instance.head_dim == 64 && instance.rows == TallPrefillE4m3Sizes64::kRows)
    return reinterpret_cast<const void*>(&prefill_kernel<PrefillShape<E4m3, TallPrefillE4m3Sizes64>, false>);
  if (instance.head_dim == 128 && instance.rows == TallPrefillE4m3Sizes128::kRows)
    return reinterpret_cast<const void*>(&prefill_kernel<PrefillShape<E4m3, TallPrefillE4m3Sizes128>, false>);
  return instance.head_dim == 64 ? kernel_of<PrefillE4m3Sizes64>(all_scores)
                                 : kernel_of<PrefillE4m3Sizes128>(all_scores);
}

}  // namespace paged_attn
