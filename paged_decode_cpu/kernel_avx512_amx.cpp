// The attention loop for Intel's processors with AVX-512 BF16 and VBMI, where vdpbf16ps is slower than the float32
// instructions that do the same: bfloat16 is multiplied in tiles (AMX) or widened, and vdpbf16ps serves only few rows
// on an 8-bit cache, which it looks up faster.
#if defined(__x86_64__)
#define PD_LANES 16
// These processors fetch by themselves what few rows read, and their L2 of 2 MiB has room for long tiles.
#define PD_READS_AHEAD_FROM 2048
#define PD_LONG_TILES_READ_AHEAD 1
#include "attend.h"
#include "ops_amx_few.h"
#include "ops_bf16.h"
#include "write.h"

namespace paged_attn {
namespace {

// One head's keys lie so far apart that a few sets of L2 must hold them: they come from L3 for every item.
constexpr int64_t kTileBlockRows = 512;
constexpr int64_t kFewestTileRows = 160;  // laying out keys costs more, beside products in tiles

constexpr PartOfSlot kPartOfSlot = {40, 80, int64_t(2) << 20};

// float32 would take six products for one: faster on one thread, slower on eight.
bool goes_through_tiles(const Problem& p) { return p.q_dtype != DType::kFloat32; }

// Whether few rows may read keys and values in place, in whole tiles.
bool fits_in_place(const Problem& p) {
  return p.q_dtype == DType::kBFloat16 && p.cache.dtype == DType::kBFloat16 && p.head_dim % 32 == 0 &&
         p.head_dim_v % OpsAmxFew::kColumns == 0 && !p.qv;
}

// Tests set 1, so that every feature goes through tiles.
#ifndef PD_MIN_TILE_ROWS
#define PD_MIN_TILE_ROWS 0
#endif
constexpr int64_t or_of_tests(int64_t fewest) { return PD_MIN_TILE_ROWS > 0 ? PD_MIN_TILE_ROWS : fewest; }

// From so many rows of a kv_head on tiles pay; a float16 number is two.
int64_t min_tile_rows(const Problem& p) {
  return or_of_tests(p.q_dtype == DType::kFloat16 ? OpsF32<DType::kFloat16>::kMinPackedRows : 8);
}

bool in_tiles(const Problem& p, const Item& item) { return goes_through_tiles(p) && item.rows() >= min_tile_rows(p); }

constexpr int64_t kMostLookedUpRows = OpsBf16<DType::kFloat8E4M3>::kMinPackedRows - 1;

bool looks_up(const Problem& p) { return multiplies_bfloat16(p) && dtype_bytes(p.cache.dtype) == 1; }
bool looked_up(const Problem& p, const Item& item) { return looks_up(p) && item.rows() <= kMostLookedUpRows; }

Products products(const Problem& p) {
  Products products = products_f32(p);
  if (!looks_up(p)) return products;
  products.in_place_few = "in_place_bf16";
  products.most_few_rows = kMostLookedUpRows;
  return products;
}

Products products_amx(const Problem& p) {
  if (!goes_through_tiles(p)) return products_f32(p);
  using Ops = OpsAmx<DType::kBFloat16, DType::kBFloat16>;
  Products all = {p.q_dtype == DType::kFloat16 ? "tiles_fp16" : "tiles_bf16",
                  looks_up(p) ? "in_place_bf16" : "in_place_f32", min_tile_rows(p), Ops::kPartRows, kTileBlockRows};
  all.fewest_rows = kFewestTileRows;
  if (fits_in_place(p)) {
    all.tiles_in_place = "tiles_in_place_bf16";
    all.min_tile_rows = or_of_tests(OpsAmxFew::kFewestRows);
    all.most_tile_rows = OpsAmxFew::kMostRows;
    all.min_tile_keys = or_of_tests(OpsAmxFew::kFewestKeys);
  }
  return all;
}

bool in_tiles_in_place(const Problem& p, const Item& item) { return products_amx(p).in_tiles_in_place(item); }

// Calls work() with how the numbers of this problem are held in tiles.
template <class Work>
auto with_tiles(const Problem& p, const Work& work) {
  const auto with_cache = [&]<DType kQuery>() {
    switch (p.cache.dtype) {
      case DType::kFloat8E4M3: return work.template operator()<OpsAmx<kQuery, DType::kFloat8E4M3>>();
      case DType::kFloat8E5M2: return work.template operator()<OpsAmx<kQuery, DType::kFloat8E5M2>>();
      default: return work.template operator()<OpsAmx<kQuery, kQuery>>();
    }
  };
  if (p.q_dtype == DType::kFloat16) return with_cache.template operator()<DType::kFloat16>();
  return with_cache.template operator()<DType::kBFloat16>();
}

int64_t scratch_bytes(const Problem& p, const Item& item) {
  if (!looked_up(p, item)) return scratch_bytes_f32(p, item);
  return scratch_bytes_as<OpsBf16<DType::kFloat8E4M3>>(p, item);
}

int64_t scratch_bytes_amx(const Problem& p, const Item& item) {
  if (in_tiles_in_place(p, item)) return scratch_bytes_as<OpsAmxFew>(p, item);
  if (!in_tiles(p, item)) return scratch_bytes(p, item);
  return with_tiles(p, [&]<class Ops>() { return scratch_bytes_as<Ops>(p, item); });
}

void attend(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  if (!looked_up(p, item)) return attend_f32(p, item, keys, memory, partial);
  if (p.cache.dtype == DType::kFloat8E4M3)
    return attend_as<OpsBf16<DType::kFloat8E4M3>>(p, item, keys, memory, partial);
  attend_as<OpsBf16<DType::kFloat8E5M2>>(p, item, keys, memory, partial);
}

void attend_amx(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  if (in_tiles_in_place(p, item)) {
    const TileUnit unit(OpsAmxFew::config(item.rows()));
    return attend_as<OpsAmxFew>(p, item, keys, memory, partial);
  }
  if (!in_tiles(p, item)) return attend(p, item, keys, memory, partial);
  const TileUnit unit(TileConfig{});
  with_tiles(p, [&]<class Ops>() { attend_as<Ops>(p, item, keys, memory, partial); });
}

}  // namespace

const Kernel kAvx512IntelKernel = {"avx512_intel", products,    scratch_bytes, attend,
                                   merge_partials, write_token, kPartOfSlot};
const Kernel kAvx512AmxKernel = {"avx512_amx",   products_amx, scratch_bytes_amx, attend_amx,
                                 merge_partials, write_token,  kPartOfSlot};

}  // namespace paged_attn
#endif
