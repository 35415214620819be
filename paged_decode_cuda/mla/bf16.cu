#include "table.cuh"

namespace paged_attn {

const void* mla_kernel_bf16(bool all_scores) { return find_mla_kernel<Bf16>(all_scores); }

}  // namespace paged_attn
