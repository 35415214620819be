#include "plan.h"

#include <initializer_list>

#include "../layout.h"
#include "wgmma_sizes.h"

namespace paged_attn {
namespace {

constexpr int kSplitKeys = 2048;  // of a request whose splits must not depend on the batch
constexpr int kDeterministicSplits = 16;
// Tiles that a multiprocessor reads while one of its blocks ends one pair and begins another, see balance.cuh.
constexpr int kPairCost = 12;
constexpr int64_t kWideRows = 32;    // of the largest items, which warpgroups alone have
constexpr int64_t kHalvesKeys = 14;  // of all pairs, for each GB/s: with more, to read them twice costs more
// The same for blocks of warpgroups, with 8, 16 and 32 rows; and how many units of a pair are worth a block: a tile of
// 128 dimensions for each consumer, twice that where blocks have whole pairs too.
constexpr int kWgmmaPairCosts[] = {8, 12, 20}, kWgmmaLeast = 8;
constexpr int64_t kLongKeys = 2048;  // of requests that are worth several pairs of 32 rows for each multiprocessor

// Few keys for few rows of 9 to 16: such a call takes most of its time to begin and to end, and with items of 8 rows
// both are shorter. The keys are read twice then, the second time from L2. Measured for 64 and 128 dimensions in 16
// bits: up to the same number of keys. Not where cuts are fixed, nor where a KV head has a scale of its own.
bool suits_halves(const Problem& p, const DeviceLimits& limits) {
  if (p.deterministic || p.num_splits != 0 || p.cache.k_descale || p.cache.v_descale) return false;
  const int64_t keys = most_keys(p, longest_query(p) * p.group), pairs = p.batch * p.kv_heads;
  const bool two_items = p.group % 2 == 0 && has_few_rows(p) && !has_few_rows(p, kItemRows);
  const bool few = 2 * pairs <= limits.processors && pairs * keys <= kHalvesKeys * limits.read_rate;
  return two_items && few && dtype_bytes(p.cache.dtype) == 2 && pd_max(p.head_dim, p.head_dim_v) <= 128;
}

// Whether warpgroups shall multiply. They take a block for each multiprocessor and are slower to begin and to end a
// pair, so not where few keys are seen of many, nor where a block would have many pairs in turn, unless these have 16
// rows of 128 dimensions. 16 rows of 64 take longer, of 256 too much shared memory. With 32 rows, which the route
// prefill has too, the end of a pair takes longest: not where most pairs would be cut, nor where more than one for each
// block may be short. Measured on H200s.
bool suits_wgmma(const Problem& p, const DeviceLimits& limits, int row_tiles) {
  const int64_t dims = pd_max(p.head_dim, p.head_dim_v), pairs = p.batch * p.kv_heads, blocks = limits.processors;
  if (*hopper_why_not(limits) != '\0' || dtype_bytes(p.cache.dtype) != 2 || dims > 256) return false;
  if (p.deterministic || p.num_splits != 0) return false;  // a block for each cut
  if (p.attention_chunk != 0 || (p.window_left >= 0 && p.window_left < p.max_kv_len)) return false;
  if (row_tiles == 1) return pairs <= 2 * blocks;
  if (row_tiles == 2) return dims <= 128 && (dims > 64 || 2 * pairs <= blocks);
  return dims <= 128 && 9 * pairs >= 4 * blocks && pairs <= (p.max_kv_len < kLongKeys ? 1 : 2) * blocks;
}

bool is_wide(const DecodeInstance& instance) { return instance.rows == kWideRows; }

// How rows are cut into tiles.
struct RowTiles {
  DecodeInstance instance;
  int64_t each;                // tiles that every request is given
  int64_t surplus;             // tiles that requests with more rows than those may need; 0: none has
  const char* fixed_why = "";  // why the cuts of a request may not depend on the lengths of the others
};

int64_t tiles_of(int64_t tokens, const Problem& p, const DecodeInstance& instance) {
  return pd_ceil_div(tokens * p.group, instance.rows);
}

// Whether items shall have 32 rows: where a request has no more, but more than 16.
bool suits_wide_items(const Problem& p, const DeviceLimits& limits) {
  const int64_t rows = said_query(p) * p.group;
  return rows > kFewRows && rows <= kWideRows && suits_wgmma(p, limits, kWideRows / 8);
}

// Without cu_seqlens_q max_q_len is the length of every request. With it, it is what the caller expects of the longest
// one: too small, too large, or no more than the sum of all. It chooses how many tiles every request is given: as many
// as it says, unless most of them would stay empty; then what an average request needs. Rows beyond are the surplus.
RowTiles cut_rows(const Problem& p, const DeviceLimits& limits, bool may_wgmma) {
  const bool wide = may_wgmma && suits_wide_items(p, limits);
  auto instance_for = [&](int64_t tokens) {
    const int row_tiles = tokens * p.group <= kItemRows && !hides_lengths(p) ? 1 : 2;
    if (wide) return find_wgmma_instance(pd_max(p.head_dim, p.head_dim_v), kWideRows / 8);
    if (may_wgmma && suits_wgmma(p, limits, row_tiles)) {
      return find_wgmma_instance(pd_max(p.head_dim, p.head_dim_v), row_tiles);
    }
    return find_decode_instance(static_cast<int>(dtype_bytes(p.cache.dtype)), pd_max(p.head_dim, p.head_dim_v),
                                row_tiles);
  };
  int64_t tokens = said_query(p);
  if (p.cu_seqlens_q && !wide) {
    const DecodeInstance longest = instance_for(tokens);
    const int64_t enough = most_given_tiles(p, limits.processors, longest.row_shift);
    // The cuts of a request must not depend on the others where its result must not.
    if (!p.deterministic && p.batch * tiles_of(tokens, p, longest) > enough) tokens = pd_ceil_div(p.total_q, p.batch);
  }
  RowTiles tiles = {instance_for(tokens), 0, 0};
  tiles.each = tiles_of(tokens, p, tiles.instance);
  const bool all = !p.cu_seqlens_q || tiles.each * tiles.instance.rows >= p.total_q * p.group;
  if (!all) tiles.surplus = packed_tiles(p, tiles.instance.row_shift);
  return tiles;
}

// "" or why the cuts of a request may not depend on the lengths of the others.
const char* balanced_why_not(const Problem& p, const RowTiles& tiles) {
  if (p.batch == 0) return "";
  if (p.num_splits != 0) return "num_splits fixes the cuts";
  if (p.deterministic) return "deterministic fixes the cuts";
  if (p.batch * tiles.each > kMaxBalancedItems) return "there are more than 1024 tiles of rows";
  const int64_t most = (capacity_of(p) >> tiles.instance.tile_shift) + 2 + kWgmmaPairCosts[2];
  if (p.batch * tiles.each * p.kv_heads * most > INT32_MAX) return "there are more tiles of keys than 32 bits count";
  if (tiles.surplus * p.kv_heads > INT32_MAX / 2) return "there are more tiles of rows than 32 bits count";
  return "";
}

// Warpgroups have balanced cuts alone.
RowTiles tile_rows(const Problem& p, const DeviceLimits& limits) {
  RowTiles tiles = cut_rows(p, limits, true);
  tiles.fixed_why = balanced_why_not(p, tiles);
  if (tiles.instance.wgmma && *tiles.fixed_why != '\0') {
    tiles = cut_rows(p, limits, false);
    tiles.fixed_why = balanced_why_not(p, tiles);
  }
  return tiles;
}

// Bytes of shared memory that `warps` warps take as a block.
int shared_bytes(const DecodeInstance& instance, int warps) {
  return warps * instance.warp_bytes + instance.query_bytes;
}

// How many such blocks a multiprocessor holds.
int blocks_beside(const DecodeInstance& instance, int warps, const DeviceLimits& limits) {
  return blocks_beside(shared_bytes(instance, warps) + instance.block_bytes, limits);
}

// Warps of one block, if it may have all of the multiprocessor.
int most_warps(const DecodeInstance& instance, const DeviceLimits& limits) {
  const int64_t fitting = (limits.shared_per_block - instance.block_bytes - instance.query_bytes) / instance.warp_bytes;
  return static_cast<int>(pd_min(fitting, instance.most_warps));
}

// Several blocks on a multiprocessor; one of all warps that fit where its shared memory is too small for that, or where
// `few` asks for it: then most pairs are cut, and big blocks make fewer partials. Where there is hardly a
// tile for every warp a block between the two sizes does.
void plan_block(const DeviceLimits& limits, bool few, int64_t tiles, DecodePlan& plan) {
  const DecodeInstance& instance = plan.instance;
  const int beside = blocks_beside(instance, instance.warps, limits), most = most_warps(instance, limits);
  plan.warps = instance.warps;
  if (few && most > instance.warps) {
    // The warps of a block are summed in batches of instance.warps.
    const int whole = most / instance.warps * instance.warps;
    const bool short_keys = tiles <= int64_t{instance.warps} * limits.processors;
    plan.warps = short_keys ? static_cast<int>(pd_min(2 * instance.warps, whole)) : whole;
  } else if (beside < 2) {
    plan.warps = most;
  }
  // The registers that all features take allow no more than the compiler is held to.
  const int most_beside = plan.basic ? instance.blocks : instance.most_warps / instance.warps;
  const int by_registers = plan.warps == instance.warps ? most_beside : 1;
  plan.blocks_per_processor =
      static_cast<int>(pd_max(pd_min(blocks_beside(instance, plan.warps, limits), by_registers), 1));
  plan.shared_bytes = shared_bytes(instance, plan.warps);
}

// What is fetched before it is known which part of it a block needs. Of a large table most may be unused.
void plan_prefetch(const Problem& p, Plan& plan) {
  constexpr int64_t kMostBytes = 1 << 20;
  const Cache& c = p.cache;
  auto lines = [](int64_t bytes) { return bytes > kMostBytes ? 0 : static_cast<int32_t>(bytes / kLine); };
  const int64_t q_token = p.q_heads * p.head_dim;
  const bool contiguous = p.q_stride_head == p.head_dim && p.q_stride_token == q_token &&
                          (p.cu_seqlens_q || p.q_stride_batch == p.max_q_len * q_token);
  if (contiguous) plan.q_lines = lines(p.total_q * q_token * dtype_bytes(p.q_dtype));
  if (c.block_table && c.table_rows > 0) {
    plan.table_lines = lines(((c.table_rows - 1) * c.block_table_stride + c.max_pages) * sizeof(int32_t));
  }
}

// A few more pairs than multiprocessors. Whole ones would leave a rest that is cut into many parts. On a line a big
// block ends one pair and then begins another, so the partial that it adds is there long before it is done. Measured
// for 16 rows of head_dim 128 in 16 bits.
bool has_about_one_pair_each(int64_t pairs, const DecodeInstance& instance, const DeviceLimits& limits) {
  const bool long_ends = instance.row_tiles == 2 && instance.bytes == 2 && instance.head_dim == 128;
  return long_ends && pairs > limits.processors && 4 * pairs <= 5 * int64_t{limits.processors};
}

void put_all_on_a_line(int64_t pairs, Plan& work) {
  work.whole_pairs = 0;
  work.line_pairs = static_cast<int32_t>(pairs);
}

// A block of warpgroups for each multiprocessor.
void plan_warpgroups(const Problem& p, int64_t pairs, const DeviceLimits& limits, DecodePlan& plan) {
  plan.warps = plan.instance.warps;
  plan.blocks_per_processor = 1;
  plan.shared_bytes = shared_bytes(plan.instance, plan.warps);
  plan.blocks = limits.processors;
  const int least = pairs > plan.blocks || plan.instance.head_dim == 64 ? 2 * kWgmmaLeast : kWgmmaLeast;
  const int pair_cost = kWgmmaPairCosts[plan.instance.row_shift - 3];
  plan_balanced_cuts(p, plan.blocks, pair_cost, least, plan.work);
  // Few pairs more than whole ones for every block would be cut into many short parts.
  if (plan.work.whole_pairs > 0 && 8 * plan.work.line_pairs < plan.blocks) put_all_on_a_line(pairs, plan.work);
}

// Blocks of warps that multiply each by itself.
void plan_warps(const Problem& p, int64_t pairs, bool one_each, const DeviceLimits& limits, DecodePlan& plan) {
  const DecodeInstance& instance = plan.instance;
  const int64_t most = pd_ceil_div(most_keys(p, instance.rows), int64_t{1} << instance.tile_shift);
  // Few pairs: most are cut, and a big block of each multiprocessor leaves fewer partials. With more of them, all its
  // warps would meet too often. 8 rows of 16 bits make the end of a segment short: there a big block also pays where it
  // has whole pairs and small ones would have none. Only where results may depend on the batch, as the number of warps
  // decides the order of sums.
  const bool short_ends = instance.row_tiles == 1 && instance.bytes == 2;
  const int64_t most_few = limits.processors * (short_ends ? instance.blocks : 1);
  // Not where big blocks would take more pairs in turn than a warp of a small one takes tiles.
  const bool short_pairs = pd_ceil_div(most, int64_t{instance.warps}) < pd_ceil_div(pairs, int64_t{limits.processors});
  const bool few = (pairs <= most_few || one_each) && !short_pairs && most_warps(instance, limits) > instance.warps;
  plan_block(limits, few, pairs * most, plan);
  plan.blocks = int64_t{limits.processors} * plan.blocks_per_processor;
  plan_balanced_cuts(p, plan.blocks, kPairCost / plan.blocks_per_processor, (few ? 1 : 2) * plan.warps, plan.work);
}

// Deals by the lengths that the kernel finds.
void plan_balanced(const Problem& p, const RowTiles& tiles, const DeviceLimits& limits, DecodePlan& plan) {
  Plan& work = plan.work;
  plan_direct_rows(p, tiles.instance.row_shift, tiles.each, work);
  const int64_t pairs = work.items * p.kv_heads;
  const bool one_each = has_about_one_pair_each(pairs, tiles.instance, limits);
  if (tiles.instance.wgmma) {
    plan_warpgroups(p, pairs, limits, plan);
  } else {
    plan_warps(p, pairs, one_each, limits, plan);
  }
  if (one_each) put_all_on_a_line(pairs, work);
  plan_lines(p, plan.blocks, work);
  work.surplus_rounds = static_cast<int32_t>(pd_ceil_div(tiles.surplus * p.kv_heads, plan.blocks));
}

// A block for every (item, kv_head, split).
void plan_fixed(const Problem& p, const RowTiles& tiles, const DeviceLimits& limits, DecodePlan& plan) {
  Plan& work = plan.work;
  if (p.cu_seqlens_q) {
    plan_packed_rows(p, tiles.instance.row_shift, work);
  } else {
    plan_direct_rows(p, tiles.instance.row_shift, tiles.each, work);
  }
  plan_block(limits, false, 0, plan);
  plan_fixed_splits(p, kSplitKeys, p.deterministic ? kDeterministicSplits : 1, work);
  plan.blocks = work.blocks.divisor;
}

DecodePlan plan_items(const Problem& p, const DeviceLimits& limits, bool basic) {
  const RowTiles tiles = tile_rows(p, limits);
  DecodePlan plan = {};
  plan.instance = tiles.instance;
  plan.basic = basic;
  Plan& work = plan.work;
  plan_tables(p, tiles.instance.tile_shift, work);
  // A partial of a wide item is registers of all dimensions that the kernel has.
  if (is_wide(tiles.instance)) work.partial_quads = tiles.instance.head_dim / 4;
  plan_prefetch(p, work);
  plan_pieces(p, work);
  if (basic) plan_basic(p, work);
  if (*tiles.fixed_why == '\0') {
    plan_balanced(p, tiles, limits, plan);
  } else {
    plan_fixed(p, tiles, limits, plan);
  }
  const bool cut = work.balanced || work.max_splits.divisor > 1;
  plan.workspace_bytes = cut ? partial_bytes(work, plan.blocks) : 0;
  return plan;
}

DecodePlan plan_decode(const Problem& p, const DeviceLimits& limits, bool basic) {
  if (!suits_halves(p, limits)) return plan_items(p, limits, basic);
  DecodePlan plan = plan_items(in_halves(p), limits, basic);
  plan.work.key_head_shift = 1;
  return plan;
}

}  // namespace

const char* decode_why_not(const Problem& p, const DeviceLimits&) {
  const Cache& c = p.cache;
  const int64_t bytes = dtype_bytes(c.dtype), q_bytes = dtype_bytes(p.q_dtype);
  if (q_bytes == 4 && bytes == 1) return "float32 q with an 8-bit cache";
  if (q_bytes == 1 && bytes != 1) return "8-bit q with a 16-bit cache";
  if (p.qv) return "qv";
  if (p.head_dim > 256 || p.head_dim_v > 256) return "head_dim or head_dim_v above 256";
  return pieces_why_not(p);
}

const char* decode_basic_why_not(const Problem& p, const DeviceLimits& limits) {
  const Cache& c = p.cache;
  if (!c.block_table) return "no block_table";
  if (!p.cache_seqlens) return "no cache_seqlens";
  if (c.cache_batch_idx) return "cache_batch_idx";
  if (p.cache_leftpad) return "cache_leftpad";
  if (p.append.cu_seqlens_k_new) return "cu_seqlens_k_new";
  if (p.window_left >= 0) return "a left window";
  if (p.attention_chunk != 0) return "attention_chunk";
  if (p.softcap != 0.f) return "softcap";
  if (p.alibi_slopes) return "alibi_slopes";
  if (p.sinks && p.sinks_dtype != p.q_dtype) return "sinks that are not of q's dtype";
  if (p.q_descale) return "q_descale";
  if (dtype_bytes(c.dtype) > 1 && (c.k_descale || c.v_descale)) return "descales of a 16-bit cache";
  if (p.q_dtype != basic_dtype(c.dtype)) return "another dtype of q than the usual one";
  if (p.head_dim != p.head_dim_v) return "head_dim and head_dim_v differ";
  if (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256) return "a head_dim other than 64, 128 and 256";
  if (c.block_table_stride > INT32_MAX) return "rows of block_table are 2^31 entries apart";
  const char* const reason = decode_why_not(p, limits);
  if (*reason != '\0') return reason;
  const RowTiles tiles = suits_halves(p, limits) ? tile_rows(in_halves(p), limits) : tile_rows(p, limits);
  if (tiles.each > 1) return "more rows of a request than one tile holds";
  // Where the compiler knows the head_dim it loads values so far ahead that registers spill.
  const DecodeInstance& instance = tiles.instance;
  if (instance.bytes == 4 && instance.head_dim == 128 && instance.row_tiles == 2) {
    return "more than 8 rows of a request in float32 at head_dim 128";
  }
  return tiles.fixed_why;
}

bool takes_wide_items(const Problem& p, const DeviceLimits& limits) {
  return suits_wide_items(p, limits) && *decode_why_not(p, limits) == '\0' && is_wide(tile_rows(p, limits).instance);
}

DecodePlan plan_decode(const Problem& p, const DeviceLimits& limits) { return plan_decode(p, limits, false); }
DecodePlan plan_decode_basic(const Problem& p, const DeviceLimits& limits) { return plan_decode(p, limits, true); }

}  // namespace paged_attn
