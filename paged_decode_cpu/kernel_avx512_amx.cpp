// The attention loop for Intel's processors with AVX-512 BF16 and VBMI, where vdpbf16ps is slower than the float32
// instructions that do the same: bfloat16 is multiplied in tiles (AMX) or widened, and vdpbf16ps serves only few rows
// on an 8-bit cache, which it looks up faster.
#if defined(__x86_64__)
#define PD_LANES 16
#include "attend.h"
#include "ops_amx.h"
#include "ops_bf16.h"
#include "write.h"

namespace paged_attn {
namespace {

// From so many rows of a kv_head on tiles pay; tests set 1, so that every feature goes through tiles.
#ifndef PD_MIN_TILE_ROWS
#define PD_MIN_TILE_ROWS 8
#endif

// One head's keys lie so far apart that a few sets of L2 must hold them: they come from L3 for every block.
constexpr int64_t kTileBlockRows = 512;

bool in_tiles(const Problem& p, const Item& block) {
  return multiplies_bfloat16(p) && block.rows() >= PD_MIN_TILE_ROWS;
}

bool looked_up(const Problem& p, const Item& block) {
  return multiplies_bfloat16(p) && dtype_bytes(p.cache.dtype) == 1 &&
         block.rows() < OpsBf16<DType::kFloat8E4M3>::kMinPackedRows;
}

Products products(const Problem& p) {
  Products products = products_f32(p);
  if (!multiplies_bfloat16(p) || dtype_bytes(p.cache.dtype) != 1) return products;
  products.in_place = "in_place_bf16";
  products.min_packed_rows = OpsBf16<DType::kFloat8E4M3>::kMinPackedRows;
  return products;
}

Products products_amx(const Problem& p) {
  if (!multiplies_bfloat16(p)) return products_f32(p);
  return {"tiles_bf16", products(p).in_place, PD_MIN_TILE_ROWS, OpsAmx<DType::kBFloat16>::kPartRows, kTileBlockRows};
}

int64_t scratch_bytes(const Problem& p, const Item& block) {
  if (!looked_up(p, block)) return scratch_bytes_f32(p, block);
  return Scratch<OpsBf16<DType::kFloat8E4M3>>(p, block, nullptr).bytes;
}

int64_t scratch_bytes_amx(const Problem& p, const Item& block) {
  if (!in_tiles(p, block)) return scratch_bytes(p, block);
  if (dtype_bytes(p.cache.dtype) == 1) return Scratch<OpsAmx<DType::kFloat8E4M3>>(p, block, nullptr).bytes;
  return Scratch<OpsAmx<DType::kBFloat16>>(p, block, nullptr).bytes;
}

void attend(const Problem& p, const Item& block, KvRange keys, char* memory, float* partial) {
  if (!looked_up(p, block)) return attend_f32(p, block, keys, memory, partial);
  if (p.cache.dtype == DType::kFloat8E4M3)
    return attend_as<OpsBf16<DType::kFloat8E4M3>>(p, block, keys, memory, partial);
  attend_as<OpsBf16<DType::kFloat8E5M2>>(p, block, keys, memory, partial);
}

void attend_amx(const Problem& p, const Item& block, KvRange keys, char* memory, float* partial) {
  if (!in_tiles(p, block)) return attend(p, block, keys, memory, partial);
  const TileUnit unit;
  switch (p.cache.dtype) {
    case DType::kFloat8E4M3: return attend_as<OpsAmx<DType::kFloat8E4M3>>(p, block, keys, memory, partial);
    case DType::kFloat8E5M2: return attend_as<OpsAmx<DType::kFloat8E5M2>>(p, block, keys, memory, partial);
    default: return attend_as<OpsAmx<DType::kBFloat16>>(p, block, keys, memory, partial);
  }
}

}  // namespace

const Kernel kAvx512IntelKernel = {"avx512_intel", products, scratch_bytes, attend, merge_partials, write_token};
const Kernel kAvx512AmxKernel = {"avx512_amx", products_amx,   scratch_bytes_amx,
                                 attend_amx,   merge_partials, write_token};

}  // namespace paged_attn
#endif
