#include "plan.h"

#include <initializer_list>

#include "../layout.h"

namespace paged_attn {
namespace {

constexpr int kFallbackSplitKeys = 256, kFallbackSplits = 32;
constexpr int kPairCost = 1, kMinUnits = 1;  // in tiles, see plan_balanced_cuts()

template <int kWordNumbers, int kPieceNumbers>
FallbackInstance instance_of(const Problem& p, bool wide) {
  const int64_t head_dim_qv = p.qv ? p.head_dim_v : 0;
  return wide ? fallback_instance<FallbackSizes<2, kWordNumbers, kPieceNumbers>>(p.head_dim, head_dim_qv, p.head_dim_v)
              : fallback_instance<FallbackSizes<1, kWordNumbers, kPieceNumbers>>(p.head_dim, head_dim_qv, p.head_dim_v);
}

// wide: of 32 rows, which read a key half as often.
FallbackInstance find_instance(const Problem& p, bool wide) {
  const int64_t bytes = dtype_bytes(p.cache.dtype);
  if (p.q_dtype == DType::kFloat32) return bytes == 4 ? instance_of<1, 4>(p, false) : instance_of<1, 16>(p, false);
  return bytes == 2 ? instance_of<2, 8>(p, wide) : instance_of<2, 16>(p, wide);
}

bool divides(int grain, const void* address, std::initializer_list<Dimension> dimensions, int64_t row, int64_t bytes) {
  bool all = aligned(address, grain) && row * bytes % grain == 0;
  for (const Dimension& d : dimensions) all = all && aligned(d, bytes, grain);
  return all;
}

// `row`: numbers of a row.
int32_t grain_of(const void* address, std::initializer_list<Dimension> dimensions, int64_t row, int64_t bytes) {
  for (const int grain : {16, 8}) {
    if (divides(grain, address, dimensions, row, bytes)) return grain;
  }
  return static_cast<int32_t>(bytes);
}

// Of q and qv, which are read alike.
int32_t query_grain(const Problem& p) {
  const int64_t bytes = dtype_bytes(p.q_dtype);
  const auto grain = [&](const void* data, int64_t batch, int64_t token, int64_t head, int64_t row) {
    const QueryDimensions q(p, batch, token, head);
    return grain_of(data, {q.batch, q.token, q.head}, row, bytes);
  };
  const int32_t of_q = grain(p.q, p.q_stride_batch, p.q_stride_token, p.q_stride_head, p.head_dim);
  if (!p.qv) return of_q;
  return pd_min(of_q, grain(p.qv.data, p.qv_stride_batch, p.qv_stride_token, p.qv_stride_head, p.head_dim_v));
}

}  // namespace

const char* fallback_why_not(const Problem&, const DeviceLimits&) { return ""; }

FallbackPlan plan_fallback(const Problem& p, const DeviceLimits& limits) {
  FallbackPlan plan = {};
  FallbackWork& work = plan.work;
  plan.instance = find_instance(p, !has_few_rows(p));
  const FallbackInstance& instance = plan.instance;
  plan.blocks_per_processor =
      static_cast<int>(pd_max(pd_min(blocks_beside(instance.shared_bytes, limits), instance.blocks), 1));
  plan_tables(p, instance.tile_shift, work);
  plan_all_rows(p, instance.row_shift, work);
  plan.blocks = int64_t{plan.blocks_per_processor} * limits.processors;
  if (may_balance(p, work.items, instance.tile_shift, kPairCost)) {
    plan_balanced_cuts(p, plan.blocks, kPairCost, kMinUnits, work);
  } else {
    // No more splits than the multiprocessors can use, so that long prompts do not fill the memory with partials.
    const int64_t enough = pd_ceil_div(plan.blocks, pd_max(int64_t{work.items} * p.kv_heads, 1));
    plan_fixed_splits(p, kFallbackSplitKeys, p.deterministic ? kFallbackSplits : pd_min(enough, kFallbackSplits), work);
    plan.blocks = pd_max(work.blocks.divisor, 1);  // one clears what belongs to no request
  }
  const bool cuts = work.balanced || work.max_splits.divisor > 1;
  plan.workspace_bytes = cuts ? partial_bytes(work, plan.blocks) : 0;

  const auto cache = cache_dimensions(p);
  const int64_t bytes = dtype_bytes(p.cache.dtype);
  work.key_grain = grain_of(p.cache.k, {cache[0], cache[1], cache[2]}, p.head_dim, bytes);
  work.value_grain = grain_of(p.cache.v, {cache[3], cache[4], cache[5]}, p.head_dim_v, bytes);
  work.query_grain = query_grain(p);
  return plan;
}

}  // namespace paged_attn
