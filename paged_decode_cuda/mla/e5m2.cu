#include "narrow_table.cuh"

namespace paged_attn {

const void* mla_kernel_e5m2(bool all_scores) { return find_narrow_mla_kernel<E5m2>(all_scores); }

}  // namespace paged_attn
