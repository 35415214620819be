#include "table.cuh"

namespace paged_attn {

const void* prefill_kernel_fp16(int head_dim, bool all_scores) {
  return find_prefill_kernel<Fp16>(head_dim, all_scores);
}

}  // namespace paged_attn
