#include "table.cuh"

namespace paged_attn {

const void* prefill_mma_widening_fp16(int head_dim) { return find_prefill_mma_widening<Fp16>(head_dim); }

}  // namespace paged_attn
