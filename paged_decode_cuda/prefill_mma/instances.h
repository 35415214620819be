// The kernels that exist, by what find_prefill_mma_instance() says; of a Problem and a PrefillMmaCall.
#pragma once

#include "sizes.h"

namespace paged_attn {

const void* prefill_mma_kernel_fp16(int head_dim, int keys);
const void* prefill_mma_kernel_bf16(int head_dim, int keys);

// For 8-bit caches, by the dtype of q.
const void* prefill_mma_widening_fp16(int head_dim);
const void* prefill_mma_widening_bf16(int head_dim);

}  // namespace paged_attn
