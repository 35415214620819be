#include "route.h"

#include "instances.h"

namespace paged_attn {
namespace {

const void* kernel_of(const Problem& p, const FallbackInstance& instance) {
  switch (p.q_dtype) {
    case DType::kFloat32: return fallback_fp32_kernel_of(instance, p.cache.dtype);
    case DType::kBFloat16: return fallback_bf16_kernel_of(instance, p.cache.dtype);
    default: return fallback_fp16_kernel_of(instance, p.cache.dtype);
  }
}

}  // namespace

Numbers fallback_numbers(const FallbackPlan& plan) {
  return {{"rows_per_tile", plan.work.rows_per_tile},
          {"tile_keys", int64_t{1} << plan.instance.tile_shift},
          {"items", plan.work.items},
          {"balanced", plan.work.balanced},
          {"splits", plan.work.max_splits.divisor},
          {"blocks", plan.blocks},
          {"blocks_per_processor", plan.blocks_per_processor},
          {"shared_bytes", plan.instance.shared_bytes},
          {"workspace_bytes", plan.workspace_bytes}};
}

void add_fallback(const Problem& p, const FallbackPlan& plan, Launches& launches) {
  FallbackWork work = plan.work;
  work.partials = static_cast<TaggedWord*>(launches.workspace(plan.workspace_bytes));
  const FallbackInstance& instance = plan.instance;
  launches.add(kernel_of(p, instance), {plan.blocks, kWarp * instance.warps, instance.shared_bytes}, p, work);
}

}  // namespace paged_attn
