#include "narrow_table.cuh"

namespace paged_attn {

const void* mla_kernel_e4m3(bool few_rows, bool all_scores) {
  return find_narrow_mla_kernel<E4m3>(few_rows, all_scores);
}

}  // namespace paged_attn
