// bfloat16 queries multiply in pairs (vdpbf16ps), 8-bit ones too, everything else is widened to float32.
#pragma once

#include "attend.h"
#include "ops_pairs.h"

namespace paged_attn {
namespace {

// The most rows of an item on packed keys, and sums of their values. Each item of a prompt packs all its keys by
// itself, which takes long beside products this fast: so an item has many rows.
constexpr int64_t kManyItemRows = 1008, kManySums = int64_t(256) << 10;

inline Products products_bf16(const Problem& p) {
  Products products = products_f32(p);
  products.most_rows = kManyItemRows;
  products.most_sums = kManySums;
  if (!multiplies_bfloat16(p)) return products;
  using Bf16 = OpsBf16<DType::kBFloat16>;
  const bool fp8 = dtype_bytes(p.cache.dtype) == 1;
  products.packed = "packed_bf16";
  products.in_place = "in_place_bf16";
  products.min_packed_rows = fp8 ? OpsBf16<DType::kFloat8E4M3>::kMinPackedRows : Bf16::kMinPackedRows;
  products.row_step = Bf16::kScoreRows;
  return products;
}

inline int64_t scratch_bytes_bf16(const Problem& p, const Item& item) {
  // Chunks of an 8-bit cache are wider than a register of floats, its elements narrower.
  int64_t bf16 = scratch_bytes_as<OpsBf16<DType::kFloat8E4M3>>(p, item);
  return pd_max(bf16, scratch_bytes_f32(p, item));
}

inline void attend_bf16(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  if (!multiplies_bfloat16(p)) return attend_f32(p, item, keys, memory, partial);
  switch (p.cache.dtype) {
    case DType::kFloat8E4M3: return attend_as<OpsBf16<DType::kFloat8E4M3>>(p, item, keys, memory, partial);
    case DType::kFloat8E5M2: return attend_as<OpsBf16<DType::kFloat8E5M2>>(p, item, keys, memory, partial);
    default: return attend_as<OpsBf16<DType::kBFloat16>>(p, item, keys, memory, partial);
  }
}

}  // namespace
}  // namespace paged_attn
