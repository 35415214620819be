#include "table.cuh"

namespace paged_attn {

const void* prefill_mma_kernel_bf16(int head_dim, int keys) { return find_prefill_mma_kernel<Bf16>(head_dim, keys); }

}  // namespace paged_attn
