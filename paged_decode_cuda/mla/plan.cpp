#include "plan.h"

#include <numeric>

#include "../layout.h"
#include "few_rows_sizes.h"
#include "instances.h"

namespace paged_attn {
namespace {

constexpr int kSplitKeys = 2048;  // of a request whose splits must not depend on the batch
constexpr int kDeterministicSplits = 16;
constexpr int kExpectedItems = 32;  // the lanes of a warp: each has the length of a request

// k_cache of 576, of which v_cache is the first 512.
bool joined(const Problem& p) { return p.head_dim == MlaSizes::kDim && p.head_dim_v == MlaSizes::kLatents && !p.qv; }

// k_cache of 64, v_cache and qv of 512.
bool apart(const Problem& p) { return p.head_dim == MlaSizes::kRope && p.head_dim_v == MlaSizes::kLatents && p.qv; }

// Keys and values of 512 numbers each.
bool wide_heads(const Problem& p) {
  return p.head_dim == MlaSizes::kLatents && p.head_dim_v == MlaSizes::kLatents && !p.qv;
}

bool values_are_latents(const Problem& p) {
  const Cache& c = p.cache;
  return c.k == c.v && same({c.num_pages, c.k_stride_page}, c.v_stride_page) &&
         same({c.page_size, c.k_stride_slot}, c.v_stride_slot) && same({p.kv_heads, c.k_stride_head}, c.v_stride_head);
}

// The kernel of a call, and its sizes.
struct Kernel {
  MlaKernel which;
  int row_shift, tile_shift, pair_cost, min_units, threads, shared_bytes;
};

template <typename Sizes>
constexpr Kernel sizes_of(MlaKernel which) {
  return {which,           Sizes::kRowShift,   Sizes::kTileShift, Sizes::kPairCost, Sizes::kMinUnits,
          Sizes::kThreads, Sizes::kSharedBytes};
}

template <bool kLatents>
Kernel few_rows(const Problem& p) {
  return has_few_rows(p, FewRowsSizes<2, kLatents>::kRows) ? sizes_of<FewRowsSizes<2, kLatents>>(MlaKernel::kFewRows)
                                                           : sizes_of<FewRowsSizes<4, kLatents>>(MlaKernel::kFewRows);
}

Kernel kernel_of(const Problem& p) {
  if (dtype_bytes(p.cache.dtype) == 1) {
    return has_few_rows(p, NarrowFewRowsSizes::kRows) ? sizes_of<NarrowFewRowsSizes>(MlaKernel::kNarrowFewRows)
                                                      : sizes_of<NarrowMlaSizes>(MlaKernel::kNarrow);
  }
  if (wide_heads(p)) return few_rows<false>(p);
  return has_few_rows(p, FewRowsSizes<4, true>::kRows) ? few_rows<true>(p) : sizes_of<MlaSizes>(MlaKernel::kUsual);
}

// Two blocks of 64 rows share the copies of their keys, where that leaves hardly one without rows.
int cluster_of(const Problem& p, const Kernel& kernel) {
  if (kernel.which == MlaKernel::kFewRows) return 1;
  const int64_t tokens = hides_lengths(p) ? 1 : longest_query(p);
  const int64_t tiles = pd_ceil_div(tokens * p.group, MlaSizes::kRows);
  return tiles % 2 == 0 || tiles > 8 ? MlaSizes::kMostCluster : 1;
}

int row_shift_of(int cluster, const Kernel& kernel) { return kernel.row_shift + (cluster > 1 ? 1 : 0); }

// Items of all requests, at most.
int64_t items_of(const Problem& p, int row_shift) {
  return p.cu_seqlens_q ? packed_tiles(p, row_shift) : p.batch * pd_ceil_div(p.max_q_len * p.group, 1 << row_shift);
}

bool balances(const Problem& p, const Kernel& kernel, int64_t items) {
  return may_balance(p, items, kernel.tile_shift, kernel.pair_cost);
}

// With cu_seqlens_q: how many items every request is given, as many as the longest one is said to need. Rows beyond
// them are the surplus. 0: rows are packed, as most of those items would be empty, or cuts are fixed.
int64_t items_each(const Problem& p, const Kernel& kernel, int row_shift, const DeviceLimits& limits) {
  const int64_t each = pd_ceil_div(longest_query(p) * p.group, int64_t{1} << row_shift);
  const int64_t items = p.batch * each;
  return items <= most_given_tiles(p, limits.processors, row_shift) && balances(p, kernel, items) ? each : 0;
}

// Plans the rows; gives the items that a surplus may need.
int64_t plan_rows(const Problem& p, const Kernel& kernel, int row_shift, const DeviceLimits& limits, Plan& work) {
  if (!p.cu_seqlens_q) {
    plan_direct_rows(p, row_shift, pd_ceil_div(p.max_q_len * p.group, 1 << row_shift), work);
    return 0;
  }
  const int64_t each = items_each(p, kernel, row_shift, limits);
  if (each == 0) {
    plan_packed_rows(p, row_shift, work);
    return 0;
  }
  // Requests of few rows have items that hold no more, so that the adding kernel has no more to look for.
  while (each == 1 && row_shift > MlaSizes::kLeastRowShift && has_few_rows(p, int64_t{1} << (row_shift - 1)))
    --row_shift;
  plan_direct_rows(p, row_shift, each, work);
  return (each << row_shift) < p.total_q * p.group ? packed_tiles(p, row_shift) : 0;
}

// Whether an item is a request, and its length says which keys it sees.
bool is_basic(const Problem& p, const Plan& work) {
  return p.cache_seqlens && !p.cache_leftpad && !p.append.cu_seqlens_k_new && p.window_left < 0 &&
         p.attention_chunk == 0 && work.direct_items == p.batch && work.row_tiles.divisor == 1 &&
         p.cache.block_table_stride <= INT32_MAX;
}

// The kernel that adds partials of rows.
void plan_combine(const Problem& p, const DeviceLimits& limits, MlaPlan& plan) {
  // 16 rows of an item, as far as the host can tell: what none has makes no shares.
  int64_t rows = plan.work.rows_per_tile;
  if (!p.cu_seqlens_q) rows = pd_min(rows, p.max_q_len * p.group);
  plan.combine_shift = MlaSizes::kShareShift;
  while (int64_t{16} << (plan.combine_shift - MlaSizes::kShareShift) < rows) ++plan.combine_shift;
  // A stretch has the first keys of one cut pair at most.
  const int64_t pairs = plan.work.items * p.kv_heads, cut = plan.work.balanced ? pd_min(pairs, plan.clusters) : pairs;
  plan.combine_shares = cut << plan.combine_shift;
  // How many threads share a row decides the order of its sums, so with `deterministic` the batch may not.
  const int64_t at_once = int64_t{MlaSizes::kCombineBlocks} * limits.processors;
  plan.combine_together = !p.deterministic && plan.combine_shares <= 2 * at_once;
  if (plan.combine_together) {
    plan.combine_threads = kCombineThreads;
    plan.combine_blocks = plan.combine_shares;
    if (plan.combine_shares > 2 * limits.processors) return;
    const int64_t most =
        plan.work.balanced
            ? pd_min(pd_ceil_div(p.max_kv_len, int64_t{plan.work.min_units} << plan.work.tile_shift), plan.clusters)
            : plan.work.max_splits.divisor;
    plan.combine_threads = most <= kCombineFewPartials ? kCombineFewThreads : kCombineMostThreads;
    return;
  }
  plan.combine_threads = kCombineManyThreads;
  plan.combine_blocks = pd_ceil_div(plan.combine_shares, kCombineManyThreads / 32);
  if (plan.work.balanced) {
    plan.combine_blocks = pd_min(plan.combine_blocks, int64_t{MlaSizes::kCombineManyBlocks} * limits.processors);
  }
}

// What keeps both kinds of heads from the kernels.
const char* heads_why_not(const Problem& p, const DeviceLimits& limits) {
  if (*hopper_why_not(limits) != '\0') return hopper_why_not(limits);
  if (p.q_dtype == DType::kFloat32 || p.cache.dtype == DType::kFloat32) return "float32";
  if (p.batch == 0) return "no requests";
  if (dtype_bytes(p.q_dtype) == 1) return "8-bit q";
  if (dtype_bytes(p.cache.dtype) == 2 && p.q_dtype != p.cache.dtype) return "q and the cache differ in dtype";
  return "";
}

const char* layout_why_not(const Problem& p) {
  const char* const reason = pieces_why_not(p);
  if (*reason != '\0') return reason;
  const int64_t items = items_of(p, kernel_of(p).row_shift);
  return items * p.kv_heads > INT32_MAX / MlaSizes::kRows ? "there are more rows than 32 bits count" : "";
}

}  // namespace

const char* mla_why_not(const Problem& p, const DeviceLimits& limits) {
  if (!joined(p) && !apart(p)) return "head_dim and head_dim_v other than (576, 512), or (64, 512) with qv";
  const char* const reason = heads_why_not(p, limits);
  if (*reason != '\0') return reason;
  if (joined(p) && !values_are_latents(p)) return "v_cache is not the first 512 values of the rows of k_cache";
  if (p.qv && (p.cache.k_descale || p.cache.v_descale)) return "descales with qv";
  if (p.qv && !aligned(p.qv.data)) return "qv does not begin at a multiple of 16 bytes";
  const QueryDimensions qv(p, p.qv_stride_batch, p.qv_stride_token, p.qv_stride_head);
  if (p.qv && !qv.aligned_by(dtype_bytes(p.q_dtype))) return "a stride of qv is no multiple of 16 bytes";
  return layout_why_not(p);
}

const char* wide_heads_why_not(const Problem& p, const DeviceLimits& limits) {
  if (!wide_heads(p)) return "head_dim and head_dim_v other than (512, 512)";
  const char* const reason = heads_why_not(p, limits);
  if (*reason != '\0') return reason;
  if (dtype_bytes(p.cache.dtype) == 1) return "an 8-bit cache";
  return layout_why_not(p);
}

Problem split_latents(const Problem& p) {
  if (!joined(p)) return p;
  Problem split = p;
  split.head_dim = MlaSizes::kRope;
  split.qv = {p.q, true};
  split.qv_stride_batch = p.q_stride_batch;
  split.qv_stride_token = p.q_stride_token;
  split.qv_stride_head = p.q_stride_head;
  split.q = static_cast<const char*>(p.q) + MlaSizes::kLatents * dtype_bytes(p.q_dtype);
  split.cache.k = static_cast<char*>(p.cache.k) + MlaSizes::kLatents * dtype_bytes(p.cache.dtype);
  return split;
}

MlaPlan plan_mla(const Problem& p, const DeviceLimits& limits) {
  const Cache& c = p.cache;
  MlaPlan plan = {};
  Plan& work = plan.work;
  plan.all_scores = p.softcap != 0.f || p.alibi_slopes;
  const Kernel kernel = kernel_of(p);
  plan.kernel = kernel.which;
  plan.rows = 1 << kernel.row_shift;
  plan.shared_bytes = kernel.shared_bytes;
  plan.threads = kernel.threads;
  plan.cluster = cluster_of(p, kernel);
  const int row_shift = row_shift_of(plan.cluster, kernel);
  plan.read_once = longest_query(p) * p.group <= int64_t{1} << row_shift;
  plan_tables(p, kernel.tile_shift, work);
  plan_pieces(split_latents(p), work);
  const int64_t surplus = plan_rows(p, kernel, row_shift, limits, work);
  if (is_basic(p, work)) plan_basic(p, work);
  const int64_t pairs = work.items * p.kv_heads;
  if (balances(p, kernel, work.items)) {
    plan.clusters = pd_min(pd_max(limits.processors / plan.cluster, 1), MlaSizes::kMostClusters);
    plan_balanced_cuts(p, plan.clusters, kernel.pair_cost, kernel.min_units, work);
    work.surplus_rounds = static_cast<int32_t>(pd_ceil_div(surplus * p.kv_heads, plan.clusters));
  } else {
    plan_fixed_splits(p, kSplitKeys, p.deterministic ? kDeterministicSplits : 1, work);
    plan.clusters = work.blocks.divisor;
  }
  plan.clusters = pd_max(plan.clusters, 1);  // one clears what belongs to no request
  plan.cut = work.balanced || work.max_splits.divisor > 1;
  // A stretch of the line may end one item, whose first keys are another's, and begin one that others end.
  if (plan.cut) plan.partial_count = plan.clusters * plan.cluster * (work.balanced ? 2 : 1);
  const bool few_rows = kernel.which == MlaKernel::kFewRows;
  plan.latents = !wide_heads(p);
  plan.basic = few_rows && work.basic && work.balanced && !plan.all_scores && !p.cache.cu_seqlens_k;
  plan.adds_two = !few_rows && work.balanced && pairs + pairs / 20 >= plan.clusters;
  plan.expects =
      !few_rows && work.balanced && work.basic && work.blocks_each.divisor > 0 && work.items <= kExpectedItems;
  plan_combine(p, limits, plan);
  // A tile is whole boxes, and so is a page; other caches are one page in which a box may begin anywhere.
  const int64_t box = c.block_table ? std::gcd(int64_t{MlaSizes::kKeys}, c.page_size) : MlaSizes::kKeys;
  const int least = dtype_bytes(c.dtype) == 1 ? kSwizzledRows : MlaSizes::kLeastBox;
  plan.box_rows = !few_rows && box >= least ? static_cast<int32_t>(box) : 0;
  return plan;
}

}  // namespace paged_attn
