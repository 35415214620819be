#include "table.cuh"

namespace paged_attn {

const void* prefill_kernel_bf16(const PrefillInstance& instance, bool all_scores) {
  return find_prefill_kernel<Bf16>(instance, all_scores);
}

}  // namespace paged_attn
