#include "plan.h"

#include "../decode/plan.h"
#include "../layout.h"

namespace paged_attn {
namespace {

constexpr int kSplitKeys = 512;  // fewer are not worth a partial
constexpr int kSplits = 32;
constexpr int kRounds = 2;       // of blocks of one group, which even out shares of different lengths
constexpr int kGroupRounds = 6;  // of blocks of several groups
// By measurement, in percent: how long several groups take for what as many blocks of one group do, and for keys that
// are cut.
constexpr int64_t kGroupTime = 109, kCutTime = 106;

int blocks_beside(const Float32Instance& instance, const DeviceLimits& limits) {
  return static_cast<int>(pd_min(blocks_beside(instance.shared_bytes, limits), instance.blocks));
}

bool fits(const Float32Instance& instance, const DeviceLimits& limits) {
  return instance.shared_bytes <= limits.shared_per_block;
}

// Percent of the time that a multiprocessor would need for all keys of a pair, when every one of them has one block of
// several groups.
int64_t time_of_groups(int64_t pairs, int64_t splits, const DeviceLimits& limits) {
  const int64_t rounds = pd_ceil_div(pairs * splits, limits.processors);
  return rounds * kGroupTime * (splits > 1 ? kCutTime : 100) / (100 * splits);
}

int64_t splits_of_groups(const Problem& p, int64_t pairs, const DeviceLimits& limits) {
  const int64_t most = pd_min(pd_ceil_div(p.max_kv_len, kSplitKeys), kSplits);
  int64_t best = 1;
  for (int64_t splits = 2; splits <= most && splits * pairs <= int64_t{kGroupRounds} * limits.processors; ++splits) {
    if (time_of_groups(pairs, splits, limits) < time_of_groups(pairs, best, limits)) best = splits;
  }
  return best;
}

// Whether one block of several groups on each multiprocessor is faster than blocks of one group beside each other.
// Which of them it is changes the order of sums, so neither the batch nor the device decides where cuts are fixed.
bool wants_groups(const Problem& p, int64_t pairs, const Float32Instance& one_group, const DeviceLimits& limits) {
  if (p.deterministic || p.num_splits > 0) return false;
  const int64_t rounds = pd_max(pd_ceil_div(pairs, limits.processors), blocks_beside(one_group, limits));
  return time_of_groups(pairs, splits_of_groups(p, pairs, limits), limits) < 100 * rounds;
}

}  // namespace

const char* float32_why_not(const Problem& p, const DeviceLimits& limits) {
  if (p.q_dtype != DType::kFloat32) return "q is not float32";
  if (has_few_rows(p)) return "no more rows than one tile of the decode kernel";
  return decode_why_not(p, limits);
}

Float32Plan plan_float32(const Problem& p, const DeviceLimits& limits) {
  Float32Plan plan = {};
  Plan& work = plan.work;
  const int64_t head_dim = pd_max(p.head_dim, p.head_dim_v);
  const bool few = has_few_rows(p, 32);
  const Float32Instance one_group = find_float32_instance(head_dim, 64, false);
  const Float32Instance groups = find_float32_instance(head_dim, few ? 32 : 64, true);
  plan_all_rows(p, groups.row_shift, work);
  int64_t pairs = int64_t{work.items} * p.kv_heads;
  const bool grouped = fits(groups, limits) && (few || wants_groups(p, pairs, one_group, limits));
  plan.instance = grouped ? groups : one_group;
  plan.blocks_per_processor = blocks_beside(plan.instance, limits);
  plan_tables(p, plan.instance.tile_shift, work);
  plan_pieces(p, work);
  plan_all_rows(p, plan.instance.row_shift, work);
  pairs = int64_t{work.items} * p.kv_heads;
  // Keys are cut where there are too few rows for the multiprocessors. A long prompt has enough, so partials do not
  // fill the memory. `deterministic` cuts nothing: the cuts may not depend on the batch, nor may there be many.
  int64_t splits = 1;
  if (grouped) {
    splits = splits_of_groups(p, pairs, limits);
  } else {
    splits = int64_t{kRounds} * plan.blocks_per_processor * limits.processors / pd_max(pairs, 1);
  }
  plan_fixed_splits(p, kSplitKeys, p.deterministic ? 1 : pd_max(pd_min(splits, kSplits), 1), work);
  plan.blocks = pd_max(work.blocks.divisor, 1);  // one clears what belongs to no request
  plan.workspace_bytes = work.max_splits.divisor > 1 ? partial_bytes(work, plan.blocks) : 0;
  return plan;
}

}  // namespace paged_attn
