#include "fallback_plan.h"

#include "layout.h"

namespace paged_attn {

const char* fallback_why_not(const Problem&, const DeviceLimits&) { return ""; }

FallbackPlan plan_fallback(const Problem& p, const DeviceLimits& limits) {
  constexpr int kSplitKeys = 128, kSplits = 32, kBlocksPerProcessor = 32;
  FallbackPlan plan = {};
  Plan& work = plan.work;
  plan_tables(p, kFallbackTileShift, work);
  if (p.cu_seqlens_q) {
    plan_packed_rows(p, kFallbackRowShift, work);
  } else {
    plan_direct_rows(p, kFallbackRowShift, pd_ceil_div(p.max_q_len * p.group, kFallbackWarps), work);
  }
  // No more splits than the multiprocessors can use, so that long prompts do not fill the memory with partials.
  const int64_t pairs = int64_t{work.items} * p.kv_heads;
  const int64_t enough = pd_ceil_div(int64_t{kBlocksPerProcessor} * limits.processors, pd_max(pairs, 1));
  plan_fixed_splits(p, kSplitKeys, p.deterministic ? kSplits : pd_min(enough, kSplits), work);
  plan.blocks = pd_max(work.blocks.divisor, 1);  // one clears what belongs to no request
  plan.workspace_bytes = work.max_splits.divisor > 1 ? partial_bytes(work, plan.blocks) : 0;
  return plan;
}

}  // namespace paged_attn
