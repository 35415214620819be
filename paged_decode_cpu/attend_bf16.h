// bfloat16 queries multiply in pairs (vdpbf16ps), 8-bit ones too, everything else is widened to float32.
#pragma once

#include "attend.h"
#include "ops_pairs.h"

namespace paged_attn {
namespace {

inline Products products_bf16(const Problem& p) {
  if (!multiplies_bfloat16(p)) return products_f32(p);
  using Bf16 = OpsBf16<DType::kBFloat16>;
  const bool fp8 = dtype_bytes(p.cache.dtype) == 1;
  const int64_t min_packed_rows = fp8 ? OpsBf16<DType::kFloat8E4M3>::kMinPackedRows : Bf16::kMinPackedRows;
  return {"packed_bf16", "in_place_bf16", min_packed_rows, Bf16::kScoreRows, kBlockRows};
}

inline int64_t scratch_bytes_bf16(const Problem& p, const Item& block) {
  // Chunks of an 8-bit cache are wider than a register of floats, its elements narrower.
  int64_t bf16 = scratch_bytes_as<OpsBf16<DType::kFloat8E4M3>>(p, block);
  return pd_max(bf16, scratch_bytes_f32(p, block));
}

inline void attend_bf16(const Problem& p, const Item& block, KvRange keys, char* memory, float* partial) {
  if (!multiplies_bfloat16(p)) return attend_f32(p, block, keys, memory, partial);
  switch (p.cache.dtype) {
    case DType::kFloat8E4M3: return attend_as<OpsBf16<DType::kFloat8E4M3>>(p, block, keys, memory, partial);
    case DType::kFloat8E5M2: return attend_as<OpsBf16<DType::kFloat8E5M2>>(p, block, keys, memory, partial);
    default: return attend_as<OpsBf16<DType::kBFloat16>>(p, block, keys, memory, partial);
  }
}

}  // namespace
}  // namespace paged_attn
