// The attention loop for Arm's processors that multiply bfloat16 (FEAT_BF16): bfloat16 queries, 8-bit ones too;
// everything else as in kernel_neon_fp16.cpp, for those processors have FEAT_FHM too.
#if defined(__aarch64__)
#define PD_LANES 4
#define PD_NEON
#include "attend_neon_fp16.h"
#include "ops_neon_bf16.h"
#include "write.h"

namespace paged_attn {
namespace {

Products products(const Problem& p) {
  return multiplies_bfloat16(p) ? neon_products("packed_bf16", "in_place_bf16") : products_neon_fp16(p);
}

void attend(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  if (!multiplies_bfloat16(p)) return attend_neon_fp16(p, item, keys, memory, partial);
  switch (p.cache.dtype) {
    case DType::kFloat8E4M3: return attend_as<OpsNeonBf16<DType::kFloat8E4M3>>(p, item, keys, memory, partial);
    case DType::kFloat8E5M2: return attend_as<OpsNeonBf16<DType::kFloat8E5M2>>(p, item, keys, memory, partial);
    default: return attend_as<OpsNeonBf16<DType::kBFloat16>>(p, item, keys, memory, partial);
  }
}

}  // namespace

const Kernel kNeonBf16Kernel = {"neon_bf16", products, scratch_bytes_neon, attend, merge_partials, write_token};

}  // namespace paged_attn
#endif
