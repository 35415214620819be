// float32 on Arm, which every kernel has: any queries, any cache.
#pragma once

#include "attend.h"

namespace paged_attn {
namespace {

inline Products neon_products(const char* packed, const char* in_place) {
  return {packed, in_place, OpsNeon::kMinPackedRows, OpsNeon::kScoreRows, kItemRows};
}

inline Products products_neon(const Problem&) { return neon_products("packed_f32", "in_place_f32"); }

// Scratch memory for numbers of four bytes is enough for smaller ones.
inline int64_t scratch_bytes_neon(const Problem& p, const Item& item) {
  return scratch_bytes_as<OpsNeonF32<DType::kFloat32>>(p, item);
}

inline void attend_neon(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  switch (p.cache.dtype) {
    case DType::kFloat32: return attend_as<OpsNeonF32<DType::kFloat32>>(p, item, keys, memory, partial);
    case DType::kFloat16: return attend_as<OpsNeonF32<DType::kFloat16>>(p, item, keys, memory, partial);
    case DType::kBFloat16: return attend_as<OpsNeonF32<DType::kBFloat16>>(p, item, keys, memory, partial);
    case DType::kFloat8E4M3: return attend_as<OpsNeonF32<DType::kFloat8E4M3>>(p, item, keys, memory, partial);
    case DType::kFloat8E5M2: return attend_as<OpsNeonF32<DType::kFloat8E5M2>>(p, item, keys, memory, partial);
  }
}

}  // namespace
}  // namespace paged_attn
