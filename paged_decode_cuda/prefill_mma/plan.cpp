#include "plan.h"

#include "../decode/plan.h"
#include "../layout.h"
#include "../plan.h"
#include "../prefill/facts.h"
#include "../prefill/plan.h"

namespace paged_attn {
namespace {

PrefillMmaInstance instance_of(const Problem& p, const DeviceLimits& limits) {
  return find_prefill_mma_instance(dtype_bytes(p.cache.dtype), p.head_dim, p.head_dim_v, all_scores(p), limits);
}

}  // namespace

const char* prefill_mma_why_not(const Problem& p, const DeviceLimits& limits) {
  if (limits.capability == kHopper) return "a device of compute capability 9.0, which has the route prefill";
  if (has_few_rows(p)) return "no more rows than one tile of the decode kernel";
  if (p.q_dtype == DType::kFloat32) return "float32";
  const int64_t bytes = dtype_bytes(p.cache.dtype);
  if (bytes > 1 && p.q_dtype != p.cache.dtype) return "q and the cache differ in dtype";
  if (dtype_bytes(p.q_dtype) == 1) return "8-bit q";
  if (p.num_splits > 1) return "num_splits above 1";
  const char* const reason = decode_why_not(p, limits);
  if (*reason != '\0') return reason;
  const PrefillMmaInstance instance = instance_of(p, limits);
  const int64_t tiles = most_tiles(p, instance.rows);
  if (tiles > INT32_MAX / 2) return "there are more tiles of rows than 32 bits count";
  if (!p.deterministic && tiles * kFewTiles < limits.processors) return "too few tiles of rows to fill the device";
  if (all_scores(p) && !instance.all_scores) return "softcap or alibi_slopes over an 8-bit cache";
  return instance.shared_bytes > limits.shared_per_block ? "tiles larger than the shared memory of a block" : "";
}

PrefillMmaPlan plan_prefill_mma(const Problem& p, const DeviceLimits& limits) {
  PrefillMmaPlan plan = {};
  plan.instance = instance_of(p, limits);
  const int64_t tiles = most_tiles(p, plan.instance.rows);
  const int64_t beside = blocks_beside(plan.instance.shared_bytes, limits);
  plan.items = tiles / p.kv_heads;
  plan.blocks_per_processor = pd_max(pd_min(beside, plan.instance.blocks), 1);
  plan.blocks = pd_max(pd_min(tiles, limits.processors * plan.blocks_per_processor), 1);
  plan.l2_keys = kL2Bytes / ((p.head_dim + p.head_dim_v) * dtype_bytes(p.cache.dtype));
  return plan;
}

}  // namespace paged_attn
