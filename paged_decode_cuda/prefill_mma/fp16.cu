#include "table.cuh"

namespace paged_attn {

const void* prefill_mma_kernel_fp16(int head_dim, int keys) { return find_prefill_mma_kernel<Fp16>(head_dim, keys); }

}  // namespace paged_attn
