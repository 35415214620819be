#include "plan.h"

#include "../decode/plan.h"
#include "../layout.h"

namespace paged_attn {
namespace {

constexpr int kSplitKeys = 512;  // fewer are not worth a partial
constexpr int kSplits = 32;
constexpr int kRounds = 2;  // of blocks, which even out shares of different lengths

}  // namespace

const char* float32_why_not(const Problem& p, const DeviceLimits& limits) {
  if (p.q_dtype != DType::kFloat32) return "q is not float32";
  if (has_few_rows(p)) return "no more rows than one tile of the decode kernel";
  return decode_why_not(p, limits);
}

Float32Plan plan_float32(const Problem& p, const DeviceLimits& limits) {
  Float32Plan plan = {};
  plan.instance = find_float32_instance(pd_max(p.head_dim, p.head_dim_v));
  const Float32Instance& instance = plan.instance;
  Plan& work = plan.work;
  plan_tables(p, instance.tile_shift, work);
  plan_pieces(p, work);
  if (p.cu_seqlens_q) {
    plan_packed_rows(p, instance.row_shift, work);
  } else {
    const int64_t rows = p.max_q_len * p.group;
    plan_direct_rows(p, instance.row_shift, pd_ceil_div(rows, int64_t{1} << instance.row_shift), work);
  }
  // Keys are cut where there are too few rows for the multiprocessors. A long prompt has enough, so partials do not
  // fill the memory. `deterministic` cuts nothing: the cuts may not depend on the batch, nor may there be many.
  const int64_t pairs = int64_t{work.items} * p.kv_heads;
  const int block_bytes = instance.shared_bytes + kSharedCostOfBlock;
  plan.blocks_per_processor = static_cast<int>(pd_min(limits.shared_per_processor / block_bytes, instance.blocks));
  const int64_t enough = int64_t{kRounds} * plan.blocks_per_processor * limits.processors / pd_max(pairs, 1);
  plan_fixed_splits(p, kSplitKeys, p.deterministic ? 1 : pd_max(pd_min(enough, kSplits), 1), work);
  plan.blocks = pd_max(pairs * work.max_splits.divisor, 1);  // one clears what belongs to no request
  plan.workspace_bytes = work.max_splits.divisor > 1 ? partial_bytes(work, plan.blocks) : 0;
  return plan;
}

}  // namespace paged_attn
