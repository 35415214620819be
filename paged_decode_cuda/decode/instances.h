// The kernels that exist, by what find_decode_instance() says: one of a Problem and a Plan, and two of a BasicCall.
#pragma once

#include "sizes.h"

namespace paged_attn {

// Every call, basic ones, and basic ones with cu_seqlens_q.
enum class DecodeKind { kFull, kBasic, kBasicPacked };

const void* decode_kernel_fp32(int head_dim, int row_tiles, DecodeKind kind);
const void* decode_kernel_fp16(int head_dim, int row_tiles, DecodeKind kind);
const void* decode_kernel_bf16(int head_dim, int row_tiles, DecodeKind kind);
const void* decode_kernel_e4m3(int head_dim, int row_tiles, DecodeKind kind);
const void* decode_kernel_e5m2(int head_dim, int row_tiles, DecodeKind kind);

// Those of warpgroups, see wgmma_sizes.h.
const void* wgmma_decode_kernel_fp16(int head_dim, int row_tiles, DecodeKind kind);
const void* wgmma_decode_kernel_bf16(int head_dim, int row_tiles, DecodeKind kind);

}  // namespace paged_attn
