// float16 queries on Arm with FEAT_FHM, everything else as in attend_neon.h.
#pragma once

#include "attend_neon.h"
#include "ops_neon_fp16.h"

namespace paged_attn {
namespace {

inline Products products_neon_fp16(const Problem& p) {
  return p.q_dtype == DType::kFloat16 ? neon_products("packed_fp16", "in_place_fp16") : products_neon(p);
}

inline void attend_neon_fp16(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  if (p.q_dtype != DType::kFloat16) return attend_neon(p, item, keys, memory, partial);
  switch (p.cache.dtype) {
    case DType::kFloat8E4M3: return attend_as<OpsNeonFp16<DType::kFloat8E4M3>>(p, item, keys, memory, partial);
    case DType::kFloat8E5M2: return attend_as<OpsNeonFp16<DType::kFloat8E5M2>>(p, item, keys, memory, partial);
    default: return attend_as<OpsNeonFp16<DType::kFloat16>>(p, item, keys, memory, partial);
  }
}

}  // namespace
}  // namespace paged_attn
