#include "narrow_table.cuh"

namespace paged_attn {

const void* mla_kernel_e5m2(bool few_rows, bool all_scores) {
  return find_narrow_mla_kernel<E5m2>(few_rows, all_scores);
}

}  // namespace paged_attn
