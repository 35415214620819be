#include "fallback.h"

#include "fallback.cuh"

namespace paged_attn {
namespace {

template <typename T>
const void* kernel_for(const Problem& p) {
  // Dimensions per lane: 4 and 8 cover head_dim 128 and 256, the widest ones (576, 512).
  if (p.qv) return reinterpret_cast<const void*>(&fallback_kernel<T, 18, 16, true>);
  const int64_t widest = pd_max(p.head_dim, p.head_dim_v);
  if (widest <= 128) return reinterpret_cast<const void*>(&fallback_kernel<T, 4, 4, false>);
  if (widest <= 256) return reinterpret_cast<const void*>(&fallback_kernel<T, 8, 8, false>);
  return reinterpret_cast<const void*>(&fallback_kernel<T, 18, 16, false>);
}

const void* kernel_of(const Problem& p) {
  switch (p.cache.dtype) {
    case DType::kFloat32: return kernel_for<float>(p);
    case DType::kFloat16: return kernel_for<__half>(p);
    case DType::kBFloat16: return kernel_for<__nv_bfloat16>(p);
    case DType::kFloat8E4M3: return kernel_for<__nv_fp8_e4m3>(p);
    default: return kernel_for<__nv_fp8_e5m2>(p);
  }
}

}  // namespace

Numbers fallback_numbers(const FallbackPlan& plan) {
  return {{"rows_per_tile", kFallbackWarps}, {"tile_keys", int64_t{1} << kFallbackTileShift},
          {"items", plan.work.items},        {"splits", plan.work.max_splits.divisor},
          {"blocks", plan.blocks},           {"workspace_bytes", plan.workspace_bytes}};
}

void add_fallback(const Problem& p, const FallbackPlan& plan, Launches& launches) {
  Plan work = plan.work;
  work.partials = static_cast<TaggedWord*>(launches.workspace(plan.workspace_bytes));
  launches.add(kernel_of(p), {plan.blocks, kFallbackWarps * kWarp, 0}, p, work);
}

}  // namespace paged_attn
