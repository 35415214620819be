#include "route.h"

#include "instances.h"
#include "shape.cuh"

namespace paged_attn {
namespace {

const void* kernel_of(DType q_dtype, const PrefillMmaInstance& instance) {
  const bool bf16 = q_dtype == DType::kBFloat16;
  const int head_dim = instance.head_dim, keys = instance.keys;
  if (instance.widens) return bf16 ? prefill_mma_widening_bf16(head_dim) : prefill_mma_widening_fp16(head_dim);
  return bf16 ? prefill_mma_kernel_bf16(head_dim, keys) : prefill_mma_kernel_fp16(head_dim, keys);
}

}  // namespace

Numbers prefill_mma_numbers(const PrefillMmaPlan& plan) {
  return {{"rows_per_tile", plan.instance.rows},
          {"tile_keys", plan.instance.keys},
          {"items", plan.items},
          {"splits", 1},
          {"blocks", plan.blocks},
          {"blocks_per_processor", plan.blocks_per_processor},
          {"shared_bytes", plan.instance.shared_bytes}};
}

void add_prefill_mma(const Problem& p, const PrefillMmaPlan& plan, Launches& launches) {
  PrefillMmaCall call = {};
  plan_tables(p, 0, call);
  plan_pieces(p, call);
  call.tile_rows = FastDivisor(plan.instance.rows);
  call.blocks_in_grid = static_cast<int32_t>(plan.blocks);
  call.l2_keys = static_cast<int32_t>(plan.l2_keys);
  call.tickets = static_cast<unsigned long long*>(launches.workspace(sizeof(unsigned long long)));
  const PrefillMmaInstance& instance = plan.instance;
  launches.add(kernel_of(p.q_dtype, instance), {plan.blocks, instance.threads, instance.shared_bytes}, p, call);
}

}  // namespace paged_attn
