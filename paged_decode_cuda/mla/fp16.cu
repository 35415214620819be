#include "table.cuh"

namespace paged_attn {

const void* mla_kernel_fp16(bool all_scores) { return find_mla_kernel<Fp16>(all_scores); }

}  // namespace paged_attn
