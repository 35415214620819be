#include "plan.h"

#include <numeric>

#include "../decode/plan.h"
#include "../layout.h"
#include "facts.h"
#include "instances.h"
#include "plan_tiles.h"

namespace paged_attn {
namespace {

// The combine kernel: where a row may have kManySplits, four warps add it if there are very few rows, two if few. Rows
// and blocks are counted for each multiprocessor. More blocks would take long to start where nothing was cut.
constexpr int64_t kManySplits = 8, kVeryFewCombinedRows = 8, kFewCombinedRows = 12, kMostCombineBlocks = 8;
constexpr int64_t kFewWidenedRows = 32;  // take less time in the decode kernel where they leave multiprocessors idle
// Up to so many dimensions the decode kernel reads keys at full rate for 16 rows, above only for 8: for 16 at half of
// it.
constexpr int64_t kDecodeDims = 128, kDecodeWideRows = 8;
constexpr int64_t kFewKeys = 256;  // for so many, as in a window, it is as fast where it has multiprocessors for all

// Whether a request has no more rows than one tile of the decode kernel, which is as fast there. Widening takes long,
// so for it all rounds of tiles must be full enough. `deterministic` needs the splits that decode alone has.
bool suits_decode(const Problem& p, const DeviceLimits& limits) {
  if (takes_wide_items(p, limits)) return true;
  if (!has_few_rows(p)) return false;
  if (p.deterministic || pd_max(p.head_dim, p.head_dim_v) <= kDecodeDims || has_few_rows(p, kDecodeWideRows))
    return true;
  const int64_t tiles = p.batch * p.kv_heads, processors = limits.processors;
  const int64_t rounds = pd_ceil_div(tiles, processors);
  if (widens(p)) return rounds < 2 || 4 * tiles < 3 * rounds * processors;
  return 3 * tiles < 2 * processors && most_keys(p, kFewRows) <= kFewKeys;
}

// Whether the decode kernel takes less time. It reads all keys for each 16 rows: on an H200 in 0.05, 0.2 and 0.9 ns for
// each key of such a tile, with up to 64, 128 and 256 dimensions, and above 128 keys it has partials to add. The
// prefill kernel takes 11 or 20 ns for each key where it cuts none. The limits are where both were as fast.
bool little_work(const Problem& p, const PrefillInstance& instance) {
  constexpr int kDecodeRows = 16;
  const int64_t keys = pd_max(most_keys(p, instance.tile_rows), 1), tiles = likely_tiles(p, kDecodeRows);
  const int64_t work = tiles * keys * dtype_bytes(p.cache.dtype);
  if (instance.head_dim <= 64) return work < 90000;
  if (instance.head_dim <= 128) return work < 45000 && tiles < 58 - (keys <= 128 ? 0 : 10000 / keys);
  return work < 22500 && tiles < 24 + 1000 / keys;
}

// The combine kernel. Several warps add the partials of a row where they may be many and rows are few. Its blocks
// start while those of the kernel before end, and the first multiprocessors that are free would take nearly all. So
// each asks for so much shared memory that none of them takes more than its share, or two.
void plan_combine(const Problem& p, const DeviceLimits& limits, PrefillPlan& plan) {
  const int64_t rows = p.total_q * p.q_heads, processors = limits.processors;
  const bool few = plan.most_splits >= kManySplits && rows <= kFewCombinedRows * processors;
  plan.combine_warps = !few ? 1 : rows > kVeryFewCombinedRows * processors ? kMostTogether / 2 : kMostTogether;
  const int64_t blocks = pd_ceil_div(rows * plan.combine_warps, int64_t{kCombineThreads / kWarp});
  plan.combine_blocks = pd_min(blocks, kMostCombineBlocks * processors);
  const int64_t share = pd_max(pd_ceil_div(plan.combine_blocks, processors), 2);
  const int64_t used = kSharedCostOfBlock + kCombineSharedBytes;
  plan.combine_bytes = static_cast<int>(pd_max(limits.shared_per_processor / share - used, 0));
}

}  // namespace

const char* prefill_why_not(const Problem& p, const DeviceLimits& limits) {
  if (*hopper_why_not(limits) != '\0') return hopper_why_not(limits);
  if (suits_decode(p, limits)) return "no more rows than one tile of the decode kernel";
  if (p.q_dtype == DType::kFloat32) return "float32";
  const char* const reason = decode_why_not(p, limits);
  if (*reason != '\0') return reason;
  if (dtype_bytes(p.cache.dtype) == 2 && p.q_dtype != p.cache.dtype) return "q and the cache differ in dtype";
  const auto [instance, tiles, cuts] = choose_tiles(p, limits);
  if (tiles > INT32_MAX / 2) return "there are more tiles of rows than 32 bits count";
  const int64_t splits = cuts.splits;
  // Where results must not depend on the other requests, none of the following may either.
  if (p.deterministic && splits > 1) return "deterministic and num_splits above 1";
  if (splits > 1 && (splits > kPartialTiles * limits.processors || tiles * splits > kPartialTiles * limits.processors))
    return "num_splits above 1 and more rows than it is meant for";
  if (!p.deterministic && tiles * splits * kFewTiles < limits.processors && little_work(p, instance))
    return "too few tiles of rows to fill the device";
  const int64_t busy = 2 * tiles > limits.processors ? tiles : tiles * splits;
  if (widens(p) && has_few_rows(p, kFewWidenedRows) && (p.deterministic || 4 * busy < 3 * limits.processors))
    return "an 8-bit cache and no more rows than the decode kernel is faster for";
  return "";
}

PrefillPlan plan_prefill(const Problem& p, const DeviceLimits& limits) {
  const Cache& c = p.cache;
  PrefillPlan plan = {};
  const auto [instance, tiles, cuts] = choose_tiles(p, limits);
  plan.instance = instance;
  plan.all_scores = all_scores(p);
  plan.widens = widens(p);
  plan.items = tiles / p.kv_heads;
  plan.few_tiles = kIdle * tiles <= limits.processors;
  plan.splits = cuts.splits;
  plan.most_splits = cuts.most;
  plan.splits_wanted = cuts.wanted;
  plan.cut_from_keys = cuts.keys;
  plan.least_split_keys = cuts.least;
  plan.least_long_split_keys = cuts.least_long;
  plan.blocks = pd_max(pd_min(tiles * plan.most_splits, limits.processors), 1);
  plan.read_once = longest_query(p) * p.group <= plan.instance.tile_rows;
  // A warp looks at as many requests at once as it has lanes. Where they have one tile of rows each, finding the first
  // tile takes no time, nor does finding that none is left. Entries of cu_seqlens_q that fall make more tiles than all
  // tokens have: then some are left out.
  plan.one_round = !plan.read_once && p.batch <= kWarp && tiles * plan.most_splits <= plan.blocks;
  plan_combine(p, limits, plan);
  plan.l2_keys = kL2Bytes / ((p.head_dim + p.head_dim_v) * dtype_bytes(c.dtype));
  // A tile is whole boxes, and so is a page; other caches are one page in which a box may begin anywhere. A box begins
  // where the swizzle does.
  const int64_t rows = c.block_table ? std::gcd(plan.instance.keys, c.page_size) : plan.instance.keys;
  const bool bulk = rows % kSwizzledRows == 0 && rows >= plan.instance.least_box_rows && !plan.widens;
  plan.box_rows = bulk ? static_cast<int32_t>(rows) : 0;
  return plan;
}

}  // namespace paged_attn
