#include "route.h"

#include "instances.h"

namespace paged_attn {

Numbers float32_numbers(const Float32Plan& plan) {
  return {{"rows_per_tile", plan.work.rows_per_tile},
          {"tile_keys", int64_t{1} << plan.instance.tile_shift},
          {"groups", plan.instance.groups},
          {"items", plan.work.items},
          {"splits", plan.work.max_splits.divisor},
          {"blocks", plan.blocks},
          {"blocks_per_processor", plan.blocks_per_processor},
          {"shared_bytes", plan.instance.shared_bytes},
          {"workspace_bytes", plan.workspace_bytes}};
}

void add_float32(const Problem& p, const Float32Plan& plan, Launches& launches) {
  Plan work = plan.work;
  work.partials = static_cast<TaggedWord*>(launches.workspace(plan.workspace_bytes));
  const Float32Instance& instance = plan.instance;
  launches.add(float32_kernel_of(instance), {plan.blocks, instance.threads, instance.shared_bytes}, p, work);
}

}  // namespace paged_attn
