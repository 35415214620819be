// The operators that torch_binding.cpp registers. An operator replaces small vectors among its arguments (lengths,
// slopes) by contiguous copies where they have gaps.
#pragma once

#include <string>

#include "arguments.h"

namespace paged_attn {

// Attention of q to a paged, contiguous (no block_table) or ragged (cu_seqlens_k) cache into `out` and `lse`. With k
// and v these are written into the cache first.
void flash_attn_with_kvcache(AttendArguments& arguments);

// How the same call would run; nothing runs. See explain_attention in backend.h.
std::string explain_flash_attn_with_kvcache(AttendArguments& arguments);

void kv_paged_write(WriteArguments& arguments);

// out and lse of the union of keys, from those of its parts.
void merge_parts(const MergeArguments& arguments);

// The same where every GPU of a host has one part, which it sends to the others. CUDA only.
void merge_with_peers(const PeerMergeArguments& arguments);

}  // namespace paged_attn
