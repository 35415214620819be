#include "table.cuh"

namespace paged_attn {

const void* prefill_mma_widening_bf16(int head_dim) { return find_prefill_mma_widening<Bf16>(head_dim); }

}  // namespace paged_attn
