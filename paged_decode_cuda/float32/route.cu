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

void launch_float32(const Problem& p, const Float32Plan& plan, const Context& context) {
  Plan work = plan.work;
  const Workspace workspace(plan.workspace_bytes);
  work.partials = static_cast<TaggedWord*>(workspace.data());
  launch(float32_kernel_of(plan.instance), {plan.blocks, plan.instance.threads, plan.instance.shared_bytes}, context, p,
         work);
}

}  // namespace paged_attn
