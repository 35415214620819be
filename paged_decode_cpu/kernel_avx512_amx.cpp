// The attention loop for Intel's processors with AVX-512 BF16 and VBMI, where vdpbf16ps is slower than the float32
// instructions that do the same: bfloat16 and float16 are multiplied in tiles (AMX) or widened, and vdpbf16ps serves
// only few rows on an 8-bit cache, which it looks up faster.
#if defined(__x86_64__)
#define PD_LANES 16
#include "attend.h"
#include "ops_amx_few.h"
#include "ops_pairs.h"
#include "write.h"

namespace paged_attn {
namespace {

// The most rows of an item, and the fewest of one that is made smaller. Items reread their keys from L3, as the keys of
// one head lie so far apart that they map to a few sets of L2; and packing keys takes long beside products in tiles.
constexpr int64_t kTileItemRows = 512;
constexpr int64_t kFewestTileRows = 160;

constexpr PartOfSlot kPartOfSlot = {40, 80, int64_t(2) << 20};

using FewBf16 = OpsAmxFew<DType::kBFloat16>;  // for the numbers that all OpsAmxFew have alike

// Sapphire Rapids and Emerald Rapids fetch by themselves what few rows read, and their L2 of 2 MiB has room for long
// tiles. On Granite Rapids, whose memory is farther away, only single rows outside of tiles gain by that.
constexpr Walk kSapphireRapidsWalk = {
    .reads_ahead_from = 2048, .reads_ahead_page = int64_t(16) << 10, .long_tiles = true};
constexpr Walk kGraniteRapidsWalk = {.reads_ahead_from = 2048,
                                     .reads_ahead_rows = 1,
                                     .tiles_read_ahead = false,
                                     .long_tiles = true,
                                     .tile_bytes = int64_t(128) << 10};

// The matrix unit of a processor.
struct Unit {
  bool multiplies_float16;
  int64_t fewest_rows;  // for which tiles in place are faster than vectors
};
constexpr Unit kSapphireRapids = {false, 3}, kGraniteRapids = {true, 1}, kGraniteRapidsBf16 = {false, 1};
constexpr int64_t kFewestWidenedRows = 3;  // over an 8-bit cache, on all of them

// The type of the numbers in tiles.
template <const Unit& kUnit>
DType elem_of(const Problem& p) {
  return kUnit.multiplies_float16 && p.q_dtype == DType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
}

// float32 would take six products for one: faster on one thread, slower on eight.
bool goes_through_tiles(const Problem& p) { return p.q_dtype != DType::kFloat32; }

bool is_narrow(const Problem& p) { return dtype_bytes(p.cache.dtype) == 1; }
bool looks_up(const Problem& p) { return multiplies_bfloat16(p) && is_narrow(p); }

// Whether few rows may multiply whole tiles of a cache: in place, or 8-bit numbers widened.
template <const Unit& kUnit>
bool fits_in_place(const Problem& p) {
  const DType elem = elem_of<kUnit>(p);
  const bool cache = p.cache.dtype == elem || is_narrow(p), queries = p.q_dtype == elem || looks_up(p);
  return cache && queries && p.head_dim % FewBf16::kChunk == 0 && p.head_dim_v % FewBf16::kColumns == 0 && !p.qv;
}

// Tests set 1, so that every feature goes through tiles.
#ifndef PD_MIN_TILE_ROWS
#define PD_MIN_TILE_ROWS 0
#endif
constexpr int64_t or_of_tests(int64_t fewest) { return PD_MIN_TILE_ROWS > 0 ? PD_MIN_TILE_ROWS : fewest; }

// From so many rows of a kv_head on tiles pay: more where a float16 number is held as two pieces.
template <const Unit& kUnit>
int64_t min_tile_rows(const Problem& p) {
  const bool pieces = p.q_dtype == DType::kFloat16 && elem_of<kUnit>(p) != p.q_dtype;
  return or_of_tests(pieces ? OpsF32<DType::kFloat16>::kMinPackedRows : 8);
}

template <const Unit& kUnit>
bool in_tiles(const Problem& p, const Item& item) {
  return goes_through_tiles(p) && item.rows() >= min_tile_rows<kUnit>(p);
}

constexpr int64_t kMostLookedUpRows = OpsBf16<DType::kFloat8E4M3>::kMinPackedRows - 1;

bool looked_up(const Problem& p, const Item& item) { return looks_up(p) && item.rows() <= kMostLookedUpRows; }

Products products(const Problem& p) {
  Products products = products_f32(p);
  if (!looks_up(p)) return products;
  products.in_place_few = "in_place_bf16";
  products.most_few_rows = kMostLookedUpRows;
  return products;
}

template <const Unit& kUnit>
Products products_amx(const Problem& p) {
  if (!goes_through_tiles(p)) return products_f32(p);
  const bool half = p.q_dtype == DType::kFloat16;
  Products all = {half ? "tiles_fp16" : "tiles_bf16", looks_up(p) ? "in_place_bf16" : "in_place_f32",
                  min_tile_rows<kUnit>(p), FewBf16::kPartRows, kTileItemRows};
  all.fewest_rows = kFewestTileRows;
  if (fits_in_place<kUnit>(p)) {
    all.tiles_in_place = half ? "tiles_in_place_fp16" : "tiles_in_place_bf16";
    all.min_tile_rows = or_of_tests(is_narrow(p) ? kFewestWidenedRows : kUnit.fewest_rows);
    all.most_tile_rows = FewBf16::kMostRows;
    all.min_tile_keys = or_of_tests(FewBf16::kFewestKeys);
  }
  return all;
}

template <const Unit& kUnit>
bool in_tiles_in_place(const Problem& p, const Item& item) {
  return products_amx<kUnit>(p).in_tiles_in_place(item);
}

// Calls work() with the type of the cache, which is kWide or 8-bit.
template <DType kWide, class Work>
auto with_cache_type(const Problem& p, const Work& work) {
  switch (p.cache.dtype) {
    case DType::kFloat8E4M3: return work.template operator()<DType::kFloat8E4M3>();
    case DType::kFloat8E5M2: return work.template operator()<DType::kFloat8E5M2>();
    default: return work.template operator()<kWide>();
  }
}

// Calls work() with how the numbers of this problem are held in tiles, few rows in place.
template <const Unit& kUnit, class Work>
auto with_few_tiles(const Problem& p, const Work& work) {
  const auto with_cache = [&]<DType kElem>() {
    return with_cache_type<kElem>(p,
                                  [&]<DType kCache>() { return work.template operator()<OpsAmxFew<kElem, kCache>>(); });
  };
  if constexpr (kUnit.multiplies_float16)
    if (p.q_dtype == DType::kFloat16) return with_cache.template operator()<DType::kFloat16>();
  return with_cache.template operator()<DType::kBFloat16>();
}

// The same where keys and values are laid out.
template <const Unit& kUnit, class Work>
auto with_tiles(const Problem& p, const Work& work) {
  const auto with_cache = [&]<DType kElem, DType kQuery>() {
    return with_cache_type<kQuery>(
        p, [&]<DType kCache>() { return work.template operator()<OpsAmx<kElem, kQuery, kCache>>(); });
  };
  constexpr DType kHalf = kUnit.multiplies_float16 ? DType::kFloat16 : DType::kBFloat16;
  if (p.q_dtype == DType::kFloat16) return with_cache.template operator()<kHalf, DType::kFloat16>();
  return with_cache.template operator()<DType::kBFloat16, DType::kBFloat16>();
}

int64_t scratch_bytes(const Problem& p, const Item& item) {
  if (!looked_up(p, item)) return scratch_bytes_f32(p, item);
  return scratch_bytes_as<OpsBf16<DType::kFloat8E4M3>>(p, item);
}

template <const Unit& kUnit>
int64_t scratch_bytes_amx(const Problem& p, const Item& item) {
  const auto bytes = [&]<class Ops>() { return scratch_bytes_as<Ops>(p, item); };
  if (in_tiles_in_place<kUnit>(p, item)) return with_few_tiles<kUnit>(p, bytes);
  if (!in_tiles<kUnit>(p, item)) return scratch_bytes(p, item);
  return with_tiles<kUnit>(p, bytes);
}

void attend(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  if (!looked_up(p, item)) return attend_f32(p, item, keys, memory, partial);
  if (p.cache.dtype == DType::kFloat8E4M3)
    return attend_as<OpsBf16<DType::kFloat8E4M3>>(p, item, keys, memory, partial);
  attend_as<OpsBf16<DType::kFloat8E5M2>>(p, item, keys, memory, partial);
}

template <const Unit& kUnit>
void attend_amx(const Problem& p, const Item& item, KvRange keys, char* memory, float* partial) {
  const auto attend_with = [&]<class Ops>() { attend_as<Ops>(p, item, keys, memory, partial); };
  if (in_tiles_in_place<kUnit>(p, item)) {
    const TileUnit unit(FewBf16::config(item.rows()));
    return with_few_tiles<kUnit>(p, attend_with);
  }
  if (!in_tiles<kUnit>(p, item)) return attend(p, item, keys, memory, partial);
  const TileUnit unit(TileConfig{});
  with_tiles<kUnit>(p, attend_with);
}

constexpr Kernel intel_kernel(const Walk& walk) {
  return {"avx512_intel", products, scratch_bytes, attend, merge_partials, write_token, kPartOfSlot, walk};
}

template <const Unit& kUnit>
constexpr Kernel amx_kernel(const char* name, const Walk& walk) {
  return {
      name, products_amx<kUnit>, scratch_bytes_amx<kUnit>, attend_amx<kUnit>, merge_partials, write_token, kPartOfSlot,
      walk};
}

}  // namespace

const Kernel kAvx512IntelKernel = intel_kernel(kSapphireRapidsWalk);
const Kernel kAvx512AmxKernel = amx_kernel<kSapphireRapids>("avx512_amx", kSapphireRapidsWalk);
const Kernel kGraniteRapidsKernel = intel_kernel(kGraniteRapidsWalk);
const Kernel kGraniteRapidsAmxKernel = amx_kernel<kGraniteRapidsBf16>("avx512_amx", kGraniteRapidsWalk);
const Kernel kAvx512AmxFp16Kernel = amx_kernel<kGraniteRapids>("avx512_amx_fp16", kGraniteRapidsWalk);

}  // namespace paged_attn
#endif
